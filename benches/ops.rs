//! `cargo bench --bench ops`: single operations of the graphs at a model's shape, with a cold cache.
//!
//! Thin: what is measured, and how, is `g4prefill::bench::ops`. Arguments come behind `--`.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use serde::Serialize;

use g4prefill::bench::ops::{self, OpReport, OpSettings, OpShape};
use g4prefill::bench::{DeviceFacts, Machine};
use g4prefill::ggml::{Backend, Device, DeviceChoice, load_backends};
use g4prefill::gguf::DType;
use g4prefill::synth::Spec;

/// Version of the JSON object (`benches/README.md`).
const SCHEMA_VERSION: u32 = 1;
/// Twice the second-level cache of the largest GPU of today, 126 MiB.
const GPU_COLD_BYTES: u64 = 256 << 20;
/// Where a CPU does not tell its cache.
const CPU_COLD_BYTES: u64 = 128 << 20;

/// Times single operations, each with memory that is not in the cache.
#[derive(Debug, Parser)]
struct Args {
    /// Device: cpu, cuda or cuda:N [default: the first GPU, else the CPU]
    #[arg(long)]
    device: Option<String>,
    /// Model whose shapes are taken, a preset of `synth`
    #[arg(long, default_value = "e4b")]
    preset: String,
    /// Tokens of the chunk [default: 2048 on a GPU, 32 on the CPU]
    #[arg(long)]
    n_tokens: Option<usize>,
    /// Tokens in the caches, the chunk included
    #[arg(long, default_value_t = 8192)]
    n_kv: usize,
    /// Types of the weights: f32, f16, bf16, q8_0, q4_0 [default: bf16,q8_0 on a GPU, q8_0 on the CPU]
    #[arg(long, value_delimiter = ',')]
    weights: Vec<String>,
    /// Only operations whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// MiB that a round over all copies moves at least [default: 256 on a GPU, twice the CPU's cache]
    #[arg(long)]
    cold_mib: Option<u64>,
    /// Samples
    #[arg(long, default_value_t = 20)]
    samples: usize,
    /// Shortest sample in milliseconds
    #[arg(long, default_value_t = 10)]
    sample_ms: u64,
    /// CPU threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Print one JSON object with all samples
    #[arg(long)]
    json: bool,
    /// What cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    commit: Option<&'static str>,
    ggml_pin: Option<&'static str>,
    series_sha256: Option<&'static str>,
    machine: Machine,
    preset: String,
    n_tokens: usize,
    n_kv: usize,
    cold_bytes: u64,
    ops: Vec<OpReport>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let backend = open(&args)?;
    let is_cpu = backend.device().is_cpu();
    let n_tokens = args.n_tokens.unwrap_or(if is_cpu { 32 } else { 2048 });
    let settings = OpSettings {
        cold_bytes: cold_bytes(&args, is_cpu),
        n_samples: args.samples,
        sample: Duration::from_millis(args.sample_ms),
    };
    let spec = Spec::preset(&args.preset)?;
    let shape = OpShape::new(&spec, n_tokens, args.n_kv);
    let mut report = Report {
        schema_version: SCHEMA_VERSION,
        commit: option_env!("G4_COMMIT"),
        ggml_pin: option_env!("G4_PIN"),
        series_sha256: option_env!("G4_SERIES_SHA256"),
        machine: Machine::new(
            DeviceFacts::of(&backend),
            std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
        ),
        preset: args.preset.clone(),
        n_tokens: shape.n_tokens,
        n_kv: shape.n_kv,
        cold_bytes: settings.cold_bytes,
        ops: Vec::new(),
    };
    if !args.json {
        head(&report)?;
    }
    for (i, dtype) in weights(&args, is_cpu)?.into_iter().enumerate() {
        for case in ops::cases(&shape, dtype, is_cpu)? {
            // What reads no weights is the same for every type of them.
            let is_measured = i > 0 && !case.reads_weights;
            if is_measured || !case.name.contains(&args.only) {
                continue;
            }
            let op = ops::measure(&backend, &case, settings)
                .with_context(|| format!("measure {case:?}"))?;
            if !args.json {
                row(&op)?;
            }
            report.ops.push(op);
        }
    }
    if args.json {
        let text = serde_json::to_string(&report).context("make JSON")?;
        writeln!(std::io::stdout(), "{text}").context("write stdout")?;
    }
    Ok(())
}

fn open(args: &Args) -> anyhow::Result<Backend> {
    load_backends(None)?;
    let choice = match args.device.as_deref() {
        None => DeviceChoice::Auto,
        Some("cpu") => DeviceChoice::Cpu,
        Some("cuda") => DeviceChoice::Cuda(0),
        Some(other) => {
            let index = other.strip_prefix("cuda:").and_then(|n| n.parse().ok());
            DeviceChoice::Cuda(index.with_context(|| {
                format!("device: expected cpu, cuda or cuda:N, found {other:?}")
            })?)
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let n_threads = args.threads.unwrap_or(threads);
    Ok(Backend::open(Device::find(choice)?, n_threads)?)
}

fn cold_bytes(args: &Args, is_cpu: bool) -> u64 {
    if let Some(mib) = args.cold_mib {
        return mib << 20;
    }
    if is_cpu {
        let cpu = Path::new("/sys/devices/system/cpu/cpu0");
        return ops::cpu_cache_bytes(cpu).map_or(CPU_COLD_BYTES, |bytes| 2 * bytes);
    }
    GPU_COLD_BYTES
}

fn weights(args: &Args, is_cpu: bool) -> anyhow::Result<Vec<DType>> {
    if args.weights.is_empty() {
        let all = [DType::Q8_0, DType::BF16];
        return Ok(all.into_iter().take(if is_cpu { 1 } else { 2 }).collect());
    }
    let names = args.weights.iter();
    names
        .map(|name| DType::from_name(name).with_context(|| format!("unknown type {name:?}")))
        .collect()
}

fn head(report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{}", report.machine.describe())?;
    writeln!(
        out,
        "{} {} tokens, {} in the caches; {} MiB at least between two uses of the same memory",
        report.preset,
        report.n_tokens,
        report.n_kv,
        report.cold_bytes >> 20,
    )?;
    writeln!(
        out,
        "{:<26} {:>12} {:>24} {:>10} {:>10} {:>9} {:>9}  operands",
        "operation", "median us", "quartiles", "MB", "GFLOP", "GB/s", "TFLOP/s"
    )?;
    Ok(())
}

fn row(op: &OpReport) -> anyhow::Result<()> {
    let quartiles = format!("{:.1} to {:.1}", op.us.q1, op.us.q3);
    let warm = if op.is_cold { "" } else { ", WARM" };
    writeln!(
        std::io::stdout(),
        "{:<26} {:>12.1} {:>24} {:>10.2} {:>10.3} {:>9.1} {:>9.3}  {}{warm}",
        op.name,
        op.us.median,
        quartiles,
        op.bytes as f64 / 1e6,
        op.flops as f64 / 1e9,
        op.gb_s,
        op.tflop_s,
        op.operands,
    )?;
    Ok(())
}
