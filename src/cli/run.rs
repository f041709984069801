//! `g4prefill run`: text in, continuation out. Generated text streams to stdout, everything else
//! to stderr.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;

use super::outcome::is_closed_pipe;
use super::report::{
    self, BucketReport, ChunkReport, DeviceReport, GraphReport, Provenance, SCHEMA_VERSION,
};
use super::session_file::{LoadedSession, Opened, SavedSession};
use super::tokenize::encode_user_message;
use super::{
    Console, EngineArgs, Interrupted, Progress, SamplingArgs, SessionArgs, TextSource, Unit,
    check_text, drive,
};
use crate::engine::sampler::{Sampler, SamplerOptions};
use crate::engine::{Rows, Session};
use crate::gguf::GgufFile;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Arguments of `run`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// The prompt.
    #[command(flatten)]
    pub text: TextSource,
    /// Most tokens to generate, in tokens; 0: only read the prompt
    #[arg(short = 'n', long = "n-gen", value_name = "N", default_value_t = 128, value_parser = super::numbers::whole::<usize>)]
    pub n_gen: usize,
    /// Put the text into the model's chat template, as one message of the user
    #[arg(long)]
    pub chat: bool,
    /// Read the names of special tokens in the text as those tokens
    #[arg(long, conflicts_with = "chat")]
    pub parse_special: bool,
    /// Sampling options.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Sessions on disk.
    #[command(flatten)]
    pub session: SessionArgs,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout, at the end
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct RunReport {
    schema_version: u32,
    n_prompt: usize,
    n_read: usize,
    n_generated: usize,
    text: String,
    ids: Vec<u32>,
    stop: Stop,
    interrupted: bool,
    invalid_utf8_at: Option<usize>,
    device: DeviceReport,
    chunks: Vec<ChunkReport>,
    buckets: Vec<BucketReport>,
    graphs: GraphReport,
    loaded_session: Option<LoadedSession>,
    saved_session: Option<SavedSession>,
    timing_us: Timing,
    #[serde(flatten)]
    provenance: Provenance,
}

/// Why the continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Stop {
    /// As many tokens as asked for.
    Length,
    /// The model said that it is done.
    End,
    /// The user stopped it.
    Cancelled,
}

#[derive(Debug, Default, Serialize)]
struct Timing {
    load: u64,
    tokenize: u64,
    prefill: u64,
    decode: u64,
    load_session: u64,
    save_session: u64,
}

/// Runs `run`.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    let destination = args.session.check_paths()?;
    let text = args.text.read()?;
    let invalid_utf8_at = check_text(&text, args.chat, console);
    let start = Instant::now();
    let (tokenizer, ids) = read_prompt(args, &text)?;
    let tokenize = start.elapsed();
    let loaded = drive::load(&args.model, &args.engine, console)?;
    let opened = args
        .session
        .open(&loaded.engine, &ids, args.n_gen, console)?;
    let Opened {
        session,
        loaded: loaded_session,
        duration: load_session,
    } = opened;
    let rest = ids.get(session.n_past()..).unwrap_or_default();
    let mut chunks = session
        .plan(rest.len(), &Rows::Last)
        .context("plan the prompt")?;
    let options = SamplerOptions::from(&args.sampling);
    let sampler = Sampler::new(options, &loaded.engine.config().suppress_tokens)?;
    let mut work = Work {
        tokenizer: &tokenizer,
        session,
        sampler,
        console,
        is_json: args.json,
        made: Made::default(),
    };

    let ended = work.produce(rest, args.n_gen);
    let was_cancelled = matches!(&ended, Err(error) if error.is::<Interrupted>());
    let is_unread = matches!(&ended, Err(error) if is_closed_pipe(error));
    if ended.is_err() && !was_cancelled && !is_unread {
        return ended.map(|()| ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let saved_session = match destination {
        Some(to) => Some(to.save(&work.session, console)?),
        None => None,
    };
    let save_session = start.elapsed();
    let n_read = work.session.n_past().min(ids.len());
    chunks.retain(|chunk| chunk.n_past + chunk.n_tokens <= n_read);
    let (chunks, buckets) = report::chunk_reports(&chunks);
    let report = RunReport {
        schema_version: SCHEMA_VERSION,
        n_prompt: ids.len(),
        n_read,
        n_generated: work.made.ids.len(),
        text: work.made.text,
        ids: work.made.ids,
        stop: work.made.stop,
        interrupted: was_cancelled,
        invalid_utf8_at,
        device: DeviceReport::from(loaded.engine.device()),
        chunks,
        buckets,
        graphs: GraphReport::from(&work.session.counters()),
        loaded_session,
        saved_session,
        timing_us: Timing {
            load: report::to_us(loaded.duration),
            tokenize: report::to_us(tokenize),
            prefill: report::to_us(work.made.prefill),
            decode: report::to_us(work.made.decode),
            load_session: report::to_us(load_session),
            save_session: report::to_us(save_session),
        },
        provenance: Provenance::new(),
    };
    if args.json {
        report::print_json(&report)?;
    }
    summarise(&report, console);
    ended.map(|()| ExitCode::SUCCESS)
}

/// The prompt's token ids, and the tokenizer for what follows.
fn read_prompt(args: &Args, text: &[u8]) -> anyhow::Result<(Tokenizer, Vec<u32>)> {
    let file = GgufFile::open(&args.model).context("open the model")?;
    let tokenizer = Tokenizer::from_gguf(&file).context("read the tokenizer")?;
    let ids = if args.chat {
        let text = String::from_utf8_lossy(text).into_owned();
        encode_user_message(&file, &tokenizer, text)?
    } else {
        let options = EncodeOptions {
            add_bos: true,
            parse_special: args.parse_special,
        };
        tokenizer.encode(text, options).context("encode the text")?
    };
    Ok((tokenizer, ids))
}

/// What has come out so far.
#[derive(Debug)]
struct Made {
    ids: Vec<u32>,
    text: String,
    stop: Stop,
    prefill: Duration,
    decode: Duration,
}

impl Default for Made {
    fn default() -> Self {
        let (prefill, decode) = (Duration::ZERO, Duration::ZERO);
        Self {
            ids: Vec::new(),
            text: String::new(),
            stop: Stop::Cancelled,
            prefill,
            decode,
        }
    }
}

/// One session on its way through prompt and continuation.
struct Work<'a> {
    tokenizer: &'a Tokenizer,
    session: Session,
    sampler: Sampler,
    console: &'a Console,
    is_json: bool,
    made: Made,
}

impl Work<'_> {
    /// Prefills the prompt, then samples until the end; what is done stays when it is interrupted.
    fn produce(&mut self, ids: &[u32], n_gen: usize) -> anyhow::Result<()> {
        let _listening = self.console.interrupt().listen("this token");
        let start = Instant::now();
        let bar = self
            .console
            .progress("prefill", ids.len() as u64, Unit::Tokens);
        self.console.detail(format_args!(
            "prefill of {} begins",
            report::count(ids.len(), "token")
        ));
        let read = drive::prefill(&mut self.session, ids, &Rows::Last, &bar, self.console);
        drop(bar);
        self.made.prefill = start.elapsed();
        let mut logits = read?;
        let start = Instant::now();
        self.console
            .detail(format_args!("generation of at most {n_gen} begins"));
        let mut decoder = self.tokenizer.decoder();
        let hidden = Progress::hidden();
        self.made.stop = Stop::Length;
        while self.made.ids.len() < n_gen {
            let row = logits.row(0).context("read logits")?;
            let id = self.sampler.sample(row).context("sample")?;
            if self.tokenizer.is_end(id) {
                self.made.stop = Stop::End;
                break;
            }
            self.made.ids.push(id);
            let piece = decoder.push(id).to_owned();
            self.emit(&piece)?;
            if self.made.ids.len() < n_gen {
                let next =
                    drive::prefill(&mut self.session, &[id], &Rows::Last, &hidden, self.console);
                self.made.decode = start.elapsed();
                logits = next.inspect_err(|_| self.made.stop = Stop::Cancelled)?;
            }
        }
        let rest = decoder.finish().to_owned();
        self.emit(&rest)?;
        self.made.decode = start.elapsed();
        if !self.is_json && !self.made.text.is_empty() {
            report::print_text("\n")?;
        }
        Ok(())
    }

    /// Keeps a piece of text, and shows it at once unless a JSON object follows.
    fn emit(&mut self, piece: &str) -> anyhow::Result<()> {
        self.made.text.push_str(piece);
        if self.is_json || piece.is_empty() {
            return Ok(());
        }
        report::print_text(piece)
    }
}

/// What happened, for people, on stderr.
fn summarise(report: &RunReport, console: &Console) {
    let timing = &report.timing_us;
    let of_all = if report.n_read < report.n_prompt {
        format!(" of {}", report.n_prompt)
    } else {
        String::new()
    };
    // What a loaded session brought along took no time.
    let n_reused = report.loaded_session.as_ref().map_or(0, |s| s.n_reused);
    let n_computed = report.n_read.saturating_sub(n_reused);
    let reused = if n_reused > 0 {
        format!(", {n_reused} reused, {n_computed} computed")
    } else {
        String::new()
    };
    console.note(format_args!(
        "prompt: {}{of_all}{reused} in {}, {}",
        report::count(report.n_read, "token"),
        report::count(report.chunks.len(), "chunk"),
        report::describe_speed(n_computed, timing.prefill)
    ));
    if report.n_generated > 1 {
        // The first token comes from the prompt's logits.
        let speed = report::describe_speed(report.n_generated - 1, timing.decode);
        console.note(format_args!(
            "generated: {}, {speed}",
            report::count(report.n_generated, "token")
        ));
    }
    console.note(format_args!("graphs: {}", report.graphs));
}
