//! Makes and writes the weights with several threads.
//!
//! The work is cut into units of [`UNIT`] elements; a unit's bytes depend on the specification
//! alone, and each is written at its own offset, so the files do not depend on the threads.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::error::SynthError;
use super::layout::Tensor;
use super::plan::Shard;

/// Elements that a thread makes at a time: a multiple of every block length, and little enough
/// that a cancelled writer stops soon.
const UNIT: u64 = 1 << 16;

/// Longest time between two calls of `progress`.
const TICK: Duration = Duration::from_millis(100);

/// How far the writing is, in bytes of tensor data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes written.
    pub n_done: u64,
    /// Bytes in all.
    pub n_bytes: u64,
}

/// What a thread does next.
struct Unit {
    shard: usize,
    tensor: usize,
    /// First element and count.
    start: u64,
    n: u64,
    /// Absolute offset in the shard's file.
    offset: u64,
}

/// Cuts all tensors of all shards into units.
fn units(shards: &[Shard], tensors: &[Tensor]) -> Vec<Unit> {
    let mut units = Vec::new();
    for (shard, file) in shards.iter().enumerate() {
        for &(tensor, offset) in &file.tensors {
            let n_elements = tensors[tensor].n_elements();
            let mut start = 0;
            while start < n_elements {
                let n = UNIT.min(n_elements - start);
                let offset = offset + tensors[tensor].ty.n_bytes(start);
                units.push(Unit {
                    shard,
                    tensor,
                    start,
                    n,
                    offset,
                });
                start += n;
            }
        }
    }
    units
}

/// Fills `x` with the elements `start..` of the tensor.
pub(super) fn fill(tensor: &Tensor, start: u64, x: &mut [f32]) {
    let (mut at, mut rest) = (0, x);
    for part in &tensor.parts {
        // `at` is the part's first element in the tensor; `want` the first one still missing.
        let want = start.max(at);
        if want < at + part.n && !rest.is_empty() {
            let skip = want - at;
            let n = usize::try_from(part.n - skip).map_or(rest.len(), |n| n.min(rest.len()));
            let (now, later) = rest.split_at_mut(n);
            part.fill.write(part.stream, part.start + skip, now);
            rest = later;
        }
        at += part.n;
    }
}

/// Takes bytes to their place: shard, offset in it, bytes.
type Put<'a> = dyn Fn(usize, u64, &[u8]) -> io::Result<()> + Sync + 'a;

/// Makes every unit and hands its bytes to `put(shard, offset, bytes)`.
///
/// # Errors
/// What `put` returned first, or [`SynthError::Cancelled`] when `progress` breaks.
pub(super) fn write_all(
    shards: &[Shard],
    tensors: &[Tensor],
    n_threads: usize,
    put: &Put<'_>,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), SynthError> {
    let units = units(shards, tensors);
    let n_bytes = tensors.iter().map(Tensor::n_bytes).sum();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = |results: &mpsc::Sender<Result<u64, (usize, io::Error)>>| {
        let (mut x, mut bytes) = (Vec::new(), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            let tensor = &tensors[unit.tensor];
            x.resize(usize::try_from(unit.n).unwrap_or(0), 0.0);
            fill(tensor, unit.start, &mut x);
            bytes.clear();
            tensor.ty.quantize(&x, &mut bytes);
            let result = put(unit.shard, unit.offset, &bytes);
            let report = result
                .map(|()| bytes.len() as u64)
                .map_err(|e| (unit.shard, e));
            if results.send(report).is_err() {
                return;
            }
        }
    };

    std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..n_threads.max(1) {
            let sender = sender.clone();
            scope.spawn(move || work(&sender));
        }
        drop(sender);
        let mut n_done = 0;
        loop {
            match results.recv_timeout(TICK) {
                Ok(Ok(n)) => n_done += n,
                Ok(Err((shard, source))) => {
                    stop.store(true, Ordering::Relaxed);
                    return Err(file_error(&shards[shard].path, n_bytes, source));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if progress(Progress { n_done, n_bytes }).is_break() {
                stop.store(true, Ordering::Relaxed);
                return Err(SynthError::Cancelled { n_done, n_bytes });
            }
        }
    })
}

/// Refuses to begin what cannot end: `available` is what the file system says, if it does.
pub(super) fn require_room(
    path: &Path,
    n_bytes: u64,
    available: Option<u64>,
) -> Result<(), SynthError> {
    match available {
        Some(available) if available < n_bytes => Err(SynthError::NoRoom {
            path: path.to_owned(),
            n_bytes,
            available,
        }),
        _ => Ok(()),
    }
}

/// Tells a full device and a limit on the size of a file from other failures.
pub(super) fn file_error(path: &Path, n_bytes: u64, source: io::Error) -> SynthError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            SynthError::DiskFull { path, n_bytes }
        }
        io::ErrorKind::FileTooLarge => SynthError::TooLarge { path, n_bytes },
        _ => SynthError::Io { path, source },
    }
}
