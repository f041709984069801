//! Drives the engine for the subcommands: progress on stderr, Ctrl-C between chunks, timings.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::report::DeviceReport;
use super::{Console, EngineArgs, Interrupted, Progress, Unit, to_stderr};
use crate::Error;
use crate::engine::{
    self, Engine, EngineError, EngineOptions, LoadProgress, Logits, PrefillControl, Rows, Session,
};
use crate::ggml::{LogLevel, set_log_sink};
use crate::numerics;

/// Variable with the folder of ggml's loadable backends.
pub(super) const BACKEND_DIR: &str = "G4_BACKEND_DIR";

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
    let dir = std::env::var_os(BACKEND_DIR).filter(|dir| !dir.is_empty());
    options.backend_dir = dir.map(Into::into);
    Ok(options)
}

/// Loads a model with a progress bar.
pub(super) fn load(model: &Path, args: &EngineArgs, console: &Console) -> anyhow::Result<Loaded> {
    let options = options(args)?;
    show_ggml_log(console);
    let _listening = console.interrupt().listen("this matrix");
    let bar = console.progress("load", 0, Unit::Bytes);
    let start = Instant::now();
    let mut report = |progress: LoadProgress| {
        bar.set_total(progress.total_bytes);
        bar.set(progress.done_bytes);
        if console.interrupt().is_requested() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let engine = match Engine::load_while(model, options, &mut report) {
        Err(Error::Engine(EngineError::LoadCancelled { .. })) => return Err(Interrupted.into()),
        loaded => loaded.with_context(|| format!("load {}", model.display()))?,
    };
    drop(bar);
    let config = engine.config();
    warn_beyond_training(engine.options().n_ctx, config.n_ctx_train, console);
    console.note(format_args!(
        "device: {}",
        DeviceReport::from(engine.device())
    ));
    Ok(Loaded {
        engine,
        duration: start.elapsed(),
    })
}

/// Says that a model was not trained for the context that was asked for.
pub(super) fn warn_beyond_training(n_ctx: usize, n_ctx_train: usize, console: &Console) {
    if n_ctx > n_ctx_train {
        console.warning(format_args!(
            "--n-ctx {n_ctx}: the model was trained for {n_ctx_train} tokens, what it writes \
             behind them may make no sense"
        ));
    }
}

/// Says why a prompt and its continuation do not fit. The plan counts what is allocated later too.
pub(super) fn require_fit(
    engine: &Arc<Engine>,
    n_prompt: usize,
    n_gen: usize,
) -> anyhow::Result<()> {
    let check = || -> crate::Result<()> {
        let plan = engine.plan(n_prompt, n_gen)?;
        plan.require_fit().map_err(EngineError::from)?;
        Ok(())
    };
    check().with_context(|| start_session(n_prompt, n_gen))
}

fn start_session(n_prompt: usize, n_gen: usize) -> String {
    format!("start a session for {n_prompt} prompt tokens and {n_gen} generated ones")
}

/// Starts a session with room for a prompt and its continuation, or says why they do not fit.
pub(super) fn session(
    engine: &Arc<Engine>,
    n_prompt: usize,
    n_gen: usize,
) -> anyhow::Result<Session> {
    require_fit(engine, n_prompt, n_gen)?;
    let session = engine.session(n_prompt.saturating_add(n_gen));
    session.with_context(|| start_session(n_prompt, n_gen))
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
    let _listening = console.interrupt().listen("this chunk");
    let before = bar.position();
    let mut progress = |p: engine::Progress| bar.set(before + p.processed as u64);
    let mut control = PrefillControl {
        progress: Some(&mut progress),
        cancel: Some(console.interrupt().cancel_token()),
        recorder: None,
    };
    match session.prefill(ids, rows, &mut control) {
        Ok(logits) => Ok(logits),
        Err(Error::Engine(EngineError::Cancelled { .. })) => Err(Interrupted.into()),
        Err(error) => Err(error).context("prefill"),
    }
}

/// The most likely token of a row of logits.
pub(super) fn argmax(row: &[f32]) -> anyhow::Result<u32> {
    numerics::argmax(row).context("find the most likely token: no logit is a number")
}
