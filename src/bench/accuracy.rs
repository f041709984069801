//! How far the logits of each side are from a float32 reference: KL divergence, position by
//! position, over a run of positions too long to keep.

use serde::Serialize;

use super::{BenchError, Contestant, Result};
use crate::numerics::{argmax, kl};

/// Positions whose logits are in memory at once.
const SLICE: usize = 128;
/// Standard errors that the mean of ours may lie above the peer's before it counts.
const STANDARD_ERRORS: f64 = 2.0;

/// Divergence of one side from the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// Who.
    pub name: String,
    /// Mean KL divergence, in nats.
    pub mean_kl: f64,
    /// Median.
    pub median_kl: f64,
    /// Largest.
    pub max_kl: f64,
    /// Part of the positions with the reference's most likely token.
    pub argmax_equal: f64,
}

/// The accuracy of both sides on one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Accuracy {
    /// Label of the model.
    pub label: String,
    /// What the reference is.
    pub reference: String,
    /// Positions.
    pub n_positions: usize,
    /// Ours, then the peer.
    pub sides: Vec<Divergence>,
    /// Mean of ours minus the peer's, position by position, in nats; null without a peer.
    pub excess: Option<f64>,
    /// Standard error of that mean.
    pub excess_standard_error: Option<f64>,
    /// Whether ours is above the peer's by more than two standard errors.
    pub is_above: Option<bool>,
}

/// KL divergences and agreement of one side, position by position.
#[derive(Default)]
struct Track {
    kl: Vec<f64>,
    n_equal: usize,
}

/// Reads `ids` with the reference and each side in step; all begin an empty sequence.
///
/// A side that shows no logits of all rows is left out.
///
/// # Errors
/// A side fails, or [`BenchError::Cancelled`].
pub fn accuracy(
    label: &str,
    ids: &[u32],
    reference: &mut dyn Contestant,
    sides: Vec<&mut dyn Contestant>,
    step: &mut dyn FnMut(usize) -> bool,
) -> Result<Accuracy> {
    reference.begin_scoring(ids.len())?;
    let mut taking_part = Vec::new();
    for side in sides {
        if side.begin_scoring(ids.len())? {
            taking_part.push((side, Track::default()));
        }
    }
    let mut done = 0;
    for slice in ids.chunks(SLICE) {
        let expected = reference.score(slice)?;
        for (side, track) in &mut taking_part {
            track.add(&expected, &side.score(slice)?, slice.len());
        }
        done += slice.len();
        if !step(done) {
            return Err(BenchError::Cancelled);
        }
    }
    let tracks: Vec<&Track> = taking_part.iter().map(|(_, track)| track).collect();
    let excess = match tracks.as_slice() {
        [ours, peer, ..] => paired(&ours.kl, &peer.kl),
        _ => None,
    };
    let settings = reference.settings();
    let settings: Vec<String> = settings.iter().map(|(k, v)| format!("{k} {v}")).collect();
    Ok(Accuracy {
        label: label.to_owned(),
        reference: format!("{}: {}", reference.name(), settings.join(", ")),
        n_positions: ids.len(),
        sides: taking_part
            .iter()
            .map(|(side, track)| track.divergence(side.name()))
            .collect(),
        excess: excess.map(|(mean, _)| mean),
        excess_standard_error: excess.map(|(_, error)| error),
        // Infinity minus infinity is no number, and not shown to be as good.
        is_above: excess
            .map(|(mean, error)| mean.is_nan() || error.is_nan() || mean > STANDARD_ERRORS * error),
    })
}

impl Track {
    /// Takes the rows of a slice, several at a time.
    fn add(&mut self, expected: &[f32], found: &[f32], n_rows: usize) {
        let n_vocab = (expected.len() / n_rows.max(1)).max(1);
        let rows: Vec<(&[f32], &[f32])> = expected
            .chunks_exact(n_vocab)
            .zip(found.chunks_exact(n_vocab))
            .collect();
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let per_thread = rows.len().div_ceil(n_threads).max(1);
        let judged: Vec<Vec<(f64, bool)>> = std::thread::scope(|scope| {
            let tasks: Vec<_> = rows
                .chunks(per_thread)
                .map(|rows| scope.spawn(|| rows.iter().map(|(a, b)| judge_row(a, b)).collect()))
                .collect();
            // A row that could not be judged counts as infinitely far.
            let join = |task: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
                task.join().unwrap_or_else(|_| vec![(f64::INFINITY, false)])
            };
            tasks.into_iter().map(join).collect()
        });
        for (kl, is_equal) in judged.into_iter().flatten() {
            self.kl.push(kl);
            self.n_equal += usize::from(is_equal);
        }
        // Rows that a side did not return are infinitely far too.
        self.kl.extend((rows.len()..n_rows).map(|_| f64::INFINITY));
    }

    fn divergence(&self, name: &str) -> Divergence {
        let n = self.kl.len().max(1) as f64;
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        Divergence {
            name: name.to_owned(),
            mean_kl: self.kl.iter().sum::<f64>() / n,
            median_kl: sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN),
            max_kl: sorted.last().copied().unwrap_or(f64::NAN),
            argmax_equal: self.n_equal as f64 / n,
        }
    }
}

fn judge_row(expected: &[f32], found: &[f32]) -> (f64, bool) {
    let best = argmax(expected);
    let is_equal = best.is_some() && best == argmax(found);
    (kl(expected, found), is_equal)
}

/// Mean of the differences of pairs, and its standard error; `None` below two pairs.
fn paired(a: &[f64], b: &[f64]) -> Option<(f64, f64)> {
    let differences: Vec<f64> = a.iter().zip(b).map(|(x, y)| x - y).collect();
    let n = differences.len() as f64;
    if differences.len() < 2 {
        return None;
    }
    let mean = differences.iter().sum::<f64>() / n;
    let squares: f64 = differences.iter().map(|d| (d - mean) * (d - mean)).sum();
    Some((mean, (squares / (n - 1.0) / n).sqrt()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::bench::{Point, Run};

    #[test]
    fn kl_of_two_coins_is_the_textbooks() {
        // p = (1/2, 1/2), q = (1/4, 3/4).
        let found = [(1.0f32).ln(), (3.0f32).ln()];
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();

        assert!((kl(&[7.0, 7.0], &found) - expected).abs() < 1e-7);
        assert!(kl(&[90.0, -90.0, 3.0], &[90.0, -90.0, 3.0]).abs() < 1e-12);
        assert_eq!(kl(&[1.0, 2.0], &[f32::NAN, 2.0]), f64::INFINITY);
    }

    /// Returns rows that lie `off` from (0, 1, 2), times a pattern over positions.
    struct Fixed {
        name: &'static str,
        off: f32,
        scores: bool,
        n: usize,
    }

    impl Contestant for Fixed {
        fn name(&self) -> &str {
            self.name
        }
        fn settings(&self) -> BTreeMap<String, String> {
            BTreeMap::new()
        }
        fn prepare(&mut self, _: &Point, _: &[u32]) -> Result<()> {
            Ok(())
        }
        fn run(&mut self) -> Result<Run> {
            Ok(Run::default())
        }
        fn begin_scoring(&mut self, _: usize) -> Result<bool> {
            self.n = 0;
            Ok(self.scores)
        }
        fn score(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
            let mut row = || {
                self.n += 1;
                let off = if self.n.is_multiple_of(3) {
                    0.0
                } else {
                    self.off
                };
                [0.0, 1.0 + off, 2.0]
            };
            Ok(ids.iter().flat_map(|_| row()).collect())
        }
    }

    fn side(name: &'static str, off: f32) -> Fixed {
        Fixed {
            name,
            off,
            scores: true,
            n: 0,
        }
    }

    fn measure(ours: &mut Fixed, peer: &mut Fixed) -> Accuracy {
        let ids = vec![0; 2 * SLICE + 5];
        let mut n_steps = 0;
        let sides: Vec<&mut dyn Contestant> = vec![ours, peer];
        let result = accuracy("m", &ids, &mut side("reference", 0.0), sides, &mut |_| {
            n_steps += 1;
            true
        });
        assert_eq!(n_steps, 3);
        result.unwrap()
    }

    #[test]
    fn the_side_further_off_has_the_larger_divergence() {
        let found = measure(&mut side("a", 0.5), &mut side("b", 0.1));

        assert_eq!(found.n_positions, 2 * SLICE + 5);
        assert!(found.sides[0].mean_kl > found.sides[1].mean_kl);
        assert!(found.excess.unwrap() > 0.0);
        assert_eq!(found.is_above, Some(true));
        assert_eq!(found.sides[0].argmax_equal, 1.0);
        let nearer = measure(&mut side("a", 0.1), &mut side("b", 0.5));
        assert_eq!(nearer.is_above, Some(false));
    }

    #[test]
    fn another_argmax_is_counted() {
        let found = measure(&mut side("a", 2.0), &mut side("b", 0.0));

        assert!((found.sides[0].argmax_equal - 1.0 / 3.0).abs() < 0.01);
        assert_eq!(found.sides[1].mean_kl, 0.0);
    }

    #[test]
    fn a_side_without_rows_is_left_out() {
        let mut silent = Fixed {
            scores: false,
            ..side("b", 0.0)
        };

        let found = measure(&mut side("a", 0.1), &mut silent);

        assert_eq!((found.sides.len(), found.is_above), (1, None));
    }

    #[test]
    fn nan_is_above_everything() {
        let found = measure(&mut side("a", f32::NAN), &mut side("b", 0.5));

        assert_eq!(found.sides[0].mean_kl, f64::INFINITY);
        assert_eq!(found.is_above, Some(true));
    }

    #[test]
    fn a_stop_is_a_stop() {
        let mut ours = side("a", 0.1);
        let sides: Vec<&mut dyn Contestant> = vec![&mut ours];
        let result = accuracy("m", &[0; 9], &mut side("r", 0.0), sides, &mut |_| false);

        assert!(matches!(result, Err(BenchError::Cancelled)));
    }
}
