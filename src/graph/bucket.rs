//! Bucket sizes: which padded shapes a graph is kept for. Arithmetic only.
//!
//! A persistent graph exists per [`BucketShape`]. Few shapes mean few captures; tight shapes mean
//! little padding. [`Ladder`] decides both, and every size of the engine that has to be padded is
//! padded here, so a mask and the K/V view that it covers cannot disagree.

/// Rows of a K/V cache that attention reads come in multiples of this.
///
/// Flash attention in ggml-cuda walks the keys in strides of up to 256 rows.
///
/// # Source
/// `ggml/src/ggml-cuda/fattn-common.cuh`, `FATTN_KQ_STRIDE`.
pub const KV_PAD: usize = 256;

/// Token counts up to this one get a bucket of their own (decode, verification of short drafts).
pub const N_TOKENS_EXACT: usize = 8;

/// How far the rows of a chunk are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// No row is wanted: the graph stops at the last K/V write.
    Body,
    /// Some rows are wanted: all rows run to the last K/V write, `n_out` of them to the logits.
    Tail {
        /// Rows of the output after padding; at least the wanted rows of the chunk.
        n_out: usize,
    },
    /// Every row is wanted.
    Full,
}

/// Key of one persistent graph. Topology and addresses follow from it and from nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BucketShape {
    /// Token rows of the graph, padding included.
    pub n_tokens: usize,
    /// Rows of the global caches that attention reads, padding included. A multiple of [`KV_PAD`].
    pub n_kv: usize,
    /// How far the rows are computed.
    pub kind: Kind,
}

impl BucketShape {
    /// Counts the logit rows that the graph writes, padding included.
    pub fn n_logit_rows(&self) -> usize {
        match self.kind {
            Kind::Body => 0,
            Kind::Tail { n_out } => n_out,
            Kind::Full => self.n_tokens,
        }
    }
}

/// The sizes that buckets may have.
///
/// Every method is total: a field that is zero counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ladder {
    /// Tokens of a whole chunk; the largest token bucket.
    pub chunk: usize,
    /// Smallest number of global cache rows a graph reads (rounded up to [`KV_PAD`]).
    pub kv_min: usize,
    /// Cache sizes between one power of two times `kv_min` and the next.
    pub kv_steps_per_octave: usize,
    /// Token sizes between one power of two and the next.
    pub token_steps_per_octave: usize,
}

impl Default for Ladder {
    /// Chunk 2048, at most an eighth of a tail chunk and a quarter of the key range is padding.
    fn default() -> Self {
        Self {
            chunk: 2048,
            kv_min: 2048,
            kv_steps_per_octave: 4,
            token_steps_per_octave: 8,
        }
    }
}

impl Ladder {
    /// Pads `n` tokens to the smallest token bucket that holds them.
    ///
    /// Exact up to [`N_TOKENS_EXACT`]; above, a power of two plus whole steps of its octave, and never more
    /// than `chunk`. Padding is below `n / token_steps_per_octave`. The planner never asks for more
    /// than `chunk` tokens; such an `n` comes back unchanged.
    pub fn tokens(&self, n: usize) -> usize {
        if n <= N_TOKENS_EXACT || n >= self.chunk {
            return n;
        }
        // Equal steps within an octave: the waste stays the same share of n at every size, with as
        // many buckets in each octave.
        let (octave, step) = self.token_octave(n);
        let above = (n - octave).div_ceil(step).saturating_mul(step);
        octave
            .saturating_add(above)
            .min(octave.saturating_mul(2))
            .min(self.chunk)
    }

    /// Rounds `n` tokens down to the largest token bucket that they fill.
    pub fn tokens_floor(&self, n: usize) -> usize {
        if n <= N_TOKENS_EXACT {
            return n;
        }
        if n >= self.chunk {
            return self.chunk.max(1);
        }
        let (octave, step) = self.token_octave(n);
        n - (n - octave) % step
    }

    /// Returns the power of two below `n` and the distance between token buckets above it.
    ///
    /// Sizes are counted from the power of two, so that every bucket is its own bucket.
    fn token_octave(&self, n: usize) -> (usize, usize) {
        let octave = 1_usize << n.max(1).ilog2();
        (octave, (octave / self.token_steps_per_octave.max(1)).max(1))
    }

    /// Pads `n_end` cache rows to the smallest key range that covers them.
    ///
    /// The result is a multiple of [`KV_PAD`], at least `n_end`, and at most `n_ctx_rows` (itself a
    /// multiple of [`KV_PAD`]) as long as `n_end` is. Padding is at most
    /// `max(kv_min, n_end / kv_steps_per_octave) + KV_PAD`.
    pub fn kv(&self, n_end: usize, n_ctx_rows: usize) -> usize {
        let exact = pad_kv(n_end);
        let mut octave = pad_kv(self.kv_min.max(1));
        if exact <= octave {
            return octave.min(n_ctx_rows).max(exact);
        }
        while octave.saturating_mul(2) < exact {
            octave = octave.saturating_mul(2);
        }
        // A step is whole strides of the kernel, so the sums are, too.
        let step = pad_kv(octave / self.kv_steps_per_octave.max(1)).max(KV_PAD);
        let above = (exact - octave).div_ceil(step).saturating_mul(step);
        let padded = octave.saturating_add(above).min(octave.saturating_mul(2));
        // At the end of the cache the bucket is what is there.
        padded.min(n_ctx_rows).max(exact)
    }

    /// Pads `n` wanted rows to the output rows of a `Tail`: 1, or a power of two.
    ///
    /// Never above `n_out_max` (the token rows of the bucket, or the logit rows that fit) as long as
    /// `n` is not.
    pub fn n_out(&self, n: usize, n_out_max: usize) -> usize {
        n.checked_next_power_of_two()
            .unwrap_or(n)
            .min(n_out_max)
            .max(n)
    }
}

/// Rounds cache rows up to a multiple of [`KV_PAD`]; saturates instead of overflowing.
pub fn pad_kv(n: usize) -> usize {
    n.saturating_add(KV_PAD - 1) / KV_PAD * KV_PAD
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ladders() -> impl Strategy<Value = Ladder> {
        (1_usize..5000, 0_usize..9000, 0_usize..17, 0_usize..17).prop_map(
            |(chunk, kv_min, k, t)| Ladder {
                chunk,
                kv_min,
                kv_steps_per_octave: k,
                token_steps_per_octave: t,
            },
        )
    }

    proptest! {
        #[test]
        fn token_bucket_holds_its_tokens_with_bounded_waste(l in ladders(), n in 1_usize..5000) {
            prop_assume!(n <= l.chunk);

            let padded = l.tokens(n);

            prop_assert!(padded >= n && padded <= l.chunk);
            prop_assert!((padded - n) * l.token_steps_per_octave.max(1) < n);
            prop_assert!(n > N_TOKENS_EXACT || padded == n);
        }

        #[test]
        fn token_bucket_is_monotone_and_its_own_bucket(l in ladders(), n in 1_usize..6000) {
            prop_assert!(l.tokens(n) <= l.tokens(n + 1));
            prop_assert_eq!(l.tokens(l.tokens(n)), l.tokens(n));
        }

        #[test]
        fn token_floor_is_a_full_bucket_below(l in ladders(), n in 1_usize..6000) {
            let floor = l.tokens_floor(n);

            prop_assert!(floor >= 1 && floor <= n && floor <= l.chunk.max(N_TOKENS_EXACT));
            prop_assert_eq!(l.tokens(floor), floor);
            prop_assert!(l.tokens(n) != n || n > l.chunk || floor == n);
        }

        #[test]
        fn kv_bucket_covers_the_end_with_bounded_waste(
            l in ladders(), n in 1_usize..300_000, ctx in 1_usize..1200,
        ) {
            let n_ctx_rows = ctx * KV_PAD;
            prop_assume!(n <= n_ctx_rows);

            let n_kv = l.kv(n, n_ctx_rows);

            prop_assert!(n_kv >= n && n_kv <= n_ctx_rows && n_kv % KV_PAD == 0);
            let bound = l.kv_min.max(n / l.kv_steps_per_octave.max(1)) + KV_PAD;
            prop_assert!(n_kv - n <= bound, "{} of {}, bound {}", n_kv, n, bound);
        }

        #[test]
        fn kv_bucket_is_monotone(l in ladders(), n in 1_usize..300_000, ctx in 1_usize..1200) {
            prop_assert!(l.kv(n, ctx * KV_PAD) <= l.kv(n + 1, ctx * KV_PAD));
        }

        #[test]
        fn n_out_is_one_or_a_power_of_two_below_its_cap(n in 1_usize..5000, cap in 1_usize..5000) {
            prop_assume!(n <= cap);

            let n_out = Ladder::default().n_out(n, cap);

            prop_assert!(n_out >= n && n_out <= cap);
            prop_assert!(n_out.is_power_of_two() || n_out == cap);
        }
    }

    #[test]
    fn a_long_context_needs_few_kv_buckets() {
        let l = Ladder::default();
        let mut sizes: Vec<usize> = (1..=262_144).map(|n| l.kv(n, 262_144)).collect();
        sizes.dedup();

        assert_eq!(sizes.first(), Some(&2048));
        assert_eq!(sizes.last(), Some(&262_144));
        assert_eq!(
            sizes.len(),
            1 + 7 * 4,
            "one base and four steps for each of seven octaves"
        );
    }

    #[test]
    fn extreme_sizes_do_not_overflow() {
        let l = Ladder {
            chunk: usize::MAX,
            ..Ladder::default()
        };

        assert!(l.tokens(usize::MAX - 1) >= usize::MAX - 1);
        assert_eq!(l.n_out(usize::MAX, usize::MAX), usize::MAX);
        assert!(l.kv(usize::MAX, usize::MAX) > usize::MAX - KV_PAD);
    }

    #[test]
    fn logit_rows_follow_the_kind() {
        let shape = |kind| BucketShape {
            n_tokens: 64,
            n_kv: 256,
            kind,
        };

        assert_eq!(shape(Kind::Body).n_logit_rows(), 0);
        assert_eq!(shape(Kind::Tail { n_out: 4 }).n_logit_rows(), 4);
        assert_eq!(shape(Kind::Full).n_logit_rows(), 64);
    }
}
