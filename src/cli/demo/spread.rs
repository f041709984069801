//! Median and spread of a few timings, and the ratio of two such sets.

use std::time::Duration;

/// Median and median absolute deviation, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median.
    pub median_s: f64,
    /// Median absolute deviation from it.
    pub mad_s: f64,
}

impl Spread {
    /// Of at least one timing.
    pub fn of(samples: &[Duration]) -> Option<Self> {
        let mut seconds: Vec<f64> = samples.iter().map(Duration::as_secs_f64).collect();
        let median_s = median(&mut seconds)?;
        let mut deviations: Vec<f64> = seconds.iter().map(|s| (s - median_s).abs()).collect();
        Some(Self {
            median_s,
            mad_s: median(&mut deviations)?,
        })
    }

    /// Relative spread.
    #[cfg(any(test, feature = "llama"))]
    fn relative(self) -> f64 {
        self.mad_s / self.median_s
    }
}

/// How many times faster `ours` is than `theirs`, with the spread of that number.
///
/// # Source
/// First-order error propagation of a quotient of independent values.
#[cfg(any(test, feature = "llama"))]
pub fn speedup(ours: Spread, theirs: Spread) -> (f64, f64) {
    let ratio = theirs.median_s / ours.median_s;
    (ratio, ratio * ours.relative().hypot(theirs.relative()))
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = *values.get(values.len() / 2 - 1)?;
    Some((lower + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(millis: &[u64]) -> Option<Spread> {
        Spread::of(
            &millis
                .iter()
                .map(|&ms| Duration::from_millis(ms))
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn median_and_mad_ignore_one_outlier() {
        let spread = spread(&[1000, 1010, 9000, 990, 1000]).unwrap();

        assert_eq!(spread.median_s, 1.0);
        assert!((spread.mad_s - 0.01).abs() < 1e-9, "{spread:?}");
    }

    #[test]
    fn even_count_takes_the_middle_of_two() {
        assert_eq!(spread(&[1000, 3000]).unwrap().median_s, 2.0);
    }

    #[test]
    fn no_sample_has_no_spread() {
        assert_eq!(spread(&[]), None);
    }

    #[test]
    fn speedup_is_theirs_over_ours_with_both_spreads() {
        let ours = Spread {
            median_s: 1.0,
            mad_s: 0.03,
        };
        let theirs = Spread {
            median_s: 2.0,
            mad_s: 0.08,
        };

        let (ratio, error) = speedup(ours, theirs);

        assert_eq!(ratio, 2.0);
        assert!((error - 0.1).abs() < 1e-12, "{error}");
    }
}
