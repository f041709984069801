//! Rotary embedding and attention.

use super::{Result, int};
use crate::ggml::graph::GraphBuilder;
use crate::ggml::quant::is_readable;
use crate::ggml::sys;
use crate::ggml::tensor::TensorId;
use crate::gguf::DType;

/// Rotary embedding parameters.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Rotated elements per head.
    pub n_rot: usize,
    /// Base of the frequencies.
    pub freq_base: f32,
}

impl GraphBuilder {
    /// Rotary embedding, NeoX pairing (i, i + n_rot / 2), of `x [n_embd_head, n_head, n_tokens]`
    /// at `pos [n_tokens]` (I32), frequencies divided by `factors [n_rot / 2]`.
    /// Wraps `ggml_rope_ext`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the shapes do not match.
    pub fn rope(
        &mut self,
        x: TensorId,
        pos: TensorId,
        factors: Option<TensorId>,
        rope: Rope,
    ) -> Result<TensorId> {
        let (d, p) = (self.dims(x)?, self.dims(pos)?);
        // ggml_rope_impl: pos is an I32 vector of ne[2]; factors F32 with >= n_dims / 2.
        let ok = d.ne(2) == p.ne(0)
            && self.is_type(pos, DType::I32)?
            && rope.n_rot <= d.ne(0)
            && rope.n_rot.is_multiple_of(2)
            && self.is_type(x, DType::F32)?;
        self.require("rope", ok, "F32 [d, h, t] and I32 [t]", &[x, pos])?;
        if let Some(factors) = factors {
            let enough = self.dims(factors)?.ne(0) >= rope.n_rot / 2;
            let ok = enough && self.is_type(factors, DType::F32)?;
            self.require("rope", ok, "F32 factors, one per pair", &[factors])?;
        }
        self.room(1)?;
        let n_rot = int("rope", rope.n_rot)?;
        let (x, pos) = (self.pointer(x)?, self.pointer(pos)?);
        let factors = match factors {
            Some(id) => self.pointer(id)?.as_ptr(),
            None => std::ptr::null_mut(),
        };
        let mode = sys::GGML_ROPE_TYPE_NEOX as i32;
        // The YaRN parameters are at their neutral values, as llama.cpp passes them for Gemma 4.
        // SAFETY: checked above; null factors are allowed.
        let t = unsafe {
            sys::ggml_rope_ext(
                self.ctx(),
                x.as_ptr(),
                pos.as_ptr(),
                factors,
                n_rot,
                mode,
                0, // n_ctx_orig: read for YaRN only
                rope.freq_base,
                1.0,  // freq_scale: none
                0.0,  // ext_factor: no YaRN
                1.0,  // attn_factor: magnitudes stay
                32.0, // beta_fast: read for YaRN only
                1.0,  // beta_slow: read for YaRN only
            )
        };
        self.push(t)
    }

    /// Attention: `q [d, n_q, n_head]`, `k, v [d, n_kv, n_head_kv]`, `mask [n_kv, n_q]` (F16)
    /// `-> [d, n_head, n_q]` (F32). Wraps `ggml_flash_attn_ext` with F32 accumulation requested.
    ///
    /// # Errors
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the shapes do not match.
    pub fn flash_attn(
        &mut self,
        q: TensorId,
        k: TensorId,
        v: TensorId,
        mask: TensorId,
        scale: f32,
    ) -> Result<TensorId> {
        let (dq, dk, dv, dm) = (
            self.dims(q)?,
            self.dims(k)?,
            self.dims(v)?,
            self.dims(mask)?,
        );
        // ggml_flash_attn_ext: can_mul_mat(k, q); mask F16, contiguous, ne[1] >= q->ne[1];
        // trap T05: the mask has exactly the key axis of the view. The CPU reads q as floats
        // without a look at its type.
        let ok = dq.ne(0) == dk.ne(0)
            && dk == dv
            && dq.ne(2) % dk.ne(2) == 0
            && dm.ne(0) == dk.ne(1)
            && dm.ne(1) >= dq.ne(1)
            && self.is_type(q, DType::F32)?
            && self.is_type(mask, DType::F16)?
            && self.is_contiguous(mask)?;
        self.require(
            "flash_attn",
            ok,
            "F32 q, matching k, v and an F16 mask",
            &[q, k, v, mask],
        )?;
        // ggml_compute_forward_flash_attn_ext_f16_one_chunk: v_to_float, unless V is F32. The CPU
        // is asked nothing about it (Q8_1 has none).
        let ok = is_readable(self.dtype(k)?) && is_readable(self.dtype(v)?);
        self.require("flash_attn", ok, "k and v that convert to F32", &[k, v])?;
        self.room(1)?;
        let (q, k, v) = (self.pointer(q)?, self.pointer(k)?, self.pointer(v)?);
        let mask = self.pointer(mask)?;
        // SAFETY: checked above.
        let t = unsafe {
            sys::ggml_flash_attn_ext(
                self.ctx(),
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                mask.as_ptr(),
                scale,
                0.0, // max_bias: no ALiBi
                0.0, // logit_softcap: Gemma 4 caps the logits of the head only
            )
        };
        // SAFETY: `t` is the flash-attention node just made.
        unsafe { sys::ggml_prec_set_acc(t, sys::GGML_PREC_F32) };
        self.push(t)
    }
}
