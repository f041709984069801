//! Where a command takes its text from: a file, the command line or stdin.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

/// Exactly one source of text.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TextSource {
    /// Read the text from this file; `-` is stdin
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The text itself
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
