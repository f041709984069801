//! What each chunk of a prefill did, for profiles and audits. Off unless a caller passes one.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Result;
use crate::engine::Counters;
use crate::engine::bucket::BucketShape;
use crate::engine::plan::Chunk;
use crate::ggml::{Backend, Change, Graph, Properties};

/// How a chunk's graph was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// First run of a graph: node by node.
    Direct,
    /// The backend recorded it, and launched what it recorded.
    Captured,
    /// The backend launched its recording.
    Replayed,
    /// The backend never records this graph: a node needs the host.
    Refused,
    /// A kept graph of a backend that does not record.
    Kept,
    /// One node after the other with a wait behind each, for its times.
    ByNode,
}

impl How {
    /// One word for tables and JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Captured => "captured",
            Self::Replayed => "replayed",
            Self::Refused => "refused",
            Self::Kept => "kept",
            Self::ByNode => "by_node",
        }
    }

    /// Whether the run reused all that an earlier one had prepared.
    pub fn is_replay(self) -> bool {
        matches!(self, Self::Replayed | Self::Kept)
    }
}

/// One chunk as it ran.
#[derive(Clone, Debug)]
pub struct ChunkRun {
    /// The chunk.
    pub chunk: Chunk,
    /// When the host began with it, on the recorder's clock, in nanoseconds.
    pub start_ns: u64,
    /// When the host had queued it, and read what it reads.
    pub end_ns: u64,
    /// How its graph was run.
    pub how: How,
    /// Whether the graph was built in this chunk.
    pub is_built: bool,
    /// Copies to the device, in number and bytes.
    pub uploads: (u64, u64),
    /// Bytes read back.
    pub read_bytes: u64,
    /// What changed in the graph since its bucket last ran, if that was asked for.
    pub change: Option<Change>,
    /// Time of each node in order, if that was asked for.
    pub node_times: Vec<Duration>,
}

/// Records the chunks of a prefill.
pub struct ChunkRecorder {
    clock: Box<dyn Fn() -> u64>,
    is_by_node: bool,
    is_audited: bool,
    runs: Vec<ChunkRun>,
    seen: BTreeMap<BucketShape, Properties>,
    begun: Option<(u64, Counters)>,
    change: Option<Change>,
    node_times: Vec<Duration>,
}

impl std::fmt::Debug for ChunkRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChunkRecorder({} chunks)", self.runs.len())
    }
}

impl ChunkRecorder {
    /// A recorder that takes times, in nanoseconds, from `clock`.
    pub fn new(clock: impl Fn() -> u64 + 'static) -> Self {
        Self {
            clock: Box::new(clock),
            is_by_node: false,
            is_audited: false,
            runs: Vec::new(),
            seen: BTreeMap::new(),
            begun: None,
            change: None,
            node_times: Vec::new(),
        }
    }

    /// Runs graphs node by node from now on, and times each node.
    pub fn time_nodes(&mut self, is_by_node: bool) {
        self.is_by_node = is_by_node;
    }

    /// Compares each graph with what it was when its bucket last ran. Costs host time per chunk.
    pub fn audit_graphs(&mut self, is_audited: bool) {
        self.is_audited = is_audited;
    }

    /// Takes the chunks recorded so far.
    pub fn take(&mut self) -> Vec<ChunkRun> {
        std::mem::take(&mut self.runs)
    }

    pub(super) fn begin(&mut self, counters: Counters) {
        self.begun = Some(((self.clock)(), counters));
        self.change = None;
        self.node_times.clear();
    }

    /// Runs a graph as the recorder was asked to.
    pub(super) fn compute(
        &mut self,
        graph: &mut Graph,
        bucket: BucketShape,
        backend: &Backend,
    ) -> Result<()> {
        if self.is_audited {
            let now = graph.properties();
            self.change = self.seen.get(&bucket).and_then(|b| now.first_change(b));
            self.seen.insert(bucket, now);
        }
        if self.is_by_node {
            self.node_times = graph.compute_by_node(backend)?;
        } else {
            graph.compute(backend)?;
        }
        Ok(())
    }

    pub(super) fn end(&mut self, chunk: &Chunk, after: &Counters) {
        let Some((start_ns, before)) = self.begun.take() else {
            return;
        };
        self.runs.push(ChunkRun {
            chunk: chunk.clone(),
            start_ns,
            end_ns: (self.clock)(),
            how: if self.is_by_node {
                How::ByNode
            } else {
                how(&before, after)
            },
            is_built: after.pool.built > before.pool.built,
            uploads: (
                after.uploads - before.uploads,
                after.uploaded_bytes - before.uploaded_bytes,
            ),
            read_bytes: after.read_bytes - before.read_bytes,
            change: self.change.take(),
            node_times: std::mem::take(&mut self.node_times),
        });
    }
}

/// What happened between two readings of the counters, one graph run apart.
fn how(before: &Counters, after: &Counters) -> How {
    match (before.cuda, after.cuda) {
        (Some(b), Some(a)) if a.replays > b.replays => How::Replayed,
        (Some(b), Some(a)) if a.captures > b.captures => How::Captured,
        (Some(b), Some(a)) if a.refused > b.refused => How::Refused,
        (None, None) if after.pool.reused > before.pool.reused => How::Kept,
        _ => How::Direct,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::GraphCounters;

    #[test]
    fn counters_say_how_a_graph_was_run() {
        let cuda = |change: fn(&mut GraphCounters)| {
            let mut counters = GraphCounters::default();
            change(&mut counters);
            Counters {
                cuda: Some(counters),
                ..Counters::default()
            }
        };
        let before = cuda(|_| ());

        assert_eq!(how(&before, &cuda(|c| c.replays = 1)), How::Replayed);
        assert_eq!(how(&before, &cuda(|c| c.captures = 1)), How::Captured);
        assert_eq!(
            how(
                &before,
                &cuda(|c| {
                    c.direct = 1;
                    c.refused = 1;
                })
            ),
            How::Refused
        );
        assert_eq!(how(&before, &cuda(|c| c.direct = 1)), How::Direct);
    }

    #[test]
    fn kept_graph_of_a_backend_without_recordings_counts_as_replay() {
        let mut after = Counters::default();
        assert_eq!(how(&Counters::default(), &after), How::Direct);

        after.pool.reused = 1;

        assert!(how(&Counters::default(), &after).is_replay());
    }
}
