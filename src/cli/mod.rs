//! Command line: what was typed. What is meant, with every cross-check, is in `options.rs`; each
//! subcommand has a file of its own.
//!
//! Rules: stdout carries the result only, stderr everything else and nothing but errors with
//! `-q`. Nothing here ends the process or prints an error: `main.rs` does. No engine logic.
#![forbid(unsafe_code)]

pub mod bench;
mod console;
pub mod demo;
mod drive;
mod engine_args;
mod environment;
mod ids;
mod inspect;
mod interrupt;
pub mod logits;
mod numbers;
mod options;
mod out_file;
mod outcome;
pub mod plan;
pub mod profile;
mod report;
pub mod run;
mod sampling_args;
mod session_file;
mod synth;
mod text_source;
mod threads;
pub mod tokenize;
pub mod verify;
mod version;

use std::process::ExitCode;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

pub use console::{Console, Progress, Unit, to_stderr};
pub use engine_args::{DeviceArg, EngineArgs, OnOff, PlaceArg, ReadbackArg, WeightsArg};
pub use environment::{check_environment, ggml_environment};
pub use ids::{IdsError, RowsArg, check_ids, parse_ids};
pub use interrupt::{Interrupt, Listening, SignalAction, is_ignored};
pub use outcome::{EXIT_ERROR, EXIT_INTERRUPTED, Interrupted, Outcome, error_chain, outcome};
pub use sampling_args::SamplingArgs;
pub use session_file::SessionArgs;
pub use text_source::{TextSource, check_text, read_file};

/// Why there is no llama.cpp to compare with, and what helps.
const WITHOUT_LLAMA: &str = "this program was built without llama.cpp; to have it: \
                             cargo build --release --features llama";

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
    /// Read a prompt and continue it
    Run(Box<run::Args>),
    /// Print a GGUF file: keys, tensors, offsets, sizes, and whether it can be run
    Inspect(inspect::Args),
    /// Make a model and a text, run them, and compare with llama.cpp
    Demo(demo::Args),
    /// Measure speed and memory, beside llama.cpp on the same file
    Bench(Box<bench::Args>),
    /// Write a synthetic Gemma-4 model
    Synth(Box<synth::Args>),
    /// Write the logits of a list of token ids
    Logits(logits::Args),
    /// Show what a prompt of some length would do, without running it
    Plan(plan::Args),
    /// Show where the time of a prompt goes
    Profile(Box<profile::Args>),
    /// Print the token ids of a text
    Tokenize(tokenize::Args),
    /// Read a prompt in many ways on this device: all must give the same
    Verify(Box<verify::Args>),
}

impl Cli {
    /// Parses the command line of this process.
    ///
    /// # Errors
    /// Wrong usage; help and version too, which are no failures.
    pub fn from_command_line() -> Result<Self, clap::Error> {
        // A negative number is a wrong value, not an unknown option.
        let command = Self::command().mut_subcommands(|c| c.allow_negative_numbers(true));
        Self::from_arg_matches(&command.try_get_matches()?)
    }

    /// Runs the subcommand; the exit code says yes (0) or no (1), anything else is an error.
    pub fn run(&self, console: &Console) -> anyhow::Result<ExitCode> {
        match &self.command {
            Command::Run(args) => run::run(args, console),
            Command::Inspect(args) => inspect::run(args, console),
            Command::Synth(args) => synth::run(args, console),
            Command::Bench(args) => bench::run(args, console),
            Command::Demo(args) => demo::run(args, console),
            Command::Logits(args) => logits::run(args, console),
            Command::Plan(args) => plan::run(args, console),
            Command::Profile(args) => profile::run(args, console),
            Command::Tokenize(args) => tokenize::run(args, console),
            Command::Verify(args) => verify::run(args, console),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value names that stand for a number; the help text must say what it counts.
    const NUMBERS: &[&str] = &["N", "K", "P", "T", "SEED"];

    /// Words that say what a number counts or measures.
    const UNITS: &[&str] = &[
        "token",
        "thread",
        "row",
        "byte",
        "layer",
        "head",
        "expert",
        "file",
        "shard",
        "number",
        "factor",
        "probab",
        "dimension",
        "width",
        "run",
        "second",
        "entries",
        "word",
        "period",
        "size",
        "bits",
    ];

    /// The definitions, completed as clap does before parsing.
    fn built() -> clap::Command {
        let mut command = Cli::command();
        command.build();
        command
    }

    fn check(command: &clap::Command, check_argument: &mut dyn FnMut(&str, &clap::Arg)) {
        for argument in command.get_arguments() {
            check_argument(command.get_name(), argument);
        }
        for subcommand in command.get_subcommands() {
            check(subcommand, check_argument);
        }
    }

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_has_help() {
        check(&built(), &mut |command, argument| {
            let help = help(argument);
            assert!(help.len() > 8, "{command}: {}: no help", argument.get_id());
        });
    }

    fn help(argument: &clap::Arg) -> String {
        let help = argument.get_help().map(ToString::to_string);
        help.unwrap_or_default()
    }

    fn takes_number(argument: &clap::Arg) -> bool {
        let names = argument.get_value_names().unwrap_or_default();
        names.iter().any(|name| NUMBERS.contains(&name.as_str()))
    }

    #[test]
    fn every_number_says_its_unit() {
        check(&built(), &mut |command, argument| {
            let help = help(argument);
            let has_unit = UNITS.iter().any(|unit| help.to_lowercase().contains(unit));
            assert!(
                !takes_number(argument) || has_unit,
                "{command}: {argument}: no unit in {help:?}"
            );
        });
    }

    #[test]
    fn every_optional_number_shows_its_default() {
        check(&built(), &mut |command, argument| {
            let help = help(argument);
            let is_shown = argument.is_required_set()
                || !argument.get_default_values().is_empty()
                || help.contains("default");
            assert!(
                !takes_number(argument) || is_shown,
                "{command}: {argument}: no default in {help:?}"
            );
        });
    }
}
