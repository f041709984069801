//! Where a command takes its text from: a file, the command line or stdin.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::Console;

/// Exactly one source of text.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TextSource {
    /// Read the text from this file; `-` is stdin
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The text itself; an empty one leaves the token that begins a sequence, with a warning
    #[arg(
        short = 'p',
        long = "prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    pub prompt: Option<OsString>,
    /// Read the text from stdin
    #[arg(value_name = "-", value_parser = ["-"])]
    pub stdin: Option<String>,
}

impl TextSource {
    /// The bytes of the text, which need not be UTF-8.
    pub fn read(&self) -> anyhow::Result<Vec<u8>> {
        match (&self.file, &self.prompt) {
            (_, Some(text)) => Ok(text.as_bytes().to_vec()),
            (Some(path), None) => read_file(path),
            (None, None) => read_file(Path::new("-")),
        }
    }
}

/// The bytes of a file, or of stdin for `-`.
pub fn read_file(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin()
            .lock()
            .read_to_end(&mut bytes)
            .context("read stdin")?;
        return Ok(bytes);
    }
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Warns of a text that is empty or no UTF-8; returns the offset in bytes of the first byte that
/// is none. With a chat template the text must be UTF-8, else it need not.
pub fn check_text(text: &[u8], is_chat: bool, console: &Console) -> Option<usize> {
    if text.is_empty() {
        console.warning("the text is empty");
    }
    let offset = std::str::from_utf8(text).err()?.valid_up_to();
    let done = if is_chat {
        "replaced by U+FFFD, with all like it"
    } else {
        "kept as it is, by a byte token"
    };
    console.warning(format_args!(
        "the text is no UTF-8: byte {offset} (from 0) is {:#04x}; {done}",
        text.get(offset).copied().unwrap_or_default()
    ));
    Some(offset)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        text: TextSource,
    }

    fn parse(args: &[&str]) -> Result<TextSource, clap::Error> {
        Only::try_parse_from([&["test"], args].concat()).map(|only| only.text)
    }

    #[test]
    fn exactly_one_source_is_needed() {
        assert!(parse(&[]).is_err());
        assert!(parse(&["-p", "a", "-f", "b"]).is_err());
        assert!(parse(&["-p", "a", "-"]).is_err());
        assert!(parse(&["-"]).unwrap().stdin.is_some());
    }

    #[test]
    fn a_word_that_is_no_option_is_refused() {
        assert!(parse(&["book.txt"]).is_err());
    }

    #[test]
    fn text_may_begin_with_a_dash() {
        assert_eq!(
            parse(&["-p", "-5 degrees"]).unwrap().read().unwrap(),
            b"-5 degrees"
        );
    }

    #[test]
    fn missing_file_is_named() {
        let error = parse(&["-f", "/nowhere/book.txt"])
            .unwrap()
            .read()
            .unwrap_err();

        assert!(error.to_string().contains("/nowhere/book.txt"), "{error}");
    }
}
