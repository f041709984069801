//! Output norm, projection to the vocabulary, soft cap.

use super::Emitter;
use crate::Result;
use crate::ggml::TensorId;

impl Emitter<'_> {
    /// `c tanh(output(norm x) / c)`: `[n_embd, n_out] -> [n_vocab, n_out]`.
    pub(super) fn head(&mut self, x: TensorId) -> Result<TensorId> {
        let cur = self.norm(x, self.p.weights.output_norm)?;
        let cur = self.b.name(cur, "result_norm")?;
        let output = self.weight(self.p.weights.output)?;
        let mut cur = self.b.mul_mat(output, cur)?;
        if let Some(cap) = self.p.config.logit_softcap {
            cur = self.b.scale(cur, 1.0 / cap)?;
            cur = self.b.tanh(cur)?;
            cur = self.b.scale(cur, cap)?;
        }
        let cur = self.b.name(cur, "result_output")?;
        Ok(self.b.output(cur)?)
    }
}
