//! K-quants: super-blocks of 256 with quantised sub-block scales.

use super::{code, extreme, half_scale, inverse, range, round_clamp};

/// Scales and minima of the eight sub-blocks of q4_K and q5_K.
struct SubBlocks {
    /// f16 bytes of the super-block scale and of the super-block minimum.
    head: [u8; 4],
    /// The 6-bit scales and minima, packed.
    packed: [u8; 12],
    /// Step of each sub-block, as the reader will compute it.
    d: [f32; 8],
    /// Minimum (as a positive number) of each sub-block, as the reader will compute it.
    m: [f32; 8],
}

/// Chooses scales for codes `0..=levels`: from minimum (not above 0) to maximum.
///
/// The 6-bit numbers are rounded up, so that no value falls outside by more than one minimum step.
fn sub_blocks(x: &[f32; 256], levels: f32) -> SubBlocks {
    let mut scale = [0.0_f32; 8];
    let mut min = [0.0_f32; 8];
    for ((s, m), sub) in scale.iter_mut().zip(&mut min).zip(x.as_chunks::<32>().0) {
        let (lo, hi) = range(sub);
        let lo = lo.min(0.0);
        *s = (hi.max(0.0) - lo) / levels;
        *m = -lo;
    }
    let top_scale = scale.iter().fold(0.0_f32, |a, &b| a.max(b));
    let top_min = min.iter().fold(0.0_f32, |a, &b| a.max(b));
    let (d_bytes, d) = half_scale(top_scale / 63.0);
    let (m_bytes, m) = half_scale(top_min / 63.0);
    let (inv_d, inv_m) = (inverse(d), inverse(m));
    let ls = scale.map(|s| code((s * inv_d).ceil(), 63));
    let lm = min.map(|v| code((v * inv_m).ceil(), 63));

    let mut packed = [0_u8; 12];
    for j in 0..4 {
        packed[j] = ls[j] | (ls[j + 4] >> 4 << 6);
        packed[j + 4] = lm[j] | (lm[j + 4] >> 4 << 6);
        packed[j + 8] = (ls[j + 4] & 15) | ((lm[j + 4] & 15) << 4);
    }
    SubBlocks {
        head: [d_bytes[0], d_bytes[1], m_bytes[0], m_bytes[1]],
        packed,
        d: ls.map(|l| d * f32::from(l)),
        m: lm.map(|l| m * f32::from(l)),
    }
}

/// Codes of all 256 elements: `round((x + m) / d)`.
fn codes(x: &[f32; 256], sub: &SubBlocks, hi: u8) -> [u8; 256] {
    let mut out = [0; 256];
    let rows = out
        .as_chunks_mut::<32>()
        .0
        .iter_mut()
        .zip(x.as_chunks::<32>().0);
    for ((row, xs), (&d, &m)) in rows.zip(sub.d.iter().zip(&sub.m)) {
        let id = inverse(d);
        for (c, &v) in row.iter_mut().zip(xs) {
            *c = code((v + m) * id, hi);
        }
    }
    out
}

/// Packs pairs of 32-element rows into low and high nibbles.
fn nibbles(codes: &[u8; 256], out: &mut [u8]) {
    for (q, pair) in out
        .as_chunks_mut::<32>()
        .0
        .iter_mut()
        .zip(codes.as_chunks::<64>().0)
    {
        for (l, byte) in q.iter_mut().enumerate() {
            *byte = (pair[l] & 15) | (pair[l + 32] << 4);
        }
    }
}

/// Layout: d, dmin, 12 bytes of scales, 128 bytes of nibbles.
pub(super) fn q4_k(x: &[f32; 256]) -> [u8; 144] {
    let sub = sub_blocks(x, 15.0);
    let mut out = [0; 144];
    out[..4].copy_from_slice(&sub.head);
    out[4..16].copy_from_slice(&sub.packed);
    nibbles(&codes(x, &sub, 15), &mut out[16..]);
    out
}

/// Layout: d, dmin, 12 bytes of scales, 32 bytes of fifth bits, 128 bytes of nibbles.
pub(super) fn q5_k(x: &[f32; 256]) -> [u8; 176] {
    let sub = sub_blocks(x, 31.0);
    let codes = codes(x, &sub, 31);
    let mut out = [0; 176];
    out[..4].copy_from_slice(&sub.head);
    out[4..16].copy_from_slice(&sub.packed);
    for (row, cs) in codes.as_chunks::<32>().0.iter().enumerate() {
        for (h, &c) in out[16..48].iter_mut().zip(cs) {
            *h |= (c >> 4) << row;
        }
    }
    nibbles(&codes, &mut out[48..]);
    out
}

/// Layout: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d.
pub(super) fn q6_k(x: &[f32; 256]) -> [u8; 210] {
    let mut scale = [0.0_f32; 16];
    for (s, sub) in scale.iter_mut().zip(x.as_chunks::<16>().0) {
        *s = extreme(sub) / -32.0;
    }
    let (d_bytes, d) = half_scale(extreme(&scale) / -128.0);
    let id = inverse(d);
    let ls = scale.map(|s| round_clamp(s * id, -128, 127));

    let mut codes = [0_u8; 256];
    let rows = codes
        .as_chunks_mut::<16>()
        .0
        .iter_mut()
        .zip(x.as_chunks::<16>().0);
    for ((row, xs), &l) in rows.zip(&ls) {
        #[expect(clippy::cast_precision_loss, reason = "8-bit integers")]
        let inv = inverse(d * l as f32);
        for (c, &v) in row.iter_mut().zip(xs) {
            *c = code(v * inv + 32.0, 63);
        }
    }

    let mut out = [0; 210];
    for (j, half) in codes.as_chunks::<128>().0.iter().enumerate() {
        for l in 0..32 {
            let [a, b, c, d] = [half[l], half[l + 32], half[l + 64], half[l + 96]];
            out[j * 64 + l] = (a & 15) | (c << 4);
            out[j * 64 + l + 32] = (b & 15) | (d << 4);
            out[128 + j * 32 + l] = (a >> 4) | (b >> 4 << 2) | (c >> 4 << 4) | (d >> 4 << 6);
        }
    }
    for (byte, &l) in out[192..208].iter_mut().zip(&ls) {
        #[expect(clippy::cast_possible_truncation, reason = "clamped to an i8")]
        let l = l as i8;
        *byte = l.cast_unsigned();
    }
    out[208..].copy_from_slice(&d_bytes);
    out
}
