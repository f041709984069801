//! Router and experts. The router reads the un-normed attention output.
//!
//! Source: `Gemma4TextRouter`, `Gemma4TextExperts`; node order as in llama.cpp `build_moe_ffn`, so
//! that ggml-cuda recognises its top-k pattern.

use super::Emitter;
use crate::Result;
use crate::ggml::{Dims, TensorId, View};
use crate::model::weights::{GateUp, MoeWeights};

/// Smallest positive normal F16: keeps the division finite.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

impl Emitter<'_> {
    /// The expert branch with its norms: `[n_embd, n_rows]`.
    pub(super) fn experts(
        &mut self,
        il: usize,
        attn_out: TensorId,
        w: &MoeWeights,
    ) -> Result<TensorId> {
        let n_used = self.p.config.n_expert_used;
        let x = self.norm(attn_out, w.pre_norm_2)?;
        let x = self.named(x, "ffn_norm_2", il)?;
        let n_rows = self.b.dims(x)?.ne(1);
        // The router has a norm of its own; `x` is for the experts only.
        let logits = self.router_logits(il, attn_out, w)?;
        let (ids, weights) = self.route(il, logits, n_used, n_rows)?;
        let n_embd = self.p.config.n_embd;
        let x = self.b.reshape(x, Dims::new(&[n_embd, 1, n_rows]))?;
        let cur = self.expert_gate_up(x, ids, w, n_used, n_rows)?;
        let down = self.weight(w.down)?;
        let mut cur = self.b.mul_mat_id(down, cur, ids)?;
        if let Some(scale) = w.down_scale {
            let scale = self.expert_scale(scale, ids, n_rows)?;
            cur = self.b.mul(cur, scale)?;
        }
        let cur = self.b.mul(cur, weights)?;
        let cur = self.sum_experts(cur, n_used, n_rows)?;
        let cur = self.norm(cur, w.post_norm_2)?;
        self.named(cur, "ffn_moe", il)
    }

    /// `gate_inp (rms_norm(x) / sqrt(n_embd) * scale)`: `[n_expert, n_rows]`.
    fn router_logits(&mut self, il: usize, x: TensorId, w: &MoeWeights) -> Result<TensorId> {
        let config = self.p.config;
        let cur = self.b.rms_norm(x, config.rms_eps)?;
        let cur = self.b.scale(cur, 1.0 / (config.n_embd as f32).sqrt())?;
        let scale = self.weight(w.gate_inp_scale)?;
        let cur = self.b.mul(cur, scale)?;
        let gate = self.weight(w.gate_inp)?;
        let logits = self.b.mul_mat(gate, cur)?;
        self.named(logits, "ffn_moe_logits", il)
    }

    /// Softmax over all experts, the largest `n_used`, renormalised:
    /// ids `I32 [n_used, n_rows]`, weights `[1, n_used, n_rows]`.
    fn route(
        &mut self,
        il: usize,
        logits: TensorId,
        n_used: usize,
        n_rows: usize,
    ) -> Result<(TensorId, TensorId)> {
        let n_expert = self.p.config.n_expert;
        let probs = self.b.soft_max(logits)?;
        let probs = self.named(probs, "ffn_moe_probs", il)?;
        let ids = self.b.top_k(probs, n_used)?;
        let ids = self.named(ids, "ffn_moe_topk", il)?;
        // As a table of one column for each row, so that get_rows picks single probabilities.
        let probs = self.b.reshape(probs, Dims::new(&[1, n_expert, n_rows]))?;
        let weights = self.b.get_rows(probs, ids)?;
        let weights = self.b.reshape(weights, Dims::new(&[n_used, n_rows]))?;
        let sum = self.b.sum_rows(weights)?;
        let sum = self.b.clamp(sum, MIN_WEIGHT_SUM, f32::INFINITY)?;
        let weights = self.b.div(weights, sum)?;
        let weights = self.b.reshape(weights, Dims::new(&[1, n_used, n_rows]))?;
        let weights = self.named(weights, "ffn_moe_weights_norm", il)?;
        // Now, while softmax to division are neighbours: ggml-cuda takes them as one kernel.
        self.b.expand(weights)?;
        Ok((ids, weights))
    }

    /// `gelu(gate x) * up x` of the chosen experts: `[n_ff_exp, n_used, n_rows]`.
    fn expert_gate_up(
        &mut self,
        x: TensorId,
        ids: TensorId,
        w: &MoeWeights,
        n_used: usize,
        n_rows: usize,
    ) -> Result<TensorId> {
        match w.gate_up {
            GateUp::Joined(id) => {
                let id = self.weight(id)?;
                let both = self.b.mul_mat_id(id, x, ids)?;
                let n_ff = self.p.config.n_ff_exp;
                let nb1 = self.b.row_stride(both)?;
                let view = |offset: usize| View {
                    dims: Dims::new(&[n_ff, n_used, n_rows]),
                    nb1,
                    nb2: nb1 * n_used,
                    offset,
                };
                // Halves of each row as views: no copy. GEGLU takes rows at equal distances.
                let gate = self.b.view(both, view(0))?;
                let up = self.b.view(both, view(n_ff * size_of::<f32>()))?;
                Ok(self.b.geglu(gate, up)?)
            }
            GateUp::Split { gate, up } => {
                let gate = self.weight(gate)?;
                let gate = self.b.mul_mat_id(gate, x, ids)?;
                let up = self.weight(up)?;
                let up = self.b.mul_mat_id(up, x, ids)?;
                Ok(self.b.geglu(gate, up)?)
            }
        }
    }

    /// The chosen experts' output scales, `[1, n_used, n_rows]`.
    fn expert_scale(
        &mut self,
        scale: crate::model::weights::WeightId,
        ids: TensorId,
        n_rows: usize,
    ) -> Result<TensorId> {
        let n_expert = self.p.config.n_expert;
        let scale = self.weight(scale)?;
        let table = self.b.reshape(scale, Dims::new(&[1, n_expert]))?;
        let table = self.b.repeat(table, Dims::new(&[1, n_expert, n_rows]))?;
        // get_rows wants a table for each row of ids: the same one, repeated. [1, n_used, n_rows]
        Ok(self.b.get_rows(table, ids)?)
    }

    /// Sum over the chosen experts, in order: `[n_embd, n_rows]`.
    fn sum_experts(&mut self, x: TensorId, n_used: usize, n_rows: usize) -> Result<TensorId> {
        let nb1 = self.b.row_stride(x)?;
        let n_embd = self.p.config.n_embd;
        // Additions in a fixed order, not a sum over a dimension: the order decides the last bits,
        // and this is llama.cpp's.
        let mut sum = None;
        for i in 0..n_used {
            let view = View {
                dims: Dims::new(&[n_embd, n_rows]),
                nb1: nb1 * n_used,
                nb2: nb1 * n_used * n_rows,
                offset: i * nb1,
            };
            let expert = self.b.view(x, view)?;
            sum = Some(match sum {
                None => expert,
                Some(sum) => self.b.add(sum, expert)?,
            });
        }
        // One expert would leave a view; norms need it contiguous.
        match sum {
            Some(sum) if n_used > 1 => Ok(sum),
            Some(view) => Ok(self.b.cont(view)?),
            None => Ok(x),
        }
    }
}
