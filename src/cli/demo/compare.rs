//! The same prompt through our engine and through llama.cpp, in turns, by the harness of `bench`:
//! same file, process, threads and cache type. Nothing is repeated to show the noise: it is a demo.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::{Args, PeerReport};
use crate::bench::{
    BenchError, Contestant as _, Facts, Harness, Limits, LlamaCpp, Ours, Point, PointReport,
    Schedule, Work,
};
use crate::cli::{Console, Interrupted, Unit};
use crate::engine::Engine;
use crate::peer::PeerOptions;

/// Times both sides in turns and compares their last logits.
pub(super) fn compare(
    path: &Path,
    ids: &[u32],
    engine: &Arc<Engine>,
    args: &Args,
    console: &Console,
) -> anyhow::Result<PeerReport> {
    let options = engine.options();
    let mut llama = LlamaCpp::load(
        path,
        PeerOptions {
            n_ctx: ids.len(),
            n_ubatch: args.peer_ubatch,
            kv_type: options.kv_type,
            n_threads: options.n_threads,
            device: options.device,
            ..PeerOptions::default()
        },
    )
    .context("load the model into llama.cpp")?;
    let _listening = console.interrupt().listen("this run");
    let cancel = console.interrupt().cancel_token().clone();
    let mut ours = Ours::new(Arc::clone(engine), cancel, None);
    let point = Point {
        label: super::super::bench::label(path),
        work: Work::Prefill {
            n_prompt: ids.len(),
        },
    };
    let start = Instant::now();
    let bar = console.progress("compare", args.rounds as u64, Unit::Runs);
    let harness = Harness {
        schedule: Schedule {
            warmup: Duration::ZERO,
            samples: args.rounds,
            min_time: Duration::ZERO,
            measures_noise: false,
        },
        limits: Limits::of(engine),
        now: &|| start.elapsed(),
        used_bytes: &|| None,
        is_cancelled: &|| console.interrupt().is_requested(),
        note: &|text| console.detail(text),
        progress: &|n| bar.set(n as u64),
    };
    let timings = match harness.run(&point, ids, &mut ours, Some(&mut llama)) {
        Ok(timings) if timings.is_complete => timings,
        Ok(_) | Err(BenchError::Cancelled) => return Err(Interrupted.into()),
        Err(error) => return Err(error).context("compare with llama.cpp"),
    };
    let facts = Facts {
        ours: (ours.name().to_owned(), ours.settings()),
        peer: Some((llama.name().to_owned(), llama.settings())),
        clocks_before: None,
        clocks_after: None,
    };
    report(PointReport::new(&point, &timings, facts), args)
}

/// What the demo shows of a point.
fn report(point: PointReport, args: &Args) -> anyhow::Result<PeerReport> {
    let peer = point.peer.context("time llama.cpp")?;
    let check = point.check.context("compare the logits")?;
    Ok(PeerReport {
        n_rounds: point.ours.samples_us.len(),
        n_ubatch: args.peer_ubatch,
        ours_us: point.ours.samples_us,
        theirs_us: peer.samples_us,
        // A wrong answer ends the rounds, maybe before the first pair; JSON has null then.
        speedup: point.pairs.map_or(f64::NAN, |p| p.median),
        speedup_spread: point.pairs.map_or(f64::NAN, |p| (p.high - p.low) / 2.0),
        nmse: check.nmse,
        nmse_limit: check.limits.nmse,
        argmax_equal: check.argmax_equal,
        argmax_gap: check.argmax_gap,
        is_valid: point.valid,
        refused: point.ratio.refused,
    })
}
