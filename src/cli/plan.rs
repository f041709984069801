//! `g4prefill plan`: what a prompt of some length would take, without loading or running anything.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

use super::report::{self, Provenance, SCHEMA_VERSION, count};
use super::{Console, EngineArgs, drive};
use crate::engine::PlanReport;
use crate::engine::budget::{Bytes, Resident};
use crate::engine::report::{ChunkGroup, MemoryReport};

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
    #[arg(short = 'n', long = "n-gen", value_name = "N", default_value_t = 0, value_parser = super::numbers::whole::<usize>)]
    pub n_gen: usize,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    #[serde(flatten)]
    plan: PlanReport,
    #[serde(flatten)]
    provenance: Provenance,
}

/// Runs `plan`; the answer is no when the prompt does not fit into the device's memory.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    let options = drive::options(&args.engine)?;
    drive::show_ggml_log(console);
    let plan = PlanReport::open(&args.model, &options, args.n_prompt, args.n_gen)
        .with_context(|| format!("plan for {}", args.model.display()))?;
    drive::warn_beyond_training(options.n_ctx, plan.n_ctx.trained, console);
    let fits = plan.memory.fits != Some(false);
    if args.json {
        report::print_json(&Report {
            schema_version: SCHEMA_VERSION,
            plan,
            provenance: Provenance::new(),
        })?;
    } else {
        report::print_text(&describe(&plan))?;
    }
    Ok(if fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// The plan for people.
fn describe(plan: &PlanReport) -> String {
    let n_ctx = &plan.n_ctx;
    let mut text = format!(
        "device     {}\nprompt     {}, {} generated\ncontext    {} of at most {} ({})",
        plan.device.name,
        count(plan.n_prompt, "token"),
        plan.n_gen,
        n_ctx.needed,
        n_ctx.limit,
        n_ctx.source
    );
    text += &if n_ctx.needed > n_ctx.trained {
        format!("; the model was trained for {}\n\n", n_ctx.trained)
    } else {
        "\n\n".to_owned()
    };
    text += &describe_bytes(plan);
    text += &describe_memory(&plan.memory);
    text += &format!(
        "\n{}, {}; graphs: {} built, {} captured, {} replayed, {} direct\n",
        count(plan.chunks.len(), "chunk"),
        count(plan.buckets.len(), "bucket"),
        plan.graphs.built,
        plan.graphs.captured,
        plan.graphs.replayed,
        plan.graphs.direct
    );
    for group in &plan.chunk_groups {
        text += &describe_group(group, plan);
    }
    text += "\nswitches\n";
    for switch in &plan.switches {
        let why = switch.why.as_ref().map(|why| format!("  ({why})"));
        text += &format!(
            "  {:<16}{}{}\n",
            switch.name,
            switch.active,
            why.unwrap_or_default()
        );
    }
    let unmet = plan.fast_path.conditions.iter().filter(|c| !c.is_met);
    text += &format!("\nfast path: {}\n", yes_no(plan.fast_path.is_met));
    for condition in unmet {
        text += &format!("  not {}: {}\n", condition.name, condition.found);
    }
    text
}

fn yes_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

fn line(name: &str, bytes: u64, more: &str) -> String {
    let bytes = Bytes(bytes).to_string();
    format!("{name:<11}{bytes:>12}  {more}")
        .trim_end()
        .to_owned()
        + "\n"
}

/// Bytes by class.
fn describe_bytes(plan: &PlanReport) -> String {
    let (bytes, weights) = (&plan.bytes, &plan.weights);
    let resident = match weights.active {
        Resident::Native => "native",
        Resident::Bf16 => "bf16",
    };
    [
        line(
            "weights",
            bytes.weights,
            &format!("{resident} ({})", weights.why),
        ),
        line("k/v global", bytes.kv_global, ""),
        line("k/v rings", bytes.kv_ring, ""),
        line("inputs", bytes.io, ""),
        line("graphs", bytes.arena_estimate, "estimate"),
        line("logits", bytes.logits, ""),
        line("staging", bytes.staging, ""),
        line("device", bytes.device_total, "in all"),
        line("host", bytes.host_total, "beside the device"),
    ]
    .concat()
}

/// Whether it fits.
fn describe_memory(memory: &MemoryReport) -> String {
    let answer = memory.fits.map_or("not known", yes_no);
    let mut text = format!("fits       {answer}");
    if let Some(why) = &memory.why_not {
        text += &format!(": {why}");
    } else if let Some(bytes) = memory.available {
        text += &format!(": {} available", Bytes(bytes));
    }
    if let Some(n) = memory.n_ctx_fitting {
        text += &format!("; longest context that fits: {n} tokens");
    }
    text + "\n"
}

fn describe_group(group: &ChunkGroup, plan: &PlanReport) -> String {
    let label = plan.buckets.get(group.bucket).map_or("", |b| &b.label);
    format!(
        "  {} x {label}: {} from {}\n",
        group.n_chunks,
        count(group.n_tokens, "token"),
        group.n_past
    )
}
