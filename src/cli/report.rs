//! JSON of the subcommands that run the engine. The schema is documented in `docs/json.md`:
//! fields are added, never renamed, within one `schema_version`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

use crate::engine::Counters;
use crate::engine::bucket::{BucketShape, Kind};
use crate::engine::budget::Bytes;
use crate::engine::plan::Chunk;
use crate::ggml::Device;

/// Version of every JSON object that this program prints.
pub const SCHEMA_VERSION: u32 = 1;

/// Prints one JSON object and a newline on stdout.
pub fn print_json(report: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(report).context("make JSON")?;
    text.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(&text)
        .and_then(|()| stdout.flush())
        .context("write stdout")
}

/// A duration in whole microseconds, as all JSON carries it.
pub fn to_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Which build made the result.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    version: &'static str,
    commit: Option<&'static str>,
    ggml_pin: Option<&'static str>,
    patch_count: Option<u32>,
    series_sha256: Option<&'static str>,
}

impl BuildReport {
    /// This build.
    pub fn new() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("G4_COMMIT"),
            ggml_pin: option_env!("G4_PIN"),
            patch_count: option_env!("G4_PATCH_COUNT").and_then(|n| n.parse().ok()),
            series_sha256: option_env!("G4_SERIES_SHA256"),
        }
    }
}

/// The device that computes.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Name, such as `CPU` or `CUDA0`.
    name: String,
    /// ggml's backend, such as `CPU` or `CUDA`.
    backend: String,
    /// What it is, in the words of its maker.
    description: String,
    /// Bytes of memory; null when it does not say.
    memory_total: Option<u64>,
    /// Free bytes now.
    memory_free: Option<u64>,
}

impl From<Device> for DeviceReport {
    fn from(device: Device) -> Self {
        let memory = device.memory();
        Self {
            name: device.name(),
            backend: device.backend_name(),
            description: device.description(),
            memory_total: memory.map(|(_, total)| total),
            memory_free: memory.map(|(free, _)| free),
        }
    }
}

impl std::fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            name,
            backend,
            description,
            ..
        } = self;
        write!(f, "{name} ({description}), backend {backend}")?;
        match (self.memory_free, self.memory_total) {
            (Some(free), Some(total)) => {
                write!(f, ", {} of {} free", Bytes(free), Bytes(total))
            }
            _ => write!(f, ", memory not known"),
        }
    }
}

/// `1 token`, `2 tokens`.
pub fn count(n: usize, what: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {what}{plural}")
}

/// What every report ends with: where the result comes from.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    build: BuildReport,
    ggml_environment: BTreeMap<String, String>,
}

impl Provenance {
    /// This build in this environment.
    pub fn new() -> Self {
        Self {
            build: BuildReport::new(),
            ggml_environment: super::ggml_environment(),
        }
    }
}

/// One chunk of a prompt.
#[derive(Clone, Debug, Serialize)]
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

/// One distinct bucket of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BucketReport {
    /// Padded tokens.
    pub n_tokens: usize,
    /// Padded rows of the global caches that attention reads.
    pub n_kv: usize,
    /// `body`, `tail` or `full`.
    pub kind: &'static str,
    /// Rows of logits that the graph writes, padding included.
    pub n_out: usize,
}

/// Chunks in order, and the distinct buckets that they use in order of first use.
pub fn chunk_reports(chunks: &[Chunk]) -> (Vec<ChunkReport>, Vec<BucketReport>) {
    let mut buckets: Vec<BucketReport> = Vec::new();
    let mut reports = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let report = bucket_report(&chunk.bucket);
        let known = buckets.iter().position(|b| *b == report);
        let bucket = known.unwrap_or_else(|| {
            buckets.push(report);
            buckets.len() - 1
        });
        let (n_past, n_tokens) = (chunk.n_past, chunk.n_tokens);
        reports.push(ChunkReport {
            n_past,
            n_tokens,
            n_rows: chunk.wanted.len(),
            bucket,
        });
    }
    (reports, buckets)
}

fn bucket_report(bucket: &BucketShape) -> BucketReport {
    let kind = match bucket.kind {
        Kind::Body => "body",
        Kind::Tail { .. } => "tail",
        Kind::Full => "full",
    };
    let BucketShape { n_tokens, n_kv, .. } = *bucket;
    BucketReport {
        n_tokens,
        n_kv,
        kind,
        n_out: bucket.n_logit_rows(),
    }
}

/// Prints text on stdout at once.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("write stdout")
}

/// `1.25 s, 4000.0 tok/s`.
pub fn describe_speed(n_tokens: usize, us: u64) -> String {
    let seconds = us as f64 / 1e6;
    if us == 0 {
        return format!("{seconds:.2} s");
    }
    format!("{seconds:.2} s, {:.1} tok/s", n_tokens as f64 / seconds)
}

/// What the graph pool and the backend's own graph recorder did.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GraphReport {
    /// Graphs built by the pool.
    pub built: u64,
    /// Graphs that the backend recorded; 0 where it does not record.
    pub captured: u64,
    /// Runs of a graph that was run before, from a recording where the backend records.
    pub replayed: u64,
    /// Runs that were no replay.
    pub direct: u64,
    /// Backend splits of a graph; 1 when everything is on one device.
    pub splits: u64,
}

impl std::fmt::Display for GraphReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            built,
            captured,
            replayed,
            direct,
            splits,
        } = self;
        write!(
            f,
            "{built} built, {captured} captured, {replayed} replayed, {direct} direct, {}",
            count(usize::try_from(*splits).unwrap_or(usize::MAX), "split")
        )
    }
}

/// One line for each chunk.
pub fn describe_chunks(chunks: &[ChunkReport], buckets: &[BucketReport]) -> String {
    let mut text = String::new();
    for (i, chunk) in chunks.iter().enumerate() {
        let Some(bucket) = buckets.get(chunk.bucket) else {
            continue;
        };
        text += &format!(
            "  chunk {i}: {} at {} in a {} graph of {}, {}\n",
            count(chunk.n_tokens, "token"),
            chunk.n_past,
            bucket.kind,
            count(bucket.n_tokens, "token"),
            count(bucket.n_kv, "cache row")
        );
    }
    text
}

// The engine computes a graph on one backend as a whole, so there is always one split.
impl From<&Counters> for GraphReport {
    fn from(counters: &Counters) -> Self {
        let (built, kept) = (counters.pool.built, counters.pool.reused);
        match counters.cuda {
            Some(cuda) => Self {
                built,
                captured: cuda.captures,
                replayed: cuda.replays,
                direct: cuda.direct,
                splits: 1,
            },
            None => Self {
                built,
                captured: 0,
                replayed: kept,
                direct: counters.chunks.saturating_sub(kept),
                splits: 1,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_buckets_are_listed_once_in_order_of_use() {
        let bucket = |n_tokens, kind| BucketShape {
            n_tokens,
            n_kv: 256,
            kind,
        };
        let chunk = |n_past, bucket: BucketShape, wanted| Chunk {
            n_past,
            n_tokens: 5,
            wanted,
            bucket,
        };
        let (body, tail) = (bucket(8, Kind::Body), bucket(8, Kind::Tail { n_out: 1 }));
        let chunks = [
            chunk(0, body, vec![]),
            chunk(5, body, vec![]),
            chunk(10, tail, vec![4]),
        ];

        let (chunks, buckets) = chunk_reports(&chunks);

        assert_eq!(
            chunks.iter().map(|c| c.bucket).collect::<Vec<_>>(),
            [0, 0, 1]
        );
        assert_eq!(chunks[2].n_rows, 1);
        assert_eq!(
            buckets.iter().map(|b| b.kind).collect::<Vec<_>>(),
            ["body", "tail"]
        );
        assert_eq!(buckets[1].n_out, 1);
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(count(1, "token"), "1 token");
        assert_eq!(count(0, "token"), "0 tokens");
        assert_eq!(count(2, "chunk"), "2 chunks");
    }

    #[test]
    fn speed_of_no_time_is_left_out() {
        assert_eq!(describe_speed(5000, 1_250_000), "1.25 s, 4000.0 tok/s");
        assert_eq!(describe_speed(5000, 0), "0.00 s");
    }
}
