use half::{bf16, f16};

use super::super::rng::{Fill, Stream};
use super::*;

/// Bell-shaped values of a size that differs from block to block, one block all zero.
fn sample() -> Vec<f32> {
    let mut x = vec![0.0; 4096];
    Fill::Normal {
        mean: 0.01,
        std: 0.05,
    }
    .write(Stream::new(9, "sample"), 0, &mut x);
    for (i, block) in x.chunks_mut(32).enumerate() {
        block.iter_mut().for_each(|v| *v *= (i % 7) as f32);
    }
    x
}

fn at_half(b: &[u8]) -> f32 {
    f16::from_le_bytes([b[0], b[1]]).to_f32()
}

/// 6-bit scale and minimum of sub-block `j` (ggml `get_scale_min_k4`).
fn scale_min(j: usize, q: &[u8]) -> (f32, f32) {
    let (s, m) = if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        (
            (q[j + 4] & 15) | (q[j - 4] >> 6 << 4),
            (q[j + 4] >> 4) | (q[j] >> 6 << 4),
        )
    };
    (f32::from(s), f32::from(m))
}

/// The reader's formulas of each type, element by element; second: the largest step of the block.
fn dequantize(ty: WeightType, block: &[u8]) -> Vec<(f32, f32)> {
    let nibble = |qs: &[u8], j: usize| f32::from(if j < 16 { qs[j] & 15 } else { qs[j - 16] >> 4 });
    let fifth = |qh: &[u8], j: usize| f32::from(qh[j / 8] >> (j % 8) & 1) * 16.0;
    let d = if ty.block_len() > 1 {
        at_half(block)
    } else {
        0.0
    };
    match ty {
        WeightType::F32 => {
            let v = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            vec![(v, 0.0)]
        }
        WeightType::F16 => vec![(at_half(block), at_half(block).abs() / 1024.0)],
        WeightType::Bf16 => {
            let v = bf16::from_le_bytes([block[0], block[1]]).to_f32();
            vec![(v, v.abs() / 128.0)]
        }
        WeightType::Q8_0 => block[2..]
            .iter()
            .map(|&q| (f32::from(q as i8) * d, d))
            .collect(),
        WeightType::Q4_0 => (0..32)
            .map(|j| ((nibble(&block[2..], j) - 8.0) * d, d))
            .collect(),
        WeightType::Q4_1 => {
            let m = at_half(&block[2..]);
            (0..32)
                .map(|j| (nibble(&block[4..], j) * d + m, d))
                .collect()
        }
        WeightType::Q5_0 => (0..32)
            .map(|j| {
                (
                    (nibble(&block[6..], j) + fifth(&block[2..], j) - 16.0) * d,
                    d,
                )
            })
            .collect(),
        WeightType::Q5_1 => {
            let m = at_half(&block[2..]);
            (0..32)
                .map(|j| ((nibble(&block[8..], j) + fifth(&block[4..], j)) * d + m, d))
                .collect()
        }
        WeightType::Q4K | WeightType::Q5K => {
            let (dmin, five) = (at_half(&block[2..]), ty == WeightType::Q5K);
            let qs = if five { &block[48..] } else { &block[16..] };
            (0..256)
                .map(|i| {
                    let (sub, l) = (i / 32, i % 32);
                    let (s, m) = scale_min(sub, &block[4..16]);
                    let byte = qs[i / 64 * 32 + l];
                    let mut q = f32::from(if sub % 2 == 0 { byte & 15 } else { byte >> 4 });
                    if five {
                        q += f32::from(block[16 + l] >> sub & 1) * 16.0;
                    }
                    // Rounding the minimum up costs at most one of its steps, hence twice.
                    (d * s * q - dmin * m, d * s + 2.0 * dmin)
                })
                .collect()
        }
        WeightType::Q6K => {
            let d = at_half(&block[208..]);
            (0..256)
                .map(|i| {
                    let (half, l, quarter) = (i / 128, i % 32, i % 128 / 32);
                    let low = block[half * 64 + l + quarter % 2 * 32];
                    let low = if quarter < 2 { low & 15 } else { low >> 4 };
                    let high = block[128 + half * 32 + l] >> (2 * quarter) & 3;
                    let scale = f32::from(block[192 + i / 16] as i8);
                    let q = f32::from(low | high << 4) - 32.0;
                    // Half a unit of the 8-bit scale, times 32 codes, on top of half a step.
                    (d * scale * q, (d * scale).abs() + 32.0 * d.abs())
                })
                .collect()
        }
    }
}

#[test]
fn every_type_reads_back_within_its_step() {
    let x = sample();
    for ty in WeightType::ALL {
        let mut bytes = Vec::new();
        ty.quantize(&x, &mut bytes);
        assert_eq!(bytes.len() as u64, ty.n_bytes(4096), "{}", ty.name());
        let back: Vec<_> = bytes
            .chunks(ty.block_bytes() as usize)
            .flat_map(|block| dequantize(ty, block))
            .collect();
        assert_eq!(back.len(), x.len());

        // One-sided types lose a whole step at the end away from the extreme; f16 scales add 2^-11
        // of a value that is at most 128 steps away.
        let whole = matches!(ty, WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q6K);
        let share = if whole { 1.0 } else { 0.5 } + 0.07;
        for (i, (&want, &(got, step))) in x.iter().zip(&back).enumerate() {
            let bound = step.abs() * share + 1e-6 * want.abs();
            assert!(
                (want - got).abs() <= bound,
                "{} [{i}]: {want} {got} {step}",
                ty.name()
            );
        }
    }
}

#[test]
fn more_bits_give_a_smaller_error() {
    let x = sample();
    let error = |ty: WeightType| {
        let mut bytes = Vec::new();
        ty.quantize(&x, &mut bytes);
        let back = bytes
            .chunks(ty.block_bytes() as usize)
            .flat_map(|b| dequantize(ty, b));
        let sum = |v: f64, (&a, (b, _)): (&f32, (f32, f32))| v + f64::from(a - b).powi(2);
        x.iter().zip(back).fold(0.0, sum) / x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>()
    };
    use WeightType::*;
    let rising = [F32, F16, Bf16, Q8_0, Q6K, Q5K, Q4K];

    for pair in rising.windows(2) {
        assert!(error(pair[0]) < error(pair[1]), "{pair:?}");
    }
    assert!(error(Q5_0) < error(Q4_0) && error(Q5_1) < error(Q4_1));
    assert!(error(Q4_0) < 0.01 && error(Q4K) < 0.01);
}

#[test]
fn rounding_is_to_nearest_and_clamps() {
    assert_eq!(round_clamp(2.4999, -128, 127), 2);
    assert_eq!(round_clamp(-2.6, -128, 127), -3);
    assert_eq!(round_clamp(1e30, -128, 127), 127);
    assert_eq!(round_clamp(-1e30, -128, 127), -128);
}

#[test]
fn names_and_numbers_are_distinct() {
    for (i, a) in WeightType::ALL.into_iter().enumerate() {
        assert_eq!(WeightType::from_name(&a.name().to_uppercase()), Some(a));
        assert!(WeightType::NAMES.contains(a.name()));
        assert!(WeightType::ALL[..i].iter().all(|b| a.id() != b.id()));
    }
}
