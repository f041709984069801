//! What `bench` was asked for, and the points that follow from it.

use std::path::PathBuf;

use anyhow::bail;

use crate::bench::{Bar, Point, Ubatch, Work};
use crate::cli::EngineArgs;
use crate::cli::numbers::{at_least_one, whole};

/// Prompt lengths when none is given, in tokens.
const N_PROMPT: [usize; 5] = [512, 2048, 8192, 32768, 131_072];

/// Arguments of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file: GGUF, the first part of a split one; may be repeated
    #[arg(
        short = 'm',
        long = "model",
        value_name = "MODEL",
        required_unless_present = "compare"
    )]
    pub models: Vec<PathBuf>,
    /// Lengths of the prompts, in tokens, separated by commas [default: 512, 2048, 8192, 32768 and
    /// 131072, as far as the model's context goes]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = at_least_one)]
    pub n_prompt: Vec<usize>,
    /// Measure one late chunk of --chunk tokens behind this many tokens [default: none]
    #[arg(long, value_name = "P", value_parser = at_least_one)]
    pub start_pos: Option<usize>,
    /// Measure decoding: this many tokens, one by one [default: none]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub decode: Option<usize>,
    /// Length of the prompt in front of --decode, in tokens
    #[arg(long, value_name = "N", default_value_t = 512, requires = "decode", value_parser = at_least_one)]
    pub after: usize,
    /// Measure accuracy: KL divergence to a float32 reference over this many tokens [default: none]
    #[arg(long, value_name = "N", requires = "accuracy_ref", value_parser = at_least_one)]
    pub accuracy: Option<usize>,
    /// The float32 copy of the model, run on the CPU as the reference; made when it is missing
    /// (four bytes per weight)
    #[arg(long, value_name = "FILE", requires = "accuracy")]
    pub accuracy_ref: Option<PathBuf>,
    /// Seed of the token ids, a number
    #[arg(long, value_name = "SEED", default_value_t = 1, value_parser = whole::<u64>)]
    pub seed: u64,
    /// Who runs beside us
    #[command(flatten)]
    pub peer: PeerArgs,
    /// How long is measured
    #[command(flatten)]
    pub schedule: ScheduleArgs,
    /// Where the result goes
    #[command(flatten)]
    pub out: OutArgs,
    /// Comparison of two results
    #[command(flatten)]
    pub compare: CompareArgs,
    /// Engine options.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// The peer.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Peer")]
pub struct PeerArgs {
    /// Who runs beside us: llama (llama.cpp at the pin, in this process) or none [default: llama
    /// where it was built in]
    #[arg(long, value_name = "PEER", value_enum)]
    pub peer: Option<PeerArg>,
    /// Tokens that llama.cpp computes in one graph run, in tokens; auto: the fastest of 512, 1024,
    /// 2048 and 4096
    #[arg(long, value_name = "N", default_value = "auto")]
    pub peer_ubatch: Ubatch,
    /// Flash attention of llama.cpp; auto: on, on the CPU the faster of both
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = FlashArg::Auto)]
    pub peer_flash_attn: FlashArg,
    /// Another program beside us: a shell command that prints llama-bench's JSON; -m, -p, -n, -d,
    /// -r and -o are put behind it, once for every sample
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["peer", "peer_ubatch", "peer_flash_attn"])]
    pub peer_cmd: Option<String>,
}

/// Peers by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PeerArg {
    /// llama.cpp at the pin, in this process
    Llama,
    /// Nobody
    None,
}

/// Settings of llama.cpp's flash attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FlashArg {
    /// On; on the CPU the faster of both, found by a run of the prompt
    Auto,
    /// On
    On,
    /// Off
    Off,
}

/// How long is measured.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Schedule")]
pub struct ScheduleArgs {
    /// Rounds of timed runs at least, one or two of each side in a round
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    pub samples: usize,
    /// Length of the rounds of a point at least, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub min_s: f64,
    /// Untimed runs of each side before the rounds, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub warmup_s: f64,
}

/// Where the result goes besides the table.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutArgs {
    /// Write the result as JSON, after every point; `-` is stdout, in place of the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    pub md: Option<PathBuf>,
    /// Draw tokens/s over the length of the prompt, as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Comparison of two results.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Comparison")]
pub struct CompareArgs {
    /// Compare two results of --json, the older first, instead of measuring
    #[arg(long, value_names = ["OLD", "NEW"], num_args = 2, conflicts_with_all = ["models", "md", "svg"])]
    pub compare: Vec<PathBuf>,
    /// The change that counts, such as 1.5%: decided before measuring. A measurement writes it
    /// into its result; a comparison takes it from the newer result, or from here
    #[arg(long, value_name = "PERCENT")]
    pub bar: Option<Bar>,
}

/// Parses a time of at most a day.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.0..=86_400.0).contains(&s) => Ok(s),
        Ok(_) => Err("expected 0 to 86400 seconds".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl Args {
    /// The points of a model with this label, context and chunk, both in tokens.
    ///
    /// # Errors
    /// A point that was asked for does not fit into the context.
    pub fn points(&self, label: &str, n_ctx: usize, chunk: usize) -> anyhow::Result<Vec<Point>> {
        let asked_for = [self.start_pos, self.decode, self.accuracy];
        let is_default = self.n_prompt.is_empty() && asked_for.iter().all(Option::is_none);
        let mut works: Vec<Work> = if is_default {
            let fitting = N_PROMPT.into_iter().filter(|&n| n <= n_ctx);
            fitting.map(|n_prompt| Work::Prefill { n_prompt }).collect()
        } else {
            let lengths = self.n_prompt.iter();
            lengths
                .map(|&n_prompt| Work::Prefill { n_prompt })
                .collect()
        };
        works.extend(self.start_pos.map(|start_pos| Work::Chunk {
            start_pos,
            n_prompt: chunk,
        }));
        works.extend(self.decode.map(|n_gen| Work::Decode {
            start_pos: self.after,
            n_gen,
        }));
        if let Some(work) = works.iter().find(|work| work.n_total() > n_ctx) {
            bail!(
                "{label}: expected points within the context of {n_ctx} tokens, found {work} \
                 ({} tokens)",
                work.n_total()
            );
        }
        let label = label.to_owned();
        Ok(works
            .into_iter()
            .map(|work| Point {
                label: label.clone(),
                work,
            })
            .collect())
    }
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

    fn parse(line: &str) -> Args {
        let words = ["bench", "-m", "m.gguf"].into_iter();
        let words = words.chain(line.split_whitespace());
        Only::try_parse_from(words).unwrap().args
    }

    fn works(line: &str, n_ctx: usize) -> Vec<String> {
        let points = parse(line).points("m", n_ctx, 512).unwrap();
        points.iter().map(|p| p.work.to_string()).collect()
    }

    #[test]
    fn default_lengths_end_at_the_context() {
        assert_eq!(works("", 10_000), ["512", "2048", "8192"]);
        assert_eq!(works("", 200_000).len(), 5);
    }

    #[test]
    fn lengths_chunk_and_decode_are_points_in_this_order() {
        assert_eq!(
            works(
                "--n-prompt 7,9 --start-pos 4096 --decode 8 --after 100",
                8192
            ),
            ["7", "9", "512 at 4096", "decode 8 after 100"]
        );
        assert_eq!(works("--decode 8", 8192), ["decode 8 after 512"]);
    }

    #[test]
    fn a_point_beyond_the_context_is_refused_with_the_numbers() {
        let error = parse("--n-prompt 100").points("m", 99, 512).unwrap_err();

        assert!(error.to_string().contains("context of 99"), "{error}");
    }

    #[test]
    fn schedule_has_defaults_and_bounds() {
        let args = parse("--samples 3 --warmup-s 0.5");

        assert_eq!((args.schedule.samples, args.schedule.warmup_s), (3, 0.5));
        assert_eq!((args.schedule.min_s, args.seed), (1.0, 1));
        for wrong in ["--samples 0", "--min-s -1", "--warmup-s x", "--after 5"] {
            let words = ["bench", "-m", "m"].into_iter().chain(wrong.split(' '));
            assert!(Only::try_parse_from(words).is_err(), "{wrong} was taken");
        }
    }
}
