//! Measures of how far two arrays are apart.

/// Returns sum (a-b)^2 / sum b^2, `b` being the reference; NaN anywhere and arrays of different
/// length give infinity.
pub fn nmse(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let (mut error, mut norm) = (0f64, 0f64);
    for (&x, &y) in a.iter().zip(b) {
        let (x, y) = (f64::from(x), f64::from(y));
        error += (x - y) * (x - y);
        norm += y * y;
    }
    let ratio = if error == 0.0 { 0.0 } else { error / norm };
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

/// Returns the largest absolute difference.
pub fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}

/// Returns the most likely token of a row of logits, the lowest id of equals.
///
/// NaN is nobody's largest value: `None` for a row that is empty or NaN throughout.
pub fn argmax(row: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &logit) in (0..).zip(row) {
        if !logit.is_nan() && best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id)
}

/// Returns the largest value minus the second largest.
pub fn gap(row: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &value in row {
        if value > first {
            (first, second) = (value, first);
        } else if value > second {
            second = value;
        }
    }
    first - second
}

/// Returns the middle value of `values`; infinity where there is none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len() / 2)
        .copied()
        .unwrap_or(f64::INFINITY)
}

/// Returns the NMSE of each row of `n` values.
pub fn row_nmse(a: &[f32], b: &[f32], n: usize) -> Vec<f64> {
    let n = n.max(1);
    a.chunks_exact(n)
        .zip(b.chunks_exact(n))
        .map(|(x, y)| nmse(x, y))
        .collect()
}

/// `sum p (ln p - ln q)` of the distributions that two rows of logits stand for, in nats.
///
/// NaN counts as infinity.
pub fn kl(expected: &[f32], found: &[f32]) -> f64 {
    let (p, q) = (log_normaliser(expected), log_normaliser(found));
    let term = |(&a, &b): (&f32, &f32)| {
        let (ln_p, ln_q) = (f64::from(a) - p, f64::from(b) - q);
        ln_p.exp() * (ln_p - ln_q)
    };
    let sum: f64 = expected.iter().zip(found).map(term).sum();
    if sum.is_nan() { f64::INFINITY } else { sum }
}

/// `ln sum exp`, without overflow.
fn log_normaliser(row: &[f32]) -> f64 {
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f64::from(highest);
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - highest).exp()).sum();
    highest + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nmse_is_relative_to_the_reference_and_nan_is_infinitely_far() {
        assert_eq!(nmse(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(nmse(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert_eq!(nmse(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(nmse(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(nmse(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    }

    #[test]
    fn argmax_takes_the_first_of_equals_and_gap_the_two_largest() {
        assert_eq!(argmax(&[1.0, 7.0, 7.0]), Some(1));
        assert_eq!(gap(&[1.0, 7.0, 4.0]), 3.0);
        assert_eq!(gap(&[4.0, 1.0, 7.0]), 3.0);
        assert_eq!(gap(&[7.0, 7.0]), 0.0);
    }

    #[test]
    fn argmax_never_takes_nan_and_says_where_nothing_is_largest() {
        const NONE: f32 = f32::NEG_INFINITY;
        assert_eq!(argmax(&[f32::NAN, 1.0, f32::NAN, 2.0]), Some(3));
        assert_eq!(argmax(&[f32::NAN, NONE, NONE]), Some(1));
        assert_eq!(argmax(&[f32::NAN, f32::NAN]), None);
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn rows_are_judged_one_by_one() {
        let rows = row_nmse(&[1.0, 0.0, 3.0, 4.0], &[0.0, 1.0, 3.0, 4.0], 2);

        assert_eq!(rows, [2.0, 0.0]);
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[]), f64::INFINITY);
    }
}
