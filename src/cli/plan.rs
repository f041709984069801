//! `g4prefill plan`: what a prompt of some length would do, without running it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

use super::report::{self, BucketReport, ChunkReport, Provenance, SCHEMA_VERSION};
use super::{Console, EngineArgs, drive};
use crate::engine::budget::Bytes;
use crate::engine::{Rows, kv_cache};

/// Arguments of `plan`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// Length of the prompt, in tokens
    #[arg(long, value_name = "N", value_parser = super::engine_args::at_least_one)]
    pub n_prompt: usize,
    /// Tokens to generate behind the prompt, in tokens
    #[arg(short = 'n', long = "n-gen", value_name = "N", default_value_t = 0)]
    pub n_gen: usize,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct PlanReport {
    schema_version: u32,
    n_prompt: usize,
    n_gen: usize,
    n_ctx: usize,
    device: String,
    weights: WeightsReport,
    bytes: BytesReport,
    chunks: Vec<ChunkReport>,
    buckets: Vec<BucketReport>,
    #[serde(flatten)]
    provenance: Provenance,
}

/// Type of the resident matrices, and why.
#[derive(Debug, Serialize)]
struct WeightsReport {
    kind: &'static str,
    reason: String,
}

/// Device memory by class, in bytes.
#[derive(Debug, Serialize)]
struct BytesReport {
    weights: u64,
    kv_global: u64,
    kv_ring: u64,
    total: u64,
    free: Option<u64>,
}

/// Runs `plan`: loads the model and makes the caches, so that what does not fit fails here.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    let loaded = drive::load(&args.model, &args.engine, console)?;
    let engine = &loaded.engine;
    let session = drive::session(engine, args.n_prompt, args.n_gen)?;
    let chunks = session
        .plan(args.n_prompt, &Rows::Last)
        .context("plan the prompt")?;
    let (chunks, buckets) = report::chunk_reports(&chunks);
    let cache = session.kv_cache();
    let kv_type = engine.options().kv_type;
    let (kv_global, kv_ring) =
        kv_cache::bytes(engine.config(), cache.n_ctx_rows, cache.ring_rows, kv_type);
    let choice = engine.weights_choice();
    let report = PlanReport {
        schema_version: SCHEMA_VERSION,
        n_prompt: args.n_prompt,
        n_gen: args.n_gen,
        n_ctx: cache.n_ctx_rows,
        device: engine.device().name(),
        weights: WeightsReport {
            kind: if choice.bf16 { "bf16" } else { "native" },
            reason: choice.reason.clone(),
        },
        bytes: BytesReport {
            weights: choice.bytes,
            kv_global,
            kv_ring,
            total: choice.bytes + kv_global + kv_ring,
            free: engine.device().memory().map(|(free, _)| free),
        },
        chunks,
        buckets,
        provenance: Provenance::new(),
    };
    if args.json {
        report::print_json(&report)?;
    } else {
        report::print_text(&describe(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The plan for people.
fn describe(report: &PlanReport) -> String {
    let PlanReport {
        device,
        n_prompt,
        n_gen,
        n_ctx,
        weights,
        bytes,
        ..
    } = report;
    let mut text = format!(
        "device   {device}\nprompt   {n_prompt} tokens, {n_gen} generated, context {n_ctx}\n\n"
    );
    text += &format!(
        "weights    {:>12}  {} ({})\n",
        Bytes(bytes.weights).to_string(),
        weights.kind,
        weights.reason
    );
    text += &format!("k/v global {:>12}\n", Bytes(bytes.kv_global).to_string());
    text += &format!("k/v rings  {:>12}\n", Bytes(bytes.kv_ring).to_string());
    text += &format!("total      {:>12}\n\n", Bytes(bytes.total).to_string());
    text += &format!(
        "{} chunks, {} buckets\n",
        report.chunks.len(),
        report.buckets.len()
    );
    text += &report::describe_chunks(&report.chunks, &report.buckets);
    text
}
