//! `g4prefill logits`: token ids in, logits of the wanted rows out. The command that tests from
//! outside use; it needs no tokenizer.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use serde::Serialize;

use super::out_file::{OutFile, is_stdout, require_apart};
use super::report::{
    self, BucketReport, ChunkReport, DeviceReport, GraphReport, Provenance, SCHEMA_VERSION,
};
use super::{Console, EngineArgs, Progress, RowsArg, Unit, check_ids, drive, parse_ids, read_file};
use crate::engine::{Chunk, Logits, Rows, Session};

/// Bytes of one logit.
const FLOAT_BYTES: u64 = size_of::<f32>() as u64;

/// Arguments of `logits`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// Token ids, whitespace-separated; `-` is stdin
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Prompt rows whose logits are wanted: last, all, or a list such as 0,7,20-29 (from 0)
    #[arg(long, value_name = "ROWS", default_value = "last")]
    pub rows: RowsArg,
    /// Where the logits go: little-endian float32, row-major [rows, n_vocab]; `-` is stdout
    #[arg(short = 'o', long = "output", value_name = "OUT")]
    pub output: PathBuf,
    /// Continue by the most likely token, this many tokens
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = super::numbers::whole::<usize>)]
    pub greedy: usize,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct LogitsReport {
    schema_version: u32,
    n_prompt: usize,
    n_vocab: usize,
    rows: Vec<usize>,
    argmax: Vec<u32>,
    greedy: Vec<u32>,
    device: DeviceReport,
    chunks: Vec<ChunkReport>,
    buckets: Vec<BucketReport>,
    graphs: GraphReport,
    timing_us: Timing,
    #[serde(flatten)]
    provenance: Provenance,
}

#[derive(Debug, Default, Serialize)]
struct Timing {
    load: u64,
    prefill: u64,
    greedy: u64,
}

/// Runs `logits`.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    if args.json && is_stdout(&args.output) {
        bail!(
            "stdout cannot carry both the logits (-o {}) and the report (--json)",
            args.output.display()
        );
    }
    let ids = parse_ids(&read_file(&args.ids)?)
        .with_context(|| format!("{}: token ids", args.ids.display()))?;
    let rows = args.rows.resolve(ids.len()).map_err(|row| {
        anyhow!(
            "expected rows below {} (prompt tokens), found row {row}",
            ids.len()
        )
    })?;
    require_apart(&[Some(&args.output)], &[&args.model, &args.ids])?;
    let mut out = OutFile::create(&args.output)?;
    let loaded = drive::load(&args.model, &args.engine, console)?;
    let n_vocab = loaded.engine.config().n_vocab;
    check_ids(&ids, n_vocab).with_context(|| args.ids.display().to_string())?;
    out.require_room((rows.len() as u64).saturating_mul(n_vocab as u64 * FLOAT_BYTES))?;
    let session = drive::session(&loaded.engine, ids.len(), args.greedy)?;
    console.detail(format_args!(
        "prefill of {} begins",
        report::count(ids.len(), "token")
    ));
    let mut work = Work {
        session,
        chunk: loaded.engine.options().chunk,
        console,
        next: None,
        chunks: Vec::new(),
    };

    let start = Instant::now();
    let argmax = work.write_rows(&ids, &rows, args, &mut out)?;
    let prefill = start.elapsed();
    let start = Instant::now();
    let greedy = work.greedy(args.greedy)?;
    let decode = start.elapsed();
    out.finish()?;

    let (chunks, buckets) = report::chunk_reports(&work.chunks);
    let report = LogitsReport {
        schema_version: SCHEMA_VERSION,
        n_prompt: ids.len(),
        n_vocab,
        rows,
        argmax,
        greedy,
        device: DeviceReport::from(loaded.engine.device()),
        chunks,
        buckets,
        graphs: GraphReport::from(&work.session.counters()),
        timing_us: Timing {
            load: report::to_us(loaded.duration),
            prefill: report::to_us(prefill),
            greedy: report::to_us(decode),
        },
        provenance: Provenance::new(),
    };
    finish(args, &report, console)
}

/// The report as JSON, or for people: greedy ids on stdout, the rest on stderr.
fn finish(args: &Args, report: &LogitsReport, console: &Console) -> anyhow::Result<ExitCode> {
    if args.json {
        report::print_json(report)?;
        return Ok(ExitCode::SUCCESS);
    }
    console.note(format_args!(
        "{} of {} logits -> {}; prompt of {}, {}",
        report::count(report.rows.len(), "row"),
        report.n_vocab,
        args.output.display(),
        report::count(report.n_prompt, "token"),
        report::describe_speed(report.n_prompt, report.timing_us.prefill)
    ));
    if args.greedy > 0 && !is_stdout(&args.output) {
        report::print_text(&format!("{}\n", join(&report.greedy)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// One session at work on one prompt.
struct Work<'a> {
    session: Session,
    /// Tokens per graph run.
    chunk: usize,
    console: &'a Console,
    /// Most likely token after the prompt, once its last row is computed.
    next: Option<u32>,
    chunks: Vec<Chunk>,
}

impl Work<'_> {
    /// Prefills the prompt and writes the wanted rows; returns each row's most likely token.
    fn write_rows(
        &mut self,
        ids: &[u32],
        rows: &[usize],
        args: &Args,
        out: &mut OutFile,
    ) -> anyhow::Result<Vec<u32>> {
        let bar = self
            .console
            .progress("prefill", ids.len() as u64, Unit::Tokens);
        if args.rows == RowsArg::All {
            return self.write_all_rows(ids, self.chunk, out, &bar);
        }
        let n_last = ids.len() - 1;
        let mut wanted = rows.to_vec();
        if args.greedy > 0 {
            wanted.push(n_last);
        }
        wanted.sort_unstable();
        wanted.dedup();
        let logits = self.prefill(ids, &Rows::List(wanted.clone()), &bar)?;
        let mut argmax = Vec::with_capacity(rows.len());
        for row in rows {
            let index = wanted
                .binary_search(row)
                .map_err(|_| anyhow!("row {row} is missing"))?;
            let values = logits.row(index).context("read logits")?;
            argmax.push(drive::argmax(values)?);
            out.write(values)?;
        }
        if wanted.last() == Some(&n_last) {
            self.next = logits
                .row(wanted.len() - 1)
                .map(drive::argmax)
                .transpose()?;
        }
        Ok(argmax)
    }

    /// All rows, one chunk at a time: the logits of a long prompt do not fit into memory.
    fn write_all_rows(
        &mut self,
        ids: &[u32],
        chunk: usize,
        out: &mut OutFile,
        bar: &Progress,
    ) -> anyhow::Result<Vec<u32>> {
        let mut argmax = Vec::with_capacity(ids.len());
        for slice in ids.chunks(chunk) {
            let logits = self.prefill(slice, &Rows::All, bar)?;
            for row in logits.data.chunks_exact(logits.n_vocab) {
                argmax.push(drive::argmax(row)?);
            }
            out.write(&logits.data)?;
        }
        self.next = argmax.last().copied();
        Ok(argmax)
    }

    fn prefill(&mut self, ids: &[u32], rows: &Rows, bar: &Progress) -> anyhow::Result<Logits> {
        self.chunks.extend(
            self.session
                .plan(ids.len(), rows)
                .context("plan the prompt")?,
        );
        drive::prefill(&mut self.session, ids, rows, bar, self.console)
    }

    /// Continues by the most likely token `n` times.
    fn greedy(&mut self, n: usize) -> anyhow::Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(n);
        let mut next = self.next;
        let bar = Progress::hidden();
        while let (Some(id), true) = (next, ids.len() < n) {
            ids.push(id);
            if ids.len() == n {
                break;
            }
            let logits = drive::prefill(&mut self.session, &[id], &Rows::Last, &bar, self.console)?;
            next = logits.row(0).map(drive::argmax).transpose()?;
        }
        Ok(ids)
    }
}
