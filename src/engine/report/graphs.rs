//! Chunks and buckets of a plan, and what the graph pool and the backend would do with them.

use std::collections::HashMap;

use serde::Serialize;

use super::super::bucket::{BucketShape, Kind};
use super::super::graph_runs::GraphRuns;
use super::super::options::Switches;
use super::super::plan::Chunk;
use super::super::policy::{DeviceTraits, POOL_LIMIT};

/// One chunk of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChunkReport {
    /// Tokens in the cache before it.
    pub n_past: usize,
    /// Its tokens.
    pub n_tokens: usize,
    /// Rows of it whose logits are read.
    pub n_rows: usize,
    /// Index into `buckets`.
    pub bucket: usize,
}

/// Neighbouring chunks of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChunkGroup {
    /// Tokens in the cache before the first of them.
    pub n_past: usize,
    /// Tokens of all of them.
    pub n_tokens: usize,
    /// How many they are.
    pub n_chunks: usize,
    /// Index into `buckets`.
    pub bucket: usize,
}

/// One distinct bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BucketReport {
    /// Name, as [`label`] makes it.
    pub label: String,
    /// Padded tokens.
    pub n_tokens: usize,
    /// Padded rows of the global caches that attention reads.
    pub n_kv: usize,
    /// `body`, `tail` or `full`.
    pub kind: &'static str,
    /// Rows of logits that the graph writes, padding included.
    pub n_out: usize,
    /// Runs for the prompt.
    pub n_runs_prompt: usize,
    /// Runs for generation.
    pub n_runs_decode: usize,
    /// What these runs are expected to be.
    pub expected: GraphRuns,
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Body => "body",
        Kind::Tail { .. } => "tail",
        Kind::Full => "full",
    }
}

/// Short name of a bucket: kind, tokens, key rows, and for a tail its logit rows.
pub fn label(shape: &BucketShape) -> String {
    let (kind, n, n_kv) = (kind_name(shape.kind), shape.n_tokens, shape.n_kv);
    match shape.kind {
        Kind::Tail { n_out } => format!("{kind}-{n}x{n_kv}-out{n_out}"),
        Kind::Body | Kind::Full => format!("{kind}-{n}x{n_kv}"),
    }
}

/// The pool as a session keeps it: which graphs live, how often each has run.
struct Pool {
    live: Vec<(usize, u64)>,
    keeps: bool,
    records: bool,
    // Most tokens of a graph that is recorded; `None`: any number.
    most_recorded: Option<usize>,
}

impl Pool {
    /// Runs a bucket; the least recently used graph goes when the pool is full.
    fn run(&mut self, bucket: usize, n_tokens: usize) -> GraphRuns {
        let mut runs = GraphRuns::default();
        let known = self.live.iter().position(|(b, _)| *b == bucket);
        let n_before = match known {
            Some(at) if self.keeps => self.live.remove(at).1,
            _ => {
                runs.built = 1;
                0
            }
        };
        let is_too_long = self.most_recorded.is_some_and(|most| n_tokens > most);
        match (n_before, self.records) {
            (0, _) => runs.direct = 1,
            (_, true) if is_too_long => runs.direct = 1,
            (1, true) => runs.captured = 1,
            _ => runs.replayed = 1,
        }
        if self.keeps {
            if self.live.len() >= POOL_LIMIT {
                self.live.remove(0);
            }
            self.live.push((bucket, n_before + 1));
        }
        runs
    }
}

/// All runs of a plan.
pub(super) struct Runs {
    pub(super) groups: Vec<ChunkGroup>,
    pub(super) chunks: Vec<ChunkReport>,
    pub(super) buckets: Vec<BucketReport>,
    pub(super) total: GraphRuns,
    shapes: Vec<BucketShape>,
}

impl Runs {
    pub(super) fn new(
        chunks: &[Chunk],
        decode: &[BucketShape],
        device: &DeviceTraits,
        (switches, most_recorded): (Switches, Option<usize>),
    ) -> Self {
        let mut runs = Self {
            groups: Vec::new(),
            chunks: Vec::with_capacity(chunks.len()),
            buckets: Vec::new(),
            total: GraphRuns::default(),
            shapes: Vec::new(),
        };
        let mut pool = Pool {
            live: Vec::new(),
            keeps: switches.replay,
            records: device.records_graphs,
            most_recorded,
        };
        let mut index = HashMap::new();
        for chunk in chunks {
            let bucket = runs.run(chunk.bucket, &mut index, &mut pool);
            if let Some(b) = runs.buckets.get_mut(bucket) {
                b.n_runs_prompt += 1;
            }
            runs.list(chunk, bucket);
        }
        for shape in decode {
            let bucket = runs.run(*shape, &mut index, &mut pool);
            if let Some(b) = runs.buckets.get_mut(bucket) {
                b.n_runs_decode += 1;
            }
        }
        runs
    }

    /// Distinct shapes, in order of first use.
    pub(super) fn shapes(&self) -> Vec<BucketShape> {
        self.shapes.clone()
    }

    fn run(
        &mut self,
        shape: BucketShape,
        index: &mut HashMap<BucketShape, usize>,
        pool: &mut Pool,
    ) -> usize {
        let bucket = *index.entry(shape).or_insert(self.buckets.len());
        if bucket == self.buckets.len() {
            self.shapes.push(shape);
            self.buckets.push(BucketReport {
                label: label(&shape),
                n_tokens: shape.n_tokens,
                n_kv: shape.n_kv,
                kind: kind_name(shape.kind),
                n_out: shape.n_logit_rows(),
                n_runs_prompt: 0,
                n_runs_decode: 0,
                expected: GraphRuns::default(),
            });
        }
        let runs = pool.run(bucket, shape.n_tokens);
        self.total += runs;
        if let Some(b) = self.buckets.get_mut(bucket) {
            b.expected += runs;
        }
        bucket
    }

    fn list(&mut self, chunk: &Chunk, bucket: usize) {
        let (n_past, n_tokens) = (chunk.n_past, chunk.n_tokens);
        self.chunks.push(ChunkReport {
            n_past,
            n_tokens,
            n_rows: chunk.wanted.len(),
            bucket,
        });
        match self.groups.last_mut() {
            Some(group) if group.bucket == bucket => {
                group.n_tokens += n_tokens;
                group.n_chunks += 1;
            }
            _ => self.groups.push(ChunkGroup {
                n_past,
                n_tokens,
                n_chunks: 1,
                bucket,
            }),
        }
    }
}
