//! The pool of persistent graphs: one per bucket, bounded, dropped when an address moves.

use std::collections::BTreeMap;

use crate::Result;
use crate::engine::bucket::BucketShape;
use crate::ggml::{Arena, Backend};
use crate::graph::{BuildParams, VerifyGraph, build};

/// What the pool did since the session began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Graphs built.
    pub built: u64,
    /// Runs of a graph that was there already.
    pub reused: u64,
    /// Graphs dropped for room.
    pub evicted: u64,
    /// Graphs dropped because an address had moved.
    pub stale: u64,
}

struct Entry {
    graph: VerifyGraph,
    last_used: u64,
    n_runs: u64,
}

/// Graphs by bucket.
pub struct GraphPool {
    entries: BTreeMap<BucketShape, Entry>,
    limit: usize,
    clock: u64,
    counters: PoolCounters,
}

impl std::fmt::Debug for GraphPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GraphPool({} of {})", self.entries.len(), self.limit)
    }
}

fn release(backend: &Backend, graph: &VerifyGraph) {
    if let Some(cuda) = backend.cuda() {
        cuda.release(backend, &graph.graph);
    }
}

impl GraphPool {
    /// Makes a pool of at most `limit` graphs.
    pub fn new(limit: usize) -> Self {
        Self {
            entries: BTreeMap::new(),
            limit: limit.max(1),
            clock: 0,
            counters: PoolCounters::default(),
        }
    }

    /// What the pool did.
    pub fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// Graphs held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no graph is held.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Buckets held, with the number of runs of each.
    pub fn buckets(&self) -> Vec<(BucketShape, u64)> {
        self.entries
            .iter()
            .map(|(shape, e)| (*shape, e.n_runs))
            .collect()
    }

    /// The graphs held.
    pub fn graphs(&self) -> impl Iterator<Item = (&BucketShape, &VerifyGraph)> {
        self.entries.iter().map(|(shape, e)| (shape, &e.graph))
    }

    /// Changes a pooled graph behind the engine's back, to show that the audit catches it.
    #[doc(hidden)]
    pub fn tamper_for_test(&mut self) {
        for entry in self.entries.values_mut() {
            entry.graph.graph.tamper_for_test();
        }
    }

    /// Builds the graph of a bucket unless it is there and current.
    ///
    /// # Errors
    /// What [`build`] returns.
    pub fn prepare(
        &mut self,
        params: BuildParams<'_>,
        shape: BucketShape,
        arena: &mut Arena,
        backend: &Backend,
    ) -> Result<()> {
        if let Some(entry) = self.entries.get(&shape)
            && entry.graph.graph.is_current()
        {
            return Ok(());
        }
        backend.synchronize();
        self.drop_stale(backend);
        while self.entries.len() >= self.limit {
            self.evict_oldest(backend);
        }
        let graph = build(params, shape, arena, backend)?;
        if let Some(cuda) = backend.cuda() {
            cuda.hold(backend, &graph.graph)?;
        }
        self.counters.built += 1;
        self.clock += 1;
        self.entries.insert(
            shape,
            Entry {
                graph,
                last_used: self.clock,
                n_runs: 0,
            },
        );
        Ok(())
    }

    /// The graph of a bucket, if [`Self::prepare`] made it.
    pub fn get(&mut self, shape: BucketShape) -> Option<&mut VerifyGraph> {
        self.clock += 1;
        let entry = self.entries.get_mut(&shape)?;
        if entry.n_runs > 0 {
            self.counters.reused += 1;
        }
        entry.last_used = self.clock;
        entry.n_runs += 1;
        Some(&mut entry.graph)
    }

    /// The graph of a bucket for reading its result; counts as no run.
    pub fn get_idle(&self, shape: BucketShape) -> Option<&VerifyGraph> {
        self.entries.get(&shape).map(|e| &e.graph)
    }

    fn drop_stale(&mut self, backend: &Backend) {
        let stale: Vec<BucketShape> = self
            .entries
            .iter()
            .filter(|(_, e)| !e.graph.graph.is_current())
            .map(|(shape, _)| *shape)
            .collect();
        for shape in stale {
            if let Some(entry) = self.entries.remove(&shape) {
                release(backend, &entry.graph);
                self.counters.stale += 1;
            }
        }
    }

    fn evict_oldest(&mut self, backend: &Backend) {
        let oldest = self
            .entries
            .iter()
            .min_by_key(|(_, e)| e.last_used)
            .map(|(s, _)| *s);
        if let Some(entry) = oldest.and_then(|shape| self.entries.remove(&shape)) {
            release(backend, &entry.graph);
            self.counters.evicted += 1;
        }
    }

    /// Drops all graphs: an address they hold is about to move.
    pub fn clear(&mut self, backend: &Backend) {
        backend.synchronize();
        for (_, entry) in std::mem::take(&mut self.entries) {
            release(backend, &entry.graph);
            self.counters.stale += 1;
        }
    }

    /// Drops the graph of one bucket after use (replay switched off).
    pub fn discard(&mut self, shape: BucketShape, backend: &Backend) {
        backend.synchronize();
        if let Some(entry) = self.entries.remove(&shape) {
            release(backend, &entry.graph);
        }
    }
}
