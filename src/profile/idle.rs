//! Where the GPU idled, and why.
//!
//! Each gap has one cause. *Edge*: before the first and behind the last thing that the GPU did.
//! *Host*: the call that launched what follows had not returned when the gap began; inside one
//! launch of a recorded graph nothing is the host's fault. *Recurring*: the same two activities have
//! such a gap between them at least twice. *One-time*: the rest.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;

use super::interval::{Interval, gaps};
use super::window::{Window, label, span};
use crate::ggml::GpuRecord;

/// Why the GPU idled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Before the first or behind the last activity.
    Edge,
    /// The host had not launched what follows.
    Host,
    /// Between two activities that have a gap between them again and again.
    Recurring,
    /// Once.
    OneTime,
}

/// A stretch in which the GPU did nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Begin, in nanoseconds after the begin of the prefill.
    pub start_ns: u64,
    /// Length in nanoseconds.
    pub ns: u64,
    /// Why.
    pub cause: Cause,
    /// What ended before it; empty at the begin.
    pub before: String,
    /// What began behind it; empty at the end.
    pub after: String,
    /// What the host was doing, where it is the cause: its longest call that is no launch, else the
    /// launch itself.
    pub host_call: Option<String>,
}

/// Idle time by cause, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IdleSplit {
    /// Before the first and behind the last activity.
    pub edge_ns: u64,
    /// The host was late.
    pub host_ns: u64,
    /// Gaps that come back.
    pub recurring_ns: u64,
    /// The rest.
    pub one_time_ns: u64,
    /// Number of recurring gaps.
    pub n_recurring: u64,
}

/// Calls that only queue work: the GPU does not idle because of one.
fn is_launch(name: &str) -> bool {
    const LAUNCHES: [&str; 6] = [
        "LaunchKernel",
        "GraphLaunch",
        "Event",
        "Async",
        "GetDevice",
        "SetDevice",
    ];
    LAUNCHES.iter().any(|launch| name.contains(launch))
}

/// All gaps of a window, in order.
pub fn find(window: &Window) -> Vec<Gap> {
    let busy = window.busy();
    let launches: HashMap<u32, &GpuRecord> =
        window.calls.iter().map(|c| (c.correlation, c)).collect();
    let around = Neighbours::new(window);
    let mut found = Vec::new();
    for gap in gaps(&busy, window.interval()) {
        let before = around.ending_at(gap.start);
        let after = around.starting_at(gap.end);
        let host_call = host_call(window, gap, before, after, &launches);
        let cause = match (before, after) {
            (None, _) | (_, None) => Cause::Edge,
            _ if host_call.is_some() => Cause::Host,
            _ => Cause::OneTime,
        };
        let name = |r: Option<&GpuRecord>| r.map(|r| label(r).to_owned()).unwrap_or_default();
        found.push(Gap {
            start_ns: gap.start - window.start_ns,
            ns: gap.ns(),
            cause,
            before: name(before),
            after: name(after),
            host_call,
        });
    }
    mark_recurring(&mut found);
    found
}

/// Finds the activity at either side of a gap.
struct Neighbours<'a> {
    by_end: HashMap<u64, &'a GpuRecord>,
    by_start: HashMap<u64, &'a GpuRecord>,
}

impl<'a> Neighbours<'a> {
    fn new(window: &'a Window) -> Self {
        let records = || window.device.iter().filter(|r| span(r).ns() > 0);
        Self {
            by_end: records().map(|r| (r.end_ns, r)).collect(),
            by_start: records().map(|r| (r.start_ns, r)).collect(),
        }
    }

    fn ending_at(&self, t: u64) -> Option<&'a GpuRecord> {
        self.by_end.get(&t).copied()
    }

    fn starting_at(&self, t: u64) -> Option<&'a GpuRecord> {
        self.by_start.get(&t).copied()
    }
}

/// The host call that explains a gap, if one does.
fn host_call(
    window: &Window,
    gap: Interval,
    before: Option<&GpuRecord>,
    after: Option<&GpuRecord>,
    launches: &HashMap<u32, &GpuRecord>,
) -> Option<String> {
    let after = after?;
    let is_one_launch = before.is_some_and(|b| b.correlation == after.correlation);
    let launch = launches.get(&after.correlation)?;
    if is_one_launch || launch.end_ns <= gap.start {
        return None;
    }
    // Calls are in order of their begin: those that begin before the gap ends come first.
    let until = window.calls.partition_point(|c| c.start_ns < gap.end);
    let longest = window
        .calls
        .get(..until)
        .unwrap_or_default()
        .iter()
        .filter(|c| c.end_ns > gap.start && !is_launch(&c.name))
        .max_by_key(|c| span(c).clip(gap).map_or(0, |i| i.ns()));
    Some(longest.unwrap_or(launch).name.to_string())
}

fn mark_recurring(found: &mut [Gap]) {
    let mut n: HashMap<(Arc<str>, Arc<str>), u64> = HashMap::new();
    let key = |gap: &Gap| {
        (
            Arc::from(gap.before.as_str()),
            Arc::from(gap.after.as_str()),
        )
    };
    for gap in found.iter().filter(|g| g.cause == Cause::OneTime) {
        *n.entry(key(gap)).or_default() += 1;
    }
    for gap in found.iter_mut().filter(|g| g.cause == Cause::OneTime) {
        if n.get(&key(gap)).is_some_and(|n| *n > 1) {
            gap.cause = Cause::Recurring;
        }
    }
}

impl IdleSplit {
    /// Adds up gaps.
    pub fn of(gaps: &[Gap]) -> Self {
        let mut split = Self::default();
        for gap in gaps {
            match gap.cause {
                Cause::Edge => split.edge_ns += gap.ns,
                Cause::Host => split.host_ns += gap.ns,
                Cause::OneTime => split.one_time_ns += gap.ns,
                Cause::Recurring => {
                    split.recurring_ns += gap.ns;
                    split.n_recurring += 1;
                }
            }
        }
        split
    }
}

/// The `n` longest gaps, longest first.
pub fn largest(gaps: &[Gap], n: usize) -> Vec<Gap> {
    let mut sorted = gaps.to_vec();
    sorted.sort_by_key(|gap| std::cmp::Reverse(gap.ns));
    sorted.truncate(n);
    sorted
}

#[cfg(test)]
mod tests {
    use super::super::testing::{call, kernel, launched};
    use super::*;

    /// An early launch, a gap that recurs, an allocation, a late launch, a single gap.
    fn window() -> Window {
        let records = [
            call("cudaGraphLaunch", 1, 2, 1),
            launched("a", 10, 20, 1),
            launched("b", 22, 30, 1),
            launched("a", 30, 40, 1),
            launched("b", 43, 50, 1),
            call("cudaMalloc", 48, 59, 2),
            call("cudaLaunchKernel", 59, 60, 3),
            launched("c", 60, 70, 3),
            // Queued while `c` ran: the gap before `d` is not the host's fault.
            call("cudaLaunchKernel", 62, 64, 4),
            launched("d", 71, 75, 4),
            call("cudaGraphLaunch", 74, 80, 5),
            launched("e", 81, 90, 5),
            // Waits for the end, as long as it likes.
            call("cudaStreamSynchronize", 82, 100, 6),
            launched("f", 91, 95, 5),
        ];
        Window::new(&records, 0, 100)
    }

    #[test]
    fn each_gap_has_its_cause() {
        let causes: Vec<(u64, u64, Cause)> = find(&window())
            .iter()
            .map(|g| (g.start_ns, g.ns, g.cause))
            .collect();

        assert_eq!(
            causes,
            [
                (0, 10, Cause::Edge),
                (20, 2, Cause::Recurring),
                (40, 3, Cause::Recurring),
                (50, 10, Cause::Host),
                (70, 1, Cause::OneTime),
                (75, 6, Cause::Host),
                (90, 1, Cause::OneTime),
                (95, 5, Cause::Edge),
            ]
        );
    }

    #[test]
    fn split_adds_up_to_the_idle_time() {
        let gaps = find(&window());
        let split = IdleSplit::of(&gaps);

        assert_eq!(
            split,
            IdleSplit {
                edge_ns: 15,
                host_ns: 16,
                recurring_ns: 5,
                one_time_ns: 2,
                n_recurring: 2,
            }
        );
        let idle = super::super::window::Usage::of(&window()).idle_ns;
        assert_eq!(idle, 15 + 16 + 5 + 2);
    }

    #[test]
    fn host_calls_and_neighbours_are_named() {
        let gaps = find(&window());

        let inner: Vec<Gap> = gaps
            .iter()
            .filter(|g| g.cause != Cause::Edge)
            .cloned()
            .collect();

        let longest = &largest(&inner, 1)[0];
        assert_eq!(
            (longest.before.as_str(), longest.after.as_str()),
            ("b", "c")
        );
        assert_eq!(longest.host_call.as_deref(), Some("cudaMalloc"));
        let late = gaps.iter().find(|g| g.start_ns == 75).unwrap();
        assert_eq!(late.host_call.as_deref(), Some("cudaGraphLaunch"));
    }

    #[test]
    fn without_host_calls_nothing_is_blamed_on_the_host() {
        let window = Window::new(&[kernel("a", 1, 2), kernel("b", 5, 6)], 0, 6);

        let gaps = find(&window);

        assert_eq!(gaps[1].cause, Cause::OneTime);
        assert_eq!(gaps[1].host_call, None);
    }
}
