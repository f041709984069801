//! Median, quartiles and the ratio of two sides. Arithmetic only.

use serde::{Deserialize, Serialize};

/// Location and spread of some samples, in the samples' unit.
///
/// The spread is the range between the quartiles: half of all samples lie in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Samples.
    pub n: usize,
    /// Median.
    pub median: f64,
    /// Lower quartile.
    pub q1: f64,
    /// Upper quartile.
    pub q3: f64,
    /// Median absolute deviation from the median.
    pub mad: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// Of at least one sample, none of them NaN.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5)?;
        let mut deviations: Vec<f64> = sorted.iter().map(|x| (x - median).abs()).collect();
        deviations.sort_by(f64::total_cmp);
        Some(Self {
            n: sorted.len(),
            median,
            q1: quantile(&sorted, 0.25)?,
            q3: quantile(&sorted, 0.75)?,
            mad: quantile(&deviations, 0.5)?,
            min: *sorted.first()?,
            max: *sorted.last()?,
        })
    }

    /// Whether the ranges between the quartiles touch.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.q1 <= other.q3 && other.q1 <= self.q3
    }

    /// Range between the quartiles relative to the median.
    pub fn relative_spread(&self) -> f64 {
        (self.q3 - self.q1) / self.median
    }
}

/// Quantile `p` of sorted values, linear between neighbours.
///
/// # Source
/// Hyndman, Fan: Sample quantiles in statistical packages, 1996, definition 7.
fn quantile(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = p * last as f64;
    // `at` lies between 0 and the last index.
    let below = sorted.iter().take(last + 1).nth(at.floor() as usize)?;
    let above = sorted.get(at.ceil() as usize)?;
    Some(below + (above - below) * at.fract())
}

/// How many times faster one side is than the other: median and quartiles of paired samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median.
    pub median: f64,
    /// Lower quartile.
    pub low: f64,
    /// Upper quartile.
    pub high: f64,
    /// Pairs.
    pub n: usize,
}

impl Ratio {
    /// `theirs / ours` of each pair of times; `None` without a pair or with a time of zero.
    pub fn of_pairs(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        if ours.iter().any(|&t| t <= 0.0) {
            return None;
        }
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| b / a).collect();
        let summary = Summary::of(&ratios)?;
        Some(Self {
            median: summary.median,
            low: summary.q1,
            high: summary.q3,
            n: summary.n,
        })
    }

    /// How far from 1 the quartiles reach: as the noise of equals, the smallest difference seen.
    pub fn distance_from_one(&self) -> f64 {
        (self.high - 1.0).abs().max((1.0 - self.low).abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_ignores_one_outlier() {
        let s = Summary::of(&[1.0, 1.01, 9.0, 0.99, 1.0]).unwrap();

        assert_eq!((s.n, s.median, s.min, s.max), (5, 1.0, 0.99, 9.0));
        assert!((s.mad - 0.01).abs() < 1e-9 && s.q1 == 1.0);
        assert!((s.q3 - 1.01).abs() < 1e-9, "{s:?}");
    }

    #[test]
    fn quartiles_lie_between_neighbours() {
        let s = Summary::of(&[1.0, 2.0, 3.0, 4.0]).unwrap();

        assert_eq!((s.q1, s.median, s.q3), (1.75, 2.5, 3.25));
        assert_eq!(Summary::of(&[7.0]).unwrap().q3, 7.0);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn ranges_overlap_when_they_touch() {
        let of = |x: &[f64]| Summary::of(x).unwrap();

        assert!(of(&[1.0, 2.0, 3.0]).overlaps(&of(&[2.0, 2.5, 3.0])));
        assert!(!of(&[1.0, 1.1]).overlaps(&of(&[2.0, 2.1])));
    }

    #[test]
    fn ratio_pairs_samples_so_that_a_common_drift_cancels() {
        let ratio = Ratio::of_pairs(&[1.0, 2.0, 4.0], &[2.0, 4.0, 8.0]).unwrap();

        assert_eq!((ratio.median, ratio.low, ratio.high), (2.0, 2.0, 2.0));
        assert_eq!(Ratio::of_pairs(&[0.0], &[1.0]), None);
        assert_eq!(Ratio::of_pairs(&[], &[]), None);
    }
}
