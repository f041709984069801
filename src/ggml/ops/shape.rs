//! Operations that rearrange: shapes, views, copies, types.

use super::{Result, shape_error};
use crate::ggml::graph::GraphBuilder;
use crate::ggml::quant::is_readable;
use crate::ggml::sys;
use crate::ggml::tensor::{Dims, TensorId, check_new};
use crate::gguf::DType;

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

fn long(op: &'static str, n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| shape_error(op, "a 63-bit count", n.to_string()))
}

impl GraphBuilder {
    /// Same elements, other shape. Wraps `ggml_reshape_3d`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the counts differ or `x` is not contiguous.
    pub fn reshape(&mut self, x: TensorId, dims: Dims) -> Result<TensorId> {
        // ggml_reshape_3d: ggml_is_contiguous, ggml_nelements(a) == ne0 * ne1 * ne2.
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
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when an extent is not a multiple of `x`'s.
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
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the other dimensions or types differ.
    pub fn concat_0(&mut self, a: TensorId, b: TensorId) -> Result<TensorId> {
        let (x, y) = (self.dims(a)?, self.dims(b)?);
        // ggml_concat: same type, equal extents but for dimension 0. The CPU copies other types
        // element by element, which blocks are not.
        let ok = (1..4).all(|i| x.ne(i) == y.ne(i)) && self.are_f32(&[a, b])?;
        self.require(
            "concat",
            ok,
            "two F32 tensors that differ in dimension 0 only",
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
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the view leaves `x`.
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
    /// [`GgmlError::ForeignTensor`](crate::ggml::GgmlError::ForeignTensor) for a handle of another graph.
    pub fn swap_1_2(&mut self, x: TensorId) -> Result<TensorId> {
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: the axes are a permutation of 0..4.
        let t = unsafe { sys::ggml_permute(self.ctx(), x.as_ptr(), 0, 2, 1, 3) };
        self.push(t)
    }

    /// Converts to another type. Wraps `ggml_cast`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the type does not convert, or a row is not whole blocks of it.
    pub fn cast(&mut self, x: TensorId, dtype: DType) -> Result<TensorId> {
        check_new(dtype, &self.dims(x)?)?;
        // ggml_compute_forward_dup aborts at other pairs: floats become anything that converts
        // back, blocks F32 alone. Into blocks it takes contiguous rows only.
        let from = self.dtype(x)?;
        let is_float = |t: DType| [DType::F32, DType::F16, DType::BF16].contains(&t);
        let ok = is_readable(from)
            && if is_float(from) {
                is_float(dtype) || is_readable(dtype) && self.is_contiguous(x)?
            } else {
                dtype == DType::F32
            };
        self.require("cast", ok, "types that convert into each other", &[x])?;
        self.room(1)?;
        let x = self.pointer(x)?;
        // SAFETY: the type is known and the row length was checked.
        let t = unsafe { sys::ggml_cast(self.ctx(), x.as_ptr(), dtype.id() as _) };
        self.push(t)
    }

    /// Rows `first .. first + n` of a two-dimensional tensor, as a view `[k, n]`.
    ///
    /// # Errors
    /// [`GgmlError::Shape`](crate::ggml::GgmlError::Shape) when the rows leave the tensor.
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
