//! stderr: warnings, notes and progress. stdout is left to the subcommands' results.

use std::fmt::Display;
use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{GlobalArgs, Interrupt};

/// Most redraws of a progress bar per second.
const REDRAWS_PER_SECOND: u8 = 10;

/// Writes to stderr. A status line that cannot be written is lost, nothing else.
pub fn to_stderr(text: impl Display) {
    use std::io::Write as _;
    let _ = write!(std::io::stderr(), "{text}");
}

/// Where a command talks to the user, and hears Ctrl-C.
#[derive(Debug)]
pub struct Console {
    /// Nothing but errors on stderr.
    pub quiet: bool,
    /// Details on stderr.
    pub verbose: bool,
    /// Whether progress bars make sense.
    pub stderr_is_terminal: bool,
    interrupt: Interrupt,
}

impl Console {
    /// A console as the options say.
    pub fn new(global: &GlobalArgs, interrupt: Interrupt) -> Self {
        Self {
            quiet: global.quiet,
            verbose: global.verbose,
            stderr_is_terminal: std::io::stderr().is_terminal(),
            interrupt,
        }
    }

    /// Something the user should know; the run goes on.
    pub fn warning(&self, text: impl Display) {
        if !self.quiet {
            to_stderr(format_args!("g4prefill: warning: {text}\n"));
        }
    }

    /// A line about the run, unless `-q`.
    pub fn note(&self, text: impl Display) {
        if !self.quiet {
            to_stderr(format_args!("{text}\n"));
        }
    }

    /// A line for `-v` only.
    pub fn detail(&self, text: impl Display) {
        if self.verbose {
            to_stderr(format_args!("{text}\n"));
        }
    }

    /// A progress bar over `total` units; it shows only on a terminal and without `-q`.
    pub fn progress(&self, what: &'static str, total: u64, unit: Unit) -> Progress {
        if self.quiet || !self.stderr_is_terminal {
            return Progress(None);
        }
        let target = ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND);
        let bar = ProgressBar::with_draw_target(Some(total), target).with_message(what);
        let template = match unit {
            Unit::Tokens => {
                "{msg} [{bar:30}] {human_pos}/{human_len} tokens  {per_sec}  left {eta}"
            }
            Unit::Runs => "{msg} [{bar:30}] {pos}/{len} runs  left {eta}",
            Unit::Bytes => "{msg} [{bar:30}] {bytes}/{total_bytes}  {bytes_per_sec}  left {eta}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress(Some(bar))
    }

    /// Ctrl-C of this process.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }
}

/// What a progress bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Prompt tokens.
    Tokens,
    /// Bytes read or written.
    Bytes,
    /// Repetitions of the same work.
    Runs,
}

/// A running progress bar, or nothing where none should show. Clears itself when dropped.
#[derive(Debug)]
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// A bar that never shows.
    pub fn hidden() -> Self {
        Self(None)
    }

    /// Units finished so far; 0 where no bar shows.
    pub fn position(&self) -> u64 {
        self.0.as_ref().map_or(0, ProgressBar::position)
    }

    /// `done` units of the total are finished.
    pub fn set(&self, done: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(done);
        }
    }

    /// The total became known, or changed.
    pub fn set_total(&self, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}
