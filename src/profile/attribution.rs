//! Each kernel with what it is for: chunk, class, layer, and the work it had to do.

use std::collections::HashMap;
use std::sync::Arc;

use super::align::{Group, align};
use super::class::{Class, of_node, of_record};
use super::layers::{Place, places};
use super::roofline::Work;
use super::window::{Window, label, span};
use super::work::{Context, group_work};
use crate::engine::ChunkRun;
use crate::engine::bucket::BucketShape;
use crate::ggml::{GpuActivity, GpuRecord, NodeFact};
use crate::model::Config;

/// One kernel, copy or node, and what is known of it.
#[derive(Clone, Debug)]
pub struct Item {
    /// Kernel with its template arguments, or operation of a node.
    pub name: Arc<str>,
    /// What it is for.
    pub class: Class,
    /// Chunk it ran in; `None` when no launch was recorded.
    pub chunk: Option<usize>,
    /// Where in the model; `None` when it has no node.
    pub place: Option<Place>,
    /// Name of its node.
    pub node: Option<String>,
    /// Time in nanoseconds.
    pub ns: u64,
    /// What it had to do; `None` for helpers and what has no node.
    pub work: Option<Work>,
}

/// The graphs of a session by bucket.
pub type Graphs = HashMap<BucketShape, Vec<NodeFact>>;

/// What the items are made from, beside the records.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// The model's numbers.
    pub config: &'a Config,
    /// Nodes of each bucket.
    pub graphs: &'a Graphs,
}

/// Chunk of each device record: that in which the host launched it.
pub fn chunk_of(window: &Window, runs: &[ChunkRun]) -> Vec<Option<usize>> {
    let launched: HashMap<u32, u64> = window
        .calls
        .iter()
        .map(|c| (c.correlation, c.start_ns))
        .collect();
    let find = |record: &GpuRecord| {
        let at = launched.get(&record.correlation)?;
        runs.iter()
            .position(|run| run.start_ns <= *at && *at <= run.end_ns)
    };
    window.device.iter().map(find).collect()
}

/// Items of a recording: one for each device record.
pub fn of_window(window: &Window, runs: &[ChunkRun], model: Model<'_>) -> Vec<Item> {
    let chunks = chunk_of(window, runs);
    let mut items: Vec<Item> = window
        .device
        .iter()
        .zip(&chunks)
        .map(|(record, chunk)| Item {
            name: Arc::from(label(record)),
            class: of_record(record),
            chunk: *chunk,
            place: None,
            node: None,
            ns: span(record).ns(),
            work: None,
        })
        .collect();
    let mut aligner = Aligner::default();
    for (number, run) in runs.iter().enumerate() {
        let Some(nodes) = model.graphs.get(&run.chunk.bucket) else {
            continue;
        };
        let members: Vec<usize> = (0..items.len())
            .filter(|i| chunks.get(*i) == Some(&Some(number)))
            .collect();
        let records: Vec<&GpuRecord> = members
            .iter()
            .filter_map(|i| window.device.get(*i))
            .collect();
        let groups = aligner.align(run.chunk.bucket, &records, nodes);
        place(&mut items, &members, &groups, run, nodes, model.config);
    }
    items
}

/// A bucket and the names of the kernels that ran for it.
type Sequence = (BucketShape, Vec<Arc<str>>);

/// Aligns equal lists of kernels once: replays of a bucket are equal.
#[derive(Default)]
struct Aligner(HashMap<Sequence, Arc<[Group]>>);

impl Aligner {
    fn align(
        &mut self,
        bucket: BucketShape,
        records: &[&GpuRecord],
        nodes: &[NodeFact],
    ) -> Arc<[Group]> {
        let names = records.iter().map(|r| Arc::from(label(r))).collect();
        let known = self.0.entry((bucket, names));
        Arc::clone(known.or_insert_with(|| align(records, nodes).into()))
    }
}

/// Writes node, place and work into the items of one chunk.
fn place(
    items: &mut [Item],
    members: &[usize],
    groups: &[Group],
    run: &ChunkRun,
    nodes: &[NodeFact],
    config: &Config,
) {
    let where_in_model = places(nodes);
    let context = Context {
        chunk: &run.chunk,
        n_swa: config.n_swa,
    };
    let mut next = groups.iter().peekable();
    let mut last_place = None;
    for (position, member) in members.iter().enumerate() {
        let Some(item) = items.get_mut(*member) else {
            continue;
        };
        match next.peek() {
            Some(group) if group.kernel == position => {
                let first = group.nodes.first().copied().unwrap_or(0);
                item.place = where_in_model.get(first).copied();
                item.node = nodes.get(first).map(|n| n.result.name.clone());
                item.work = Some(group_work(nodes, &group.nodes, context));
                last_place = item.place;
                next.next();
            }
            // A conversion prepares the next node; a fix-up finishes the last one.
            Some(group) if item.class == Class::Cast => {
                let node = group.nodes.first().copied().unwrap_or(0);
                item.place = where_in_model.get(node).copied();
            }
            _ if item.class != Class::Copy => item.place = last_place,
            _ => {}
        }
    }
}

/// Items of a run node by node: one for each node that computes something.
pub fn of_nodes(runs: &[ChunkRun], model: Model<'_>) -> Vec<Item> {
    let mut items = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        let Some(nodes) = model.graphs.get(&run.chunk.bucket) else {
            continue;
        };
        let context = Context {
            chunk: &run.chunk,
            n_swa: model.config.n_swa,
        };
        let places = places(nodes);
        for (i, (node, time)) in nodes.iter().zip(&run.node_times).enumerate() {
            let Some(class) = of_node(node) else {
                continue;
            };
            items.push(Item {
                name: Arc::from(node.op.as_str()),
                class,
                chunk: Some(number),
                place: places.get(i).copied(),
                node: Some(node.result.name.clone()),
                ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
                work: Some(group_work(nodes, &[i], context)),
            });
        }
    }
    items
}

/// Uploads and read-backs of each chunk: number and bytes, to the device and to the host.
pub fn transfers(window: &Window, runs: &[ChunkRun]) -> Vec<[(u64, u64); 2]> {
    let mut sums = vec![[(0, 0); 2]; runs.len()];
    for (record, chunk) in window.device.iter().zip(chunk_of(window, runs)) {
        let direction = match record.activity {
            GpuActivity::HostToDevice => 0,
            GpuActivity::DeviceToHost => 1,
            _ => continue,
        };
        if let Some(sum) = chunk.and_then(|c| sums.get_mut(c))
            && let Some((n, bytes)) = sum.get_mut(direction)
        {
            *n += 1;
            *bytes += record.bytes;
        }
    }
    sums
}
