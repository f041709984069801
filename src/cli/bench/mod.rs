//! `g4prefill bench`: our engine beside llama.cpp on the same file, in turns. The measuring itself
//! is in `crate::bench`; here models are loaded, results saved and printed.

mod accuracy;
mod args;
mod compare;
mod peer;
mod save;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;

pub use args::Args;

use super::{Console, Interrupted, Unit, drive, report};
use crate::bench::{
    self, BenchError, Contestant, DeviceFacts, Facts, Harness, Limits, Machine, Method,
    ModelReport, Ours, Point, PointReport, Report, Schedule, fingerprint, random_ids, token_pool,
};
use crate::engine::Engine;
use crate::ggml::{Device, load_backends};

/// Runs `bench`; the answer is no when an answer was wrong, or less accurate than the peer's.
pub fn run(args: &Args, console: &Console) -> anyhow::Result<ExitCode> {
    if let [old, new] = args.compare.compare.as_slice() {
        return compare::run(old, new, args);
    }
    let _listening = console.interrupt().listen("this run");
    save::check_targets(&args.out)?;
    let mut bench = Bench {
        args,
        console,
        start: Instant::now(),
        report: None,
    };
    let outcome = args.models.iter().try_for_each(|path| bench.model(path));
    let is_interrupted = match outcome {
        Ok(()) => false,
        Err(error) => {
            let is_interrupted = error.chain().any(|cause| {
                cause.is::<Interrupted>()
                    || matches!(cause.downcast_ref(), Some(BenchError::Cancelled))
            });
            if !is_interrupted {
                // What was measured before is in the files; it is shown too.
                bench.finish(false)?;
                return Err(error);
            }
            true
        }
    };
    let is_valid = bench.finish(!is_interrupted)?;
    if is_interrupted || console.interrupt().is_requested() {
        return Err(Interrupted.into());
    }
    Ok(if is_valid {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

struct Bench<'a> {
    args: &'a Args,
    console: &'a Console,
    start: Instant,
    report: Option<Report>,
}

impl Bench<'_> {
    /// Measures all points of one model.
    fn model(&mut self, path: &Path) -> anyhow::Result<()> {
        let (args, console) = (self.args, self.console);
        let options = drive::options(&args.engine)?;
        load_backends(options.backend_dir.as_deref())?;
        let device = Device::find(options.device)?;
        let used = used_bytes(device);
        let before = used();
        let loaded = drive::load(path, &args.engine, console)?;
        let weights = before.zip(used()).map(|(a, b)| b.saturating_sub(a));
        let engine = loaded.engine;
        if args.accuracy.is_some() {
            accuracy::prepare(engine.file(), (args, console))?;
        }
        let label = label(path);
        let points = args.points(&label, engine.context_limit(), engine.options().chunk)?;
        let pool = token_pool(engine.file(), engine.config())?;
        let n_longest = points.iter().map(|p| p.work.n_total()).max().unwrap_or(0);
        let ids = random_ids(&pool, n_longest, args.seed);
        let mut peer = peer::Peer::load(path, &engine, &points, &ids, (args, console))?;
        let entry = ModelReport {
            label,
            path: path.display().to_string(),
            bytes: engine.file().shard_bytes().iter().sum(),
            fingerprint: fingerprint(engine.file()),
            load_us: report::to_us(loaded.duration),
            switches: engine.plan(1, 0)?.switches,
            peer_sweep: peer.sweep.clone(),
        };
        self.begin(&engine)?.models.push(entry);
        let cancel = console.interrupt().cancel_token().clone();
        let mut ours = Ours::new(Arc::clone(&engine), cancel, weights);
        for point in &points {
            let is_cut = self.point(point, &ids, &mut ours, peer.contestant(), &used)?;
            if is_cut {
                return Err(Interrupted.into());
            }
        }
        if let Some(n) = args.accuracy {
            let ids = random_ids(&pool, n, args.seed);
            let found = accuracy::measure(&ids, &mut ours, peer.contestant(), (args, console))?;
            let report = self.report.as_mut().context("begin the report")?;
            report.accuracy.push(found);
            save::save(report, &args.out)?;
        }
        Ok(())
    }

    /// The report, begun with the first model.
    fn begin(&mut self, engine: &Arc<Engine>) -> anyhow::Result<&mut Report> {
        if self.report.is_none() {
            let device = DeviceFacts::of(&engine.open_backend()?);
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let machine = Machine::new(device, visible.as_deref());
            self.console.note(format_args!("{}", machine.describe()));
            let schedule = &self.args.schedule;
            self.report = Some(Report {
                is_complete: false,
                points: Vec::new(),
                accuracy: Vec::new(),
                models: Vec::new(),
                method: Method {
                    command: std::env::args().collect(),
                    started_unix_s: SystemTime::now()
                        .duration_since(UNIX_EPOCH)
                        .map_or(0, |d| d.as_secs()),
                    timed_region: bench::TIMED_REGION,
                    order: bench::ORDER,
                    spread: bench::SPREAD,
                    seed: self.args.seed,
                    samples: schedule.samples,
                    warmup_us: micros(schedule.warmup_s),
                    min_us: micros(schedule.min_s),
                    bar_percent: self.args.compare.bar.map(|bar| bar.0),
                },
                machine,
            });
        }
        self.report.as_mut().context("begin the report")
    }

    /// Measures a point and saves; says whether it was cut short.
    fn point(
        &mut self,
        point: &Point,
        ids: &[u32],
        ours: &mut Ours,
        mut peer: Option<&mut dyn Contestant>,
        used: &dyn Fn() -> Option<u64>,
    ) -> anyhow::Result<bool> {
        let (console, start) = (self.console, self.start);
        let engine = Arc::clone(ours.engine());
        let limits = Limits::of(&engine);
        let n_rounds = self.args.schedule.samples as u64;
        let bar = console.progress("rounds", n_rounds, Unit::Runs);
        let clocks = || self.report.as_ref().and_then(|r| r.machine.clocks());
        let clocks_before = clocks();
        let harness = Harness {
            schedule: Schedule {
                warmup: Duration::from_secs_f64(self.args.schedule.warmup_s),
                samples: self.args.schedule.samples,
                min_time: Duration::from_secs_f64(self.args.schedule.min_s),
                measures_noise: true,
            },
            limits,
            now: &|| start.elapsed(),
            used_bytes: used,
            is_cancelled: &|| console.interrupt().is_requested(),
            note: &|text| console.detail(text),
            progress: &|n| bar.set(n as u64),
        };
        let ids = ids.get(..point.work.n_total()).unwrap_or_default();
        let timings = harness
            .run(point, ids, ours, peer.as_deref_mut())
            .with_context(|| format!("measure {point}"))?;
        drop(bar);
        let facts = Facts {
            ours: (ours.name().to_owned(), ours.settings()),
            peer: peer.map(|p| (p.name().to_owned(), p.settings())),
            clocks_before,
            clocks_after: clocks(),
        };
        let result = PointReport::new(point, &timings, facts);
        let line = bench::one_line(&result);
        let report = self.report.as_mut().context("begin the report")?;
        report.points.push(result);
        save::save(report, &self.args.out)?;
        console.note(line);
        Ok(!timings.is_complete)
    }

    /// Saves and prints; says whether every answer was right.
    fn finish(&mut self, is_complete: bool) -> anyhow::Result<bool> {
        let Some(report) = &mut self.report else {
            return Ok(true);
        };
        report.is_complete = is_complete;
        // What ended before the first point replaces no older result, and prints no empty table.
        if is_complete || !report.points.is_empty() || !report.accuracy.is_empty() {
            save::save(report, &self.args.out)?;
            save::print(report, &self.args.out)?;
        }
        Ok(report.is_good())
    }
}

/// `e4b-q8_0` of `models/e4b-q8_0.gguf`.
pub(super) fn label(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    stem.to_string_lossy().into_owned()
}

/// Bytes in use on a GPU. The CPU reports all memory as free, so it says nothing.
fn used_bytes(device: Device) -> impl Fn() -> Option<u64> {
    move || {
        if device.is_cpu() {
            return None;
        }
        let (free, total) = device.memory()?;
        Some(total.saturating_sub(free))
    }
}

fn micros(seconds: f64) -> u64 {
    report::to_us(Duration::from_secs_f64(seconds))
}
