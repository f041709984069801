//! The `g4prefill` binary: parse, run, map the outcome to an exit code.
//!
//! This is the only place that prints an error or ends the process. Exit codes: 0 done; 1 done,
//! and the answer is no; 2 error or wrong usage; 130 interrupted; 134 ggml aborted (the process
//! dies of SIGABRT). A closed output pipe counts as success.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;

use g4prefill::cli::{self, Cli, Console, Interrupt, Outcome, SignalAction};
use g4prefill::{ggml, unfinished};

/// Signals that end the process at once and with a word of the shell's only: an abort, Ctrl-\, a
/// limit on time, what schedulers send.
const ENDS: [i32; 6] = [SIGABRT, SIGQUIT, SIGXCPU, SIGALRM, SIGUSR1, SIGUSR2];

fn main() -> ExitCode {
    let cli = match Cli::from_command_line() {
        Ok(cli) => cli,
        // Help and version end here with 0, wrong usage with 2.
        Err(error) => error.exit(),
    };
    let interrupt = Interrupt::default();
    let console = Console::new(&cli.global, interrupt.clone());
    let result = install_signals(interrupt, console.quiet)
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

/// First Ctrl-C asks the running command to stop at the next good place; the second, or a Ctrl-C
/// while nothing listens, ends the process at once. A write beyond the limit on the size of a file
/// becomes an error of that write instead of an end.
fn install_signals(interrupt: Interrupt, quiet: bool) -> anyhow::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("handle SIGXFSZ")?;
    ggml::on_lost_page(exit_for).context("handle SIGBUS")?;
    // What the parent process ignores for us (nohup, a job in the background) stays ignored.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let is_wanted = |signal: &i32| !cli::is_ignored(&status, *signal);
    ggml::remove_unfinished_on(ENDS.into_iter().filter(is_wanted)).context("handle SIGABRT")?;
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(is_wanted);
    let mut signals = Signals::new(wanted).context("handle Ctrl-C")?;
    let listen = move || {
        for _ in &mut signals {
            match interrupt.on_signal() {
                SignalAction::Exit => exit_now(),
                SignalAction::Wait(_) if quiet => {}
                SignalAction::Wait(step) => {
                    cli::to_stderr(format_args!(
                        "g4prefill: stopping after {step}; interrupt again to stop at once\n"
                    ));
                }
            }
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(listen)
        .context("start the thread that hears Ctrl-C")?;
    Ok(())
}

/// Ends the process in the middle of reading a mapped file.
fn exit_for(reason: &str) {
    unfinished::remove_all();
    cli::to_stderr(format_args!("g4prefill: {reason}\n"));
    signal_hook::low_level::exit(i32::from(cli::EXIT_ERROR))
}

/// Ends the process while other threads may be anywhere: nothing is unwound, no exit handler runs.
fn exit_now() -> ! {
    unfinished::remove_all();
    cli::to_stderr(format_args!("g4prefill: interrupted\n"));
    signal_hook::low_level::exit(i32::from(cli::EXIT_INTERRUPTED))
}
