//! Gated feed-forward: `down (gelu(gate x) * up x)`.

use super::Emitter;
use crate::Result;
use crate::ggml::TensorId;
use crate::model::weights::GateUp;

impl Emitter<'_> {
    /// The feed-forward of a layer, dense or with experts beside it: `[n_embd, n_rows]`.
    pub(super) fn feed_forward(&mut self, il: usize, attn_out: TensorId) -> Result<TensorId> {
        let w = self.layer_weights(il)?;
        let cur = self.norm(attn_out, w.ffn_norm)?;
        let cur = self.named(
            cur,
            if w.moe.is_some() {
                "ffn_norm_1"
            } else {
                "ffn_norm"
            },
            il,
        )?;
        let dense = self.dense(il, cur)?;
        let Some(moe) = &w.moe else {
            return self.named(dense, "ffn_out", il);
        };
        let dense = self.norm(dense, moe.post_norm_1)?;
        let dense = self.named(dense, "ffn_mlp", il)?;
        // Both branches read the stream, each through a norm of its own.
        let experts = self.experts(il, attn_out, moe)?;
        let sum = self.b.add(dense, experts)?;
        self.named(sum, "ffn_moe_combined", il)
    }

    fn dense(&mut self, il: usize, x: TensorId) -> Result<TensorId> {
        let w = self.layer_weights(il)?;
        let x = self.operand(x)?;
        let cur = match w.gate_up {
            GateUp::Joined(id) => {
                let id = self.weight(id)?;
                let both = self.b.mul_mat(id, x)?;
                let gated = self.b.geglu_halves(both)?;
                // One row: product and GEGLU are one kernel, which writes `gated` while it reads
                // `x`, so `x` must not give its memory away. More rows: the rounding that
                // `operand` adds is part of GEGLU's kernel, which reads `both`.
                self.keep(gated, &[x])?;
                self.chain = vec![both];
                gated
            }
            GateUp::Split { gate, up } => {
                let gate = self.weight(gate)?;
                let gate = self.b.mul_mat(gate, x)?;
                let up = self.weight(up)?;
                let up = self.b.mul_mat(up, x)?;
                self.chain = vec![gate, up];
                self.b.geglu(gate, up)?
            }
        };
        let down = self.weight(w.ffn_down)?;
        let cur = self.operand(cur)?;
        Ok(self.b.mul_mat(down, cur)?)
    }
}
