//! Tables of a profile: by kernel, class and kind of layer. Sums and sorting only.

use std::collections::BTreeMap;

use serde::Serialize;

use super::attribution::Item;
use super::class::{Class, short_name};
use super::idle::{Gap, IdleSplit, find, largest};
use super::roofline::{Figure, Peaks, Tally};
use super::window::{Copies, Usage, Window};
use super::work::FORMULAS;
use crate::engine::{ChunkRun, How};
use crate::ggml::GpuActivity;
use crate::model::Config;

/// Gaps that a report lists.
const N_GAPS: usize = 20;

/// How the times were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The GPU's own record of an ordinary run.
    Cupti,
    /// One node after the other, with a wait behind each.
    NodeByNode,
}

/// All kernels of one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelRow {
    /// Name with template arguments.
    pub name: String,
    /// What it is for.
    pub class: Class,
    /// Calls.
    pub n: u64,
    /// Time in nanoseconds.
    pub ns: u64,
    /// Share of the wall time.
    pub share: f64,
}

/// All work of one class, one kind of layer, or both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkRow {
    /// Kind of layer; null for all.
    pub layer_kind: Option<String>,
    /// Class; null for all.
    pub class: Option<Class>,
    /// Kernels, copies or nodes.
    pub n: u64,
    /// Time in nanoseconds.
    pub ns: u64,
    /// Share of the wall time.
    pub share: f64,
    /// The part of the time whose work is known: the rest is helpers and what has no node.
    pub known_ns: u64,
    /// FLOPs by closed form, of the known part.
    pub flops: f64,
    /// Bytes by closed form, of the known part.
    pub bytes: f64,
    /// What follows; null where no work is known.
    pub figure: Option<Figure>,
}

/// What the GPU moved between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Transfers {
    /// To the device.
    pub host_to_device: Copies,
    /// To the host.
    pub device_to_host: Copies,
    /// On the device.
    pub device_to_device: Copies,
    /// Fills.
    pub memset: Copies,
}

/// One chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkRow {
    /// Index into the report's buckets.
    pub bucket: usize,
    /// Tokens in the cache before it.
    pub n_past: usize,
    /// Its tokens.
    pub n_tokens: usize,
    /// `direct`, `captured`, `replayed`, `refused`, `kept` or `by_node`.
    pub how: &'static str,
    /// Whether its graph was built in it.
    pub is_built: bool,
    /// What changed in its graph since the bucket last ran; null when nothing did, or nobody looked.
    pub change: Option<String>,
    /// Host time from its begin until it was queued (and its logits read), in nanoseconds.
    pub host_ns: u64,
    /// Time of its kernels, in nanoseconds; overlaps counted twice.
    pub kernel_ns: u64,
    /// Parts that the graph was cut into.
    pub splits: u64,
    /// Copies to the device.
    pub n_uploads: u64,
    /// Their bytes.
    pub uploaded_bytes: u64,
    /// Bytes read back.
    pub read_bytes: u64,
}

/// A formula for FLOPs and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Formula {
    /// Operation.
    pub op: &'static str,
    /// FLOPs.
    pub flops: &'static str,
    /// Bytes.
    pub bytes: &'static str,
}

/// A whole profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// How the times were taken.
    pub method: Method,
    /// Wall time of the profiled prefill, in nanoseconds: of the ordinary run, also where nodes were
    /// timed in another.
    pub wall_ns: u64,
    /// Sum of all kernels or nodes, in nanoseconds.
    pub sum_ns: u64,
    /// How the GPU's time was spent; null without its record.
    pub usage: Option<Usage>,
    /// Idle time by cause; null as above.
    pub idle: Option<IdleSplit>,
    /// The longest gaps.
    pub gaps: Vec<Gap>,
    /// Copies; null as above.
    pub transfers: Option<Transfers>,
    /// By kernel (or operation), longest first.
    pub kernels: Vec<KernelRow>,
    /// By class.
    pub classes: Vec<WorkRow>,
    /// By kind of layer.
    pub layer_kinds: Vec<WorkRow>,
    /// By kind of layer and class.
    pub layer_classes: Vec<WorkRow>,
    /// Share of the time whose node is known.
    pub placed_share: f64,
    /// What the shares of the peak refer to.
    pub peaks: Peaks,
    /// How FLOPs and bytes are counted.
    pub formulas: Vec<Formula>,
    /// The chunks, in order.
    pub chunks: Vec<ChunkRow>,
}

/// What a profile is made from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The GPU's records, if there are any.
    pub window: Option<&'a Window>,
    /// Wall time in nanoseconds.
    pub wall_ns: u64,
    /// Kernels or nodes.
    pub items: &'a [Item],
    /// The chunks of the profiled run.
    pub runs: &'a [ChunkRun],
    /// The model's numbers.
    pub config: &'a Config,
    /// What the device does at most.
    pub peaks: &'a Peaks,
}

impl Profile {
    /// Adds everything up.
    pub fn new(inputs: Inputs<'_>) -> Self {
        let Inputs { window, items, .. } = inputs;
        let gaps = window.map(find).unwrap_or_default();
        let sum_ns: u64 = items.iter().map(|i| i.ns).sum();
        let placed: u64 = items
            .iter()
            .filter(|i| i.place.is_some())
            .map(|i| i.ns)
            .sum();
        // What shares refer to: the sum is longer than the wall when each node runs alone.
        let whole_ns = sum_ns.max(inputs.wall_ns);
        let rows = |key: &dyn Fn(&Item) -> Option<Key>| work_rows(&inputs, whole_ns, key);
        let kind = |item: &Item| item.place.map(|p| p.kind(inputs.config).to_owned());
        Self {
            method: if window.is_some() {
                Method::Cupti
            } else {
                Method::NodeByNode
            },
            wall_ns: inputs.wall_ns,
            sum_ns,
            usage: window.map(Usage::of),
            idle: window.map(|_| IdleSplit::of(&gaps)),
            gaps: largest(&gaps, N_GAPS),
            transfers: window.map(Transfers::of),
            kernels: kernel_rows(items, whole_ns),
            classes: rows(&|item| Some((None, Some(item.class)))),
            layer_kinds: rows(&|item| Some((Some(kind(item)?), None))),
            layer_classes: rows(&|item| Some((Some(kind(item)?), Some(item.class)))),
            placed_share: ratio(placed, sum_ns),
            peaks: inputs.peaks.clone(),
            formulas: formulas(),
            chunks: chunk_rows(&inputs),
        }
    }
}

impl Transfers {
    fn of(window: &Window) -> Self {
        let of = |activity| Copies::of(&window.device, activity);
        Self {
            host_to_device: of(GpuActivity::HostToDevice),
            device_to_host: of(GpuActivity::DeviceToHost),
            device_to_device: of(GpuActivity::DeviceToDevice),
            memset: of(GpuActivity::Memset),
        }
    }
}

fn formulas() -> Vec<Formula> {
    let formula = |(op, flops, bytes)| Formula { op, flops, bytes };
    FORMULAS.into_iter().map(formula).collect()
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    part as f64 / whole as f64
}

fn kernel_rows(items: &[Item], whole_ns: u64) -> Vec<KernelRow> {
    let mut sums: BTreeMap<(&str, Class), (u64, u64)> = BTreeMap::new();
    for item in items {
        let sum = sums
            .entry((short_name(&item.name), item.class))
            .or_default();
        sum.0 += 1;
        sum.1 += item.ns;
    }
    let row = |((name, class), (n, ns)): ((&str, Class), (u64, u64))| KernelRow {
        name: name.to_owned(),
        class,
        n,
        ns,
        share: ratio(ns, whole_ns),
    };
    let mut rows: Vec<KernelRow> = sums.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.ns));
    rows
}

/// What rows are summed by: kind of layer, class.
type Key = (Option<String>, Option<Class>);

#[derive(Default)]
struct Sum {
    n: u64,
    ns: u64,
    tally: Tally,
}

fn work_rows(
    inputs: &Inputs<'_>,
    whole_ns: u64,
    key: &dyn Fn(&Item) -> Option<Key>,
) -> Vec<WorkRow> {
    let mut sums: BTreeMap<Key, Sum> = BTreeMap::new();
    for item in inputs.items {
        let Some(key) = key(item) else {
            continue;
        };
        let sum = sums.entry(key).or_default();
        sum.n += 1;
        sum.ns += item.ns;
        if let Some(work) = item.work {
            sum.tally.add(work, item.ns as f64, inputs.peaks);
        }
    }
    let row = |((layer_kind, class), sum): (Key, Sum)| WorkRow {
        layer_kind,
        class,
        n: sum.n,
        ns: sum.ns,
        share: ratio(sum.ns, whole_ns),
        known_ns: sum.tally.ns.round() as u64,
        flops: sum.tally.work.flops,
        bytes: sum.tally.work.bytes,
        figure: sum.tally.figure(whole_ns as f64),
    };
    let mut rows: Vec<WorkRow> = sums.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.ns));
    rows
}

fn chunk_rows(inputs: &Inputs<'_>) -> Vec<ChunkRow> {
    let mut buckets = Vec::new();
    let transfers = inputs
        .window
        .map(|w| super::attribution::transfers(w, inputs.runs));
    let mut rows = Vec::new();
    for (number, run) in inputs.runs.iter().enumerate() {
        let chunk = &run.chunk;
        let bucket = buckets.iter().position(|b| *b == chunk.bucket);
        let bucket = bucket.unwrap_or_else(|| {
            buckets.push(chunk.bucket);
            buckets.len() - 1
        });
        let items = inputs.items.iter().filter(|i| i.chunk == Some(number));
        // What the GPU copied, where that was recorded; else what the engine asked for.
        let recorded = transfers.as_ref().and_then(|t| t.get(number)).copied();
        let [(n_uploads, uploaded_bytes), (_, read_bytes)] =
            recorded.unwrap_or([run.uploads, (0, run.read_bytes)]);
        rows.push(ChunkRow {
            bucket,
            n_past: chunk.n_past,
            n_tokens: chunk.n_tokens,
            how: run.how.word(),
            is_built: run.is_built,
            change: run.change.as_ref().map(ToString::to_string),
            host_ns: run.end_ns.saturating_sub(run.start_ns),
            kernel_ns: items.filter(|i| i.class != Class::Copy).map(|i| i.ns).sum(),
            splits: 1,
            n_uploads,
            uploaded_bytes,
            read_bytes,
        });
    }
    rows
}

/// Why a chunk was no replay, in words; `None` when it was one.
pub fn why_no_replay(run: &ChunkRun) -> Option<String> {
    if let Some(change) = &run.change {
        return Some(format!("{change}{}", built(run)));
    }
    let why = match run.how {
        How::Replayed | How::Kept => return None,
        How::Captured => "second run of this graph: recorded",
        How::Refused => "a node needs the host, so the backend never records this graph",
        How::ByNode => "run node by node",
        How::Direct => "first run of this graph",
    };
    Some(format!("{why}{}", built(run)))
}

fn built(run: &ChunkRun) -> &'static str {
    if run.is_built {
        "; built in this chunk"
    } else {
        ""
    }
}
