//! What became of graph runs: as a plan expects it, and as a session counted it.

use serde::Serialize;

use super::session::Counters;

/// Graph runs by what they were.
///
/// Where the backend records graphs: the first run of a graph is direct, the second records it,
/// later ones replay. Elsewhere the first run of a graph is direct and later ones count as replays
/// of the kept graph. With replay off every run builds a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GraphRuns {
    /// Graphs built; again when the pool had to drop one.
    pub built: u64,
    /// Runs that record.
    pub captured: u64,
    /// Runs of a recording, or of a kept graph where nothing records.
    pub replayed: u64,
    /// Runs that are neither.
    pub direct: u64,
}

impl GraphRuns {
    /// What a session ran between two readings; `None` where its backend counts nothing.
    pub fn between(before: &Counters, after: &Counters) -> Option<Self> {
        let (old, new) = (before.cuda?, after.cuda?);
        Some(Self {
            built: after.pool.built.saturating_sub(before.pool.built),
            captured: new.captures.saturating_sub(old.captures),
            replayed: new.replays.saturating_sub(old.replays),
            direct: new.direct.saturating_sub(old.direct),
        })
    }

    /// Whether these runs were replays alone.
    pub fn is_replay(&self) -> bool {
        self.replayed > 0 && self.built == 0 && self.captured == 0 && self.direct == 0
    }
}

impl std::ops::AddAssign for GraphRuns {
    fn add_assign(&mut self, other: Self) {
        self.built += other.built;
        self.captured += other.captured;
        self.replayed += other.replayed;
        self.direct += other.direct;
    }
}
