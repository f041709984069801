//! The model's numbers: read from metadata, checked against each other and the tensors, once.
//!
//! Nothing is defaulted except what the format itself leaves out for "none": no soft cap, no
//! experts, no shared layers, no suppressed tokens, and RoPE over the whole head.
//!
//! # Source
//! `models/gemma4.cpp:load_arch_hparams` and `llama-model.cpp:load_hparams` at the pin, and
//! `transformers` 5.24 `Gemma4TextConfig` where they differ (the donor rule).

use super::error::ConfigError;
use super::names::{self, key};
use crate::gguf::{GgufFile, Metadata};

/// Most layers; `LLAMA_MAX_LAYERS`.
pub const MAX_LAYERS: u64 = 512;
/// Most experts; `LLAMA_MAX_EXPERTS`.
pub const MAX_EXPERTS: u64 = 1024;
/// Most heads of one layer.
pub const MAX_HEADS: u64 = 1024;
/// Widest head in elements.
pub const MAX_HEAD_DIM: u64 = 4096;
/// Widest row of the model: embedding, feed-forward, per-layer embedding.
pub const MAX_WIDTH: u64 = 1 << 20;
/// Largest vocabulary.
pub const MAX_VOCAB: u64 = 1 << 24;
/// Longest context and widest window in tokens; positions are 32-bit signed in ggml.
pub const MAX_CTX: u64 = (1 << 31) - 1;

/// The whole model's numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Entries of the vocabulary.
    pub n_vocab: usize,
    /// Context length of the training, in tokens.
    pub n_ctx_train: usize,
    /// Width of the per-layer embeddings; 0 when the model has none.
    pub n_embd_per_layer: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Cap of the final logits, `c * tanh(x / c)`.
    pub logit_softcap: Option<f32>,
    /// Sliding window in tokens: keys with `q - k < n_swa` are visible.
    pub n_swa: usize,
    /// Experts per expert layer; 0 when the model has none.
    pub n_expert: usize,
    /// Experts used per token.
    pub n_expert_used: usize,
    /// Feed-forward width of one expert.
    pub n_ff_exp: usize,
    /// RoPE base of the global layers.
    pub rope_freq_base: f32,
    /// RoPE base of the sliding layers.
    pub rope_freq_base_swa: f32,
    /// Whether the token embeddings are also the output head.
    pub tied_output: bool,
    /// Token ids whose logits are to be suppressed in sampling.
    pub suppress_tokens: Vec<u32>,
    /// The model's name, if the file gives one.
    pub name: Option<String>,
    /// One entry per layer.
    pub layers: Vec<LayerConfig>,
}

/// One layer's numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerConfig {
    /// Index from 0.
    pub il: usize,
    /// Sliding-window attention; otherwise global.
    pub is_swa: bool,
    /// Query heads.
    pub n_head: usize,
    /// Key/value heads.
    pub n_head_kv: usize,
    /// Width of one head, the same for keys and values.
    pub n_embd_head: usize,
    /// Rotated elements of a head.
    pub n_rot: usize,
    /// Width of the dense feed-forward.
    pub n_ff: usize,
    /// Whether the layer computes and stores K and V.
    pub owns_kv: bool,
    /// Layer whose K and V this one reads; itself when it owns them.
    pub donor: usize,
    /// V is the raw K projection: the file has no `attn_v`. False on KV-shared layers.
    pub v_from_k: bool,
    /// Whether experts run beside the dense feed-forward.
    pub is_moe: bool,
    /// Whether the file holds `attn_qkv` in place of `attn_q`, `attn_k` and `attn_v`.
    pub qkv_fused_in_file: bool,
    /// Whether the file holds `ffn_gate_up_exps` in place of two tensors.
    pub experts_fused_in_file: bool,
    /// Whether the layer's output is scaled.
    pub has_out_scale: bool,
    /// Whether each expert's output is scaled.
    pub has_expert_down_scale: bool,
}

impl Config {
    /// Reads and checks the configuration, and every tensor's presence, shape and type.
    ///
    /// # Errors
    /// See [`ConfigError`]: the first fault found, by key or tensor name.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ConfigError> {
        let r = Reader {
            file,
            md: file.metadata(),
        };
        r.check_supported()?;
        let n_layer = r.number(key::BLOCK_COUNT, 1, MAX_LAYERS)?;
        let is_swa = r.pattern(n_layer)?;
        let has_swa = is_swa.contains(&true);
        let n_vocab = r.n_vocab()?;
        let (n_expert, n_expert_used, n_ff_exp) = r.experts(n_layer)?;
        let config = Self {
            n_layer,
            n_embd: r.number(key::EMBEDDING_LENGTH, 1, MAX_WIDTH)?,
            n_vocab,
            n_ctx_train: r.number(key::CONTEXT_LENGTH, 1, MAX_CTX)?,
            n_embd_per_layer: r.number(key::EMBEDDING_LENGTH_PER_LAYER, 0, MAX_WIDTH)?,
            rms_eps: r.positive(key::RMS_EPS)?,
            logit_softcap: r.softcap()?,
            n_swa: if has_swa {
                r.number(key::SLIDING_WINDOW, 1, MAX_CTX)?
            } else {
                0
            },
            n_expert,
            n_expert_used,
            n_ff_exp,
            rope_freq_base: r.positive(key::ROPE_FREQ_BASE)?,
            rope_freq_base_swa: r.positive(key::ROPE_FREQ_BASE_SWA)?,
            tied_output: file.tensor(names::OUTPUT).is_none(),
            suppress_tokens: r.suppress_tokens(n_vocab)?,
            name: r.md.opt_str(key::NAME)?.map(str::to_owned),
            layers: r.layers(&is_swa, n_expert)?,
        };
        names::check(file, &config)?;
        Ok(config)
    }

    /// Returns the last layer that computes K and V.
    pub fn last_kv_layer(&self) -> usize {
        self.layers.iter().rposition(|l| l.owns_kv).unwrap_or(0)
    }
}

/// Reads keys with their ranges.
struct Reader<'a> {
    file: &'a GgufFile,
    md: &'a Metadata,
}

impl Reader<'_> {
    fn path(&self) -> std::path::PathBuf {
        self.md.path().to_path_buf()
    }

    fn check_range(&self, key: &str, found: u32, min: u64, max: u64) -> Result<usize, ConfigError> {
        if (min..=max).contains(&u64::from(found)) {
            return Ok(found as usize);
        }
        let (path, key, found) = (self.path(), key.to_owned(), found.into());
        Err(ConfigError::Range {
            path,
            key,
            min,
            max,
            found,
        })
    }

    fn number(&self, key: &str, min: u64, max: u64) -> Result<usize, ConfigError> {
        self.check_range(key, self.md.u32(key)?, min, max)
    }

    fn opt_number(&self, key: &str, min: u64, max: u64) -> Result<Option<usize>, ConfigError> {
        self.md
            .opt_u32(key)?
            .map(|found| self.check_range(key, found, min, max))
            .transpose()
    }

    fn per_layer(
        &self,
        key: &str,
        n_layer: usize,
        min: u64,
        max: u64,
    ) -> Result<Vec<usize>, ConfigError> {
        let raw = self.md.per_layer_u32(key, n_layer)?;
        raw.into_iter()
            .map(|found| self.check_range(key, found, min, max))
            .collect()
    }

    /// Reads a per-layer number that has to be the same everywhere.
    fn uniform(&self, key: &str, n_layer: usize, min: u64, max: u64) -> Result<usize, ConfigError> {
        let all = self.md.per_layer_u32(key, n_layer)?;
        let first = all.first().copied().unwrap_or(0);
        if let Some((il, &found)) = all.iter().enumerate().find(|(_, n)| **n != first) {
            let (path, key) = (self.path(), key.to_owned());
            return Err(ConfigError::NotUniform {
                path,
                key,
                il,
                first,
                found,
            });
        }
        self.check_range(key, first, min, max)
    }

    fn positive(&self, key: &str) -> Result<f32, ConfigError> {
        let found = self.md.f32(key)?;
        if found > 0.0 {
            return Ok(found);
        }
        Err(ConfigError::NotPositive {
            path: self.path(),
            key: key.to_owned(),
            found,
        })
    }

    /// Reads the cap of the logits; upstream writes and reads 0 as "none".
    fn softcap(&self) -> Result<Option<f32>, ConfigError> {
        match self.md.opt_f32(key::FINAL_LOGIT_SOFTCAPPING)? {
            None | Some(0.0) => Ok(None),
            Some(_) => self.positive(key::FINAL_LOGIT_SOFTCAPPING).map(Some),
        }
    }

    /// Refuses other architectures and keys that would change the computation.
    fn check_supported(&self) -> Result<(), ConfigError> {
        let found = self.md.str(key::ARCHITECTURE)?;
        if found != names::ARCHITECTURE {
            let (path, found) = (self.path(), found.to_owned());
            return Err(ConfigError::Architecture {
                path,
                expected: names::ARCHITECTURE,
                found,
            });
        }
        let refuse = |key: &str, expected, found: String| {
            Err(ConfigError::Unsupported {
                path: self.path(),
                key: key.to_owned(),
                expected,
                found,
            })
        };
        if self.md.opt_bool(key::CAUSAL)? == Some(false) {
            return refuse(key::CAUSAL, "causal attention", "false".to_owned());
        }
        if let Some(n @ 1..) = self.md.opt_u32(key::NEXTN_PREDICT_LAYERS)? {
            return refuse(key::NEXTN_PREDICT_LAYERS, "0", n.to_string());
        }
        for key in [key::ROPE_SCALING_FACTOR, key::ROPE_SCALE_LINEAR] {
            // Upstream reads 0 as "not given".
            match self.md.opt_f32(key)? {
                None | Some(0.0 | 1.0) => {}
                Some(factor) => return refuse(key, "no RoPE scaling", factor.to_string()),
            }
        }
        match self.md.opt_str(key::ROPE_SCALING_TYPE)? {
            // "linear" with factor 1, which was checked above, changes nothing.
            None | Some("none" | "linear") => Ok(()),
            Some(other) => refuse(key::ROPE_SCALING_TYPE, "no RoPE scaling", other.to_owned()),
        }
    }

    /// Reads which layers slide: one boolean per layer, or a period whose last layer is global.
    ///
    /// # Source
    /// `llama-hparams.cpp:set_swa_pattern`: layer `il` slides when `il % period < period - 1`.
    fn pattern(&self, n_layer: usize) -> Result<Vec<bool>, ConfigError> {
        if let Some(is_swa) = self
            .md
            .per_layer_bool(key::SLIDING_WINDOW_PATTERN, n_layer)?
        {
            return Ok(is_swa);
        }
        let period = self.number(key::SLIDING_WINDOW_PATTERN, 1, MAX_LAYERS)?;
        Ok((0..n_layer).map(|il| il % period < period - 1).collect())
    }

    /// Takes the vocabulary from the embedding tensor; the keys that repeat it must agree.
    fn n_vocab(&self) -> Result<usize, ConfigError> {
        let missing = || ConfigError::MissingTensor {
            path: self.path(),
            tensor: names::TOKEN_EMBD.to_owned(),
            expected: Vec::new(),
        };
        let [_, rows, ..] = self
            .file
            .tensor(names::TOKEN_EMBD)
            .ok_or_else(missing)?
            .shape;
        let tokens = self
            .md
            .strings(key::TOKENS)
            .ok()
            .flatten()
            .map(|v| v.len() as u64);
        let size = self.md.opt_u64(key::VOCAB_SIZE)?;
        for (key, found) in [(key::TOKENS, tokens), (key::VOCAB_SIZE, size)] {
            let Some(found) = found.filter(|&found| found != rows) else {
                continue;
            };
            return Err(ConfigError::Disagree {
                path: self.path(),
                key: key.to_owned(),
                other: names::TOKEN_EMBD.to_owned(),
                expected: rows,
                found,
            });
        }
        usize::try_from(rows)
            .ok()
            .filter(|_| rows <= MAX_VOCAB)
            .ok_or_else(|| ConfigError::Range {
                path: self.path(),
                key: names::TOKEN_EMBD.to_owned(),
                min: 1,
                max: MAX_VOCAB,
                found: rows,
            })
    }

    /// Reads expert count, experts used and their width; all 0 for a dense model.
    fn experts(&self, n_layer: usize) -> Result<(usize, usize, usize), ConfigError> {
        let n_expert = self
            .opt_number(key::EXPERT_COUNT, 0, MAX_EXPERTS)?
            .unwrap_or(0);
        if n_expert == 0 {
            return Ok((0, 0, 0));
        }
        let used = self.uniform(key::EXPERT_USED_COUNT, n_layer, 1, n_expert as u64)?;
        let n_ff = self.uniform(key::EXPERT_FEED_FORWARD_LENGTH, n_layer, 1, MAX_WIDTH)?;
        Ok((n_expert, used, n_ff))
    }

    /// Reads the ids to suppress; ids outside the vocabulary are dropped, as upstream does.
    ///
    /// # Source
    /// `llama-vocab.cpp:impl::load`, "drop out-of-range ids".
    fn suppress_tokens(&self, n_vocab: usize) -> Result<Vec<u32>, ConfigError> {
        let raw = self.md.i32s(key::SUPPRESS_TOKENS)?.unwrap_or_default();
        let ids = raw.into_iter().filter_map(|id| u32::try_from(id).ok());
        Ok(ids.filter(|&id| (id as usize) < n_vocab).collect())
    }

    /// Reads one head width and checks that keys and values agree on it.
    fn head_dim(&self, k: &str, v: &str) -> Result<usize, ConfigError> {
        let n_embd_head = self.number(k, 2, MAX_HEAD_DIM)?;
        let found = self.number(v, 2, MAX_HEAD_DIM)?;
        if found != n_embd_head {
            return Err(ConfigError::Disagree {
                path: self.path(),
                key: v.to_owned(),
                other: k.to_owned(),
                expected: n_embd_head as u64,
                found: found as u64,
            });
        }
        self.even(k, n_embd_head)
    }

    fn even(&self, key: &str, n: usize) -> Result<usize, ConfigError> {
        if n.is_multiple_of(2) {
            return Ok(n);
        }
        Err(ConfigError::Odd {
            path: self.path(),
            key: key.to_owned(),
            found: n as u64,
        })
    }

    /// Reads how much of a head rotates; files without the key rotate all of it.
    fn n_rot(&self, key: &str, n_embd_head: usize) -> Result<usize, ConfigError> {
        let n_rot = self
            .opt_number(key, 2, n_embd_head as u64)?
            .unwrap_or(n_embd_head);
        self.even(key, n_rot)
    }

    fn layers(&self, is_swa: &[bool], n_expert: usize) -> Result<Vec<LayerConfig>, ConfigError> {
        let n_layer = is_swa.len();
        let n_shared = self
            .opt_number(key::SHARED_KV_LAYERS, 0, n_layer as u64 - 1)?
            .unwrap_or(0);
        let n_layer_kv = n_layer - n_shared;
        let n_head = self.per_layer(key::HEAD_COUNT, n_layer, 1, MAX_HEADS)?;
        let n_head_kv = self.per_layer(key::HEAD_COUNT_KV, n_layer, 1, MAX_HEADS)?;
        let n_ff = self.per_layer(key::FEED_FORWARD_LENGTH, n_layer, 1, MAX_WIDTH)?;
        let head = self.head_dim(key::KEY_LENGTH, key::VALUE_LENGTH)?;
        let head_swa = self.head_dim(key::KEY_LENGTH_SWA, key::VALUE_LENGTH_SWA)?;
        let n_rot = self.n_rot(key::ROPE_DIMENSION_COUNT, head)?;
        let n_rot_swa = self.n_rot(key::ROPE_DIMENSION_COUNT_SWA, head_swa)?;
        let v_from_k = self.v_from_k(is_swa, n_layer_kv);
        let has_moe = n_expert > 0 && (0..n_layer).any(|il| self.has_moe_tensor(il));
        let mut layers = Vec::with_capacity(n_layer);
        let numbers = is_swa
            .iter()
            .zip(n_head)
            .zip(n_head_kv)
            .zip(n_ff)
            .enumerate();
        for (il, (((&is_swa, n_head), n_head_kv), n_ff)) in numbers {
            self.check_head_ratio(il, n_head, n_head_kv)?;
            let owns_kv = il < n_layer_kv;
            layers.push(LayerConfig {
                il,
                is_swa,
                n_head,
                n_head_kv,
                n_embd_head: if is_swa { head_swa } else { head },
                n_rot: if is_swa { n_rot_swa } else { n_rot },
                n_ff,
                owns_kv,
                donor: self.donor(&layers, il, is_swa, n_layer_kv)?,
                v_from_k: owns_kv && !is_swa && v_from_k,
                // No expert tensor at all in a model with experts: every layer is missing them.
                is_moe: n_expert > 0 && (!has_moe || self.has_moe_tensor(il)),
                qkv_fused_in_file: self.has(&names::attn_qkv(il)),
                experts_fused_in_file: self.has(&names::ffn_gate_up_exps(il)),
                has_out_scale: self.has(&names::layer_output_scale(il)),
                has_expert_down_scale: self.has(&names::ffn_down_exps_scale(il)),
            });
        }
        self.check_donors(&layers)?;
        Ok(layers)
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    fn has_moe_tensor(&self, il: usize) -> bool {
        names::moe_names(il).iter().any(|name| self.has(name))
    }

    /// Says whether V is the raw K projection on the global layers that own K and V.
    ///
    /// `transformers` has one switch for all of them (`attention_k_eq_v`), so a file omits
    /// `attn_v` on all or on none; with it on some, the others count as missing.
    fn v_from_k(&self, is_swa: &[bool], n_layer_kv: usize) -> bool {
        let owners = is_swa
            .iter()
            .take(n_layer_kv)
            .enumerate()
            .filter(|(_, is_swa)| !**is_swa);
        let mut has_v =
            owners.map(|(il, _)| self.has(&names::attn_v(il)) || self.has(&names::attn_qkv(il)));
        !has_v.any(|has_v| has_v)
    }

    fn check_head_ratio(&self, il: usize, n_head: usize, n_kv: usize) -> Result<(), ConfigError> {
        if n_head.is_multiple_of(n_kv) {
            return Ok(());
        }
        // Both were u32 in the file and are capped.
        let [n_head, n_head_kv] = [n_head, n_kv].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Err(ConfigError::HeadRatio {
            path: self.path(),
            il,
            n_head,
            n_head_kv,
        })
    }

    /// Finds the layer whose K and V layer `il` reads: the last owning layer of its own type.
    ///
    /// # Source
    /// `transformers` 5.24 `Gemma4TextAttention`. llama.cpp takes fixed layers instead and aborts
    /// on patterns where the two rules differ (fixture `e-donor-f32`).
    fn donor(
        &self,
        below: &[LayerConfig],
        il: usize,
        is_swa: bool,
        n_layer_kv: usize,
    ) -> Result<usize, ConfigError> {
        if il < n_layer_kv {
            return Ok(il);
        }
        let donor = below.iter().rposition(|l| l.owns_kv && l.is_swa == is_swa);
        donor.ok_or_else(|| ConfigError::NoDonor {
            path: self.path(),
            il,
            n_layer_kv,
            kind: if is_swa { "sliding" } else { "global" },
        })
    }

    /// A KV-shared layer reads its donor's heads: both must say the same number of them.
    fn check_donors(&self, layers: &[LayerConfig]) -> Result<(), ConfigError> {
        for layer in layers {
            let Some(donor) = layers.get(layer.donor) else {
                continue;
            };
            if donor.n_head_kv != layer.n_head_kv {
                return Err(ConfigError::Disagree {
                    path: self.path(),
                    key: format!("{}[{}]", key::HEAD_COUNT_KV, layer.il),
                    other: format!("{}[{}]", key::HEAD_COUNT_KV, layer.donor),
                    expected: donor.n_head_kv as u64,
                    found: layer.n_head_kv as u64,
                });
            }
        }
        Ok(())
    }
}
