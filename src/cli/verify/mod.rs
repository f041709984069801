//! `g4prefill verify`: reads one prompt in many ways on the user's own model and device, which must
//! all give the same. The cases and their judgement are in `crate::verify`.

mod table;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use table::{Row, Table};

use super::report::{self, DeviceReport, Provenance, SCHEMA_VERSION, to_us};
use super::{Console, EngineArgs, Interrupted, WITHOUT_LLAMA, WeightsArg, drive};
use crate::Error;
use crate::bench::{random_ids, token_pool};
use crate::engine::ring::ring_rows;
use crate::engine::{Engine, EngineError, PlanReport};
use crate::model::weights::WeightsMode;
use crate::verify::{Base, Case, Prompt, Verdict, cases, default_length};

/// Arguments of `verify`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// Length of the prompt, in tokens; by default it wraps the caches of sliding layers (window,
    /// one and a half chunks): a smaller --chunk makes it shorter
    #[arg(long, value_name = "N", value_parser = super::engine_args::at_least_one)]
    pub n_prompt: Option<usize>,
    /// Number that the random tokens of the prompt follow from
    #[arg(long, value_name = "SEED", default_value_t = 1, value_parser = super::numbers::whole::<u64>)]
    pub seed: u64,
    /// Compare with this program too, on the same file (needs a build with feature `llama`)
    #[arg(long, value_name = "PEER", value_enum)]
    pub against: Option<AgainstArg>,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout instead of text
    #[arg(long)]
    pub json: bool,
}

/// Who else reads the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AgainstArg {
    /// llama.cpp at the pin, in this process
    Llama,
}

#[derive(Debug, Serialize)]
struct Timing {
    load: u64,
    checks: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    #[serde(flatten)]
    table: Table,
    n_prompt: usize,
    seed: u64,
    wraps_rings: bool,
    device: DeviceReport,
    timing_us: Timing,
    #[serde(flatten)]
    provenance: Provenance,
}

/// Runs `verify`; the answer is no when a check is wrong.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    if args.against.is_some() && !cfg!(feature = "llama") {
        anyhow::bail!("--against llama: {WITHOUT_LLAMA}");
    }
    let loaded = drive::load(&args.model, &args.engine, console)?;
    let (engine, load) = (loaded.engine, loaded.duration);
    let _listening = console.interrupt().listen("this chunk");
    let prompt = prompt(args, &engine)?;
    let n_prompt = prompt.ids.len();
    let options = engine.options();
    let wraps_rings = n_prompt > ring_rows(engine.config().n_swa, options.chunk);
    if !wraps_rings && engine.config().layers.iter().any(|l| l.is_swa) {
        console.warning(format_args!(
            "a prompt of {n_prompt} tokens does not wrap the caches of sliding layers: what \
             happens then is not verified"
        ));
    }
    let start = Instant::now();
    let cases = cases(n_prompt, options.chunk);
    let mut verifier = Verifier {
        args,
        console,
        n_checks: cases.len() + 1 + 2 * usize::from(args.against.is_some()),
        rows: Vec::new(),
    };
    let device = engine.device();
    verifier.all(engine, prompt, &cases)?;
    let report = Report {
        schema_version: SCHEMA_VERSION,
        table: Table::new(verifier.rows),
        n_prompt,
        seed: args.seed,
        wraps_rings,
        device: DeviceReport::from(device),
        timing_us: Timing {
            load: to_us(load),
            checks: to_us(start.elapsed()),
        },
        provenance: Provenance::new(),
    };
    if args.json {
        report::print_json(&report)?;
    } else {
        report::print_text(&report.table.describe())?;
    }
    Ok(ExitCode::from(report.table.exit_code()))
}

/// The prompt: random ordinary tokens.
fn prompt(args: &Args, engine: &Engine) -> anyhow::Result<Prompt> {
    let (config, limit) = (engine.config(), engine.context_limit());
    let n = args
        .n_prompt
        .unwrap_or_else(|| default_length(config, engine.options(), limit));
    engine
        .plan(n, 0)?
        .require_fit()
        .map_err(EngineError::from)
        .with_context(|| format!("plan a prompt of {n} tokens"))?;
    let pool = token_pool(engine.file(), config)?;
    let mut ids = random_ids(&pool, n.saturating_mul(2), args.seed);
    let others = ids.split_off(n);
    Ok(Prompt::new(ids, others, config.n_swa))
}

/// Runs the checks one after another.
struct Verifier<'a> {
    args: &'a Args,
    console: &'a Console,
    n_checks: usize,
    rows: Vec<Row>,
}

impl Verifier<'_> {
    /// The cases on the loaded weights; then these make room for others.
    fn all(&mut self, engine: Arc<Engine>, prompt: Prompt, cases: &[Case]) -> anyhow::Result<()> {
        let cancel = self.console.interrupt().cancel_token().clone();
        let base = interruptible(Base::new(&engine, prompt, &cancel), "read the prompt")?;
        for case in cases {
            self.check(&case.to_string(), || case.run(&engine, &base, &cancel))?;
        }
        #[cfg(feature = "llama")]
        let ours = match self.args.against {
            Some(AgainstArg::Llama) => Some(interruptible(
                base.spread(&engine, &cancel),
                "read the prompt",
            )?),
            None => None,
        };
        let options = engine.options().clone();
        let other = Base::other_weights(&engine);
        drop(engine);
        self.weights(&base, other)?;
        #[cfg(feature = "llama")]
        if let Some(ours) = ours {
            self.llama(&base, &options, &ours)?;
        }
        #[cfg(not(feature = "llama"))]
        drop(options);
        Ok(())
    }

    /// Says which check runs, runs it and keeps its verdict.
    fn check(
        &mut self,
        name: &str,
        run: impl FnOnce() -> crate::Result<Verdict>,
    ) -> anyhow::Result<()> {
        let start = self.begin(name)?;
        let verdict = interruptible(run(), name)?;
        self.end(name, verdict, start.elapsed());
        Ok(())
    }

    fn begin(&self, name: &str) -> anyhow::Result<Instant> {
        if self.console.interrupt().is_requested() {
            return Err(Interrupted.into());
        }
        let i = self.rows.len() + 1;
        self.console
            .note(format_args!("check {i} of {}: {name}", self.n_checks));
        Ok(Instant::now())
    }

    fn end(&mut self, name: &str, verdict: Verdict, duration: Duration) {
        let row = Row::new(name, verdict, duration);
        if row.is_wrong() {
            let why = row.why().unwrap_or_default();
            self.console.warning(format_args!("{name} is wrong: {why}"));
        }
        self.rows.push(row);
    }

    /// The matrices in the other type, where they fit.
    fn weights(&mut self, base: &Base, mode: WeightsMode) -> anyhow::Result<()> {
        let weights = match mode {
            WeightsMode::Bf16 => WeightsArg::Bf16,
            WeightsMode::Native | WeightsMode::Auto => WeightsArg::Native,
        };
        let name = match weights {
            WeightsArg::Bf16 => "weights bf16",
            WeightsArg::Native | WeightsArg::Auto => "weights native",
        };
        let start = self.begin(name)?;
        let args = EngineArgs {
            weights,
            ..self.args.engine.clone()
        };
        let (model, n) = (&self.args.model, base.prompt.ids.len());
        let plan = PlanReport::open(model, &drive::options(&args)?, n, 0)?;
        let verdict = match plan.require_fit() {
            Err(why) => Verdict::Skipped {
                why: why.to_string(),
            },
            Ok(()) => {
                let engine = drive::load(model, &args, self.console)?.engine;
                let cancel = self.console.interrupt().cancel_token();
                interruptible(base.check_weights(&engine, cancel), name)?
            }
        };
        self.end(name, verdict, start.elapsed());
        Ok(())
    }

    #[cfg(feature = "llama")]
    fn llama(
        &mut self,
        base: &Base,
        options: &crate::engine::EngineOptions,
        ours: &crate::verify::Outcome,
    ) -> anyhow::Result<()> {
        let name = "llama.cpp logits";
        let start = self.begin(name)?;
        let (model, cancel) = (&self.args.model, self.console.interrupt().cancel_token());
        let found = crate::verify::against_llama(model, options, base, ours, cancel);
        let found = interruptible(found, name)?;
        self.end(name, found.logits, start.elapsed());
        // Read in the same run.
        let name = "llama.cpp K/V rows";
        let start = self.begin(name)?;
        self.end(name, found.kv, start.elapsed());
        Ok(())
    }
}

/// A stopped run is an interruption, every other error says which check it was.
fn interruptible<T>(result: crate::Result<T>, name: &str) -> anyhow::Result<T> {
    match result {
        Err(Error::Engine(EngineError::Cancelled { .. })) => Err(Interrupted.into()),
        other => other.with_context(|| format!("check {name:?}")),
    }
}
