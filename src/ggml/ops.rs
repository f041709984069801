//! One constructor per operation. Each checks what ggml would otherwise assert, so that no
//! sequence of safe calls can end the process. The comment above a check names the assertion.

mod attention;
mod shape;

pub use attention::Rope;
pub use shape::View;

use super::graph::GraphBuilder;
use super::quant::is_readable;
use super::status::GgmlError;
use super::sys;
use super::tensor::TensorId;
use crate::gguf::DType;

type Result<T> = std::result::Result<T, GgmlError>;

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
            found.push(format!("{}{}", self.dtype(*id)?.name(), self.dims(*id)?));
        }
        Err(shape_error(op, expected, found.join(" and ")))
    }

    fn is_type(&self, id: TensorId, dtype: DType) -> Result<bool> {
        Ok(self.header(id)?.type_ == dtype.id())
    }

    fn are_f32(&self, ids: &[TensorId]) -> Result<bool> {
        ids.iter()
            .try_fold(true, |ok, id| Ok(ok && self.is_type(*id, DType::F32)?))
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

    /// As `ggml_is_contiguous_1`: elements of a row lie together, rows at one distance.
    fn has_even_rows(&self, id: TensorId) -> Result<bool> {
        let (dims, [nb0, nb1, nb2, nb3]) = (self.dims(id)?, self.header(id)?.nb);
        let matrix = nb1 * dims.ne(1);
        Ok(nb0 as u64 == self.dtype(id)?.block_bytes()
            && (dims.ne(2) == 1 || nb2 == matrix)
            && (dims.ne(3) == 1 || nb3 == matrix * dims.ne(2)))
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
        // ggml_can_mul_mat; !ggml_is_transposed(a). Types of x are the backend's to refuse.
        let ok = a.ne(0) == b.ne(0) && b.ne(2) % a.ne(2) == 0 && b.ne(3) % a.ne(3) == 0;
        self.require("mul_mat", ok, "equal inner dimensions", &[w, x])?;
        // The CPU calls the type's vec_dot, which is null for types without numbers to multiply.
        let ok = is_readable(self.dtype(w)?);
        self.require("mul_mat", ok, "a weight that converts to F32", &[w])?;
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
        // ggml_mul_mat_id: 3d weights, I32 ids, ids per row of b, broadcastable. The CPU asserts
        // F32 in ggml_compute_forward_mul_mat_id, and calls the weight type's vec_dot.
        let ok = a.ne(3) == 1
            && b.ne(3) == 1
            && i.ne(2) == 1
            && i.ne(1) == b.ne(2)
            && a.ne(0) == b.ne(0)
            && i.ne(0) % b.ne(1) == 0
            && is_readable(self.dtype(w)?)
            && self.is_type(x, DType::F32)?
            && self.is_type(ids, DType::I32)?;
        self.require(
            "mul_mat_id",
            ok,
            "[k, n, e], F32 [k, m, t], I32 [m, t]",
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
        // ggml_get_rows: a->ne[2] == b->ne[1], a->ne[3] == b->ne[2], b->ne[3] == 1, I32;
        // ggml_compute_forward_get_rows aborts at a type that it cannot read.
        let ok = a.ne(2) == b.ne(1)
            && a.ne(3) == b.ne(2)
            && b.ne(3) == 1
            && is_readable(self.dtype(table)?)
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
        // ggml_set_rows: same row length, same ne[2], ne[3]; b->ne[1] == c->ne[0]; F32; I64. The
        // CPU calls the from_float of dst's type, which integers lack.
        let ok = a.ne(0) == b.ne(0)
            && a.ne(2) == b.ne(2)
            && a.ne(3) == b.ne(3)
            && b.ne(1) == c.ne(0)
            && is_readable(self.dtype(dst)?)
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
        // ggml_compute_forward_rms_norm_f32: elements side by side, eps >= 0.
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
        // ggml_can_repeat(b, a): every extent of a is a multiple of b's. binary_op of the CPU aborts
        // at pairs of types that it has no loop for; only F32 is needed.
        let ok = (0..4).all(|i| x.ne(i) % y.ne(i) == 0) && self.are_f32(&[a, b])?;
        self.require(
            op,
            ok,
            "F32 and a second operand that repeats into the first",
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
        // ggml_glu_impl: ggml_is_contiguous_1, same shape and type;
        // ggml_compute_forward_geglu aborts at types that are no floats.
        let ok = self.dims(gate)? == self.dims(up)?
            && self.are_f32(&[gate, up])?
            && self.has_even_rows(gate)?
            && self.has_even_rows(up)?;
        let expected = "two F32 tensors of one shape, rows at equal distances";
        self.require("geglu", ok, expected, &[gate, up])?;
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
        // ggml_glu_impl halves ne[0], and asserts ggml_is_contiguous_1; types as for `geglu`.
        let ok = self.dims(x)?.ne(0) % 2 == 0
            && self.is_type(x, DType::F32)?
            && self.is_contiguous(x)?;
        self.require("geglu", ok, "contiguous F32, an even first dimension", &[x])?;
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
        // ggml_unary_impl: elements of a row side by side, which no operation here undoes; unary_op
        // aborts at other types.
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
        // ggml_soft_max_impl: ggml_is_contiguous.
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
    /// [`GgmlError::Shape`] when `x` is not contiguous F32.
    pub fn scale(&mut self, x: TensorId, s: f32) -> Result<TensorId> {
        // ggml_scale_impl: ggml_is_padded_1d; ggml_compute_forward_scale_f32: contiguous.
        let ok = self.is_type(x, DType::F32)? && self.is_contiguous(x)?;
        self.require("scale", ok, "contiguous F32", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: checked above.
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
}

#[cfg(test)]
mod tests;
