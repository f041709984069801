//! Sampling options as typed.

use clap::Args;

use super::numbers::whole;
use crate::engine::sampler::SamplerOptions;

/// How the next token is chosen.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature, as a factor on the spread of the logits; 0: always the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f32,
    /// Keep the K most likely tokens, in tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 40, value_parser = whole::<usize>)]
    pub top_k: usize,
    /// Keep the most likely tokens that together reach this probability (0 to 1); 1: all
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = probability)]
    pub top_p: f32,
    /// Keep tokens at least this probable relative to the best one (0 to 1); 0: all
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = probability)]
    pub min_p: f32,
    /// Seed of the random choice, any 64-bit number
    #[arg(long, value_name = "SEED", default_value_t = 0, value_parser = whole::<u64>)]
    pub seed: u64,
}

impl From<&SamplingArgs> for SamplerOptions {
    fn from(args: &SamplingArgs) -> Self {
        let SamplingArgs {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
        } = *args;
        Self {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
        }
    }
}

/// A finite number from 0 on.
fn temperature(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_usable = value.is_finite() && value >= 0.0;
    is_usable
        .then_some(value)
        .ok_or_else(|| "expected a number from 0 on".to_owned())
}

/// A number from 0 to 1.
fn probability(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_usable = (0.0..=1.0).contains(&value);
    is_usable
        .then_some(value)
        .ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn parse(args: &[&str]) -> Result<SamplingArgs, clap::Error> {
        Only::try_parse_from([&["test"], args].concat()).map(|only| only.sampling)
    }

    #[test]
    fn default_is_greedy() {
        assert_eq!(parse(&[]).unwrap().temperature, 0.0);
    }

    #[test]
    fn numbers_outside_their_range_are_refused() {
        for args in [
            ["--temperature", "-1"],
            ["--temperature", "NaN"],
            ["--temperature", "inf"],
            ["--top-p", "1.5"],
            ["--top-p", "nan"],
            ["--min-p", "-0.1"],
            ["--top-k", "-1"],
            ["--seed", "1.5"],
        ] {
            assert!(parse(&[&args.join("=")]).is_err(), "{args:?} was taken");
        }
    }

    #[test]
    fn values_are_kept() {
        let args = parse(&[
            "--temperature=0.7",
            "--top-k=0",
            "--top-p=1",
            "--min-p=0",
            "--seed=9",
        ]);

        let args = args.unwrap();
        assert_eq!((args.temperature, args.top_k, args.seed), (0.7, 0, 9));
        assert_eq!((args.top_p, args.min_p), (1.0, 0.0));
    }
}
