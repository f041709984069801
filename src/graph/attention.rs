//! Attention of one layer: Q/K/V projection, norms, RoPE, cache write, attention.

use super::{Emitter, Stream};
use crate::Result;
use crate::ggml::{Dims, GgmlError, Rope, TensorId, View};

/// Projections of the same rows, before norms: parts of one product or of several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Projected {
    q: Option<Part>,
    k: Option<Part>,
    v: Option<Part>,
}

/// Elements `first..` of each row of a product `[n, n_rows]`.
#[derive(Clone, Copy, Debug)]
struct Part {
    product: TensorId,
    first: usize,
}

fn absent(what: &'static str) -> crate::Error {
    GgmlError::Shape {
        op: what,
        expected: "a projection".into(),
        found: "none".into(),
    }
    .into()
}

impl Emitter<'_> {
    /// Multiplies by the matrices that hold what is wanted: Q, and/or K and V.
    ///
    /// Where the file has no V, V is the raw K projection (`attention_k_eq_v`).
    pub(super) fn project(
        &mut self,
        il: usize,
        x: TensorId,
        want_q: bool,
        want_kv: bool,
    ) -> Result<Projected> {
        let mut out = Projected::default();
        // One matrix with all three, or up to three: what was joined at load is one product here. A
        // part with no rows in a matrix is 0 long there.
        for m in self.layer_weights(il)?.qkv {
            if !(want_q && m.q > 0 || want_kv && m.k + m.v > 0) {
                continue;
            }
            let w = self.weight(m.id)?;
            let product = self.b.mul_mat(w, x)?;
            let part = |n: usize, first: usize| (n > 0).then_some(Part { product, first });
            out.q = out.q.or(part(m.q, 0));
            out.k = out.k.or(part(m.k, m.q));
            out.v = out.v.or(part(m.v, m.q + m.k));
        }
        // Before norm and RoPE: K gets both afterwards, V a norm without weight.
        if self.layer_config(il)?.v_from_k {
            out.v = out.k;
        }
        Ok(out)
    }

    /// A part as heads, a strided view `[n_embd_head, n_head, n_rows]`: no copy splits a product.
    fn heads(&mut self, part: Part, n_embd_head: usize, n_head: usize) -> Result<TensorId> {
        let n_rows = self.b.dims(part.product)?.ne(1);
        let view = View {
            dims: Dims::new(&[n_embd_head, n_head, n_rows]),
            // Heads of a row lie side by side; the next row is a whole product row away, over the
            // parts of the others.
            nb1: n_embd_head * size_of::<f32>(),
            nb2: self.b.row_stride(part.product)?,
            offset: part.first * size_of::<f32>(),
        };
        Ok(self.b.view(part.product, view)?)
    }

    fn rope_of(&mut self, il: usize) -> Result<(Option<TensorId>, Rope)> {
        let layer = self.layer_config(il)?;
        let (is_swa, n_rot) = (layer.is_swa, layer.n_rot);
        let config = self.p.config;
        if is_swa {
            return Ok((
                None,
                Rope {
                    n_rot,
                    freq_base: config.rope_freq_base_swa,
                },
            ));
        }
        // Proportional RoPE: factors of 1e30 stop the pairs that do not rotate.
        let factors = match self.p.weights.rope_freqs {
            Some(id) => Some(self.weight(id)?),
            None => None,
        };
        Ok((
            factors,
            Rope {
                n_rot,
                freq_base: config.rope_freq_base,
            },
        ))
    }

    /// Q after norm and RoPE, `[n_embd_head, n_head, n_rows]`.
    pub(super) fn query(&mut self, il: usize, p: Projected, pos: TensorId) -> Result<TensorId> {
        let layer = self.layer_config(il)?;
        let (d, h) = (layer.n_embd_head, layer.n_head);
        let w = self.layer_weights(il)?;
        let q = self.heads(p.q.ok_or_else(|| absent("Q"))?, d, h)?;
        let q = self.norm(q, w.attn_q_norm)?;
        let q = self.named(q, "Qcur_normed", il)?;
        let (factors, rope) = self.rope_of(il)?;
        let q = self.b.rope(q, pos, factors, rope)?;
        let q = self.named(q, "Qcur_pos", il)?;
        // Brings the joined product into the graph, so that the nodes of K follow each other.
        Ok(self.b.expand(q)?)
    }

    /// Writes K and V of these rows to the layer's cache.
    ///
    /// K: norm with weight, RoPE. V: norm without weight. The order of nodes lets ggml-cuda fuse
    /// norm, RoPE, view and `set_rows` of K (docs/decisions/0003-cuda-graphs.md): the cache must be
    /// a leaf and the view directly behind the RoPE.
    pub(super) fn write_kv(&mut self, il: usize, p: Projected, pos: TensorId) -> Result<()> {
        let layer = self.layer_config(il)?;
        let (d, h, is_swa) = (layer.n_embd_head, layer.n_head_kv, layer.is_swa);
        let w = self.layer_weights(il)?;
        let (k_cache, v_cache) = self.caches(il)?;
        // A sliding layer's cache is a ring: its slots are other numbers than the positions.
        let rows = if is_swa {
            self.inputs.rows_swa
        } else {
            self.inputs.rows_global
        };
        let k = self.heads(p.k.ok_or_else(|| absent("K"))?, d, h)?;
        let k = self.norm(k, w.attn_k_norm.ok_or_else(|| absent("K norm"))?)?;
        let k = self.named(k, "Kcur_normed", il)?;
        let (factors, rope) = self.rope_of(il)?;
        let k = self.b.rope(k, pos, factors, rope)?;
        let k = self.named(k, "Kcur_pos", il)?;
        let k = self.flat(k, d * h)?;
        let k = self.b.set_rows(k_cache, k, rows)?;
        let k = self.named(k, "g4_k_write", il)?;
        // Nothing reads the node `set_rows` gives; attention reads the cache itself. So both writes
        // are put into the graph here, before attention: nodes run in this order.
        self.b.expand(k)?;
        let v = self.heads(p.v.ok_or_else(|| absent("V"))?, d, h)?;
        let v = self.b.rms_norm(v, self.p.config.rms_eps)?;
        let v = self.named(v, "Vcur_normed", il)?;
        let v = self.flat(v, d * h)?;
        let v = self.b.set_rows(v_cache, v, rows)?;
        let v = self.named(v, "g4_v_write", il)?;
        self.b.expand(v)?;
        Ok(())
    }

    /// All heads of a row in one dimension, a view `[n, n_rows]`.
    fn flat(&mut self, x: TensorId, n: usize) -> Result<TensorId> {
        let n_rows = self.b.dims(x)?.ne(2);
        let nb1 = n * size_of::<f32>();
        let view = View {
            dims: Dims::new(&[n, n_rows]),
            nb1,
            nb2: nb1 * n_rows,
            offset: 0,
        };
        Ok(self.b.view(x, view)?)
    }

    fn caches(&mut self, il: usize) -> Result<(TensorId, TensorId)> {
        let kv = self.p.kv;
        let pair = kv.layers.get(il).copied().flatten();
        let (k, v) = pair.ok_or_else(|| absent("K/V cache"))?;
        Ok((self.b.import(&kv.store, k)?, self.b.import(&kv.store, v)?))
    }

    /// Attention of `q [n_embd_head, n_head, n_rows]` to the donor's cache, and the output
    /// projection: `[n_embd, n_rows]`. The scale is 1 (`Gemma4TextAttention.scaling`).
    pub(super) fn attend(&mut self, il: usize, q: TensorId, s: Stream) -> Result<TensorId> {
        let layer = self.layer_config(il)?;
        let (donor, is_swa, n_embd_q) =
            (layer.donor, layer.is_swa, layer.n_embd_head * layer.n_head);
        let (d, h) = (layer.n_embd_head, layer.n_head_kv);
        // A donor is of the layer's own kind, so the layer's mask fits the donor's cache.
        let mask = if is_swa { s.masks.swa } else { s.masks.global };
        let mask = mask.ok_or_else(|| absent("mask"))?;
        // The mask says how many rows are read (T05): the bucket's for a linear cache, all of a ring.
        let n_kv = self.b.dims(mask)?.ne(0);
        let (k, v) = self.caches(donor)?;
        let k = self.cache_view(k, d, h, n_kv)?;
        let v = self.cache_view(v, d, h, n_kv)?;
        // [n_embd_head, n_rows, n_head], as flash attention wants it; a view, it reads strides.
        let q = self.b.swap_1_2(q)?;
        let cur = self.b.flash_attn(q, k, v, mask, 1.0)?;
        // The result has its heads back in dimension 1: [n_embd_head, n_head, n_rows].
        let cur = self.b.reshape(cur, Dims::new(&[n_embd_q, s.n_rows]))?;
        let cur = self.named(cur, "kqv_out", il)?;
        let w = self.layer_weights(il)?;
        let output = self.weight(w.attn_output)?;
        let operand = self.operand(cur)?;
        Ok(self.b.mul_mat(output, operand)?)
    }

    /// Rows `0..n_kv` of a cache by head: `[n_embd_head, n_kv, n_head_kv]`.
    fn cache_view(&mut self, c: TensorId, d: usize, h: usize, n_kv: usize) -> Result<TensorId> {
        // A cache row holds its heads side by side, so a head is a strided view of the rows:
        //
        //   row 0  | head 0 | head 1 |    nb2: one head
        //   row 1  | head 0 | head 1 |    nb1: one row
        //
        // Quantised caches: a head has to be whole blocks, or its view would begin inside one.
        let dtype = self.b.dtype(c)?;
        let head_bytes = dtype
            .row_bytes(d as u64)
            .and_then(|b| usize::try_from(b).ok());
        let nb2 = head_bytes.ok_or_else(|| GgmlError::Shape {
            op: "K/V cache",
            expected: format!(
                "heads of whole {} blocks of {}",
                dtype.name(),
                dtype.block_len()
            ),
            found: format!("heads of {d}"),
        })?;
        let nb1 = self.b.row_stride(c)?;
        Ok(self.b.view(
            c,
            View {
                dims: Dims::new(&[d, n_kv, h]),
                nb1,
                nb2,
                offset: 0,
            },
        )?)
    }
}
