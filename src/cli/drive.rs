//! Drives the engine for the subcommands: progress on stderr, Ctrl-C between chunks, timings.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::{Console, EngineArgs, Interrupted, Progress, Unit, to_stderr};
use crate::Error;
use crate::engine::{
    self, Engine, EngineError, EngineOptions, LoadProgress, Logits, PrefillControl, Rows, Session,
};
use crate::ggml::{LogLevel, set_log_sink};

/// Variable with the folder of ggml's loadable backends.
const BACKEND_DIR: &str = "G4_BACKEND_DIR";

/// A model on its device.
pub(super) struct Loaded {
    pub engine: Arc<Engine>,
    pub duration: Duration,
}

/// Sends ggml's log to stderr: warnings always, the rest with `-v`.
pub(super) fn show_ggml_log(console: &Console) {
    let (is_quiet, is_verbose) = (console.quiet, console.verbose);
    set_log_sink(move |level, text| {
        if is_verbose || (level >= LogLevel::Warn && !is_quiet) {
            to_stderr(text);
        }
    });
}

/// The engine's options: what was typed, and where ggml's backends are.
pub(super) fn options(args: &EngineArgs) -> anyhow::Result<EngineOptions> {
    let mut options = args.to_options()?;
    options.backend_dir = std::env::var_os(BACKEND_DIR).map(Into::into);
    Ok(options)
}

/// Loads a model with a progress bar.
pub(super) fn load(model: &Path, args: &EngineArgs, console: &Console) -> anyhow::Result<Loaded> {
    let options = options(args)?;
    show_ggml_log(console);
    let bar = console.progress("load", 0, Unit::Bytes);
    let start = Instant::now();
    let mut report = |progress: LoadProgress| {
        bar.set_total(progress.total_bytes);
        bar.set(progress.done_bytes);
    };
    let engine = Engine::load(model, options, &mut report)
        .with_context(|| format!("load {}", model.display()))?;
    drop(bar);
    Ok(Loaded {
        engine,
        duration: start.elapsed(),
    })
}

/// Starts a session with room for a prompt and its continuation, or says why they do not fit. The
/// plan is asked first: it counts what is allocated later too.
pub(super) fn session(
    engine: &Arc<Engine>,
    n_prompt: usize,
    n_gen: usize,
) -> anyhow::Result<Session> {
    let start = || {
        let plan = engine.plan(n_prompt, n_gen)?;
        plan.require_fit().map_err(EngineError::from)?;
        engine.session(n_prompt.saturating_add(n_gen))
    };
    start().with_context(|| {
        format!("start a session for {n_prompt} prompt tokens and {n_gen} generated ones")
    })
}

/// Prefills `ids` behind what the session holds and moves `bar` on; Ctrl-C stops it between two
/// chunks.
pub(super) fn prefill(
    session: &mut Session,
    ids: &[u32],
    rows: &Rows,
    bar: &Progress,
    console: &Console,
) -> anyhow::Result<Logits> {
    let _listening = console.interrupt().listen();
    let before = bar.position();
    let mut progress = |p: engine::Progress| bar.set(before + p.processed as u64);
    let mut control = PrefillControl {
        progress: Some(&mut progress),
        cancel: Some(console.interrupt().cancel_token()),
    };
    match session.prefill(ids, rows, &mut control) {
        Ok(logits) => Ok(logits),
        Err(Error::Engine(EngineError::Cancelled { .. })) => Err(Interrupted.into()),
        Err(error) => Err(error).context("prefill"),
    }
}

/// Index of the largest logit; the first one of equals.
pub(super) fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    u32::try_from(best).unwrap_or(u32::MAX)
}
