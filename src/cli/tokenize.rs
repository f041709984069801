//! `g4prefill tokenize`: token ids of a text.

use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use super::{Console, TextSource, check_text};
use crate::gguf::GgufFile;
use crate::tokenizer::{ChatTemplate, EncodeOptions, Message, Tokenizer};

/// Version of the JSON object.
const SCHEMA_VERSION: u32 = 1;

/// What was typed; the ids go to stdout, separated by spaces, ready for `logits --ids -`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// GGUF model file; only its vocabulary is used
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: PathBuf,
    /// Where the text comes from.
    #[command(flatten)]
    pub text: TextSource,
    /// Put the text into the model's chat template, as one message of the user
    #[arg(long)]
    pub chat: bool,
    /// Do not begin with the beginning-of-sequence token
    #[arg(long, conflicts_with = "chat")]
    pub no_bos: bool,
    /// Read the names of special tokens in the text as those tokens
    #[arg(long, conflicts_with = "chat")]
    pub parse_special: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Debug, serde::Serialize)]
struct Report<'a> {
    schema_version: u32,
    n_tokens: usize,
    ids: &'a [u32],
    invalid_utf8_at: Option<usize>,
}

/// Encodes the text and prints its ids.
///
/// # Errors
/// A file or text that cannot be read, and every fault of vocabulary and chat template.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    let file = GgufFile::open(&args.model).context("open the model")?;
    let tokenizer = Tokenizer::from_gguf(&file).context("load the tokenizer")?;
    let text = args.text.read()?;
    let invalid_utf8_at = check_text(&text, args.chat, console);
    let ids = if args.chat {
        let text = String::from_utf8_lossy(&text).into_owned();
        encode_user_message(&file, &tokenizer, text)?
    } else {
        let options = EncodeOptions {
            add_bos: !args.no_bos,
            parse_special: args.parse_special,
        };
        tokenizer
            .encode(&text, options)
            .context("encode the text")?
    };
    console.detail(format_args!("{} tokens", ids.len()));
    let report = Report {
        schema_version: SCHEMA_VERSION,
        n_tokens: ids.len(),
        ids: &ids,
        invalid_utf8_at,
    };
    print(&report, args.json, std::io::stdout().lock()).context("write the token ids")?;
    Ok(ExitCode::SUCCESS)
}

/// Puts one message of the user into the file's chat template and encodes the result.
///
/// # Errors
/// A file without a chat template, and every fault of the template.
pub fn encode_user_message(
    file: &GgufFile,
    tokenizer: &Tokenizer,
    text: String,
) -> anyhow::Result<Vec<u32>> {
    let template = ChatTemplate::from_gguf(file)
        .context("load the chat template")?
        .with_context(|| {
            format!(
                "{}: expected key tokenizer.chat_template for --chat, found none; \
                 leave --chat out to use the text as it is",
                file.metadata().path().display()
            )
        })?;
    let message = Message {
        role: "user".to_owned(),
        content: text,
    };
    tokenizer
        .encode_chat(&template, &[message], true)
        .context("encode the conversation")
}

fn print(report: &Report<'_>, json: bool, out: impl Write) -> std::io::Result<()> {
    let mut out = BufWriter::new(out);
    if json {
        serde_json::to_writer(&mut out, report)?;
    } else {
        for (i, id) in report.ids.iter().enumerate() {
            write!(out, "{}{id}", if i > 0 { " " } else { "" })?;
        }
    }
    out.write_all(b"\n")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        Only::try_parse_from([&["test"], args].concat()).map(|only| only.args)
    }

    fn printed(ids: &[u32], json: bool) -> String {
        let mut out = Vec::new();
        let report = Report {
            schema_version: SCHEMA_VERSION,
            n_tokens: ids.len(),
            ids,
            invalid_utf8_at: None,
        };
        print(&report, json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn model_and_text_are_needed() {
        assert!(parse(&["-p", "a"]).is_err());
        assert!(parse(&["-m", "a.gguf"]).is_err());
        let args = parse(&["-m", "a.gguf", "-"]).unwrap();
        assert!(!args.chat && !args.json && !args.no_bos && !args.parse_special);
    }

    #[test]
    fn the_template_decides_about_bos_and_special_tokens() {
        assert!(parse(&["-m", "a.gguf", "-p", "a", "--chat", "--no-bos"]).is_err());
        assert!(parse(&["-m", "a.gguf", "-p", "a", "--chat", "--parse-special"]).is_err());
    }

    #[test]
    fn ids_are_one_line_separated_by_spaces() {
        assert_eq!(printed(&[2, 9259], false), "2 9259\n");
        assert_eq!(printed(&[], false), "\n");
    }

    #[test]
    fn json_begins_with_the_schema_version() {
        let expected =
            "{\"schema_version\":1,\"n_tokens\":2,\"ids\":[2,9259],\"invalid_utf8_at\":null}\n";
        assert_eq!(printed(&[2, 9259], true), expected);
    }
}
