//! The timeline as trace events that Perfetto and Chrome open.
//!
//! # Source
//! Trace Event Format (Google), complete events (`ph` = `X`) and metadata (`M`); times in
//! microseconds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::attribution::Item;
use super::class::short_name;
use super::window::Window;
use crate::engine::ChunkRun;
use crate::ggml::GpuRecord;

/// Process number of the GPU's streams.
const GPU: u32 = 1;
/// Process number of the host's threads.
const HOST: u32 = 2;
/// Thread number of the chunks, below all real ones.
const CHUNKS: u32 = 0;

/// A whole trace file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Events.
    #[serde(rename = "traceEvents")]
    pub events: Vec<Event>,
    /// Unit that viewers show.
    #[serde(rename = "displayTimeUnit")]
    pub unit: String,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// What is shown.
    pub name: String,
    /// Class, or kind of metadata.
    pub cat: String,
    /// `X`: a stretch of time; `M`: a name of a row.
    pub ph: String,
    /// Begin in microseconds after the begin of the prefill.
    pub ts: f64,
    /// Length in microseconds.
    pub dur: f64,
    /// 1: GPU, 2: host.
    pub pid: u32,
    /// Stream or thread; 0 of the host: chunks.
    pub tid: u32,
    /// Details.
    pub args: BTreeMap<String, serde_json::Value>,
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn row_name(kind: &str, pid: u32, tid: u32, name: &str) -> Event {
    Event {
        name: kind.to_owned(),
        cat: "__metadata".to_owned(),
        ph: "M".to_owned(),
        ts: 0.0,
        dur: 0.0,
        pid,
        tid,
        args: BTreeMap::from([("name".to_owned(), name.into())]),
    }
}

fn stretch(name: &str, cat: &str, (pid, tid): (u32, u32), (start, ns): (u64, u64)) -> Event {
    Event {
        name: name.to_owned(),
        cat: cat.to_owned(),
        ph: "X".to_owned(),
        ts: us(start),
        dur: us(ns),
        pid,
        tid,
        args: BTreeMap::new(),
    }
}

/// The trace of a recording; `items` are those of the window's device records, in order.
pub fn of_window(window: &Window, items: &[Item], runs: &[ChunkRun]) -> Trace {
    let since = |t: u64| t.saturating_sub(window.start_ns);
    let mut events = heads(runs, window.start_ns);
    for stream in numbers(&window.device) {
        events.push(row_name(
            "thread_name",
            GPU,
            stream,
            &format!("stream {stream}"),
        ));
    }
    for (record, item) in window.device.iter().zip(items) {
        let mut event = stretch(
            short_name(&item.name),
            &item.class.to_string(),
            (GPU, record.stream),
            (since(record.start_ns), record.end_ns - record.start_ns),
        );
        let mut detail = |key: &str, value: serde_json::Value| {
            event.args.insert(key.to_owned(), value);
        };
        if record.bytes > 0 {
            detail("bytes", record.bytes.into());
        }
        if let Some(node) = &item.node {
            detail("node", node.as_str().into());
        }
        if let Some(work) = item.work {
            detail("flops", work.flops.into());
            detail("min_bytes", work.bytes.into());
        }
        if record.graph_node != 0 {
            detail("graph_node", record.graph_node.into());
        }
        events.push(event);
    }
    for thread in numbers(&window.calls) {
        events.push(row_name(
            "thread_name",
            HOST,
            thread,
            &format!("thread {thread}"),
        ));
    }
    for call in &window.calls {
        let (start, end) = (call.start_ns.max(window.start_ns), call.end_ns);
        let when = (since(start), end.saturating_sub(start));
        events.push(stretch(&call.name, "cuda_api", (HOST, call.stream), when));
    }
    finish(events)
}

/// The trace of a run node by node: the nodes of a chunk one behind the other.
pub fn of_nodes(items: &[Item], runs: &[ChunkRun]) -> Trace {
    let start = runs.first().map_or(0, |run| run.start_ns);
    let mut events = heads(runs, start);
    let tid = CHUNKS + 1;
    events.push(row_name("thread_name", HOST, tid, "nodes"));
    let mut at = 0;
    let mut chunk = None;
    for item in items {
        if item.chunk != chunk {
            chunk = item.chunk;
            let run = chunk.and_then(|c| runs.get(c));
            at = run.map_or(at, |run| run.start_ns.saturating_sub(start).max(at));
        }
        let name = item.node.as_deref().unwrap_or(&item.name);
        let mut event = stretch(name, &item.class.to_string(), (HOST, tid), (at, item.ns));
        event
            .args
            .insert("op".to_owned(), item.name.as_ref().into());
        events.push(event);
        at += item.ns;
    }
    finish(events)
}

/// Names of the processes, and the chunks.
fn heads(runs: &[ChunkRun], start_ns: u64) -> Vec<Event> {
    let mut events = vec![
        row_name("process_name", GPU, 0, "GPU"),
        row_name("process_name", HOST, 0, "host"),
        row_name("thread_name", HOST, CHUNKS, "chunks"),
    ];
    for (i, run) in runs.iter().enumerate() {
        let when = (
            run.start_ns.saturating_sub(start_ns),
            run.end_ns.saturating_sub(run.start_ns),
        );
        let mut event = stretch(&format!("chunk {i}"), run.how.word(), (HOST, CHUNKS), when);
        let args = [
            ("n_past", run.chunk.n_past),
            ("n_tokens", run.chunk.n_tokens),
        ];
        event
            .args
            .extend(args.map(|(key, value)| (key.to_owned(), value.into())));
        events.push(event);
    }
    events
}

/// Streams or threads of records, each once.
fn numbers(records: &[GpuRecord]) -> Vec<u32> {
    let mut all: Vec<u32> = records.iter().map(|r| r.stream).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn finish(events: Vec<Event>) -> Trace {
    Trace {
        events,
        unit: "ns".to_owned(),
    }
}
