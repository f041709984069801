//! The `g4prefill` binary: parse, run, map the outcome to an exit code.
//!
//! This is the only place that prints an error or ends the process. Exit codes: 0 done; 1 done,
//! and the answer is no; 2 error or wrong usage; 130 interrupted; 134 ggml aborted (the process
//! dies of SIGABRT). A closed output pipe counts as success.

use std::process::ExitCode;

use clap::Parser as _;

use g4prefill::cli::{self, Cli, Console, Interrupt, Outcome, SignalAction};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version end here with 0, wrong usage with 2.
        Err(error) => error.exit(),
    };
    let interrupt = Interrupt::default();
    let console = Console::new(&cli.global, interrupt.clone());
    let result = install_interrupt(interrupt, console.quiet)
        .and_then(|()| cli::check_environment(std::env::vars_os().map(|(name, _)| name)))
        .and_then(|()| cli.run(&console));
    match cli::outcome(result) {
        Outcome::Done(code) => code,
        Outcome::PipeClosed => ExitCode::SUCCESS,
        Outcome::Interrupted => {
            cli::to_stderr(format_args!("g4prefill: interrupted\n"));
            ExitCode::from(cli::EXIT_INTERRUPTED)
        }
        Outcome::Failed(error) => {
            let causes = cli::error_chain(&error);
            cli::to_stderr(format_args!("g4prefill: {}\n", causes.join(": ")));
            if console.verbose {
                for cause in causes.iter().skip(1) {
                    cli::to_stderr(format_args!("  caused by: {cause}\n"));
                }
            }
            ExitCode::from(cli::EXIT_ERROR)
        }
    }
}

/// First Ctrl-C asks the running command to stop between two chunks; the second, or a Ctrl-C
/// while nothing listens, ends the process at once.
fn install_interrupt(interrupt: Interrupt, quiet: bool) -> anyhow::Result<()> {
    ctrlc::set_handler(move || match interrupt.on_signal() {
        SignalAction::Exit => std::process::exit(i32::from(cli::EXIT_INTERRUPTED)),
        SignalAction::Wait if quiet => {}
        SignalAction::Wait => {
            cli::to_stderr(format_args!(
                "g4prefill: stopping after this chunk; interrupt again to stop at once\n"
            ));
        }
    })?;
    Ok(())
}
