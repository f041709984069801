//! Which tensors a specification has, their shapes, types and distributions.
//!
//! Conditioning. Embeddings have unit size after their scaling; matrices keep the size of what
//! they multiply (deviation 1 / sqrt(fan in)); attention scores have deviation 1.5; each block adds
//! a modest part to the stream (post-norm weights well below 1), less in deeper models, so that
//! the sum over all layers is the same and a rounding error does not grow; `output_norm` gives
//! logits a deviation of about 5.5, with random signs, so that a token does not predict itself.

use super::preset::Spec;
use super::quant::WeightType;
use super::rng::{Fill, Stream};

/// A run of elements taken from one stream.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) stream: Stream,
    pub(super) fill: Fill,
    /// First element in the stream.
    pub(super) start: u64,
    /// Elements.
    pub(super) n: u64,
}

/// One tensor of the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// ggml order, fastest first.
    pub(super) shape: Vec<u64>,
    pub(super) ty: WeightType,
    /// Where its elements come from, in order; together they are the whole tensor.
    pub(super) parts: Vec<Part>,
}

impl Tensor {
    /// Returns the number of elements.
    pub(super) fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the bytes of the data.
    pub(super) fn n_bytes(&self) -> u64 {
        self.ty.n_bytes(self.n_elements())
    }
}

/// Returns the tensors in file order.
pub(super) fn tensors(spec: &Spec) -> Vec<Tensor> {
    let mut layout = Layout {
        spec,
        depth: Depth::new(spec),
        tensors: Vec::new(),
    };
    layout.head();
    for il in 0..spec.n_layer {
        layout.attention(il);
        layout.feed_forward(il);
        if spec.n_expert > 0 {
            layout.experts(il);
        }
        if spec.n_embd_per_layer > 0 {
            layout.per_layer(il);
        }
    }
    layout.tensors
}

/// How much one block adds, as a function of depth.
struct Depth {
    /// Factor of all post-norm weights.
    gain: f32,
    /// Mean and deviation of `layer_output_scale`.
    out_scale: (f32, f32),
}

impl Depth {
    fn new(spec: &Spec) -> Self {
        // Up to 12 layers as the reference fixtures; deeper: variance per layer ~ 1 / n_layer.
        let share = f64::from(12.0_f32) / f64::from(spec.n_layer.max(12));
        Self {
            gain: narrow(share.sqrt()),
            out_scale: (narrow(1.0 - 0.15 * share), narrow(0.03 * share)),
        }
    }
}

/// Rounds a parameter to f32 (IEEE, the same everywhere).
#[expect(clippy::cast_possible_truncation, reason = "the rounding is wanted")]
fn narrow(x: f64) -> f32 {
    x as f32
}

/// A norm weight around `mean` with a spread of a fifth.
fn norm(mean: f32) -> Fill {
    Fill::Normal {
        mean,
        std: 0.2 * mean,
    }
}

/// A matrix that keeps the size of its input.
fn matrix(fan_in: u32) -> Fill {
    Fill::Normal {
        mean: 0.0,
        std: narrow(1.0 / f64::from(fan_in).sqrt()),
    }
}

struct Layout<'a> {
    spec: &'a Spec,
    depth: Depth,
    tensors: Vec<Tensor>,
}

impl Layout<'_> {
    /// The whole stream of the tensor `name`.
    fn stream(&self, name: &str) -> Stream {
        Stream::new(self.spec.seed, name)
    }

    /// Adds a tensor whose elements are one stream.
    fn push(&mut self, name: String, shape: &[u32], ty: WeightType, fill: Fill) {
        let shape: Vec<u64> = shape.iter().map(|&n| u64::from(n)).collect();
        let part = Part {
            stream: self.stream(&name),
            fill,
            start: 0,
            n: shape.iter().product(),
        };
        let ty = shape.first().map_or(ty, |&ne0| ty.for_row(ne0));
        self.tensors.push(Tensor {
            name,
            shape,
            ty,
            parts: vec![part],
        });
    }

    /// Adds an F32 vector of layer `il`.
    fn vector(&mut self, il: u32, name: &str, n: u32, fill: Fill) {
        self.push(blk(il, name), &[n], WeightType::F32, fill);
    }

    /// Adds a matrix `[n_in, n_out]` of layer `il`.
    fn weight(&mut self, il: u32, name: &str, n_in: u32, n_out: u32) {
        self.push(
            blk(il, name),
            &[n_in, n_out],
            self.spec.weight_type,
            matrix(n_in),
        );
    }

    /// Tensors outside the layers.
    fn head(&mut self) {
        let spec = self.spec;
        let (n_embd, n_vocab, ty) = (spec.n_embd, spec.n_vocab, spec.weight_type);
        if (0..spec.n_layer).any(|il| !spec.is_swa(il)) {
            // A quarter of the width rotates: 64 of 256 pairs at head width 512.
            let fill = Fill::RopeFactors {
                n_active: u64::from(spec.head_dim / 8),
            };
            self.push(
                "rope_freqs.weight".into(),
                &[spec.head_dim / 2],
                WeightType::F32,
                fill,
            );
        }
        self.push(
            "token_embd.weight".into(),
            &[n_embd, n_vocab],
            ty,
            matrix(n_embd),
        );
        if spec.untied_output {
            self.push(
                "output.weight".into(),
                &[n_embd, n_vocab],
                ty,
                matrix(n_embd),
            );
        }
        let fill = Fill::Signed {
            mean: 5.6,
            std: 1.1,
        };
        self.push(
            "output_norm.weight".into(),
            &[n_embd],
            WeightType::F32,
            fill,
        );
        let n_ple = spec.n_embd_per_layer;
        if n_ple > 0 {
            let width = n_ple * spec.n_layer;
            let table = spec.ple_type.unwrap_or(ty);
            let name = "per_layer_token_embd.weight".into();
            self.push(name, &[width, n_vocab], table, matrix(n_ple));
            // Quantised files keep this one in 16 bits.
            let proj = if ty.block_len() == 1 {
                ty
            } else {
                WeightType::Bf16
            };
            let name = "per_layer_model_proj.weight".into();
            self.push(name, &[n_embd, width], proj, matrix(n_embd));
            self.push(
                "per_layer_proj_norm.weight".into(),
                &[n_ple],
                WeightType::F32,
                norm(1.0),
            );
        }
    }

    /// Attention tensors of layer `il`.
    fn attention(&mut self, il: u32) {
        let spec = self.spec;
        let n_embd_head = spec.n_embd_head(il);
        let n_q = spec.n_head * n_embd_head;
        let n_kv = spec.n_head_kv_at(il) * n_embd_head;
        let has_v = !spec.k_eq_v || spec.is_swa(il);
        let has_kv = spec.owns_kv(il) || !spec.trim_shared;
        // q . k has deviation w^2 * sqrt(n_embd_head) for norm weights w.
        let head_norm = norm(narrow((1.5 / f64::from(n_embd_head).sqrt()).sqrt()));

        self.vector(il, "attn_norm", spec.n_embd, norm(1.0));
        if spec.fused_qkv && has_v && spec.owns_kv(il) {
            self.fused_qkv(il, n_q, n_kv);
        } else {
            self.weight(il, "attn_q", spec.n_embd, n_q);
            if has_kv {
                self.weight(il, "attn_k", spec.n_embd, n_kv);
            }
            if has_kv && has_v {
                self.weight(il, "attn_v", spec.n_embd, n_kv);
            }
        }
        self.vector(il, "attn_q_norm", n_embd_head, head_norm);
        if has_kv {
            self.vector(il, "attn_k_norm", n_embd_head, head_norm);
        }
        self.weight(il, "attn_output", n_q, spec.n_embd);
        let post = if spec.n_expert > 0 { 0.27 } else { 0.36 };
        self.vector(
            il,
            "post_attention_norm",
            spec.n_embd,
            norm(post * self.depth.gain),
        );
        let (mean, std) = self.depth.out_scale;
        self.vector(il, "layer_output_scale", 1, Fill::Normal { mean, std });
    }

    /// One tensor with the rows of Q, K and V: the same numbers as the three apart.
    fn fused_qkv(&mut self, il: u32, n_q: u32, n_kv: u32) {
        let n_embd = u64::from(self.spec.n_embd);
        let rows = [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)];
        let parts = rows
            .map(|(name, n)| Part {
                stream: self.stream(&blk(il, name)),
                fill: matrix(self.spec.n_embd),
                start: 0,
                n: n_embd * u64::from(n),
            })
            .to_vec();
        self.tensors.push(Tensor {
            name: blk(il, "attn_qkv"),
            shape: vec![n_embd, u64::from(n_q + 2 * n_kv)],
            ty: self.spec.weight_type.for_row(n_embd),
            parts,
        });
    }

    /// Dense feed-forward tensors of layer `il`.
    fn feed_forward(&mut self, il: u32) {
        let (n_embd, n_ff) = (self.spec.n_embd, self.spec.n_ff_at(il));
        self.vector(il, "ffn_norm", n_embd, norm(1.0));
        self.weight(il, "ffn_gate", n_embd, n_ff);
        self.weight(il, "ffn_up", n_embd, n_ff);
        self.weight(il, "ffn_down", n_ff, n_embd);
        let post = if self.spec.n_expert > 0 { 0.22 } else { 0.285 };
        self.vector(il, "post_ffw_norm", n_embd, norm(post * self.depth.gain));
    }

    /// Router and expert tensors of layer `il`.
    fn experts(&mut self, il: u32) {
        let spec = self.spec;
        let (n_embd, n_expert, n_ff_exp) = (spec.n_embd, spec.n_expert, spec.n_ff_exp);
        // The router's input has length 1, so its logits have the deviation of its weights.
        let router = Fill::Normal {
            mean: 0.0,
            std: 3.0,
        };
        let expert_scale = Fill::Normal {
            mean: 1.0,
            std: 0.25,
        };
        self.push(
            blk(il, "ffn_gate_inp"),
            &[n_embd, n_expert],
            WeightType::F32,
            router,
        );
        self.push(
            format!("blk.{il}.ffn_gate_inp.scale"),
            &[n_embd],
            WeightType::F32,
            norm(1.0),
        );
        self.vector(il, "pre_ffw_norm_2", n_embd, norm(1.0));
        self.vector(il, "post_ffw_norm_1", n_embd, norm(0.8));
        self.vector(il, "post_ffw_norm_2", n_embd, norm(0.8));
        if spec.split_experts {
            for name in ["ffn_gate_exps", "ffn_up_exps"] {
                let shape = [n_embd, n_ff_exp, n_expert];
                self.push(blk(il, name), &shape, spec.weight_type, matrix(n_embd));
            }
        } else {
            self.fused_experts(il);
        }
        let shape = [n_ff_exp, n_embd, n_expert];
        self.push(
            blk(il, "ffn_down_exps"),
            &shape,
            spec.weight_type,
            matrix(n_ff_exp),
        );
        let name = format!("blk.{il}.ffn_down_exps.scale");
        self.push(name, &[n_expert], WeightType::F32, expert_scale);
    }

    /// Gate rows, then up rows, expert by expert: the same numbers as the two apart.
    fn fused_experts(&mut self, il: u32) {
        let spec = self.spec;
        let per_expert = u64::from(spec.n_embd) * u64::from(spec.n_ff_exp);
        let streams = ["ffn_gate_exps", "ffn_up_exps"].map(|name| self.stream(&blk(il, name)));
        let fill = matrix(spec.n_embd);
        let parts = (0..u64::from(spec.n_expert))
            .flat_map(|expert| streams.map(|s| (s, expert * per_expert)))
            .map(|(stream, start)| Part {
                stream,
                fill,
                start,
                n: per_expert,
            })
            .collect();
        self.tensors.push(Tensor {
            name: blk(il, "ffn_gate_up_exps"),
            shape: [spec.n_embd, 2 * spec.n_ff_exp, spec.n_expert]
                .map(u64::from)
                .to_vec(),
            ty: spec.weight_type.for_row(u64::from(spec.n_embd)),
            parts,
        });
    }

    /// Per-layer embedding tensors of layer `il`.
    fn per_layer(&mut self, il: u32) {
        let (n_embd, n_ple) = (self.spec.n_embd, self.spec.n_embd_per_layer);
        self.weight(il, "inp_gate", n_embd, n_ple);
        self.weight(il, "proj", n_ple, n_embd);
        self.vector(il, "post_norm", n_embd, norm(0.2 * self.depth.gain));
    }
}

/// `blk.<il>.<name>.weight`.
fn blk(il: u32, name: &str) -> String {
    format!("blk.{il}.{name}.weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(spec: &Spec) -> Vec<String> {
        tensors(spec).into_iter().map(|t| t.name).collect()
    }

    #[test]
    fn parts_cover_every_tensor_and_end_at_rows() {
        for name in ["tiny", "tiny-moe", "e2b", "26b-a4b"] {
            let spec = Spec {
                fused_qkv: true,
                ..Spec::preset(name).unwrap()
            };
            for t in tensors(&spec) {
                let n: u64 = t.parts.iter().map(|p| p.n).sum();
                assert_eq!(n, t.n_elements(), "{}", t.name);
                assert!(t.parts.iter().all(|p| p.n % t.shape[0] == 0), "{}", t.name);
                assert_eq!(t.shape[0] % t.ty.block_len(), 0, "{}", t.name);
            }
        }
    }

    #[test]
    fn trimmed_files_lack_only_the_kv_tensors_of_shared_layers() {
        let full = Spec::preset("tiny").unwrap();
        let trimmed = names(&Spec {
            trim_shared: true,
            ..full.clone()
        });
        let missing: Vec<_> = names(&full)
            .into_iter()
            .filter(|n| !trimmed.contains(n))
            .collect();

        assert_eq!(missing.len(), 4 * 3);
        assert!(missing.contains(&"blk.6.attn_k.weight".to_owned()));
        assert!(missing.contains(&"blk.9.attn_k_norm.weight".to_owned()));
    }

    #[test]
    fn global_layers_of_dense_models_have_no_v() {
        let names = names(&Spec::preset("12b").unwrap());

        assert!(names.contains(&"blk.4.attn_v.weight".to_owned()));
        assert!(!names.contains(&"blk.5.attn_v.weight".to_owned()));
    }

    #[test]
    fn rows_that_a_k_quant_cannot_hold_fall_back_to_q8_0() {
        let spec = Spec {
            weight_type: WeightType::Q4K,
            ..Spec::preset("26b-a4b").unwrap()
        };
        let types: Vec<_> = tensors(&spec)
            .into_iter()
            .filter(|t| t.name.starts_with("blk.0.ffn_"))
            .map(|t| (t.name, t.ty))
            .collect();

        assert!(types.contains(&("blk.0.ffn_down_exps.weight".into(), WeightType::Q8_0)));
        assert!(types.contains(&("blk.0.ffn_gate_up_exps.weight".into(), WeightType::Q4K)));
    }

    #[test]
    fn e4b_in_q8_0_has_about_eight_gigabytes() {
        let n: u64 = tensors(&Spec::preset("e4b").unwrap())
            .iter()
            .map(Tensor::n_bytes)
            .sum();

        assert!((7_800_000_000..8_700_000_000).contains(&n), "{n}");
    }
}
