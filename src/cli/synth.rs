//! `g4prefill synth`: write a synthetic model.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::numbers::whole;
use super::out_file::{holds_model, is_stdout};
use super::{Console, Interrupted, Unit};
use crate::gguf::GgufFile;
use crate::synth::{self, NAME, Spec, Summary, SynthError, WeightType};

/// Write a synthetic Gemma-4 model: any preset and type, the same bytes for the same options.
///
/// With the defaults of a preset come the numbers of that model; each can be given instead.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model whose numbers to use: tiny, tiny-dense, tiny-moe, mini, mini-dense, mini-moe, e2b,
    /// e4b, 12b, 26b-a4b, 31b
    #[arg(long, value_name = "NAME")]
    pub preset: String,
    /// Type of the matrix weights: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_K, q5_K, q6_K
    #[arg(long = "type", value_name = "TYPE", default_value = "q8_0", value_parser = weight_type)]
    pub weight_type: WeightType,
    /// Seed of the weights, any number
    #[arg(long, value_name = "SEED", default_value_t = 0, value_parser = whole::<u64>)]
    pub seed: u64,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Number of threads [default: all]
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub threads: Option<usize>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    /// Numbers that replace the preset's
    #[command(flatten)]
    pub numbers: Numbers,
    /// How the file stores the model
    #[command(flatten)]
    pub storage: Storage,
}

/// Numbers that replace the preset's.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Numbers")]
pub struct Numbers {
    /// Layers [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_layer: Option<u32>,
    /// Model width [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_embd: Option<u32>,
    /// Query heads [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_head: Option<u32>,
    /// K/V heads of all layers, or of sliding layers with --n-head-kv-full [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_head_kv: Option<u32>,
    /// K/V heads of global layers [default: --n-head-kv, else the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_head_kv_full: Option<u32>,
    /// Head width of global layers [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub head_dim: Option<u32>,
    /// Head width of sliding layers [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub head_dim_swa: Option<u32>,
    /// Feed-forward width [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_ff: Option<u32>,
    /// Sliding window in tokens [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_swa: Option<u32>,
    /// Vocabulary size in tokens [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_vocab: Option<u32>,
    /// Context length in tokens that the file states [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_ctx_train: Option<u32>,
    /// Layers at the end that own no K/V [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_shared_kv: Option<u32>,
    /// Sliding (S) and full (F) attention, a letter per layer; repeated when too short
    /// [default: the preset's]
    #[arg(long, value_name = "LETTERS")]
    pub pattern: Option<String>,
    /// Width of the per-layer embeddings, 0 for none [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub ple: Option<u32>,
    /// Experts, 0 for none [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_expert: Option<u32>,
    /// Experts used per token [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_expert_used: Option<u32>,
    /// Feed-forward width of one expert [default: the preset's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    pub n_ff_exp: Option<u32>,
    /// Global layers without a V projection (V = raw K): true or false [default: the preset's]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub k_eq_v: Option<bool>,
    /// Shared layers with twice the feed-forward width: true or false [default: the preset's]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub wide_shared_ff: Option<bool>,
}

/// How the file stores the model.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Storage")]
pub struct Storage {
    /// Type of the per-layer embedding table [default: as --type]
    #[arg(long, value_name = "TYPE", value_parser = weight_type)]
    pub ple_type: Option<WeightType>,
    /// Leave out the K/V tensors of shared layers, as QAT files do
    #[arg(long)]
    pub trim_shared: bool,
    /// Store Q, K and V of a layer as one tensor
    #[arg(long)]
    pub fused_qkv: bool,
    /// Store gate and up of the experts apart
    #[arg(long)]
    pub split_experts: bool,
    /// Add an output matrix of its own
    #[arg(long)]
    pub untied_output: bool,
    /// Write numbers per layer as arrays, even equal ones
    #[arg(long)]
    pub array_metadata: bool,
    /// Number of shards, named FILE-00001-of-0000N.gguf
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>)]
    pub split: u32,
}

/// Parses `--type` and `--ple-type`.
fn weight_type(name: &str) -> Result<WeightType, String> {
    WeightType::from_name(name).ok_or_else(|| format!("expected one of {}", WeightType::NAMES))
}

/// The JSON result.
#[derive(Serialize)]
struct Report<'a> {
    schema_version: u32,
    name: &'a str,
    seed: u64,
    #[serde(rename = "type")]
    weight_type: &'static str,
    paths: Vec<String>,
    n_bytes: u64,
    n_tensors: usize,
    n_params: u64,
    n_layer: u32,
    n_embd: u32,
    n_vocab: u32,
    n_shared_kv: u32,
    n_swa: u32,
    n_threads: usize,
    elapsed_us: u64,
}

/// Writes the model and prints what was written.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    if is_stdout(&args.output) {
        bail!(
            "expected the name of a file for --output, found {}: a model is written out of order",
            args.output.display()
        );
    }
    let spec = spec(args)?;
    keep_real_model(&args.output)?;
    let n_threads = match args.threads {
        Some(n) => n.clamp(1, 1024),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let started = std::time::Instant::now();
    let summary = write(&spec, &args.output, n_threads, console)?;
    let elapsed_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let report = Report {
        schema_version: 1,
        name: &spec.name,
        seed: spec.seed,
        weight_type: spec.weight_type.name(),
        paths: summary
            .paths
            .iter()
            .map(|p| p.display().to_string())
            .collect(),
        n_bytes: summary.n_bytes,
        n_tensors: summary.n_tensors,
        n_params: summary.n_params,
        n_layer: spec.n_layer,
        n_embd: spec.n_embd,
        n_vocab: spec.n_vocab,
        n_shared_kv: spec.n_shared_kv,
        n_swa: spec.n_swa,
        n_threads,
        elapsed_us,
    };
    print(&report, args.json).context("cannot write to stdout")?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses to replace a model that is not synthetic: it may have taken hours to download.
fn keep_real_model(output: &Path) -> anyhow::Result<()> {
    if !holds_model(output) {
        return Ok(());
    }
    let Ok(file) = GgufFile::open(output) else {
        return Ok(());
    };
    let name = file.metadata().str("general.name").unwrap_or("no name");
    if !name.starts_with(NAME) {
        bail!(
            "{}: expected a new name or an older synthetic model, found another model ({name})",
            output.display()
        );
    }
    Ok(())
}

/// Runs the writer with a progress bar; Ctrl-C cancels it and leaves nothing behind.
fn write(
    spec: &Spec,
    output: &Path,
    n_threads: usize,
    console: &Console,
) -> anyhow::Result<Summary> {
    let _listening = console.interrupt().listen("removing the unfinished file");
    let bar = console.progress("writing", 0, Unit::Bytes);
    let mut is_first = true;
    let result = synth::write(spec, output, n_threads, &mut |progress| {
        if std::mem::take(&mut is_first) {
            console.detail(format_args!("writing {} bytes", progress.n_bytes));
            bar.set_total(progress.n_bytes);
        }
        bar.set(progress.n_done);
        if console.interrupt().is_requested() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    match result {
        Err(SynthError::Cancelled { .. }) => Err(Interrupted.into()),
        other => other.context("cannot write the model"),
    }
}

/// Prints the result.
fn print(report: &Report<'_>, json: bool) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        return writeln!(out);
    }
    for path in &report.paths {
        writeln!(out, "{path}")?;
    }
    writeln!(
        out,
        "{}, {}, seed {}: {} tensors, {} parameters, {} bytes",
        report.name,
        report.weight_type,
        report.seed,
        report.n_tensors,
        report.n_params,
        report.n_bytes,
    )
}

/// What is meant: the preset with its replacements, checked.
fn spec(args: &Args) -> Result<Spec, SynthError> {
    let mut spec = Spec::preset(&args.preset)?;
    spec.seed = args.seed;
    spec.weight_type = args.weight_type;
    replace_numbers(&mut spec, &args.numbers);
    let storage = &args.storage;
    spec.ple_type = storage.ple_type;
    spec.trim_shared = storage.trim_shared;
    spec.fused_qkv = storage.fused_qkv;
    spec.split_experts = storage.split_experts;
    spec.untied_output = storage.untied_output;
    spec.array_metadata = storage.array_metadata;
    spec.n_shard = storage.split;
    spec.validate()?;
    Ok(spec)
}

/// Puts each given number in the place of the preset's.
fn replace_numbers(spec: &mut Spec, given: &Numbers) {
    let full = given.n_head_kv_full.or(given.n_head_kv);
    for (place, value) in [
        (&mut spec.n_layer, given.n_layer),
        (&mut spec.n_embd, given.n_embd),
        (&mut spec.n_head, given.n_head),
        (&mut spec.n_head_kv, given.n_head_kv),
        (&mut spec.n_head_kv_full, full),
        (&mut spec.head_dim, given.head_dim),
        (&mut spec.head_dim_swa, given.head_dim_swa),
        (&mut spec.n_ff, given.n_ff),
        (&mut spec.n_swa, given.n_swa),
        (&mut spec.n_vocab, given.n_vocab),
        (&mut spec.n_ctx_train, given.n_ctx_train),
        (&mut spec.n_shared_kv, given.n_shared_kv),
        (&mut spec.n_embd_per_layer, given.ple),
        (&mut spec.n_expert, given.n_expert),
        (&mut spec.n_expert_used, given.n_expert_used),
        (&mut spec.n_ff_exp, given.n_ff_exp),
    ] {
        if let Some(value) = value {
            *place = value;
        }
    }
    if let Some(pattern) = &given.pattern {
        spec.pattern.clone_from(pattern);
    }
    if let Some(k_eq_v) = given.k_eq_v {
        spec.k_eq_v = k_eq_v;
    }
    if let Some(wide) = given.wide_shared_ff {
        spec.wide_shared_ff = wide;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Spec {
        let words = ["synth", "--preset"].into_iter().chain(line.split(' '));
        spec(&Line::try_parse_from(words).unwrap().args).unwrap()
    }

    #[test]
    fn a_preset_alone_is_the_preset() {
        assert_eq!(parse("e4b -o m.gguf"), Spec::preset("e4b").unwrap());
    }

    #[test]
    fn given_numbers_replace_the_presets() {
        let spec = parse(
            "tiny --type q6_k --seed 9 -o m --n-layer 12 --n-embd 512 --n-head 8 --n-head-kv 2 \
             --head-dim 128 --head-dim-swa 64 --n-ff 1024 --n-swa 8 --n-vocab 600 --n-shared-kv 6 \
             --pattern SSF --ple 32 --n-expert 4 --n-expert-used 2 --n-ff-exp 64 --k-eq-v \
             --ple-type q4_0 --trim-shared --fused-qkv --split-experts --untied-output --split 3",
        );

        assert_eq!((spec.weight_type, spec.seed), (WeightType::Q6K, 9));
        assert_eq!((spec.n_layer, spec.n_embd, spec.n_head), (12, 512, 8));
        assert_eq!((spec.n_head_kv, spec.n_head_kv_full), (2, 2));
        assert_eq!(
            (spec.head_dim, spec.head_dim_swa, spec.n_ff),
            (128, 64, 1024)
        );
        assert_eq!((spec.n_swa, spec.n_vocab, spec.n_shared_kv), (8, 600, 6));
        assert_eq!((spec.pattern.as_str(), spec.n_embd_per_layer), ("SSF", 32));
        assert_eq!(
            (spec.n_expert, spec.n_expert_used, spec.n_ff_exp),
            (4, 2, 64)
        );
        assert!(spec.k_eq_v && spec.trim_shared && spec.fused_qkv);
        assert!(spec.split_experts && spec.untied_output);
        assert_eq!((spec.ple_type, spec.n_shard), (Some(WeightType::Q4_0), 3));
    }

    #[test]
    fn an_unknown_type_is_refused_with_the_list() {
        let line = ["synth", "--preset", "tiny", "--type", "q9", "-o", "m"];
        let error = Line::try_parse_from(line).err().unwrap().to_string();

        assert!(error.contains("q4_K"), "{error}");
    }
}
