//! `g4prefill profile`: where the time of one prefill went.

mod files;
mod measure;

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use super::report::{self, BucketReport, GraphReport, Provenance, SCHEMA_VERSION};
use super::{Console, EngineArgs};
use crate::engine::ChunkRun;
use crate::profile::{Profile, render, report::why_no_replay};
use files::Outputs;

/// Arguments of `profile`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// Length of the prompt, in tokens; its ids are made from a fixed seed
    #[arg(long, value_name = "N", value_parser = super::engine_args::at_least_one)]
    pub n_prompt: usize,
    /// Prefills before the profiled one: a graph is replayed from its third run on
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warmup: usize,
    /// Profile the first prefill of the process: no runs before it
    #[arg(long, conflicts_with = "warmup")]
    pub cold: bool,
    /// Time one node after the other, also where the GPU's own record is to be had
    #[arg(long)]
    pub by_node: bool,
    /// Say of each chunk whether it was a replay, and if not which node and property changed
    #[arg(long)]
    pub graph_audit: bool,
    /// Write the timeline for Perfetto or Chrome's trace viewer to this file
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write a page with timeline, tables and roofline to this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the graph of a bucket for Graphviz to this file
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
    /// Write the graph of a bucket as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub graph_json: Option<PathBuf>,
    /// Bucket of `--dot` and `--graph-json`: its number in the list of buckets
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub bucket: usize,
    /// Highest matrix product rate, in TFLOP/s (a number); measured by a short run by default
    #[arg(long, value_name = "T", requires = "peak_tbs", value_parser = positive)]
    pub peak_tflops: Option<f64>,
    /// Highest copy rate, in TB/s (a number), reads and writes added; measured by default
    #[arg(long, value_name = "T", requires = "peak_tflops", value_parser = positive)]
    pub peak_tbs: Option<f64>,
    /// File of libcupti, where the loader does not find it
    #[arg(long, value_name = "FILE", env = "G4_CUPTI")]
    pub cupti: Option<PathBuf>,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object on stdout instead of text
    #[arg(long)]
    pub json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        Ok(_) => Err("must be above 0".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    n_prompt: usize,
    device: String,
    /// Prefills before the profiled one.
    n_warmup: usize,
    /// CUPTI's API version; null without its records.
    cupti_version: Option<u32>,
    /// Why there are no records of the GPU; null where there are.
    no_cupti: Option<String>,
    /// Records that CUPTI lost.
    n_dropped: u64,
    buckets: Vec<BucketReport>,
    /// Of the profiled prefill.
    graphs: GraphReport,
    #[serde(flatten)]
    profile: Profile,
    #[serde(flatten)]
    provenance: Provenance,
}

/// Runs `profile`.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    let outputs = Outputs::create(args)?;
    let measured = measure::measure(args, console)?;
    let chunks: Vec<_> = measured.runs.iter().map(|run| run.chunk.clone()).collect();
    let (_, buckets) = report::chunk_reports(&chunks);
    let title = format!(
        "{}, {} tokens on {}",
        args.model.file_name().unwrap_or_default().to_string_lossy(),
        args.n_prompt,
        measured.device
    );
    outputs.write(&measured, &title, args.bucket)?;
    if let Some(why) = &measured.no_cupti {
        console.note(format_args!("no GPU records: {why}"));
    }
    let report = Report {
        schema_version: SCHEMA_VERSION,
        n_prompt: args.n_prompt,
        device: measured.device,
        n_warmup: measured.n_warmup,
        cupti_version: measured.cupti_version,
        no_cupti: measured.no_cupti,
        n_dropped: measured.n_dropped,
        buckets,
        graphs: measured.graphs,
        profile: measured.profile,
        provenance: Provenance::new(),
    };
    if args.json {
        report::print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!("{title}\n");
    text += &describe_run(&report);
    text += &render::text(&report.profile);
    if args.graph_audit {
        text += &describe_audit(&measured.runs);
    }
    report::print_text(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn describe_run(report: &Report) -> String {
    let which = match report.n_warmup {
        0 => "the first prefill of the process".to_owned(),
        n => format!("after {n} prefills"),
    };
    let how = match report.cupti_version {
        Some(version) => format!("CUPTI {version}, {} records lost", report.n_dropped),
        None => "one node after the other".to_owned(),
    };
    format!(
        "{which}; {how}; graphs: {}; {}\n\n",
        report.graphs,
        report::describe_speed(report.n_prompt, report.profile.wall_ns / 1000)
    )
}

/// One line for each chunk.
fn describe_audit(runs: &[ChunkRun]) -> String {
    let mut text = String::from("\ngraph audit\n");
    for (i, run) in runs.iter().enumerate() {
        let why = why_no_replay(run).unwrap_or_else(|| "replay".to_owned());
        text += &format!(
            "  chunk {i} at {}: {}: {why}\n",
            run.chunk.n_past,
            run.how.word()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_must_be_positive_numbers() {
        assert_eq!(positive("4.26"), Ok(4.26));
        for text in ["0", "-1", "inf", "NaN", "x"] {
            assert!(positive(text).is_err(), "{text}");
        }
    }
}
