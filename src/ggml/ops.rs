//! One constructor per operation. Each checks what ggml would otherwise assert, so that no
//! sequence of safe calls can end the process. The comment above a check names the assertion.

use super::graph::GraphBuilder;
use super::status::GgmlError;
use super::sys;
use super::tensor::{Dims, TensorId};
use crate::gguf::DType;

type Result<T> = std::result::Result<T, GgmlError>;

/// Rotary embedding parameters.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Rotated elements per head.
    pub n_rot: usize,
    /// Base of the frequencies.
    pub freq_base: f32,
}

/// A view: extents and byte strides of dimensions 1 and 2, and a byte offset.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Shape of the view.
    pub dims: Dims,
    /// Bytes between elements of dimension 1.
    pub nb1: usize,
    /// Bytes between elements of dimension 2.
    pub nb2: usize,
    /// Bytes from the start of the viewed tensor.
    pub offset: usize,
}

fn shape_error(
    op: &'static str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> GgmlError {
    GgmlError::Shape {
        op,
        expected: expected.into(),
        found: found.into(),
    }
}

fn int(op: &'static str, n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| shape_error(op, "a 32-bit count", n.to_string()))
}

fn long(op: &'static str, n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| shape_error(op, "a 63-bit count", n.to_string()))
}

impl GraphBuilder {
    fn header(&self, id: TensorId) -> Result<sys::ggml_tensor> {
        let ptr = self.pointer(id)?;
        // SAFETY: headers live as long as the builder, which keeps stores and context.
        Ok(*unsafe { ptr.as_ref() })
    }

    fn require(&self, op: &'static str, ok: bool, expected: &str, ids: &[TensorId]) -> Result<()> {
        if ok {
            return Ok(());
        }
        let mut found = Vec::new();
        for id in ids {
            let header = self.header(*id)?;
            found.push(format!("type {} {}", header.type_, self.dims(*id)?));
        }
        Err(shape_error(op, expected, found.join(" and ")))
    }

    fn is_type(&self, id: TensorId, dtype: DType) -> Result<bool> {
        Ok(self.header(id)?.type_ == dtype.id())
    }

    /// Element type of a tensor.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn dtype(&self, id: TensorId) -> Result<DType> {
        let id = self.header(id)?.type_;
        DType::from_id(id).ok_or_else(|| shape_error("dtype", "a known type", id.to_string()))
    }

    /// Bytes between rows of a tensor.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn row_stride(&self, id: TensorId) -> Result<usize> {
        let [_, nb1, ..] = self.header(id)?.nb;
        Ok(nb1)
    }

    fn is_contiguous(&self, id: TensorId) -> Result<bool> {
        let ptr = self.pointer(id)?;
        // SAFETY: the header is alive.
        Ok(unsafe { sys::ggml_is_contiguous(ptr.as_ptr()) })
    }

    /// `y = w x`: `[k, n] x [k, m] -> [n, m]` (F32). Wraps `ggml_mul_mat`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the inner dimensions differ.
    pub fn mul_mat(&mut self, w: TensorId, x: TensorId) -> Result<TensorId> {
        let (a, b) = (self.dims(w)?, self.dims(x)?);
        // ggml_can_mul_mat; !ggml_is_transposed(a)
        let ok = a.ne(0) == b.ne(0) && b.ne(2) % a.ne(2) == 0 && b.ne(3) % a.ne(3) == 0;
        self.require("mul_mat", ok, "equal inner dimensions", &[w, x])?;
        let [nb0, nb1, ..] = self.header(w)?.nb;
        self.require(
            "mul_mat",
            nb0 <= nb1,
            "a weight that is not transposed",
            &[w],
        )?;
        self.room(1)?;
        let (w, x) = (self.pointer(w)?, self.pointer(x)?);
        // SAFETY: the conditions of ggml_mul_mat were checked above; room was reserved.
        let t = unsafe { sys::ggml_mul_mat(self.ctx(), w.as_ptr(), x.as_ptr()) };
        self.push(t)
    }

    /// Expert product: `[k, n, n_expert] x [k, m|1, n_tokens]` by `ids [m, n_tokens]` (I32)
    /// `-> [n, m, n_tokens]`. Wraps `ggml_mul_mat_id`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the shapes do not match.
    pub fn mul_mat_id(&mut self, w: TensorId, x: TensorId, ids: TensorId) -> Result<TensorId> {
        let (a, b, i) = (self.dims(w)?, self.dims(x)?, self.dims(ids)?);
        // ggml_mul_mat_id: 3d weights, I32 ids, ids per row of b, broadcastable.
        let ok = a.ne(3) == 1
            && b.ne(3) == 1
            && i.ne(2) == 1
            && i.ne(1) == b.ne(2)
            && a.ne(0) == b.ne(0)
            && i.ne(0) % b.ne(1) == 0
            && self.is_type(ids, DType::I32)?;
        self.require(
            "mul_mat_id",
            ok,
            "[k, n, e], [k, m, t], I32 [m, t]",
            &[w, x, ids],
        )?;
        self.room(1)?;
        let (w, x, ids) = (self.pointer(w)?, self.pointer(x)?, self.pointer(ids)?);
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_mul_mat_id(self.ctx(), w.as_ptr(), x.as_ptr(), ids.as_ptr()) };
        self.push(t)
    }

    /// Rows of `table [k, n]` by `ids [m]` (I32) `-> [k, m]` (F32). Wraps `ggml_get_rows`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when ids are not I32 or the batches differ.
    pub fn get_rows(&mut self, table: TensorId, ids: TensorId) -> Result<TensorId> {
        let (a, b) = (self.dims(table)?, self.dims(ids)?);
        // ggml_get_rows: a->ne[2] == b->ne[1], a->ne[3] == b->ne[2], b->ne[3] == 1, I32.
        let ok = a.ne(2) == b.ne(1)
            && a.ne(3) == b.ne(2)
            && b.ne(3) == 1
            && self.is_type(ids, DType::I32)?;
        self.require("get_rows", ok, "a table and I32 row ids", &[table, ids])?;
        self.room(1)?;
        let (a, b) = (self.pointer(table)?, self.pointer(ids)?);
        // SAFETY: checked above; ids are kept in range by the planner and the tokenizer check.
        let t = unsafe { sys::ggml_get_rows(self.ctx(), a.as_ptr(), b.as_ptr()) };
        self.push(t)
    }

    /// Writes `src [k, m]` (F32) to rows `ids [m]` (I64) of `dst [k, n]`. Wraps `ggml_set_rows`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the shapes do not match.
    pub fn set_rows(&mut self, dst: TensorId, src: TensorId, ids: TensorId) -> Result<TensorId> {
        let (a, b, c) = (self.dims(dst)?, self.dims(src)?, self.dims(ids)?);
        // ggml_set_rows: same row length, same ne[2], ne[3]; b->ne[1] == c->ne[0]; F32; I64.
        let ok = a.ne(0) == b.ne(0)
            && a.ne(2) == b.ne(2)
            && a.ne(3) == b.ne(3)
            && b.ne(1) == c.ne(0)
            && self.is_type(src, DType::F32)?
            && self.is_type(ids, DType::I64)?;
        self.require(
            "set_rows",
            ok,
            "[k, n], F32 [k, m], I64 [m]",
            &[dst, src, ids],
        )?;
        self.room(1)?;
        let (a, b, c) = (self.pointer(dst)?, self.pointer(src)?, self.pointer(ids)?);
        // SAFETY: checked above; the row indices are written by the planner, in range.
        let t = unsafe { sys::ggml_set_rows(self.ctx(), a.as_ptr(), b.as_ptr(), c.as_ptr()) };
        self.push(t)
    }

    /// `x / sqrt(mean(x^2) + eps)` over dimension 0. Wraps `ggml_rms_norm`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn rms_norm(&mut self, x: TensorId, eps: f32) -> Result<TensorId> {
        let ok = self.is_type(x, DType::F32)? && eps >= 0.0;
        self.require("rms_norm", ok, "F32 and eps >= 0", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_rms_norm(self.ctx(), x.as_ptr(), eps) };
        self.push(t)
    }

    fn binary(
        &mut self,
        op: &'static str,
        a: TensorId,
        b: TensorId,
        call: unsafe extern "C" fn(
            *mut sys::ggml_context,
            *mut sys::ggml_tensor,
            *mut sys::ggml_tensor,
        ) -> *mut sys::ggml_tensor,
    ) -> Result<TensorId> {
        let (x, y) = (self.dims(a)?, self.dims(b)?);
        // ggml_can_repeat(b, a): every extent of a is a multiple of b's.
        let ok = (0..4).all(|i| x.ne(i) % y.ne(i) == 0);
        self.require(
            op,
            ok,
            "a second operand that repeats into the first",
            &[a, b],
        )?;
        self.room(1)?;
        let (a, b) = (self.pointer(a)?, self.pointer(b)?);
        // SAFETY: the broadcast condition was checked; the function is one of ggml's own.
        let t = unsafe { call(self.ctx(), a.as_ptr(), b.as_ptr()) };
        self.push(t)
    }

    /// `a + b`, `b` broadcast. Wraps `ggml_add`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `b` does not repeat into `a`.
    pub fn add(&mut self, a: TensorId, b: TensorId) -> Result<TensorId> {
        self.binary("add", a, b, sys::ggml_add)
    }

    /// `a * b`, `b` broadcast. Wraps `ggml_mul`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `b` does not repeat into `a`.
    pub fn mul(&mut self, a: TensorId, b: TensorId) -> Result<TensorId> {
        self.binary("mul", a, b, sys::ggml_mul)
    }

    /// `a / b`, `b` broadcast. Wraps `ggml_div`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `b` does not repeat into `a`.
    pub fn div(&mut self, a: TensorId, b: TensorId) -> Result<TensorId> {
        self.binary("div", a, b, sys::ggml_div)
    }

    /// `gelu(gate) * up`, element by element. Wraps `ggml_geglu_split`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the shapes differ.
    pub fn geglu(&mut self, gate: TensorId, up: TensorId) -> Result<TensorId> {
        let same = self.dims(gate)? == self.dims(up)?;
        // ggml_glu_impl: contiguous rows, same shape and type.
        self.require("geglu", same, "two tensors of one shape", &[gate, up])?;
        self.room(1)?;
        let (a, b) = (self.pointer(gate)?, self.pointer(up)?);
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_geglu_split(self.ctx(), a.as_ptr(), b.as_ptr()) };
        self.push(t)
    }

    /// `gelu(first half) * second half` of dimension 0: `[2 n, m] -> [n, m]`. Wraps `ggml_geglu`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when dimension 0 is odd.
    pub fn geglu_halves(&mut self, x: TensorId) -> Result<TensorId> {
        let even = self.dims(x)?.ne(0) % 2 == 0 && self.is_contiguous(x)?;
        self.require("geglu", even, "an even first dimension", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_geglu(self.ctx(), x.as_ptr()) };
        self.push(t)
    }

    fn unary(
        &mut self,
        op: &'static str,
        x: TensorId,
        call: unsafe extern "C" fn(
            *mut sys::ggml_context,
            *mut sys::ggml_tensor,
        ) -> *mut sys::ggml_tensor,
    ) -> Result<TensorId> {
        let f32 = self.is_type(x, DType::F32)?;
        self.require(op, f32, "F32", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: any F32 tensor is allowed; the function is one of ggml's own.
        let t = unsafe { call(self.ctx(), x.as_ptr()) };
        self.push(t)
    }

    /// GELU (tanh form). Wraps `ggml_gelu`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn gelu(&mut self, x: TensorId) -> Result<TensorId> {
        self.unary("gelu", x, sys::ggml_gelu)
    }

    /// Hyperbolic tangent. Wraps `ggml_tanh`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn tanh(&mut self, x: TensorId) -> Result<TensorId> {
        self.unary("tanh", x, sys::ggml_tanh)
    }

    /// Softmax over dimension 0. Wraps `ggml_soft_max`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not contiguous F32.
    pub fn soft_max(&mut self, x: TensorId) -> Result<TensorId> {
        let ok = self.is_contiguous(x)?;
        self.require("soft_max", ok, "a contiguous tensor", &[x])?;
        self.unary("soft_max", x, sys::ggml_soft_max)
    }

    /// Sum over dimension 0: `[n, m] -> [1, m]`. Wraps `ggml_sum_rows`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn sum_rows(&mut self, x: TensorId) -> Result<TensorId> {
        self.unary("sum_rows", x, sys::ggml_sum_rows)
    }

    /// Contiguous copy. Wraps `ggml_cont`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn cont(&mut self, x: TensorId) -> Result<TensorId> {
        self.unary("cont", x, sys::ggml_cont)
    }

    /// `x * s`. Wraps `ggml_scale`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn scale(&mut self, x: TensorId, s: f32) -> Result<TensorId> {
        let f32 = self.is_type(x, DType::F32)?;
        self.require("scale", f32, "F32", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: any padded-1d F32 tensor is allowed.
        let t = unsafe { sys::ggml_scale(self.ctx(), x.as_ptr(), s) };
        self.push(t)
    }

    /// `x` limited to `[min, max]`. Wraps `ggml_clamp` (works in place on `x`).
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `x` is not F32.
    pub fn clamp(&mut self, x: TensorId, min: f32, max: f32) -> Result<TensorId> {
        let f32 = self.is_type(x, DType::F32)?;
        self.require("clamp", f32, "F32", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: any F32 tensor is allowed.
        let t = unsafe { sys::ggml_clamp(self.ctx(), x.as_ptr(), min, max) };
        self.push(t)
    }

    /// Indices of the `k` largest of dimension 0: `[n, m] -> I32 [k, m]`, largest first.
    /// Wraps `ggml_argsort_top_k`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when `k` exceeds dimension 0.
    pub fn top_k(&mut self, x: TensorId, k: usize) -> Result<TensorId> {
        let n = self.dims(x)?.ne(0);
        // ggml_argsort_top_k: a->ne[0] >= k; argsort: ne[0] <= INT32_MAX.
        let ok = k >= 1 && k <= n && self.is_type(x, DType::F32)?;
        self.require("top_k", ok, "F32 with at least k entries", &[x])?;
        self.room(2)?;
        let k = int("top_k", k)?;
        let x = self.pointer(x)?;
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_argsort_top_k(self.ctx(), x.as_ptr(), k) };
        self.push(t)
    }

    /// Same elements, other shape. Wraps `ggml_reshape_3d`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the counts differ or `x` is not contiguous.
    pub fn reshape(&mut self, x: TensorId, dims: Dims) -> Result<TensorId> {
        let same = self.dims(x)?.n_elements() == dims.n_elements() && dims.ne(3) == 1;
        let ok = same && self.is_contiguous(x)?;
        self.require(
            "reshape",
            ok,
            "a contiguous tensor of as many elements",
            &[x],
        )?;
        self.room(1)?;
        let [a, b, c, _] = dims.as_ne();
        let x = self.pointer(x)?;
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_reshape_3d(self.ctx(), x.as_ptr(), a, b, c) };
        self.push(t)
    }

    /// Repeats `x` to a larger shape. Wraps `ggml_repeat_4d`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when an extent is not a multiple of `x`'s.
    pub fn repeat(&mut self, x: TensorId, dims: Dims) -> Result<TensorId> {
        let from = self.dims(x)?;
        // ggml_repeat_4d: every new extent is a multiple of the old one.
        let ok =
            (0..4).all(|i| dims.ne(i).is_multiple_of(from.ne(i))) && self.is_type(x, DType::F32)?;
        self.require("repeat", ok, "F32 that repeats into the shape", &[x])?;
        self.room(1)?;
        let [a, b, c, d] = dims.as_ne();
        let x = self.pointer(x)?;
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_repeat_4d(self.ctx(), x.as_ptr(), a, b, c, d) };
        self.push(t)
    }

    /// One behind the other along dimension 0. Wraps `ggml_concat`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the other dimensions or types differ.
    pub fn concat_0(&mut self, a: TensorId, b: TensorId) -> Result<TensorId> {
        let (x, y) = (self.dims(a)?, self.dims(b)?);
        // ggml_concat: same type, equal extents but for dimension 0.
        let ok = (1..4).all(|i| x.ne(i) == y.ne(i)) && self.dtype(a)? == self.dtype(b)?;
        self.require(
            "concat",
            ok,
            "two tensors that differ in dimension 0 only",
            &[a, b],
        )?;
        self.room(1)?;
        let (a, b) = (self.pointer(a)?, self.pointer(b)?);
        // SAFETY: checked above.
        let t = unsafe { sys::ggml_concat(self.ctx(), a.as_ptr(), b.as_ptr(), 0) };
        self.push(t)
    }

    /// A window into `x`. Wraps `ggml_view_3d`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the view leaves `x`.
    pub fn view(&mut self, x: TensorId, view: View) -> Result<TensorId> {
        let header = self.pointer(x)?;
        // SAFETY: the header is alive.
        let limit = unsafe { sys::ggml_nbytes(header.as_ptr()) };
        let dtype = self.dtype(x)?;
        let row = dtype
            .row_bytes(view.dims.ne(0) as u64)
            .and_then(|b| usize::try_from(b).ok());
        // ggml_view_impl: the last byte of the view lies inside the viewed tensor.
        let last = row.and_then(|row| {
            (view.dims.ne(1).checked_sub(1)?)
                .checked_mul(view.nb1)?
                .checked_add(view.dims.ne(2).checked_sub(1)?.checked_mul(view.nb2)?)?
                .checked_add(row)?
                .checked_add(view.offset)
        });
        let ok = view.dims.ne(3) == 1 && last.is_some_and(|last| last <= limit);
        self.require("view", ok, "a view inside the tensor", &[x])?;
        self.room(1)?;
        let [a, b, c, _] = view.dims.as_ne();
        // SAFETY: the view was checked to lie inside the tensor.
        let t = unsafe {
            sys::ggml_view_3d(
                self.ctx(),
                header.as_ptr(),
                a,
                b,
                c,
                view.nb1,
                view.nb2,
                view.offset,
            )
        };
        self.push(t)
    }

    /// Exchanges dimensions 1 and 2 (a view). Wraps `ggml_permute`.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn swap_1_2(&mut self, x: TensorId) -> Result<TensorId> {
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: the axes are a permutation of 0..4.
        let t = unsafe { sys::ggml_permute(self.ctx(), x.as_ptr(), 0, 2, 1, 3) };
        self.push(t)
    }

    /// Rotary embedding, NeoX pairing (i, i + n_rot / 2), of `x [n_embd_head, n_head, n_tokens]`
    /// at `pos [n_tokens]` (I32), frequencies divided by `factors [n_rot / 2]`.
    /// Wraps `ggml_rope_ext`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the shapes do not match.
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
                0,
                rope.freq_base,
                1.0,
                0.0,
                1.0,
                32.0,
                1.0,
            )
        };
        self.push(t)
    }

    /// Attention: `q [d, n_q, n_head]`, `k, v [d, n_kv, n_head_kv]`, `mask [n_kv, n_q]` (F16)
    /// `-> [d, n_head, n_q]` (F32). Wraps `ggml_flash_attn_ext` with F32 accumulation requested.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the shapes do not match.
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
        // trap T05: the mask has exactly the key axis of the view.
        let ok = dq.ne(0) == dk.ne(0)
            && dk == dv
            && dq.ne(2) % dk.ne(2) == 0
            && dm.ne(0) == dk.ne(1)
            && dm.ne(1) >= dq.ne(1)
            && self.is_type(mask, DType::F16)?
            && self.is_contiguous(mask)?;
        self.require(
            "flash_attn",
            ok,
            "matching q, k, v and an F16 mask",
            &[q, k, v, mask],
        )?;
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
                0.0,
                0.0,
            )
        };
        // SAFETY: `t` is the flash-attention node just made.
        unsafe { sys::ggml_prec_set_acc(t, sys::GGML_PREC_F32) };
        self.push(t)
    }

    /// Converts to another type. Wraps `ggml_cast`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when a row is not whole blocks of the type.
    pub fn cast(&mut self, x: TensorId, dtype: DType) -> Result<TensorId> {
        super::tensor::check_new(dtype, &self.dims(x)?)?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: the type is known and the row length was checked.
        let t = unsafe { sys::ggml_cast(self.ctx(), x.as_ptr(), dtype.id() as _) };
        self.push(t)
    }

    /// Rows `first .. first + n` of a two-dimensional tensor, as a view `[k, n]`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when the rows leave the tensor.
    pub fn rows(&mut self, x: TensorId, first: usize, n: usize) -> Result<TensorId> {
        let stride = self.row_stride(x)?;
        let k = self.dims(x)?.ne(0);
        long("rows", first)?;
        let offset = first.saturating_mul(stride);
        self.view(
            x,
            View {
                dims: Dims::new(&[k, n]),
                nb1: stride,
                nb2: stride * n,
                offset,
            },
        )
    }
}
