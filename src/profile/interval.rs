//! Sets of time intervals: union, intersection, gaps. Half-open, in nanoseconds.

/// A stretch of time `start..end`, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interval {
    /// First nanosecond.
    pub start: u64,
    /// First nanosecond behind it.
    pub end: u64,
}

impl Interval {
    /// Length in nanoseconds.
    pub fn ns(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// The part of it that lies in `window`; `None` when nothing does.
    pub fn clip(&self, window: Self) -> Option<Self> {
        let clipped = Self {
            start: self.start.max(window.start),
            end: self.end.min(window.end),
        };
        (clipped.start < clipped.end).then_some(clipped)
    }
}

/// Disjoint intervals in order that cover the same time as `all`.
pub fn union(all: impl IntoIterator<Item = Interval>) -> Vec<Interval> {
    let mut sorted: Vec<Interval> = all.into_iter().filter(|i| i.ns() > 0).collect();
    sorted.sort_unstable();
    let mut merged: Vec<Interval> = Vec::new();
    for interval in sorted {
        match merged.last_mut() {
            Some(last) if interval.start <= last.end => last.end = last.end.max(interval.end),
            _ => merged.push(interval),
        }
    }
    merged
}

/// Time covered by disjoint intervals, in nanoseconds.
pub fn total(disjoint: &[Interval]) -> u64 {
    disjoint.iter().map(Interval::ns).sum()
}

/// What two ordered lists of disjoint intervals have in common.
pub fn intersection(a: &[Interval], b: &[Interval]) -> Vec<Interval> {
    let (mut i, mut j) = (0, 0);
    let mut common = Vec::new();
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        common.extend(x.clip(*y));
        if x.end < y.end {
            i += 1;
        } else {
            j += 1;
        }
    }
    common
}

/// The parts of `window` that an ordered list of disjoint intervals leaves free.
pub fn gaps(busy: &[Interval], window: Interval) -> Vec<Interval> {
    let mut gaps = Vec::new();
    let mut at = window.start;
    for interval in busy.iter().filter_map(|i| i.clip(window)) {
        if interval.start > at {
            gaps.push(Interval {
                start: at,
                end: interval.start,
            });
        }
        at = at.max(interval.end);
    }
    if at < window.end {
        gaps.push(Interval {
            start: at,
            end: window.end,
        });
    }
    gaps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(pairs: &[(u64, u64)]) -> Vec<Interval> {
        pairs
            .iter()
            .map(|&(start, end)| Interval { start, end })
            .collect()
    }

    #[test]
    fn overlapping_and_touching_intervals_merge() {
        assert_eq!(
            union(list(&[(5, 7), (0, 2), (2, 4), (6, 9), (3, 3)])),
            list(&[(0, 4), (5, 9)])
        );
    }

    #[test]
    fn gaps_begin_and_end_with_the_window() {
        let window = Interval { start: 0, end: 20 };

        assert_eq!(
            gaps(&list(&[(2, 4), (9, 30)]), window),
            list(&[(0, 2), (4, 9)])
        );
        assert_eq!(gaps(&[], window), [window]);
    }

    proptest! {
        #[test]
        fn union_intersection_and_gaps_count_each_nanosecond_once(
            a in prop::collection::vec((0u64..100, 0u64..20), 0..20),
            b in prop::collection::vec((0u64..100, 0u64..20), 0..20),
        ) {
            let spans = |v: &[(u64, u64)]| -> Vec<Interval> {
                v.iter().map(|&(start, n)| Interval { start, end: start + n }).collect()
            };
            let (a, b) = (spans(&a), spans(&b));
            let covers = |v: &[Interval], t: u64| v.iter().any(|i| i.start <= t && t < i.end);
            let window = Interval { start: 10, end: 90 };

            let (ua, ub) = (union(a.clone()), union(b.clone()));

            let count = |f: &dyn Fn(u64) -> bool| (0..130).filter(|&t| f(t)).count() as u64;
            prop_assert_eq!(total(&ua), count(&|t| covers(&a, t)));
            prop_assert_eq!(
                total(&intersection(&ua, &ub)),
                count(&|t| covers(&a, t) && covers(&b, t))
            );
            prop_assert_eq!(
                total(&gaps(&ua, window)),
                count(&|t| (10..90).contains(&t) && !covers(&a, t))
            );
        }
    }
}
