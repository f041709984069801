//! Runs the prefills of `profile` and collects what they did.

use std::rc::Rc;
use std::time::Instant;

use anyhow::Context as _;

use super::super::report::GraphReport;
use super::super::{Console, DeviceArg, Interrupted, drive};
use super::Args;
use crate::Error;
use crate::engine::bucket::BucketShape;
use crate::engine::{
    ChunkRecorder, ChunkRun, Engine, EngineError, How, PrefillControl, Rows, Session,
};
use crate::ggml::{Cupti, NodeFact};
use crate::profile::trace::{self, Trace};
use crate::profile::{Graphs, Inputs, Model, Peaks, Profile, Window, of_nodes, of_window, peaks};

/// What the prefills did.
pub(super) struct Measured {
    pub device: String,
    pub n_warmup: usize,
    pub cupti_version: Option<u32>,
    pub no_cupti: Option<String>,
    pub n_dropped: u64,
    pub graphs: GraphReport,
    pub profile: Profile,
    pub runs: Vec<ChunkRun>,
    pub trace: Trace,
    nodes: Graphs,
    /// Buckets in order of first use.
    buckets: Vec<BucketShape>,
}

impl Measured {
    /// Bucket and nodes of the graph with this number, where it is still there.
    pub fn graph(&self, number: usize) -> Option<(BucketShape, &[NodeFact])> {
        let bucket = *self.buckets.get(number)?;
        Some((bucket, self.nodes.get(&bucket)?.as_slice()))
    }

    /// Buckets of the prompt.
    pub fn n_graphs(&self) -> usize {
        self.buckets.len()
    }
}

/// Begins to record the GPU, or says why not. It must come before anything that starts CUDA.
fn start_cupti(args: &Args) -> Result<Rc<Cupti>, String> {
    if args.by_node {
        return Err("--by-node was given".to_owned());
    }
    if args.engine.device == DeviceArg::Cpu {
        return Err("the device is the CPU".to_owned());
    }
    let dir = std::env::var_os(drive::BACKEND_DIR).map(Into::into);
    let dirs: Vec<_> = dir.into_iter().collect();
    let started = Cupti::start(&dirs, args.cupti.as_deref(), true);
    started.map(Rc::new).map_err(|error| error.to_string())
}

/// Token ids from a fixed seed: what they are does not change the time.
fn prompt(n: usize, n_vocab: usize) -> Vec<u32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let id = (u64::from(state) * n_vocab as u64) >> 32;
        u32::try_from(id).unwrap_or(0)
    };
    (0..n).map(|_| next()).collect()
}

/// Prefills an empty session.
fn prefill(
    session: &mut Session,
    ids: &[u32],
    recorder: &mut ChunkRecorder,
    console: &Console,
) -> anyhow::Result<()> {
    let _listening = console.interrupt().listen("this chunk");
    session.reset();
    let mut control = PrefillControl {
        cancel: Some(console.interrupt().cancel_token()),
        recorder: Some(recorder),
        ..PrefillControl::default()
    };
    match session.prefill(ids, &Rows::Last, &mut control) {
        Ok(_) => Ok(()),
        Err(Error::Engine(EngineError::Cancelled { .. })) => Err(Interrupted.into()),
        Err(error) => Err(error).context("prefill"),
    }
}

/// The runs behind a profile.
struct Runs {
    /// The profiled prefill.
    ordinary: Vec<ChunkRun>,
    /// Begin and end of it, in nanoseconds.
    times: (u64, u64),
    /// Graphs that it built.
    n_built: u64,
    /// The prefill node by node, where there are no records.
    by_node: Vec<ChunkRun>,
}

fn run_prefills(
    session: &mut Session,
    args: &Args,
    cupti: Option<&Rc<Cupti>>,
    n_vocab: usize,
    console: &Console,
) -> anyhow::Result<Runs> {
    let ids = prompt(args.n_prompt, n_vocab);
    let epoch = Instant::now();
    let clock = {
        let cupti = cupti.cloned();
        move || match &cupti {
            Some(cupti) => cupti.now_ns(),
            None => u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    };
    let mut recorder = ChunkRecorder::new(clock.clone());
    recorder.audit_graphs(args.graph_audit);
    for i in 0..n_warmup(args) {
        console.detail(format_args!("warm-up {i}"));
        prefill(session, &ids, &mut recorder, console)?;
    }
    recorder.take();
    if let Some(cupti) = cupti {
        cupti.clear().context("clear the GPU's records")?;
    }
    let built_before = session.counters().pool.built;
    let start = clock();
    prefill(session, &ids, &mut recorder, console)?;
    let times = (start, clock());
    let n_built = session.counters().pool.built - built_before;
    let ordinary = recorder.take();
    if cupti.is_none() {
        recorder.audit_graphs(false);
        recorder.time_nodes(true);
        prefill(session, &ids, &mut recorder, console)?;
    }
    Ok(Runs {
        ordinary,
        times,
        n_built,
        by_node: recorder.take(),
    })
}

fn n_warmup(args: &Args) -> usize {
    if args.cold { 0 } else { args.warmup }
}

/// Loads the model, runs the prefills and adds up.
pub(super) fn measure(args: &Args, console: &Console) -> anyhow::Result<Measured> {
    let started = start_cupti(args);
    let engine = drive::load(&args.model, &args.engine, console)?.engine;
    let config = engine.config();
    let mut session = drive::session(&engine, args.n_prompt, 0)?;
    let (cupti, no_cupti) = match started {
        Ok(_) if engine.device().is_cpu() => (None, Some("the device is the CPU".to_owned())),
        Ok(cupti) => (Some(cupti), None),
        Err(why) => (None, Some(why)),
    };
    let runs = run_prefills(&mut session, args, cupti.as_ref(), config.n_vocab, console)?;
    let recording = match &cupti {
        Some(cupti) => Some(cupti.finish().context("collect the GPU's records")?),
        None => None,
    };
    let nodes: Graphs = session
        .pool()
        .graphs()
        .map(|(bucket, graph)| (*bucket, graph.graph.facts()))
        .collect();
    drop(session);
    let peaks = peaks_of(args, &engine)?;
    let model = Model {
        config,
        graphs: &nodes,
    };
    let (start, end) = runs.times;
    let window = recording
        .as_ref()
        .map(|r| Window::new(&r.records, start, end));
    let (items, trace) = match &window {
        Some(window) => {
            let items = of_window(window, &runs.ordinary, model);
            let trace = trace::of_window(window, &items, &runs.ordinary);
            (items, trace)
        }
        None => {
            let items = of_nodes(&runs.by_node, model);
            let trace = trace::of_nodes(&items, &runs.by_node);
            (items, trace)
        }
    };
    let profile = Profile::new(Inputs {
        window: window.as_ref(),
        wall_ns: end - start,
        items: &items,
        runs: &runs.ordinary,
        config,
        peaks: &peaks,
    });
    Ok(Measured {
        device: engine.device().description(),
        n_warmup: n_warmup(args),
        cupti_version: recording.as_ref().map(|r| r.cupti_version),
        no_cupti,
        n_dropped: recording.as_ref().map_or(0, |r| r.n_dropped),
        graphs: graph_report(&runs.ordinary, runs.n_built),
        profile,
        trace,
        nodes,
        buckets: buckets(&runs.ordinary),
        runs: runs.ordinary,
    })
}

/// The peaks as typed, else measured.
fn peaks_of(args: &Args, engine: &Engine) -> anyhow::Result<Peaks> {
    if let (Some(tflop_s), Some(tb_s)) = (args.peak_tflops, args.peak_tbs) {
        return Ok(Peaks {
            tflop_s,
            tb_s,
            source: "given".to_owned(),
        });
    }
    let backend = engine.open_backend()?;
    peaks::measure(&backend)
        .context("measure the device's peaks (or give --peak-tflops and --peak-tbs)")
}

fn buckets(runs: &[ChunkRun]) -> Vec<BucketShape> {
    let mut buckets = Vec::new();
    for run in runs {
        if !buckets.contains(&run.chunk.bucket) {
            buckets.push(run.chunk.bucket);
        }
    }
    buckets
}

fn graph_report(runs: &[ChunkRun], built: u64) -> GraphReport {
    let count = |is: &dyn Fn(&ChunkRun) -> bool| runs.iter().filter(|run| is(run)).count() as u64;
    let (captured, replayed) = (
        count(&|run| run.how == How::Captured),
        count(&|run| run.how.is_replay()),
    );
    GraphReport {
        built,
        captured,
        replayed,
        direct: runs.len() as u64 - captured - replayed,
        splits: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_ids_are_in_the_vocabulary_and_always_the_same() {
        let ids = prompt(1000, 50);

        assert!(ids.iter().all(|id| *id < 50));
        assert!(ids.iter().any(|id| *id != ids[0]));
        assert_eq!(ids, prompt(1000, 50));
    }
}
