//! Token and per-layer embeddings, gathered on the device from the resident tables.

use std::ops::Range;

use super::inputs::OutInputs;
use super::{Emitter, Stream};
use crate::Result;
use crate::ggml::{Dims, TensorId, View};

impl Emitter<'_> {
    /// Embeds all rows: the stream of layer 0, with per-layer embeddings for `layers`.
    ///
    /// The embedding is scaled by `sqrt(n_embd)` (`Gemma4TextScaledWordEmbedding`).
    pub(super) fn embed(
        &mut self,
        tokens: TensorId,
        n_rows: usize,
        layers: Range<usize>,
    ) -> Result<Stream> {
        let x = self.token_rows(tokens)?;
        let x = self.b.name(x, "inp_scaled")?;
        let ple = self.per_layer_inputs(x, tokens, self.inputs.ple, n_rows, &layers)?;
        let (pos, masks) = (self.inputs.pos, self.inputs.masks);
        Ok(Stream {
            x,
            pos,
            masks,
            ple,
            ple_first: layers.start,
            n_rows,
        })
    }

    /// The stream of the wanted rows from `layers.start` on, `[n_embd, n_out]`.
    pub(super) fn embed_wanted(
        &mut self,
        out: OutInputs,
        n_out: usize,
        x: TensorId,
        layers: Range<usize>,
    ) -> Result<Stream> {
        let x = self.b.get_rows(x, out.ids)?;
        let x = self.b.name(x, "g4_out_rows")?;
        // Per-layer inputs project the token's embedding, not the stream: by now `x` has been
        // through layers, so the few rows are embedded again.
        let ple = if self.p.weights.ple.is_some() {
            let embd = self.token_rows(out.tokens)?;
            self.per_layer_inputs(embd, out.tokens, out.ple, n_out, &layers)?
        } else {
            None
        };
        let (pos, masks) = (out.pos, out.masks);
        Ok(Stream {
            x,
            pos,
            masks,
            ple,
            ple_first: layers.start,
            n_rows: n_out,
        })
    }

    /// `sqrt(n_embd) * token_embd[tokens]`: `[n_embd, n_rows]`.
    fn token_rows(&mut self, tokens: TensorId) -> Result<TensorId> {
        let table = self.weight(self.p.weights.token_embd)?;
        let rows = self.b.get_rows(table, tokens)?;
        Ok(self.b.scale(rows, (self.p.config.n_embd as f32).sqrt())?)
    }

    /// `(sqrt(n_ple) * table[tokens] + rms_norm(proj x / sqrt(n_embd)) * w) / sqrt(2)` for
    /// `layers`: `[n_embd_per_layer, n_rows, layers]`.
    ///
    /// `x` is the *scaled* embedding. Source: `Gemma4TextModel.project_per_layer_inputs`.
    fn per_layer_inputs(
        &mut self,
        x: TensorId,
        tokens: TensorId,
        host_rows: Option<TensorId>,
        n_rows: usize,
        layers: &Range<usize>,
    ) -> Result<Option<TensorId>> {
        let Some(ple) = self.p.weights.ple else {
            return Ok(None);
        };
        if layers.is_empty() {
            return Ok(None);
        }
        let n_ple = self.p.config.n_embd_per_layer;
        let cube = Dims::new(&[n_ple, layers.len(), n_rows]);
        let rows = match host_rows {
            Some(rows) => rows,
            None => {
                let table = self.weight(ple.token_embd)?;
                let columns = self.table_columns(table, layers)?;
                self.b.get_rows(columns, tokens)?
            }
        };
        let rows = self.b.reshape(rows, cube)?;
        let rows = self.b.scale(rows, (n_ple as f32).sqrt())?;
        let rows = self.b.name(rows, "inp_per_layer_selected")?;
        // The rows first: then all from the projection to the end is one chain.
        self.b.expand(rows)?;
        let product = self.model_proj(x, layers)?;
        let n_embd = self.p.config.n_embd as f32;
        let proj = self.b.scale(product, 1.0 / n_embd.sqrt())?;
        let proj = self.b.reshape(proj, cube)?;
        let proj = self.norm(proj, ple.proj_norm)?;
        let proj = self.b.name(proj, "per_layer_proj")?;
        let sum = self.b.add(proj, rows)?;
        let sum = self.b.scale(sum, std::f32::consts::FRAC_1_SQRT_2)?;
        // A layer's rows lie together, so that each layer reads a contiguous view.
        let swapped = self.b.swap_1_2(sum)?;
        let all = self.b.cont(swapped)?;
        self.keep(all, &[product, rows])?;
        Ok(Some(self.b.name(all, "inp_per_layer")?))
    }

    /// Columns of the per-layer table that `layers` read, a view `[n_ple * layers, n_vocab]`.
    fn table_columns(&mut self, table: TensorId, layers: &Range<usize>) -> Result<TensorId> {
        let config = self.p.config;
        if layers.len() == config.n_layer {
            return Ok(table);
        }
        let n_ple = config.n_embd_per_layer;
        let dtype = self.b.dtype(table)?;
        let stride = self.b.row_stride(table)?;
        let bytes = |n: usize| {
            dtype
                .row_bytes(n as u64)
                .and_then(|b| usize::try_from(b).ok())
                .ok_or_else(|| crate::ggml::GgmlError::Shape {
                    op: "per-layer table view",
                    expected: format!("a multiple of the block of {}", dtype.name()),
                    found: n.to_string(),
                })
        };
        // A table row holds all layers in order; a view may begin and end at a block's border only.
        let offset = bytes(n_ple * layers.start)?;
        let n = n_ple * layers.len();
        bytes(n)?;
        let dims = Dims::new(&[n, config.n_vocab]);
        Ok(self.b.view(
            table,
            View {
                dims,
                nb1: stride,
                nb2: stride * config.n_vocab,
                offset,
            },
        )?)
    }

    /// Projection of the embedding for `layers`: `[n_ple * layers, n_rows]`.
    ///
    /// `layers` is all, all before `last_kv_layer`, or all from it on.
    fn model_proj(&mut self, x: TensorId, layers: &Range<usize>) -> Result<TensorId> {
        let Some(ple) = self.p.weights.ple else {
            return Ok(x);
        };
        let config = self.p.config;
        let x = self.operand(x)?;
        let mut parts = Vec::new();
        // Cut in two at load, where `layers` may be cut: nobody multiplies by rows that he drops.
        if layers.start == 0
            && let Some(body) = ple.body_proj
        {
            let body = self.weight(body)?;
            parts.push(self.b.mul_mat(body, x)?);
        }
        if layers.end == config.n_layer {
            let tail = self.weight(ple.tail_proj)?;
            parts.push(self.b.mul_mat(tail, x)?);
        }
        match parts.as_slice() {
            [one] => Ok(*one),
            [first, second] => Ok(self.b.concat_0(*first, *second)?),
            _ => Ok(x),
        }
    }

    /// The per-layer block: `x + rms_norm(proj (gelu(gate x) * ple)) * w`.
    pub(super) fn per_layer(
        &mut self,
        il: usize,
        x: TensorId,
        ple: TensorId,
        index: usize,
        n_rows: usize,
    ) -> Result<TensorId> {
        let Some(w) = self.layer_weights(il)?.ple else {
            return Ok(x);
        };
        let n_ple = self.p.config.n_embd_per_layer;
        let nb1 = n_ple * size_of::<f32>();
        // [n_embd_per_layer, n_rows, layers]: a layer's piece is contiguous, as GEGLU needs it.
        let view = View {
            dims: Dims::new(&[n_ple, n_rows]),
            nb1,
            nb2: nb1 * n_rows,
            offset: index * nb1 * n_rows,
        };
        let slice = self.b.view(ple, view)?;
        let gate = self.weight(w.inp_gate)?;
        let operand = self.operand(x)?;
        let cur = self.b.mul_mat(gate, operand)?;
        self.chain = vec![cur];
        let cur = self.b.geglu(cur, slice)?;
        let proj = self.weight(w.proj)?;
        let operand = self.operand(cur)?;
        let cur = self.b.mul_mat(proj, operand)?;
        self.add_norm(cur, w.post_norm, x, "per_layer_embd_out", il)
    }
}
