//! What a command's result means for the process: exit code, or the text of the error.

use std::io;
use std::process::ExitCode;

/// Error or wrong usage.
pub const EXIT_ERROR: u8 = 2;
/// Stopped by Ctrl-C.
pub const EXIT_INTERRUPTED: u8 = 130;

/// The error of a command that stopped because the user interrupted it.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// How the process ends.
#[derive(Debug)]
pub enum Outcome {
    /// The command came to its end; the code is 0 or 1.
    Done(ExitCode),
    /// The reader of stdout went away: success.
    PipeClosed,
    /// The user stopped it.
    Interrupted,
    /// It failed.
    Failed(anyhow::Error),
}

/// Sorts a command's result into the four ways to end.
pub fn outcome(result: anyhow::Result<ExitCode>) -> Outcome {
    let error = match result {
        Ok(code) => return Outcome::Done(code),
        Err(error) => error,
    };
    if error.chain().any(|cause| cause.is::<Interrupted>()) {
        return Outcome::Interrupted;
    }
    if is_closed_pipe(&error) {
        return Outcome::PipeClosed;
    }
    Outcome::Failed(error)
}

/// Whether the reader of stdout went away.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let is_broken_pipe = |cause: &(dyn std::error::Error + 'static)| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    error.chain().any(is_broken_pipe)
}

/// The messages of an error and its causes, outermost first, each on one line.
///
/// A cause that the message before it already ends with is dropped: typed errors often print
/// their source themselves. So is a path that a cause begins with and the message before it ends
/// with.
pub fn error_chain(error: &anyhow::Error) -> Vec<String> {
    let mut messages: Vec<String> = Vec::new();
    for cause in error.chain() {
        let mut text = one_line(&cause.to_string());
        if let Some(last) = messages.last() {
            text = without_repeat(last, &text).to_owned();
        }
        if !text.is_empty() {
            messages.push(text);
        }
    }
    messages
}

/// The part of `text` that `before` does not end with.
fn without_repeat<'t>(before: &str, text: &'t str) -> &'t str {
    if before.ends_with(text) {
        return "";
    }
    match text.split_once(": ") {
        Some((path, rest)) if path.contains('/') || path.contains('.') => {
            let is_repeated = before
                .strip_suffix(path)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with(' '));
            if is_repeated { rest } else { text }
        }
        _ => text,
    }
}

/// Control characters (file names may hold any) become spaces.
fn one_line(text: &str) -> String {
    text.trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn chain_is_outermost_first_and_without_repeats() {
        let error = anyhow!("no such file")
            .context("a.gguf: no such file")
            .context("open model");

        assert_eq!(error_chain(&error), ["open model", "a.gguf: no such file"]);
    }

    #[test]
    fn path_is_not_repeated() {
        let error = anyhow!("/a/b.gguf: no such file").context("open /a/b.gguf");
        assert_eq!(error_chain(&error), ["open /a/b.gguf", "no such file"]);

        let other = anyhow!("b.gguf: no such file").context("open a/b.gguf");
        assert_eq!(
            error_chain(&other).join(": "),
            "open a/b.gguf: b.gguf: no such file"
        );
    }

    #[test]
    fn message_stays_on_one_line() {
        let error = anyhow!("bad\nname\t\u{1b}[2J");

        assert_eq!(error_chain(&error), ["bad name  [2J"]);
    }

    #[test]
    fn closed_pipe_anywhere_in_the_chain_is_success() {
        let pipe: io::Result<()> = Err(io::ErrorKind::BrokenPipe.into());

        let result = pipe.context("write text").map(|()| ExitCode::SUCCESS);

        assert!(matches!(outcome(result), Outcome::PipeClosed));
    }

    #[test]
    fn interruption_survives_context() {
        let result = Err(Interrupted).context("prefill");

        assert!(matches!(outcome(result), Outcome::Interrupted));
    }

    #[test]
    fn other_errors_fail() {
        let result = Err(anyhow!("no model"));

        assert!(matches!(outcome(result), Outcome::Failed(_)));
    }
}
