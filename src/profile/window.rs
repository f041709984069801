//! The records of one prefill, and how the GPU's time in it was spent.

use serde::Serialize;

use super::interval::{Interval, intersection, total, union};
use crate::ggml::{GpuActivity, GpuRecord};

/// What was recorded between two moments.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Begin of the prefill, in nanoseconds.
    pub start_ns: u64,
    /// End of the prefill.
    pub end_ns: u64,
    /// Kernels, copies and fills, by start time, cut at the ends.
    pub device: Vec<GpuRecord>,
    /// Calls of the CUDA API, by start time.
    pub calls: Vec<GpuRecord>,
}

impl Window {
    /// The records that overlap `start_ns..end_ns`.
    pub fn new(records: &[GpuRecord], start_ns: u64, end_ns: u64) -> Self {
        let window = Interval {
            start: start_ns,
            end: end_ns,
        };
        let mut device = Vec::new();
        let mut calls = Vec::new();
        for record in records {
            let Some(span) = span(record).clip(window) else {
                continue;
            };
            if record.activity == GpuActivity::HostCall {
                calls.push(record.clone());
            } else {
                device.push(GpuRecord {
                    start_ns: span.start,
                    end_ns: span.end,
                    ..record.clone()
                });
            }
        }
        device.sort_by_key(|r| r.start_ns);
        calls.sort_by_key(|r| r.start_ns);
        Self {
            start_ns,
            end_ns,
            device,
            calls,
        }
    }

    /// The whole window.
    pub fn interval(&self) -> Interval {
        Interval {
            start: self.start_ns,
            end: self.end_ns,
        }
    }

    /// Disjoint intervals in which the GPU did something.
    pub fn busy(&self) -> Vec<Interval> {
        union(self.device.iter().map(span))
    }
}

/// When a record ran.
pub fn span(record: &GpuRecord) -> Interval {
    Interval {
        start: record.start_ns,
        end: record.end_ns,
    }
}

/// A kernel by its name, another activity by a word.
pub fn label(record: &GpuRecord) -> &str {
    match record.activity {
        GpuActivity::Kernel | GpuActivity::HostCall => &record.name,
        GpuActivity::HostToDevice => "[copy to device]",
        GpuActivity::DeviceToHost => "[copy to host]",
        GpuActivity::DeviceToDevice => "[copy on device]",
        GpuActivity::Memset => "[fill]",
    }
}

/// How the time of a prefill was spent, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// From the call to its result.
    pub wall_ns: u64,
    /// The GPU ran a kernel, a copy or a fill: each moment counted once.
    pub busy_ns: u64,
    /// It ran a kernel.
    pub kernel_ns: u64,
    /// It ran a copy or a fill.
    pub copy_ns: u64,
    /// It ran a copy or a fill beside a kernel.
    pub copy_overlap_ns: u64,
    /// It ran nothing.
    pub idle_ns: u64,
    /// Kernels.
    pub n_kernels: u64,
    /// Copies and fills.
    pub n_copies: u64,
}

impl Usage {
    /// Adds up a window.
    pub fn of(window: &Window) -> Self {
        let is_kernel = |r: &&GpuRecord| r.activity == GpuActivity::Kernel;
        let kernels = union(window.device.iter().filter(is_kernel).map(span));
        let copies = union(window.device.iter().filter(|r| !is_kernel(r)).map(span));
        let n_kernels = window.device.iter().filter(is_kernel).count() as u64;
        let wall_ns = window.interval().ns();
        let busy_ns = total(&window.busy());
        Self {
            wall_ns,
            busy_ns,
            kernel_ns: total(&kernels),
            copy_ns: total(&copies),
            copy_overlap_ns: total(&intersection(&kernels, &copies)),
            idle_ns: wall_ns.saturating_sub(busy_ns),
            n_kernels,
            n_copies: window.device.len() as u64 - n_kernels,
        }
    }
}

/// Copies of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Copies {
    /// Number.
    pub n: u64,
    /// Bytes.
    pub bytes: u64,
    /// Time in nanoseconds, overlaps counted twice.
    pub ns: u64,
    /// How many had a page-locked host side.
    pub n_pinned: u64,
}

impl Copies {
    /// Adds up one kind of activity.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a GpuRecord>, activity: GpuActivity) -> Self {
        let mut sum = Self::default();
        for record in records.into_iter().filter(|r| r.activity == activity) {
            sum.n += 1;
            sum.bytes += record.bytes;
            sum.ns += span(record).ns();
            sum.n_pinned += u64::from(record.is_pinned);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{copy, kernel};
    use super::*;

    #[test]
    fn busy_counts_overlaps_once_and_idle_is_the_rest() {
        let records = [
            kernel("a", 10, 20),
            kernel("b", 15, 30),
            copy(GpuActivity::HostToDevice, 25, 40, 100),
            copy(GpuActivity::DeviceToHost, 90, 130, 7),
            kernel("before", 0, 2),
        ];

        let window = Window::new(&records, 5, 100);
        let usage = Usage::of(&window);

        assert_eq!(
            usage,
            Usage {
                wall_ns: 95,
                busy_ns: 30 + 10,
                kernel_ns: 20,
                copy_ns: 15 + 10,
                copy_overlap_ns: 5,
                idle_ns: 55,
                n_kernels: 2,
                n_copies: 2,
            }
        );
        let down = Copies::of(&window.device, GpuActivity::DeviceToHost);
        assert_eq!((down.n, down.bytes, down.ns), (1, 7, 10));
    }

    #[test]
    fn empty_window_is_idle_throughout() {
        let usage = Usage::of(&Window::new(&[], 5, 25));

        assert_eq!((usage.wall_ns, usage.idle_ns, usage.busy_ns), (20, 20, 0));
    }
}
