//! The oracle: a naive Gemma-4 forward of the whole prompt at once. No cache, no ring, no chunks,
//! no graphs; the mask comes from absolute positions. Weights are F32, sums are F64.
//!
//! Formulas: `transformers` 5.24 `Gemma4ForCausalLM`, tensors as `tests/fixtures/README.md` says.
//! The donor rule is written out here again, from the layer types alone.

use std::collections::HashMap;
use std::path::Path;

use g4prefill::ggml::dequantize_row;
use g4prefill::gguf::GgufFile;
use g4prefill::model::{Config, LayerConfig};

/// Rows of `n` values.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    pub n: usize,
    pub data: Vec<f64>,
}

impl Rows {
    fn zeros(n: usize, n_rows: usize) -> Self {
        let data = vec![0.0; n * n_rows];
        Self { n, data }
    }

    pub fn row(&self, i: usize) -> &[f64] {
        &self.data[i * self.n..(i + 1) * self.n]
    }

    fn row_mut(&mut self, i: usize) -> &mut [f64] {
        &mut self.data[i * self.n..(i + 1) * self.n]
    }

    pub fn n_rows(&self) -> usize {
        self.data.len() / self.n
    }

    pub fn f32(&self) -> Vec<f32> {
        self.data.iter().map(|x| *x as f32).collect()
    }
}

/// What a forward leaves behind.
pub struct Trace {
    /// `[n_vocab, rows]`.
    pub logits: Rows,
    /// K (after norm and RoPE) and V (after norm) of the layers that own them, all heads of a
    /// token together.
    pub kv: Vec<Option<(Rows, Rows)>>,
    /// Of each row the smallest relative lead, over all layers, of the last expert chosen over the
    /// first one left out. Near zero, rounding decides.
    pub margins: Vec<f64>,
}

pub struct Oracle {
    file: GgufFile,
    pub config: Config,
    weights: HashMap<String, Vec<f32>>,
}

fn rms(x: &[f64], eps: f64) -> f64 {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    1.0 / (mean + eps).sqrt()
}

fn norm(x: &[f64], weight: Option<&[f32]>, eps: f64) -> Vec<f64> {
    let r = rms(x, eps);
    let scaled = x.iter().map(|v| v * r);
    match weight {
        Some(w) => scaled.zip(w).map(|(v, w)| v * f64::from(*w)).collect(),
        None => scaled.collect(),
    }
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

fn dot(w: &[f32], x: &[f64]) -> f64 {
    w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

/// `y = w x` with `w [x.len(), n]`, fastest dimension first.
fn mat(w: &[f32], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|v| v / sum).collect()
}

/// NeoX pairs `(i, i + d / 2)` of a head at `pos`.
pub fn rope(head: &mut [f64], pos: usize, base: f64, factors: Option<&[f32]>) {
    let half = head.len() / 2;
    for i in 0..half {
        let frequency = base.powf(-(i as f64) / half as f64);
        let factor = factors.map_or(1.0, |f| f64::from(f[i]));
        let (sin, cos) = (pos as f64 * frequency / factor).sin_cos();
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = a * sin + b * cos;
    }
}

impl Oracle {
    pub fn open(path: &Path) -> Self {
        let file = GgufFile::open(path).unwrap_or_else(|e| panic!("{e}"));
        let config = Config::from_gguf(&file).unwrap_or_else(|e| panic!("{e}"));
        let mut weights = HashMap::new();
        for t in file.tensors() {
            let n = usize::try_from(t.shape[0]).expect("small");
            let data = file.tensor_data(t);
            let n_rows = usize::try_from(t.n_elements()).expect("small") / n;
            let mut out = vec![0.0; n * n_rows];
            let rows = data.chunks_exact(data.len() / n_rows);
            for (src, dst) in rows.zip(out.chunks_exact_mut(n)) {
                dequantize_row(t.dtype, src, dst).expect("a readable type");
            }
            weights.insert(t.name.clone(), out);
        }
        Self {
            file,
            config,
            weights,
        }
    }

    fn w(&self, name: &str) -> &[f32] {
        let found = self.weights.get(name);
        found.unwrap_or_else(|| panic!("{name} in {:?}", self.file.paths()))
    }

    fn blk(&self, il: usize, name: &str) -> &[f32] {
        self.w(&format!("blk.{il}.{name}"))
    }

    fn has(&self, il: usize, name: &str) -> bool {
        self.weights.contains_key(&format!("blk.{il}.{name}"))
    }

    /// The layer whose K and V layer `il` reads: the last owner of its own type.
    pub fn donor(&self, il: usize) -> usize {
        let layers = &self.config.layers;
        let is_own = layers[il].owns_kv;
        let found = layers
            .iter()
            .rposition(|l| l.owns_kv && l.is_swa == layers[il].is_swa);
        if is_own { il } else { found.expect("a donor") }
    }

    /// Runs all of `tokens` through the first `n_layers` layers and, if those are all, the head.
    pub fn forward(&self, tokens: &[u32], n_layers: usize) -> Trace {
        let c = &self.config;
        let scale = (c.n_embd as f64).sqrt();
        let table = self.w("token_embd.weight");
        let mut x = Rows::zeros(c.n_embd, tokens.len());
        for (i, &t) in tokens.iter().enumerate() {
            let row = &table[t as usize * c.n_embd..][..c.n_embd];
            for (to, from) in x.row_mut(i).iter_mut().zip(row) {
                *to = f64::from(*from) * scale;
            }
        }
        let ple: Vec<Vec<f64>> = (0..tokens.len())
            .map(|i| self.per_layer_inputs(tokens[i], x.row(i)))
            .collect();
        let mut kv: Vec<Option<(Rows, Rows)>> = Vec::new();
        let mut margins = vec![f64::INFINITY; tokens.len()];
        for il in 0..n_layers {
            self.attention(il, &mut x, &mut kv);
            for (i, ple) in ple.iter().enumerate() {
                let row = x.row_mut(i);
                margins[i] = margins[i].min(self.feed_forward(il, row));
                self.per_layer(il, row, ple);
                if self.has(il, "layer_output_scale.weight") {
                    let scale = f64::from(self.blk(il, "layer_output_scale.weight")[0]);
                    row.iter_mut().for_each(|v| *v *= scale);
                }
            }
        }
        let mut logits = Rows {
            n: c.n_vocab,
            data: Vec::new(),
        };
        if n_layers == c.n_layer {
            for i in 0..tokens.len() {
                logits.data.extend(self.head(x.row(i)));
            }
        }
        Trace {
            logits,
            kv,
            margins,
        }
    }

    fn eps(&self) -> f64 {
        f64::from(self.config.rms_eps)
    }

    fn head(&self, x: &[f64]) -> Vec<f64> {
        let x = norm(x, Some(self.w("output_norm.weight")), self.eps());
        let name = if self.config.tied_output {
            "token_embd.weight"
        } else {
            "output.weight"
        };
        let mut logits = mat(self.w(name), &x);
        if let Some(cap) = self.config.logit_softcap.map(f64::from) {
            logits.iter_mut().for_each(|v| *v = cap * (*v / cap).tanh());
        }
        logits
    }

    /// Per-layer embeddings of one token, all layers; `x` is the scaled embedding.
    fn per_layer_inputs(&self, token: u32, x: &[f64]) -> Vec<f64> {
        let c = &self.config;
        let (n, width) = (c.n_embd_per_layer, c.n_embd_per_layer * c.n_layer);
        if n == 0 {
            return Vec::new();
        }
        let row = &self.w("per_layer_token_embd.weight")[token as usize * width..][..width];
        let mut proj = mat(self.w("per_layer_model_proj.weight"), x);
        let scale = 1.0 / (c.n_embd as f64).sqrt();
        proj.iter_mut().for_each(|v| *v *= scale);
        let weight = self.w("per_layer_proj_norm.weight");
        let proj = proj
            .chunks_exact(n)
            .flat_map(|p| norm(p, Some(weight), self.eps()));
        proj.zip(row)
            .map(|(p, r)| (p + f64::from(*r) * (n as f64).sqrt()) / 2f64.sqrt())
            .collect()
    }

    fn per_layer(&self, il: usize, x: &mut [f64], ple: &[f64]) {
        let n = self.config.n_embd_per_layer;
        if n == 0 {
            return;
        }
        let gate = mat(self.blk(il, "inp_gate.weight"), x);
        let part = &ple[il * n..(il + 1) * n];
        let cur: Vec<f64> = gate.iter().zip(part).map(|(g, p)| gelu(*g) * p).collect();
        let cur = mat(self.blk(il, "proj.weight"), &cur);
        let cur = norm(&cur, Some(self.blk(il, "post_norm.weight")), self.eps());
        x.iter_mut().zip(cur).for_each(|(x, v)| *x += v);
    }

    /// Projects, norms and (where `base` is given) rotates the heads of one token.
    fn heads(&self, l: &LayerConfig, x: &[f64], name: &str, weight: Option<&[f32]>) -> Vec<f64> {
        mat(self.blk(l.il, name), x)
            .chunks_exact(l.n_embd_head)
            .flat_map(|head| norm(head, weight, self.eps()))
            .collect()
    }

    fn rotate(&self, l: &LayerConfig, heads: &mut [f64], pos: usize) {
        assert_eq!(
            l.n_rot, l.n_embd_head,
            "Gemma 4 rotates over the whole head"
        );
        for head in heads.chunks_exact_mut(l.n_embd_head) {
            if l.is_swa {
                rope(head, pos, f64::from(self.config.rope_freq_base_swa), None);
            } else {
                let factors = self.w("rope_freqs.weight");
                rope(
                    head,
                    pos,
                    f64::from(self.config.rope_freq_base),
                    Some(factors),
                );
            }
        }
    }

    fn attention(&self, il: usize, x: &mut Rows, kv: &mut Vec<Option<(Rows, Rows)>>) {
        let l = &self.config.layers[il];
        let n = x.n_rows();
        let (d, n_q, n_kv) = (l.n_embd_head, l.n_head, l.n_head_kv);
        let mut q = Rows::zeros(d * n_q, n);
        let (mut k, mut v) = (Rows::zeros(d * n_kv, n), Rows::zeros(d * n_kv, n));
        for p in 0..n {
            let h = norm(x.row(p), Some(self.blk(il, "attn_norm.weight")), self.eps());
            let weight = self.blk(il, "attn_q_norm.weight");
            let mut heads = self.heads(l, &h, "attn_q.weight", Some(weight));
            self.rotate(l, &mut heads, p);
            q.row_mut(p).copy_from_slice(&heads);
            if l.owns_kv {
                let weight = self.blk(il, "attn_k_norm.weight");
                let mut heads = self.heads(l, &h, "attn_k.weight", Some(weight));
                self.rotate(l, &mut heads, p);
                k.row_mut(p).copy_from_slice(&heads);
                // K = V: the raw projection of K, norm without weight, no RoPE.
                let name = if self.has(il, "attn_v.weight") {
                    "attn_v.weight"
                } else {
                    "attn_k.weight"
                };
                v.row_mut(p).copy_from_slice(&self.heads(l, &h, name, None));
            }
        }
        kv.push(l.owns_kv.then_some((k, v)));
        let (k, v) = kv[self.donor(il)].as_ref().expect("the donor ran before");
        for p in 0..n {
            let first = if l.is_swa {
                (p + 1).saturating_sub(self.config.n_swa)
            } else {
                0
            };
            let mut out = vec![0.0; d * n_q];
            for h in 0..n_q {
                let at = h / (n_q / n_kv) * d;
                let query = &q.row(p)[h * d..(h + 1) * d];
                let score = |j: usize| -> f64 {
                    let key = &k.row(j)[at..at + d];
                    query.iter().zip(key).map(|(a, b)| a * b).sum()
                };
                let scores: Vec<f64> = (first..=p).map(score).collect();
                for (j, w) in (first..=p).zip(softmax(&scores)) {
                    let value = &v.row(j)[at..at + d];
                    let out = &mut out[h * d..(h + 1) * d];
                    out.iter_mut().zip(value).for_each(|(o, v)| *o += w * v);
                }
            }
            let out = mat(self.blk(il, "attn_output.weight"), &out);
            let weight = self.blk(il, "post_attention_norm.weight");
            let out = norm(&out, Some(weight), self.eps());
            x.row_mut(p).iter_mut().zip(out).for_each(|(x, v)| *x += v);
        }
    }

    /// Returns the router's margin.
    fn feed_forward(&self, il: usize, x: &mut [f64]) -> f64 {
        let mut margin = f64::INFINITY;
        let eps = self.eps();
        let h = norm(x, Some(self.blk(il, "ffn_norm.weight")), eps);
        let gate = mat(self.blk(il, "ffn_gate.weight"), &h);
        let up = mat(self.blk(il, "ffn_up.weight"), &h);
        let cur: Vec<f64> = gate.iter().zip(up).map(|(g, u)| gelu(*g) * u).collect();
        let mut cur = mat(self.blk(il, "ffn_down.weight"), &cur);
        if self.config.layers[il].is_moe {
            cur = norm(&cur, Some(self.blk(il, "post_ffw_norm_1.weight")), eps);
            let (experts, lead) = self.experts(il, x);
            margin = lead;
            let weight = self.blk(il, "post_ffw_norm_2.weight");
            let experts = norm(&experts, Some(weight), eps);
            cur.iter_mut().zip(experts).for_each(|(c, e)| *c += e);
        }
        let cur = norm(&cur, Some(self.blk(il, "post_ffw_norm.weight")), eps);
        x.iter_mut().zip(cur).for_each(|(x, v)| *x += v);
        margin
    }

    fn experts(&self, il: usize, x: &[f64]) -> (Vec<f64>, f64) {
        let c = &self.config;
        let (n_embd, n_ff) = (c.n_embd, c.n_ff_exp);
        let mut router = norm(x, Some(self.blk(il, "ffn_gate_inp.scale")), self.eps());
        let scale = 1.0 / (n_embd as f64).sqrt();
        router.iter_mut().for_each(|v| *v *= scale);
        let probs = softmax(&mat(self.blk(il, "ffn_gate_inp.weight"), &router));
        let mut order: Vec<usize> = (0..probs.len()).collect();
        // Stable: the lower index wins a tie.
        order.sort_by(|a, b| probs[*b].total_cmp(&probs[*a]));
        let left_out = order.get(c.n_expert_used).map_or(0.0, |e| probs[*e]);
        order.truncate(c.n_expert_used);
        let margin = 1.0 - left_out / probs[order[c.n_expert_used - 1]];
        let sum: f64 = order.iter().map(|e| probs[*e]).sum();
        let h = norm(x, Some(self.blk(il, "pre_ffw_norm_2.weight")), self.eps());
        let down = self.blk(il, "ffn_down_exps.weight");
        let mut out = vec![0.0; n_embd];
        for e in order {
            let (gate, up) = if c.layers[il].experts_fused_in_file {
                let both = self.blk(il, "ffn_gate_up_exps.weight");
                let both = &both[e * 2 * n_ff * n_embd..][..2 * n_ff * n_embd];
                both.split_at(n_ff * n_embd)
            } else {
                let part = |name| &self.blk(il, name)[e * n_ff * n_embd..][..n_ff * n_embd];
                (part("ffn_gate_exps.weight"), part("ffn_up_exps.weight"))
            };
            let (gate, up) = (mat(gate, &h), mat(up, &h));
            let cur: Vec<f64> = gate.iter().zip(up).map(|(g, u)| gelu(*g) * u).collect();
            let cur = mat(&down[e * n_embd * n_ff..][..n_embd * n_ff], &cur);
            let scale = if self.has(il, "ffn_down_exps.scale") {
                f64::from(self.blk(il, "ffn_down_exps.scale")[e])
            } else {
                1.0
            };
            let weight = probs[e] / sum * scale;
            out.iter_mut().zip(cur).for_each(|(o, v)| *o += weight * v);
        }
        (out, margin)
    }
}
