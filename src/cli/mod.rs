//! Command line: what was typed. What is meant, with every cross-check, is in `options.rs`; each
//! subcommand has a file of its own.
//!
//! Rules: stdout carries the result only, stderr everything else and nothing but errors with
//! `-q`. Nothing here ends the process or prints an error: `main.rs` does. No engine logic.

mod console;
mod engine_args;
mod environment;
mod ids;
mod inspect;
mod interrupt;
mod out_file;
mod outcome;
mod synth;
mod text_source;
mod version;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

pub use console::{Console, Progress, Unit};
pub use engine_args::{DeviceArg, EngineArgs, OnOff, PlaceArg, ReadbackArg, WeightsArg};
pub use environment::{check_environment, ggml_environment};
pub use ids::{IdsError, RowsArg, check_ids, parse_ids};
pub use interrupt::{Interrupt, Listening, SignalAction};
pub use outcome::{EXIT_ERROR, EXIT_INTERRUPTED, Interrupted, Outcome, error_chain, outcome};
pub use text_source::{TextSource, read_file};

/// Fast long-prompt prefill for Gemma-4 GGUF models on ggml.
#[derive(Debug, Parser)]
#[command(
    name = "g4prefill",
    version,
    long_version = version::long(),
    arg_required_else_help = true,
    subcommand_required = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Options of every subcommand.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every subcommand has.
#[derive(Clone, Debug, Default, Args)]
pub struct GlobalArgs {
    /// Print more on stderr: details of the run, and the causes of an error one per line
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// Print nothing on stderr except errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// The subcommands, one file each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print a GGUF file: keys, tensors, offsets, sizes, and whether it can be run
    Inspect(inspect::Args),
    /// Write a synthetic Gemma-4 model
    Synth(Box<synth::Args>),
}

impl Cli {
    /// Runs the subcommand; the exit code says yes (0) or no (1), anything else is an error.
    pub fn run(&self, console: &Console) -> anyhow::Result<ExitCode> {
        match &self.command {
            Command::Inspect(args) => inspect::run(args, console),
            Command::Synth(args) => synth::run(args, console),
        }
    }
}
