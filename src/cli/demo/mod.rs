//! `g4prefill demo`: a model, a long text and a comparison with llama.cpp out of nothing. Needs no
//! download and no GPU; `make demo` runs it.
//!
//! The text is real prose and the engine runs as on any model, but the weights are random: what
//! comes out shows that the machinery works and how fast it is, not that it writes well.

#[cfg(feature = "llama")]
mod compare;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;

use super::report::{self, BucketReport, ChunkReport, GraphReport, Provenance, SCHEMA_VERSION};
use super::{Console, EngineArgs, Interrupted, Progress, Unit, drive};
use crate::bench::Summary;
use crate::engine::{Engine, Rows, Session};
use crate::gguf::GgufFile;
use crate::synth::{self, Spec, SynthError, WeightType};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Presets that the demo makes: one like E4B, one like 12B, both small.
const PRESETS: [&str; 2] = ["mini", "mini-dense"];

/// How long the demo takes with its default options.
const DURATION: &str = "about 4 minutes on 2 cores";

/// Seed of the demo's models.
const SEED: u64 = 4;

/// Arguments of `demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder for the models and the text; made if missing, kept for the next time
    #[arg(long, value_name = "DIR", default_value = "demo")]
    pub dir: PathBuf,
    /// Type of the models' weights
    #[arg(long = "type", value_name = "TYPE", default_value = "q8_0")]
    pub dtype: String,
    /// Length of the text, in words
    #[arg(long, value_name = "N", default_value_t = 2500, value_parser = super::engine_args::at_least_one)]
    pub n_words: usize,
    /// Tokens to generate behind the text, in tokens
    #[arg(short = 'n', long = "n-gen", value_name = "N", default_value_t = 16, value_parser = super::numbers::whole::<usize>)]
    pub n_gen: usize,
    /// Timed runs of each side of the comparison
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = super::engine_args::at_least_one)]
    pub rounds: usize,
    /// Tokens that llama.cpp computes in one graph run, in tokens (its default)
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = super::engine_args::at_least_one)]
    pub peer_ubatch: usize,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct DemoReport {
    schema_version: u32,
    n_threads: usize,
    models: Vec<ModelReport>,
    #[serde(flatten)]
    provenance: Provenance,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    model: String,
    device: String,
    n_prompt: usize,
    chunks: Vec<ChunkReport>,
    buckets: Vec<BucketReport>,
    graphs: GraphReport,
    prefill_us: u64,
    prefill_tok_s: f64,
    text: String,
    peer: Option<PeerReport>,
}

/// The comparison with llama.cpp on the same file, threads and machine.
#[derive(Clone, Debug, Serialize)]
struct PeerReport {
    n_rounds: usize,
    n_ubatch: usize,
    ours_us: Vec<u64>,
    theirs_us: Vec<u64>,
    speedup: f64,
    speedup_spread: f64,
    nmse: f64,
    nmse_limit: f64,
    argmax_equal: bool,
    argmax_gap: f32,
    is_valid: bool,
    /// Why the harness would give no ratio.
    refused: Option<String>,
}

/// Runs `demo`; the answer is no when the logits differ from llama.cpp's.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("make folder {}", args.dir.display()))?;
    let journal = text::journal(args.n_words);
    let book = args.dir.join("journal.txt");
    std::fs::write(&book, &journal).with_context(|| format!("write {}", book.display()))?;
    let mut steps = Steps::new(console);
    let mut models = Vec::new();
    for preset in PRESETS {
        let path = make_model(preset, args, &mut steps)?;
        let report = show(&path, &journal, args, &mut steps)?;
        if !args.json {
            print_model(&report, &book)?;
        }
        models.push(report);
    }
    let is_valid = models
        .iter()
        .all(|m| m.peer.as_ref().is_none_or(|peer| peer.is_valid));
    if args.json {
        let n_threads = args.engine.to_options()?.n_threads;
        let provenance = Provenance::new();
        let schema_version = SCHEMA_VERSION;
        report::print_json(&DemoReport {
            schema_version,
            n_threads,
            models,
            provenance,
        })?;
    }
    Ok(if is_valid {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// Says on stderr which step begins, of how many.
struct Steps<'a> {
    console: &'a Console,
    n_begun: usize,
    n: usize,
}

impl<'a> Steps<'a> {
    /// Of one demo.
    fn new(console: &'a Console) -> Self {
        let n = PRESETS.len() * if cfg!(feature = "llama") { 3 } else { 2 };
        console.note(format_args!("demo: {n} steps, {DURATION}"));
        Self {
            console,
            n_begun: 0,
            n,
        }
    }

    fn begin(&mut self, what: impl std::fmt::Display) {
        self.n_begun += 1;
        self.console
            .note(format_args!("step {} of {}: {what}", self.n_begun, self.n));
    }
}

/// Writes the preset's model unless it is there.
fn make_model(preset: &str, args: &Args, steps: &mut Steps<'_>) -> anyhow::Result<PathBuf> {
    let console = steps.console;
    let path = args.dir.join(format!("{preset}-{}.gguf", args.dtype));
    if path.exists() {
        steps.begin(format_args!("{} is there", path.display()));
        return Ok(path);
    }
    steps.begin(format_args!("make {} with random weights", path.display()));
    let mut spec = Spec::preset(preset)?;
    spec.weight_type = WeightType::from_name(&args.dtype).with_context(|| {
        format!(
            "expected one of {}, found {}",
            WeightType::NAMES,
            args.dtype
        )
    })?;
    spec.seed = SEED;
    let _listening = console.interrupt().listen("removing the unfinished file");
    let bar = console.progress("synth", 0, Unit::Bytes);
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let written = synth::write(&spec, &path, n_threads, &mut |progress| {
        bar.set_total(progress.n_bytes);
        bar.set(progress.n_done);
        if console.interrupt().is_requested() {
            std::ops::ControlFlow::Break(())
        } else {
            std::ops::ControlFlow::Continue(())
        }
    });
    match written {
        Ok(_) => Ok(path),
        Err(SynthError::Cancelled { .. }) => Err(Interrupted.into()),
        Err(error) => Err(error).with_context(|| format!("write {}", path.display())),
    }
}

/// One model at work: prefill with progress, a short continuation, the comparison.
fn show(
    path: &Path,
    journal: &str,
    args: &Args,
    steps: &mut Steps<'_>,
) -> anyhow::Result<ModelReport> {
    let console = steps.console;
    let file = GgufFile::open(path).with_context(|| format!("open {}", path.display()))?;
    let tokenizer = Tokenizer::from_gguf(&file).context("read the tokenizer")?;
    let options = EncodeOptions {
        add_bos: true,
        parse_special: false,
    };
    let ids = tokenizer
        .encode(journal.as_bytes(), options)
        .context("encode the text")?;
    drop(file);
    steps.begin(format_args!(
        "read {} and write {}",
        report::count(ids.len(), "token"),
        args.n_gen
    ));
    let loaded = drive::load(path, &args.engine, console)?;
    let mut session = drive::session(&loaded.engine, ids.len(), args.n_gen)?;
    let chunks = session
        .plan(ids.len(), &Rows::Last)
        .context("plan the prompt")?;
    let bar = console.progress("prefill", ids.len() as u64, Unit::Tokens);
    let start = Instant::now();
    let logits = drive::prefill(&mut session, &ids, &Rows::Last, &bar, console)?;
    let prefill = start.elapsed();
    drop(bar);
    let first = logits.row(0).map(drive::argmax).transpose()?;
    let text = continue_greedily(&mut session, &tokenizer, first, args.n_gen, console)?;
    let graphs = GraphReport::from(&session.counters());
    let (chunks, buckets) = report::chunk_reports(&chunks);
    let peer = compare_with_peer(path, &ids, &loaded.engine, args, steps)?;
    Ok(ModelReport {
        model: path.display().to_string(),
        device: loaded.engine.device().name(),
        n_prompt: ids.len(),
        chunks,
        buckets,
        graphs,
        prefill_us: report::to_us(prefill),
        prefill_tok_s: ids.len() as f64 / prefill.as_secs_f64(),
        text,
        peer,
    })
}

/// The text that the model writes behind the prompt.
fn continue_greedily(
    session: &mut Session,
    tokenizer: &Tokenizer,
    first: Option<u32>,
    n_gen: usize,
    console: &Console,
) -> anyhow::Result<String> {
    let bar = Progress::hidden();
    let mut decoder = tokenizer.decoder();
    let mut text = String::new();
    let mut next = first;
    for _ in 0..n_gen {
        let Some(id) = next.filter(|&id| !tokenizer.is_end(id)) else {
            break;
        };
        text.push_str(decoder.push(id));
        let logits = drive::prefill(session, &[id], &Rows::Last, &bar, console)?;
        next = logits.row(0).map(drive::argmax).transpose()?;
    }
    text.push_str(decoder.finish());
    Ok(text)
}

#[cfg(feature = "llama")]
fn compare_with_peer(
    path: &Path,
    ids: &[u32],
    engine: &Arc<Engine>,
    args: &Args,
    steps: &mut Steps<'_>,
) -> anyhow::Result<Option<PeerReport>> {
    steps.begin(format_args!(
        "the same prompt in turns with llama.cpp, {} each",
        report::count(args.rounds + 1, "run")
    ));
    compare::compare(path, ids, engine, args, steps.console).map(Some)
}

#[cfg(not(feature = "llama"))]
fn compare_with_peer(
    _path: &Path,
    _ids: &[u32],
    _engine: &Arc<Engine>,
    _args: &Args,
    steps: &mut Steps<'_>,
) -> anyhow::Result<Option<PeerReport>> {
    steps
        .console
        .warning(format_args!("no comparison: {}", crate::cli::WITHOUT_LLAMA));
    Ok(None)
}

/// One model's part of the result, for people.
fn print_model(report: &ModelReport, book: &Path) -> anyhow::Result<()> {
    let mut out = format!(
        "{}: {} of {} on {}\n  plan       {}, {}\n",
        report.model,
        report::count(report.n_prompt, "token"),
        book.display(),
        report.device,
        report::count(report.chunks.len(), "chunk"),
        report::count(report.buckets.len(), "bucket"),
    );
    out += &report::describe_chunks(&report.chunks, &report.buckets);
    out += &format!("  graphs     {}\n", report.graphs);
    out += &format!(
        "  prefill    {}\n",
        report::describe_speed(report.n_prompt, report.prefill_us)
    );
    out += &format!("  writes     {:?}\n", report.text);
    if let Some(peer) = &report.peer {
        out += &describe_peer(peer, report.n_prompt);
    }
    out.push('\n');
    report::print_text(&out)
}

fn describe_peer(peer: &PeerReport, n_prompt: usize) -> String {
    let median = |us: &[u64]| {
        let samples: Vec<f64> = us.iter().map(|&us| us as f64 / 1e6).collect();
        Summary::of(&samples).map_or(0.0, |s| n_prompt as f64 / s.median)
    };
    let refused = peer.refused.as_ref();
    let refused = refused.map_or_else(String::new, |why| format!(" (not counted: {why})"));
    let verdict = if peer.is_valid {
        "logits agree"
    } else {
        "INVALID"
    };
    format!(
        "  llama.cpp  ours {:.1} tok/s, theirs {:.1} tok/s (median of {} runs in turns, ubatch {})\n  \
         ratio      {:.2} +- {:.2}{refused}\n  check      {verdict}: NMSE {:.1e} (limit {:.1e}), argmax {}\n",
        median(&peer.ours_us),
        median(&peer.theirs_us),
        peer.n_rounds,
        peer.n_ubatch,
        peer.speedup,
        peer.speedup_spread,
        peer.nmse,
        peer.nmse_limit,
        if peer.argmax_equal {
            "equal"
        } else {
            "different"
        },
    )
}
