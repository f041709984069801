//! `cargo bench --features llama --bench prefill`: the harness of `g4prefill bench` on a small model and the CPU,
//! beside llama.cpp. Arguments behind `--` are those of `bench`; `-- -m MODEL` replaces the model.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;

use g4prefill::cli::{Cli, Console, Interrupt};
use g4prefill::synth::{self, Spec};

/// Points and schedule that take a minute.
const QUICK: [&str; 10] = [
    "--n-prompt",
    "128,512",
    "--samples",
    "5",
    "--min-s",
    "0",
    "--warmup-s",
    "0",
    "--device",
    "cpu",
];

fn main() -> anyhow::Result<ExitCode> {
    // Cargo itself adds `--bench`.
    let typed: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let mut words = vec!["g4prefill".to_owned(), "bench".to_owned()];
    if typed.is_empty() {
        words.extend(["-m".to_owned(), model()?.display().to_string()]);
        words.extend(QUICK.map(str::to_owned));
    }
    words.extend(typed);
    let cli = Cli::try_parse_from(words)?;
    let console = Console::new(&cli.global, Interrupt::default());
    cli.run(&console)
}

/// The small model, made once.
fn model() -> anyhow::Result<PathBuf> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mini-q8_0.gguf");
    if !path.exists() {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let spec = Spec::preset("mini")?;
        synth::write(&spec, &path, threads, &mut |_| ControlFlow::Continue(()))
            .context("make the model")?;
    }
    Ok(path)
}
