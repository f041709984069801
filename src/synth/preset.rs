//! The numbers of a synthetic model: presets, and the checks that a specification must pass.

use super::error::SynthError;
use super::quant::WeightType;

/// Beginning of the `general.name` of every synthetic model.
pub const NAME: &str = "g4prefill synthetic";

/// Everything that decides the bytes of a synthetic model, besides its file name.
///
/// Start from [`Spec::preset`] and change what should differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// `general.name`.
    pub name: String,
    /// Seed of all weights.
    pub seed: u64,
    /// Type of the matrix weights.
    pub weight_type: WeightType,
    /// Type of the per-layer embedding table, if it should differ.
    pub ple_type: Option<WeightType>,
    /// Layers.
    pub n_layer: u32,
    /// Model width.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// K/V heads of sliding layers.
    pub n_head_kv: u32,
    /// K/V heads of global layers.
    pub n_head_kv_full: u32,
    /// Head width of global layers.
    pub head_dim: u32,
    /// Head width of sliding layers.
    pub head_dim_swa: u32,
    /// Feed-forward width.
    pub n_ff: u32,
    /// The K/V-shared layers have twice the feed-forward width.
    pub wide_shared_ff: bool,
    /// Sliding window in tokens.
    pub n_swa: u32,
    /// Vocabulary size.
    pub n_vocab: u32,
    /// `context_length`.
    pub n_ctx_train: u32,
    /// Layers at the end that own no K/V.
    pub n_shared_kv: u32,
    /// One letter per layer, `S` sliding or `F` full; repeated when shorter than the model.
    pub pattern: String,
    /// Width of the per-layer embeddings, 0 for none.
    pub n_embd_per_layer: u32,
    /// Experts, 0 for a dense model.
    pub n_expert: u32,
    /// Experts used per token.
    pub n_expert_used: u32,
    /// Feed-forward width of one expert.
    pub n_ff_exp: u32,
    /// Global layers have no V projection: V is the raw K projection.
    pub k_eq_v: bool,
    /// Leave out the K/V tensors of shared layers, as files of quantisation-aware training do.
    pub trim_shared: bool,
    /// Store Q, K and V of a layer as one tensor, where the layer has all three.
    pub fused_qkv: bool,
    /// Store gate and up of the experts as two tensors.
    pub split_experts: bool,
    /// A separate `output.weight`.
    pub untied_output: bool,
    /// Write per-layer numbers as arrays even where one number would do.
    pub array_metadata: bool,
    /// Shards, 1 for a single file.
    pub n_shard: u32,
}

impl Spec {
    /// The names that [`Spec::preset`] knows, for messages.
    pub const PRESETS: &'static str = "tiny, tiny-dense, tiny-moe, mini, mini-dense, mini-moe, \
                                       e2b, e4b, 12b, 26b-a4b, 31b";

    /// Returns the preset called `name`, in q8_0 with seed 0.
    ///
    /// # Errors
    /// [`SynthError::Word`] for an unknown name.
    ///
    /// # Source
    /// The released models' configurations; `tiny*` and `mini*` keep the real head widths.
    pub fn preset(name: &str) -> Result<Self, SynthError> {
        let base = Self::base(name);
        Ok(match name {
            "tiny" => base
                .e_series(10, 256, 512, 64)
                .heads(4, 1, 1)
                .shared(4, 64)
                .cycle("SSSSSFSSSF"),
            "tiny-dense" => base.dense(8, 256, 512, 64).heads(4, 2, 1).cycle("SSSF"),
            "tiny-moe" => base
                .dense(8, 256, 256, 64)
                .heads(4, 2, 1)
                .cycle("SSSF")
                .experts(8, 2, 128),
            "mini" => base
                .e_series(12, 512, 1536, 512)
                .heads(4, 1, 1)
                .shared(6, 128),
            "mini-dense" => base.dense(12, 512, 1536, 512).heads(4, 2, 1),
            "mini-moe" => base
                .dense(12, 512, 512, 512)
                .heads(4, 2, 1)
                .experts(16, 4, 256),
            "e2b" => Self {
                wide_shared_ff: true,
                ..base.e_series(35, 1536, 6144, 512)
            }
            .heads(8, 1, 1)
            .shared(20, 256)
            .cycle("SSSSF"),
            "e4b" => base
                .e_series(42, 2560, 10240, 512)
                .heads(8, 2, 2)
                .shared(18, 256),
            "12b" => base.dense(48, 3840, 15360, 1024).heads(16, 8, 1),
            "26b-a4b" => base
                .dense(30, 2816, 2112, 1024)
                .heads(16, 8, 2)
                .experts(128, 8, 704),
            "31b" => base.dense(60, 5376, 21504, 1024).heads(32, 16, 4),
            _ => {
                return Err(SynthError::Word {
                    name: "preset",
                    expected: Self::PRESETS,
                    found: name.to_owned(),
                });
            }
        })
    }

    /// What all presets of a size have in common.
    fn base(name: &str) -> Self {
        let n_vocab = match name.split('-').next() {
            Some("tiny") => 512,
            Some("mini") => 4096,
            _ => 262_144,
        };
        Self {
            name: format!("{NAME} {name}"),
            seed: 0,
            weight_type: WeightType::Q8_0,
            ple_type: None,
            n_layer: 0,
            n_embd: 0,
            n_head: 0,
            n_head_kv: 0,
            n_head_kv_full: 0,
            head_dim: 512,
            head_dim_swa: 256,
            n_ff: 0,
            wide_shared_ff: false,
            n_swa: 0,
            n_vocab,
            n_ctx_train: 131_072,
            n_shared_kv: 0,
            pattern: "SSSSSF".to_owned(),
            n_embd_per_layer: 0,
            n_expert: 0,
            n_expert_used: 0,
            n_ff_exp: 0,
            k_eq_v: false,
            trim_shared: false,
            fused_qkv: false,
            split_experts: false,
            untied_output: false,
            array_metadata: false,
            n_shard: 1,
        }
    }

    /// Sizes of a model with per-layer embeddings.
    fn e_series(self, n_layer: u32, n_embd: u32, n_ff: u32, n_swa: u32) -> Self {
        Self {
            n_layer,
            n_embd,
            n_ff,
            n_swa,
            ..self
        }
    }

    /// Sizes of a model without per-layer embeddings: K = V on global layers.
    fn dense(self, n_layer: u32, n_embd: u32, n_ff: u32, n_swa: u32) -> Self {
        let n_ctx_train = 262_144;
        Self {
            n_layer,
            n_embd,
            n_ff,
            n_swa,
            n_ctx_train,
            k_eq_v: true,
            ..self
        }
    }

    /// Query heads, K/V heads of sliding and of global layers.
    fn heads(self, n_head: u32, n_head_kv: u32, n_head_kv_full: u32) -> Self {
        Self {
            n_head,
            n_head_kv,
            n_head_kv_full,
            ..self
        }
    }

    /// K/V-shared layers and width of the per-layer embeddings.
    fn shared(self, n_shared_kv: u32, n_embd_per_layer: u32) -> Self {
        Self {
            n_shared_kv,
            n_embd_per_layer,
            ..self
        }
    }

    /// Layer pattern.
    fn cycle(self, pattern: &str) -> Self {
        Self {
            pattern: pattern.to_owned(),
            ..self
        }
    }

    /// Experts, experts used, feed-forward width of one.
    fn experts(self, n_expert: u32, n_expert_used: u32, n_ff_exp: u32) -> Self {
        Self {
            n_expert,
            n_expert_used,
            n_ff_exp,
            ..self
        }
    }

    /// Returns whether layer `il` has sliding attention.
    pub fn is_swa(&self, il: u32) -> bool {
        let pattern = self.pattern.as_bytes();
        let at = usize::try_from(il).unwrap_or(0) % pattern.len().max(1);
        pattern.get(at).is_some_and(|&letter| letter == b'S')
    }

    /// Returns whether layer `il` owns K/V.
    pub fn owns_kv(&self, il: u32) -> bool {
        il < self.n_layer - self.n_shared_kv
    }

    /// Returns the head width of layer `il`.
    pub fn n_embd_head(&self, il: u32) -> u32 {
        if self.is_swa(il) {
            self.head_dim_swa
        } else {
            self.head_dim
        }
    }

    /// Returns the K/V heads of layer `il`.
    pub fn n_head_kv_at(&self, il: u32) -> u32 {
        if self.is_swa(il) {
            self.n_head_kv
        } else {
            self.n_head_kv_full
        }
    }

    /// Returns the feed-forward width of layer `il`.
    pub fn n_ff_at(&self, il: u32) -> u32 {
        if self.wide_shared_ff && !self.owns_kv(il) {
            2 * self.n_ff
        } else {
            self.n_ff
        }
    }

    /// Checks every number against the others.
    ///
    /// # Errors
    /// The first [`SynthError`] found, naming the number.
    pub fn validate(&self) -> Result<(), SynthError> {
        for (name, value) in [
            ("n_layer", self.n_layer),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_head_kv", self.n_head_kv),
            ("n_head_kv_full", self.n_head_kv_full),
            ("n_ff", self.n_ff),
            ("n_swa", self.n_swa),
            ("n_ctx_train", self.n_ctx_train),
            ("split", self.n_shard),
        ] {
            within(name, value, 1, 1 << 24)?;
        }
        within("n_layer", self.n_layer, 1, 512)?;
        within("n_embd", self.n_embd, 1, 1 << 17)?;
        within("n_head", self.n_head, 1, 1 << 10)?;
        within("n_ff", self.n_ff, 1, 1 << 20)?;
        within("n_embd_per_layer", self.n_embd_per_layer, 0, 1 << 12)?;
        within("n_expert", self.n_expert, 0, 1 << 12)?;
        within("split", self.n_shard, 1, 999)?;
        within("n_vocab", self.n_vocab, super::vocab::MIN_N_VOCAB, 1 << 24)?;
        within("n_shared_kv", self.n_shared_kv, 0, self.n_layer - 1)?;
        for (name, value) in [
            ("head_dim", self.head_dim),
            ("head_dim_swa", self.head_dim_swa),
        ] {
            within(name, value, 32, 1 << 12)?;
            multiple(name, value, 32)?;
        }
        for (name, value) in [("n_embd", self.n_embd), ("n_ff", self.n_ff)] {
            multiple(name, value, 32)?;
        }
        multiple("n_embd_per_layer", self.n_embd_per_layer, 32)?;
        multiple("n_head", self.n_head, self.n_head_kv)?;
        multiple("n_head", self.n_head, self.n_head_kv_full)?;
        if self.n_expert > 0 {
            within("n_expert_used", self.n_expert_used, 1, self.n_expert)?;
            within("n_ff_exp", self.n_ff_exp, 32, 1 << 20)?;
            multiple("n_ff_exp", self.n_ff_exp, 32)?;
        }
        self.validate_ple_type()?;
        self.validate_pattern()
    }

    /// An explicit type of the per-layer table is kept or refused, never replaced.
    fn validate_ple_type(&self) -> Result<(), SynthError> {
        let row = u64::from(self.n_embd_per_layer) * u64::from(self.n_layer);
        match self.ple_type {
            Some(ty) if row % ty.block_len() != 0 => Err(SynthError::Number {
                name: "n_embd_per_layer * n_layer",
                expected: format!("a multiple of {} for {}", ty.block_len(), ty.name()),
                found: row,
            }),
            _ => Ok(()),
        }
    }

    /// Checks the letters, and that every shared layer has a donor.
    fn validate_pattern(&self) -> Result<(), SynthError> {
        let known = |letter| letter == b'S' || letter == b'F';
        if self.pattern.is_empty() || !self.pattern.bytes().all(known) {
            return Err(SynthError::Pattern {
                found: self.pattern.clone(),
            });
        }
        let n_owning = self.n_layer - self.n_shared_kv;
        for il in n_owning..self.n_layer {
            if !(0..n_owning).any(|donor| self.is_swa(donor) == self.is_swa(il)) {
                let (il, n_owning) = (il as usize, n_owning as usize);
                return Err(SynthError::NoDonor { il, n_owning });
            }
        }
        Ok(())
    }
}

/// Fails unless `lo <= value <= hi`.
fn within(name: &'static str, value: u32, lo: u32, hi: u32) -> Result<(), SynthError> {
    if (lo..=hi).contains(&value) {
        return Ok(());
    }
    let expected = format!("between {lo} and {hi}");
    Err(SynthError::Number {
        name,
        expected,
        found: u64::from(value),
    })
}

/// Fails unless `value` is a multiple of `of`.
fn multiple(name: &'static str, value: u32, of: u32) -> Result<(), SynthError> {
    if value.is_multiple_of(of) {
        return Ok(());
    }
    let expected = format!("a multiple of {of}");
    Err(SynthError::Number {
        name,
        expected,
        found: u64::from(value),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESETS: [&str; 11] = [
        "tiny",
        "tiny-dense",
        "tiny-moe",
        "mini",
        "mini-dense",
        "mini-moe",
        "e2b",
        "e4b",
        "12b",
        "26b-a4b",
        "31b",
    ];

    #[test]
    fn every_preset_is_valid_and_ends_with_a_global_layer() {
        for name in PRESETS {
            let spec = Spec::preset(name).unwrap();
            spec.validate().unwrap();
            assert!(!spec.is_swa(spec.n_layer - 1), "{name}");
            assert!(Spec::PRESETS.contains(name));
        }
    }

    #[test]
    fn shared_tails_start_after_a_sliding_and_a_global_layer() {
        // llama.cpp's simple donor rule agrees with the right one only then.
        for name in ["tiny", "mini", "e2b", "e4b"] {
            let spec = Spec::preset(name).unwrap();
            let n_owning = spec.n_layer - spec.n_shared_kv;
            assert!(
                !spec.is_swa(n_owning - 1) && spec.is_swa(n_owning - 2),
                "{name}"
            );
        }
    }

    #[test]
    fn wrong_numbers_are_named() {
        let good = Spec::preset("tiny").unwrap();
        let cases = [
            (
                "n_head",
                Spec {
                    n_head: 3,
                    n_head_kv: 2,
                    ..good.clone()
                },
            ),
            (
                "n_embd",
                Spec {
                    n_embd: 100,
                    ..good.clone()
                },
            ),
            (
                "n_vocab",
                Spec {
                    n_vocab: 10,
                    ..good.clone()
                },
            ),
            (
                "n_shared_kv",
                Spec {
                    n_shared_kv: 10,
                    ..good.clone()
                },
            ),
            (
                "n_layer",
                Spec {
                    n_layer: 0,
                    ..good.clone()
                },
            ),
            (
                "n_expert_used",
                Spec {
                    n_expert: 4,
                    ..good.clone()
                },
            ),
        ];

        for (want, spec) in cases {
            match spec.validate() {
                Err(SynthError::Number { name, .. }) => assert_eq!(name, want),
                other => panic!("{want}: {other:?}"),
            }
        }
        let no_donor = Spec {
            pattern: "SSSSSSSSSF".to_owned(),
            ..good.clone()
        };
        assert!(matches!(
            no_donor.validate(),
            Err(SynthError::NoDonor { il: 9, n_owning: 6 })
        ));
        let letters = Spec {
            pattern: "SXF".to_owned(),
            ..good
        };
        assert!(matches!(
            letters.validate(),
            Err(SynthError::Pattern { .. })
        ));
    }
}
