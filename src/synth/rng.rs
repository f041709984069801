//! Counter-based random weights: element `i` of a tensor depends on the seed, the tensor's name
//! and `i`, on nothing else. So any thread can make any part, and every machine makes the same.
//!
//! Only integer arithmetic, IEEE multiplication, addition and square roots are used: no `libm`.

/// Odd constant nearest to 2^64 / golden ratio: the step of SplitMix64.
///
/// # Source
/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (OOPSLA 2014).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Standard deviation of a sum of four uniform 16-bit integers: sqrt(4 * (2^32 - 1) / 12).
const SUM_STD: f64 = 37_837.226_8;

/// Twice the mean of one 16-bit lane, times two lanes: the sum's centre, 4 * 65535 / 2.
const SUM_MEAN: i32 = 131_070;

/// SplitMix64's output function: a bijection of 64-bit words that spreads every bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The stream of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stream {
    key: u64,
}

impl Stream {
    /// Derives the stream of the tensor `name` under `seed` (FNV-1a over the name).
    pub(super) fn new(seed: u64, name: &str) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self {
            key: mix(hash ^ mix(seed.wrapping_add(GOLDEN))),
        }
    }

    /// Returns the 64 random bits of element `i`.
    pub(super) fn bits(self, i: u64) -> u64 {
        mix(self
            .key
            .wrapping_add(i.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// Returns element `i` of a bell-shaped distribution with mean 0, deviation 1, |z| < 3.47.
    pub(super) fn normal(self, i: u64) -> f32 {
        bell(self.bits(i))
    }
}

/// Sums the four 16-bit lanes of `bits`: close to a normal distribution, exact in integers.
fn bell(bits: u64) -> f32 {
    let pairs = (bits & 0x0000_ffff_0000_ffff) + ((bits >> 16) & 0x0000_ffff_0000_ffff);
    let sum = (pairs & 0xffff_ffff) + (pairs >> 32);
    #[expect(clippy::cast_possible_truncation, reason = "the sum is below 2^18")]
    let centred = sum as i32 - SUM_MEAN;
    #[expect(clippy::cast_precision_loss, reason = "below 2^18: exact in f32")]
    let z = centred as f32;
    #[expect(clippy::cast_possible_truncation, reason = "a constant, rounded once")]
    const INV_STD: f32 = (1.0 / SUM_STD) as f32;
    z * INV_STD
}

/// How the elements of one tensor are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// `mean + std * z`.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// `mean + std * z` with a random sign: a norm weight that turns the direction of the stream.
    Signed {
        /// Mean magnitude.
        mean: f32,
        /// Standard deviation of the magnitude.
        std: f32,
    },
    /// Frequency factors of proportional RoPE: 1 for the first `n_active` pairs, 1e30 after.
    RopeFactors {
        /// Pairs that rotate.
        n_active: u64,
    },
}

impl Fill {
    /// Writes elements `start..` of `stream` into `out`.
    pub(super) fn write(self, stream: Stream, start: u64, out: &mut [f32]) {
        match self {
            Self::Normal { mean, std } => {
                for (i, x) in (start..).zip(out) {
                    *x = mean + std * stream.normal(i);
                }
            }
            Self::Signed { mean, std } => {
                // Bit 0 of a second draw, so that sign and magnitude are independent.
                for (i, x) in (start..).zip(out) {
                    let magnitude = mean + std * stream.normal(i);
                    let negative = stream.bits(!i) & 1 == 1;
                    *x = if negative { -magnitude } else { magnitude };
                }
            }
            Self::RopeFactors { n_active } => {
                for (i, x) in (start..).zip(out) {
                    *x = if i < n_active { 1.0 } else { 1e30 };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_mean_zero_and_deviation_one() {
        let stream = Stream::new(7, "blk.0.attn_q.weight");
        let n = 200_000_u64;
        let (mut sum, mut sum_sq) = (0.0_f64, 0.0_f64);
        for i in 0..n {
            let z = f64::from(stream.normal(i));
            sum += z;
            sum_sq += z * z;
        }
        let mean = sum / n as f64;
        let var = sum_sq / n as f64 - mean * mean;

        // Five standard errors: 5 / sqrt(n), and 5 * sqrt(2 / n) for the variance.
        assert!(mean.abs() < 0.0112, "mean {mean}");
        assert!((var - 1.0).abs() < 0.0158, "variance {var}");
    }

    #[test]
    fn neighbouring_elements_and_tensors_are_uncorrelated() {
        let (a, b) = (Stream::new(1, "a"), Stream::new(1, "b"));
        let n = 100_000_u64;
        let (mut next, mut other) = (0.0_f64, 0.0_f64);
        for i in 0..n {
            next += f64::from(a.normal(i)) * f64::from(a.normal(i + 1));
            other += f64::from(a.normal(i)) * f64::from(b.normal(i));
        }

        assert!((next / n as f64).abs() < 0.0158);
        assert!((other / n as f64).abs() < 0.0158);
    }

    #[test]
    fn parts_made_apart_equal_the_whole() {
        let stream = Stream::new(3, "x");
        let fill = Fill::Signed {
            mean: 1.0,
            std: 0.2,
        };
        let mut whole = vec![0.0; 100];
        fill.write(stream, 0, &mut whole);
        let mut part = vec![0.0; 40];
        fill.write(stream, 60, &mut part);

        assert_eq!(whole[60..], part[..]);
    }

    #[test]
    fn the_first_bits_are_these_on_every_machine() {
        let stream = Stream::new(42, "token_embd.weight");

        assert_eq!(stream.bits(0), GOLDEN_BITS[0]);
        assert_eq!(stream.bits(u64::from(u32::MAX) + 5), GOLDEN_BITS[1]);
    }

    /// From the formulas in another language (arbitrary-precision integers).
    const GOLDEN_BITS: [u64; 2] = [8_139_032_147_682_107_943, 6_600_998_854_304_765_934];
}
