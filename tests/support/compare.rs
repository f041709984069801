//! Measures of how far two arrays are apart.

/// Returns sum (a-b)^2 / sum b^2, `b` being the reference; NaN anywhere gives infinity.
pub fn nmse(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "arrays of different length");
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

/// Returns the index of the largest value; the lowest index wins a tie.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if x > row[best] {
            best = i;
        }
    }
    best
}

/// Returns the largest value minus the second largest.
pub fn gap(row: &[f32]) -> f32 {
    let best = argmax(row);
    let second = row
        .iter()
        .enumerate()
        .filter(|&(i, _)| i != best)
        .map(|(_, &x)| x);
    row[best] - second.fold(f32::NEG_INFINITY, f32::max)
}

/// Returns the middle value of `values`.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Returns the NMSE of each row of `n` values.
pub fn row_nmse(a: &[f32], b: &[f32], n: usize) -> Vec<f64> {
    a.chunks_exact(n)
        .zip(b.chunks_exact(n))
        .map(|(x, y)| nmse(x, y))
        .collect()
}
