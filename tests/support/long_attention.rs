//! Attention over very many keys, with results that a sum in F64 gives (T33).

use g4prefill::ggml::Backend;

use super::op;

/// How scores and values are laid out over the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// All scores are equal, and so are all values: 1, as large as a norm leaves them.
    Even,
    /// All scores are equal; values have both signs and a mean of 1/8.
    EvenSigned,
    /// One key has nearly all weight, the first or the last one.
    OneFirst,
    OneLast,
    /// Scores fall by 8 over all keys.
    Falling,
    /// Scores rise by 8 over all keys: each block raises the largest score seen so far.
    Rising,
}

pub const PATTERNS: [Pattern; 6] = [
    Pattern::Even,
    Pattern::EvenSigned,
    Pattern::OneFirst,
    Pattern::OneLast,
    Pattern::Falling,
    Pattern::Rising,
];

impl Pattern {
    fn score(self, key: usize, n_kv: usize) -> f32 {
        let part = key as f32 / n_kv as f32;
        match self {
            Self::Even | Self::EvenSigned => 0.0,
            Self::OneFirst if key == 0 => 30.0,
            Self::OneLast if key + 1 == n_kv => 30.0,
            Self::OneFirst | Self::OneLast => 0.0,
            Self::Falling => -8.0 * part,
            Self::Rising => 8.0 * part,
        }
    }

    fn value(self, key: usize, lane: usize) -> f32 {
        match self {
            Self::Even => 1.0,
            _ => {
                // Between -1 and 1 in steps of 1/64, then moved up by 1/8.
                let hash =
                    (key as u32).wrapping_mul(2_654_435_761) ^ (lane as u32).wrapping_mul(40_503);
                (hash >> 16 & 127) as f32 / 64.0 - 1.0 + 0.125
            }
        }
    }
}

/// Attention of `n_q` equal rows of `gqa` heads to `n_kv` keys of width `d`: what the device gives
/// (`[d, gqa, n_q]`), and what is right for each head and row (`[d]`).
pub fn run(
    backend: &Backend,
    (d, gqa, n_q): (usize, usize, usize),
    n_kv: usize,
    pattern: Pattern,
) -> (Vec<f32>, Vec<f32>) {
    let half = |x: f32| half::f16::from_f32(x);
    // Only lane 0 of Q and K carries the score.
    let mut q = vec![0f32; d * n_q * gqa];
    q.iter_mut().step_by(d).for_each(|x| *x = 1.0);
    let mut k = vec![0u16; d * n_kv];
    let mut v = vec![0u16; d * n_kv];
    let mut sums = vec![0f64; d];
    let mut weights = 0f64;
    let scores: Vec<half::f16> = (0..n_kv)
        .map(|key| half(pattern.score(key, n_kv)))
        .collect();
    let highest = scores.iter().fold(f64::MIN, |m, s| m.max(s.to_f64()));
    for (key, score) in scores.iter().enumerate() {
        k[key * d] = score.to_bits();
        let weight = (score.to_f64() - highest).exp();
        weights += weight;
        let row = &mut v[key * d..(key + 1) * d];
        for (lane, (cell, sum)) in row.iter_mut().zip(&mut sums).enumerate() {
            let value = half(pattern.value(key, lane));
            *cell = value.to_bits();
            *sum += weight * value.to_f64();
        }
    }
    let right = sums.iter().map(|s| (s / weights) as f32).collect();
    let inputs = [
        op::f32s(&[d, n_q, gqa], &q),
        op::f16s(&[d, n_kv, 1], &k),
        op::f16s(&[d, n_kv, 1], &v),
        op::f16s(&[n_kv, n_q], &vec![0; n_kv * n_q]),
    ];
    let found = op::run_on(backend, &inputs, |b, i| {
        b.flash_attn(i[0], i[1], i[2], i[3], 1.0)
    });
    (found.expect("attention").values, right)
}
