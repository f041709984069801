//! Where a command takes its text from: a file, the command line or stdin.

use std::ffi::OsString;
use std::io::Read;
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

/// Most bytes of a text or a list of ids: far more than any context holds, and a stop for a source
/// that never ends.
const MAX_BYTES: u64 = 1 << 30;

/// The bytes of a file, or of stdin for `-`.
pub fn read_file(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path == Path::new("-") {
        return read_all(std::io::stdin().lock(), MAX_BYTES).context("read stdin");
    }
    let read = || read_all(std::fs::File::open(path)?, MAX_BYTES);
    read().with_context(|| format!("read {}", path.display()))
}

/// All bytes of a source, which are at most `most`.
fn read_all(source: impl Read, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(most.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let text = format!("expected at most {most} bytes, found more");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
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
    fn source_that_never_ends_is_refused() {
        let error = read_all(std::io::repeat(b'y'), 1000).unwrap_err();

        assert!(error.to_string().contains("at most 1000 bytes"), "{error}");
        assert_eq!(read_all(&[7; 1000][..], 1000).unwrap(), [7; 1000]);
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
