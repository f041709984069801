//! Quantisers: float32 weights to the bytes of a ggml tensor type.
//!
//! The block layouts are ggml's (`ggml-common.h`, `block_*`); the choice of scales is the plain
//! one (largest magnitude, or minimum and maximum), without ggml's searches. All arithmetic is
//! IEEE single precision in a fixed order, so the bytes are the same on every machine.

mod k;

use half::{bf16, f16};

/// A tensor type that the writer can produce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 8-bit, blocks of 32.
    Q8_0,
    /// 4-bit, blocks of 32.
    Q4_0,
    /// 4-bit with minimum, blocks of 32.
    Q4_1,
    /// 5-bit, blocks of 32.
    Q5_0,
    /// 5-bit with minimum, blocks of 32.
    Q5_1,
    /// 4-bit, super-blocks of 256.
    Q4K,
    /// 5-bit, super-blocks of 256.
    Q5K,
    /// 6-bit, super-blocks of 256.
    Q6K,
}

impl WeightType {
    /// Every type, in the order of the help text.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// The names of [`WeightType::ALL`], for messages.
    pub const NAMES: &'static str =
        "f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_K, q5_K, q6_K";

    /// Returns the type called `name`, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// Returns ggml's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q4K => "q4_K",
            Self::Q5K => "q5_K",
            Self::Q6K => "q6_K",
        }
    }

    /// Returns ggml's number of the type (`enum ggml_type`).
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// Returns the number that `general.file_type` gives a file of this type (`llama_ftype`).
    pub fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
            Self::Q5_0 => 8,
            Self::Q5_1 => 9,
            Self::Q4K => 15,
            Self::Q5K => 17,
            Self::Q6K => 18,
            Self::Bf16 => 32,
        }
    }

    /// Returns the elements of one block.
    pub fn block_len(self) -> u64 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the bytes of one block.
    pub fn block_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the bytes of `n` elements; `n` is a multiple of the block length.
    pub fn n_bytes(self, n: u64) -> u64 {
        n / self.block_len() * self.block_bytes()
    }

    /// Returns this type, or for rows of `ne0` that it cannot hold, the nearest that can:
    /// q8_0 for multiples of 32, else f16.
    pub fn for_row(self, ne0: u64) -> Self {
        if ne0.is_multiple_of(self.block_len()) {
            self
        } else if ne0.is_multiple_of(32) {
            Self::Q8_0
        } else {
            Self::F16
        }
    }

    /// Appends the bytes of `x` to `out`. Elements after the last whole block are ignored.
    pub fn quantize(self, x: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(x.iter().flat_map(|v| v.to_le_bytes())),
            Self::F16 => out.extend(x.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes())),
            Self::Bf16 => out.extend(x.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes())),
            Self::Q8_0 => blocks(x, out, q8_0),
            Self::Q4_0 => blocks(x, out, q4_0),
            Self::Q4_1 => blocks(x, out, q4_1),
            Self::Q5_0 => blocks(x, out, q5_0),
            Self::Q5_1 => blocks(x, out, q5_1),
            Self::Q4K => blocks(x, out, k::q4_k),
            Self::Q5K => blocks(x, out, k::q5_k),
            Self::Q6K => blocks(x, out, k::q6_k),
        }
    }
}

/// Applies `f` to each block of `N` elements.
fn blocks<const N: usize, const B: usize>(
    x: &[f32],
    out: &mut Vec<u8>,
    f: impl Fn(&[f32; N]) -> [u8; B],
) {
    for block in x.as_chunks::<N>().0 {
        out.extend_from_slice(&f(block));
    }
}

/// Rounds to the nearest integer, ties to even, and clamps to `lo..=hi`.
///
/// Adding 1.5 * 2^23 leaves the integer in the low mantissa bits: exact for |x| < 2^22, and the
/// compiler can do many at a time.
fn round_clamp(x: f32, lo: i32, hi: i32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    let bits = (x.clamp(-4e6, 4e6) + MAGIC).to_bits();
    ((bits & 0x007f_ffff).cast_signed() - 0x0040_0000).clamp(lo, hi)
}

/// [`round_clamp`] for codes that fit a byte.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to 0..=hi"
)]
fn code(x: f32, hi: u8) -> u8 {
    round_clamp(x, 0, i32::from(hi)) as u8
}

/// Returns 1 / x, or 0 for 0.
fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// Rounds a scale to f16 and returns both its bytes and its value.
fn half_scale(x: f32) -> ([u8; 2], f32) {
    let h = f16::from_f32(x);
    (h.to_le_bytes(), h.to_f32())
}

/// Returns the element of largest magnitude, with its sign.
fn extreme(x: &[f32]) -> f32 {
    x.iter()
        .fold(0.0_f32, |m, &v| if v.abs() > m.abs() { v } else { m })
}

/// Returns minimum and maximum.
fn range(x: &[f32]) -> (f32, f32) {
    x.iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
            (lo.min(v), hi.max(v))
        })
}

/// `d = max |x| / 127; q = round(x / d)`.
fn q8_0(x: &[f32; 32]) -> [u8; 34] {
    let amax = x.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let (d_bytes, _) = half_scale(amax / 127.0);
    let id = inverse(amax / 127.0);
    let mut out = [0; 34];
    out[..2].copy_from_slice(&d_bytes);
    for (q, &v) in out[2..].iter_mut().zip(x) {
        #[expect(clippy::cast_possible_truncation, reason = "clamped to an i8")]
        let r = round_clamp(v * id, -127, 127) as i8;
        *q = r.cast_unsigned();
    }
    out
}

/// Packs two halves of 16 codes into low and high nibbles.
fn nibbles(codes: &[u8; 32], out: &mut [u8]) {
    let (lo, hi) = codes.split_at(16);
    for ((q, &a), &b) in out.iter_mut().zip(lo).zip(hi) {
        *q = (a & 15) | (b << 4);
    }
}

/// Gathers bit 4 of each of 32 codes.
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    codes
        .iter()
        .enumerate()
        .fold(0_u32, |h, (j, &c)| h | (u32::from(c >> 4) << j))
        .to_le_bytes()
}

/// `d = extreme / -8; q = round(x / d) + 8`.
fn q4_0(x: &[f32; 32]) -> [u8; 18] {
    let d = extreme(x) / -8.0;
    let id = inverse(d);
    let codes = x.map(|v| code(v * id + 8.0, 15));
    let mut out = [0; 18];
    out[..2].copy_from_slice(&half_scale(d).0);
    nibbles(&codes, &mut out[2..]);
    out
}

/// `d = (max - min) / 15; q = round((x - min) / d)`.
fn q4_1(x: &[f32; 32]) -> [u8; 20] {
    let (lo, hi) = range(x);
    let d = (hi - lo) / 15.0;
    let id = inverse(d);
    let codes = x.map(|v| code((v - lo) * id, 15));
    let mut out = [0; 20];
    out[..2].copy_from_slice(&half_scale(d).0);
    out[2..4].copy_from_slice(&half_scale(lo).0);
    nibbles(&codes, &mut out[4..]);
    out
}

/// `d = extreme / -16; q = round(x / d) + 16`.
fn q5_0(x: &[f32; 32]) -> [u8; 22] {
    let d = extreme(x) / -16.0;
    let id = inverse(d);
    let codes = x.map(|v| code(v * id + 16.0, 31));
    let mut out = [0; 22];
    out[..2].copy_from_slice(&half_scale(d).0);
    out[2..6].copy_from_slice(&fifth_bits(&codes));
    nibbles(&codes, &mut out[6..]);
    out
}

/// `d = (max - min) / 31; q = round((x - min) / d)`.
fn q5_1(x: &[f32; 32]) -> [u8; 24] {
    let (lo, hi) = range(x);
    let d = (hi - lo) / 31.0;
    let id = inverse(d);
    let codes = x.map(|v| code((v - lo) * id, 31));
    let mut out = [0; 24];
    out[..2].copy_from_slice(&half_scale(d).0);
    out[2..4].copy_from_slice(&half_scale(lo).0);
    out[4..8].copy_from_slice(&fifth_bits(&codes));
    nibbles(&codes, &mut out[8..]);
    out
}

#[cfg(test)]
mod tests;
