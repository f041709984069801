//! Shapes and handles: what the rest of the crate knows about a tensor.

use super::status::GgmlError;
use crate::gguf::DType;

/// Shape in ggml order, fastest dimension first, padded with ones to four dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims([usize; 4]);

impl Dims {
    /// Takes up to four extents; further ones are ignored.
    pub fn new(ne: &[usize]) -> Self {
        let mut dims = [1; 4];
        for (to, from) in dims.iter_mut().zip(ne) {
            *to = *from;
        }
        Self(dims)
    }

    /// Extent of dimension `i` (1 beyond the fourth).
    pub fn ne(&self, i: usize) -> usize {
        self.0.get(i).copied().unwrap_or(1)
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.0.iter().product()
    }

    pub(super) fn as_ne(&self) -> [i64; 4] {
        self.0.map(|n| i64::try_from(n).unwrap_or(i64::MAX))
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d] = self.0;
        write!(f, "[{a}, {b}, {c}, {d}]")
    }
}

/// Refuses a tensor whose rows are not whole blocks or that has no elements.
pub(super) fn check_new(dtype: DType, dims: &Dims) -> Result<(), GgmlError> {
    let block = usize::try_from(dtype.block_len()).unwrap_or(usize::MAX);
    if dims.n_elements() == 0 || !dims.ne(0).is_multiple_of(block) {
        return Err(GgmlError::Shape {
            op: "new_tensor",
            expected: format!("rows of whole {block}-element blocks of {}", dtype.name()),
            found: dims.to_string(),
        });
    }
    Ok(())
}

/// A tensor of a graph under construction or of a built graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId {
    pub(super) graph: u32,
    pub(super) index: u32,
}
