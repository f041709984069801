//! Converting rows between tensor types with ggml's own routines, on all threads.

use super::status::{GgmlError, host_zeros};
use super::sys;
use crate::gguf::DType;

/// Converts `n_rows` rows of `n_per_row` elements to BF16.
///
/// # Errors
/// [`GgmlError::Shape`] when the bytes do not match or the type has no conversion, out of memory.
pub fn to_bf16(
    dtype: DType,
    data: &[u8],
    n_per_row: usize,
    n_threads: usize,
) -> Result<Vec<u8>, GgmlError> {
    let n_rows = row_count(dtype, data, n_per_row)?;
    let row_bytes = data.len() / n_rows.max(1);
    let mut out = host_zeros(n_rows * n_per_row * 2, "a weight that is converted")?;
    let rows_per_thread = n_rows.div_ceil(n_threads.max(1)).max(1);
    let result: Result<Vec<()>, GgmlError> = std::thread::scope(|scope| {
        let tasks: Vec<_> = data
            .chunks(rows_per_thread * row_bytes)
            .zip(out.chunks_mut(rows_per_thread * n_per_row * 2))
            .map(|(src, dst)| scope.spawn(move || bf16_rows(dtype, src, dst, n_per_row)))
            .collect();
        tasks
            .into_iter()
            .map(|t| {
                t.join().unwrap_or(Err(GgmlError::Compute {
                    status: -1,
                    what: "conversion",
                }))
            })
            .collect()
    });
    result.map(|_| out)
}

fn bf16_rows(dtype: DType, src: &[u8], dst: &mut [u8], n: usize) -> Result<(), GgmlError> {
    let row_bytes = usize::try_from(dtype.row_bytes(n as u64).unwrap_or(0))
        .unwrap_or(0)
        .max(1);
    let mut row = vec![0f32; n];
    for (src, dst) in src.chunks_exact(row_bytes).zip(dst.chunks_exact_mut(n * 2)) {
        dequantize_row(dtype, src, &mut row)?;
        for (value, out) in row.iter().zip(dst.chunks_exact_mut(2)) {
            out.copy_from_slice(&half::bf16::from_f32(*value).to_bits().to_le_bytes());
        }
    }
    Ok(())
}

fn row_count(dtype: DType, data: &[u8], n_per_row: usize) -> Result<usize, GgmlError> {
    let row = dtype
        .row_bytes(n_per_row as u64)
        .and_then(|b| usize::try_from(b).ok())
        .unwrap_or(0);
    if row == 0 || !data.len().is_multiple_of(row) {
        return Err(GgmlError::Shape {
            op: "dequantize",
            expected: format!("whole rows of {row} bytes of {}", dtype.name()),
            found: format!("{} bytes", data.len()),
        });
    }
    Ok(data.len() / row)
}

/// Dequantises one row. Uses the `to_float` of `ggml_get_type_traits`.
///
/// # Errors
/// [`GgmlError::Shape`] when lengths do not match or the type has no conversion.
pub fn dequantize_row(dtype: DType, src: &[u8], out: &mut [f32]) -> Result<(), GgmlError> {
    if row_count(dtype, src, out.len())? != 1 {
        return Err(GgmlError::Shape {
            op: "dequantize",
            expected: "one row".to_owned(),
            found: format!("{} bytes", src.len()),
        });
    }
    if dtype == DType::F32 {
        for (value, bytes) in out.iter_mut().zip(src.chunks_exact(4)) {
            let mut le = [0; 4];
            le.copy_from_slice(bytes);
            *value = f32::from_le_bytes(le);
        }
        return Ok(());
    }
    let to_float = to_float(dtype).ok_or_else(|| GgmlError::Shape {
        op: "dequantize",
        expected: "a type with a conversion to F32".to_owned(),
        found: dtype.name().to_owned(),
    })?;
    let n = i64::try_from(out.len()).unwrap_or(0);
    // Quantised blocks are read through their own unaligned-safe structs only when aligned to 2
    // bytes; mapped data is aligned to general.alignment >= 8, which the reader checks.
    // SAFETY: `src` is exactly one row of this type and `out` has the row's element count.
    unsafe { to_float(src.as_ptr().cast(), out.as_mut_ptr(), n) };
    Ok(())
}

/// Whether rows of this type can be read as F32.
pub(super) fn is_readable(dtype: DType) -> bool {
    dtype == DType::F32 || to_float(dtype).is_some()
}

/// ggml's conversion of a row to F32, for types other than F32 that have one.
fn to_float(dtype: DType) -> sys::ggml_to_float_t {
    // SAFETY: the type id is one of ggml's (DType has no other).
    let traits = unsafe { sys::ggml_get_type_traits(dtype.id() as _) };
    // SAFETY: ggml returns a pointer into a static table.
    unsafe { traits.as_ref() }.and_then(|t| t.to_float)
}
