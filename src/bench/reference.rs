//! A float32 copy of a model file: every tensor dequantised, all else as it is. On the CPU with
//! float32 K/V it is the reference that accuracy is measured against.

use std::fs::File;
use std::io::{BufWriter, Read as _, Write};
use std::path::Path;

use super::{BenchError, Result};
use crate::ggml::dequantize_row;
use crate::gguf::{DType, GgufFile, TensorEntry};
use crate::unfinished::Unfinished;

/// Alignment of tensors where the file names none, in bytes.
///
/// # Source
/// ggml `docs/gguf.md`, `general.alignment`.
const ALIGNMENT: u64 = 32;
/// Bytes collected before a write.
const BUFFER_BYTES: usize = 8 << 20;

/// Writes the float32 copy of `model`; the file has its name only when it is complete.
///
/// `progress` is told bytes written and bytes in all, and says whether to go on.
///
/// # Errors
/// A split model, a failed file operation, [`BenchError::Cancelled`].
pub fn write_f32_copy(
    model: &GgufFile,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let fail = io_error(path);
    let unfinished = Unfinished::create(path).map_err(&fail)?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, unfinished.file());
    copy(model, &mut out, &fail, progress)?;
    out.flush().map_err(&fail)?;
    drop(out);
    unfinished.finish().map_err(&fail)
}

fn io_error(path: &Path) -> impl Fn(std::io::Error) -> BenchError {
    let path = path.to_owned();
    move |source| BenchError::Io {
        path: path.clone(),
        source,
    }
}

fn copy(
    model: &GgufFile,
    out: &mut impl Write,
    fail: &impl Fn(std::io::Error) -> BenchError,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let alignment = model.metadata().opt_u32("general.alignment");
    let alignment = alignment
        .map_err(crate::Error::from)?
        .map_or(ALIGNMENT, u64::from);
    let mut head = keys(model)?;
    let mut offset = 0;
    for tensor in model.tensors() {
        put_entry(&mut head, tensor, offset);
        offset += f32_bytes(tensor).next_multiple_of(alignment);
    }
    head.resize(head.len().next_multiple_of(usize_of(alignment)), 0);

    out.write_all(&head).map_err(fail)?;
    let mut done = 0;
    for tensor in model.tensors() {
        put_data(model, tensor, out, fail)?;
        let bytes = f32_bytes(tensor);
        let padding = bytes.next_multiple_of(alignment) - bytes;
        out.write_all(&vec![0; usize_of(padding)]).map_err(fail)?;
        done += bytes + padding;
        if !progress(done, offset) {
            return Err(BenchError::Cancelled);
        }
    }
    Ok(())
}

/// The bytes of a single file up to its tensor directory: magic, version, counts, keys.
fn keys(model: &GgufFile) -> Result<Vec<u8>> {
    let path = model.metadata().path().to_owned();
    if model.paths().len() != 1 {
        return Err(BenchError::ResultFile {
            path,
            expected: "a model in one file",
            found: format!("{} parts", model.paths().len()),
        });
    }
    let n = model.tensors().first().map_or(0, |t| t.entry_offset);
    let mut bytes = Vec::new();
    let file = File::open(&path).map_err(io_error(&path))?;
    file.take(n)
        .read_to_end(&mut bytes)
        .map_err(io_error(&path))?;
    Ok(bytes)
}

/// Appends a directory entry: name, dimensions, type, offset in the data.
fn put_entry(out: &mut Vec<u8>, tensor: &TensorEntry, offset: u64) {
    out.extend((tensor.name.len() as u64).to_le_bytes());
    out.extend(tensor.name.as_bytes());
    out.extend(u32::try_from(tensor.n_dims).unwrap_or(4).to_le_bytes());
    for n in tensor.dims() {
        out.extend(n.to_le_bytes());
    }
    out.extend(DType::F32.id().to_le_bytes());
    out.extend(offset.to_le_bytes());
}

fn put_data(
    model: &GgufFile,
    tensor: &TensorEntry,
    out: &mut impl Write,
    fail: &impl Fn(std::io::Error) -> BenchError,
) -> Result<()> {
    let (data, n) = (model.tensor_data(tensor), usize_of(tensor.shape[0]));
    let mut row = vec![0.0; n];
    let mut bytes = Vec::with_capacity(4 * n);
    for source in data.chunks_exact(row_bytes(tensor)) {
        dequantize_row(tensor.dtype, source, &mut row).map_err(crate::Error::from)?;
        bytes.clear();
        bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
        out.write_all(&bytes).map_err(fail)?;
    }
    Ok(())
}

/// Whether `copy` is the float32 copy of `model`: the same tensors, and the first row of each
/// dequantised bit by bit.
///
/// # Errors
/// A tensor that cannot be dequantised.
pub fn is_f32_copy(model: &GgufFile, copy: &GgufFile) -> Result<bool> {
    if model.tensors().len() != copy.tensors().len() {
        return Ok(false);
    }
    for tensor in model.tensors() {
        let Some(other) = copy.tensor(&tensor.name) else {
            return Ok(false);
        };
        if other.dtype != DType::F32 || other.shape != tensor.shape {
            return Ok(false);
        }
        let mut row = vec![0.0; usize_of(tensor.shape[0])];
        let source = model.tensor_data(tensor);
        let source = source.get(..row_bytes(tensor)).unwrap_or_default();
        dequantize_row(tensor.dtype, source, &mut row).map_err(crate::Error::from)?;
        let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
        if !copy.tensor_data(other).starts_with(&bytes) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn f32_bytes(tensor: &TensorEntry) -> u64 {
    4 * tensor.n_elements()
}

fn row_bytes(tensor: &TensorEntry) -> usize {
    let bytes = tensor.dtype.row_bytes(tensor.shape[0]);
    usize_of(bytes.unwrap_or(0)).max(1)
}

/// Sizes that the reader has compared with the file, or with memory.
fn usize_of(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Spec, WeightType, write};

    fn model(folder: &Path, name: &str, weight_type: WeightType, seed: u64) -> GgufFile {
        let path = folder.join(name);
        let mut spec = Spec::preset("tiny").unwrap();
        (spec.weight_type, spec.seed) = (weight_type, seed);
        write(
            &spec,
            &path,
            1,
            &mut |_| std::ops::ControlFlow::Continue(()),
        )
        .unwrap();
        GgufFile::open(&path).unwrap()
    }

    #[test]
    fn copy_has_every_key_and_every_value_dequantised() {
        let folder = tempfile::tempdir().unwrap();
        let original = model(folder.path(), "q.gguf", WeightType::Q8_0, 1);
        let path = folder.path().join("f.gguf");
        let mut last = (0, 0);

        write_f32_copy(&original, &path, &mut |done, all| {
            last = (done, all);
            true
        })
        .unwrap();

        let copy = GgufFile::open(&path).unwrap();
        assert!(last.0 > 0 && last.0 == last.1);
        assert_eq!(
            copy.metadata().entries().len(),
            original.metadata().entries().len()
        );
        for (a, b) in original
            .metadata()
            .entries()
            .iter()
            .zip(copy.metadata().entries())
        {
            assert_eq!((&a.key, &a.value), (&b.key, &b.value));
        }
        for (a, b) in original.tensors().iter().zip(copy.tensors()) {
            let mut row = vec![0.0; usize_of(a.shape[0])];
            let (from, to) = (original.tensor_data(a), copy.tensor_data(b));
            assert_eq!(to.len() as u64, f32_bytes(a), "{}", a.name);
            let pairs = from
                .chunks_exact(row_bytes(a))
                .zip(to.chunks_exact(4 * row.len()));
            for (source, bytes) in pairs {
                dequantize_row(a.dtype, source, &mut row).unwrap();
                let expected: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
                assert_eq!(expected, bytes, "{}", a.name);
            }
        }
        assert!(is_f32_copy(&original, &copy).unwrap());
    }

    #[test]
    fn another_model_is_no_copy() {
        let folder = tempfile::tempdir().unwrap();
        let original = model(folder.path(), "q.gguf", WeightType::Q8_0, 1);
        let other = model(folder.path(), "other.gguf", WeightType::F32, 2);
        // The same seed in float32 holds the values before they were quantised.
        let unquantised = model(folder.path(), "same.gguf", WeightType::F32, 1);

        assert!(!is_f32_copy(&original, &other).unwrap());
        assert!(!is_f32_copy(&original, &unquantised).unwrap());
        assert!(!is_f32_copy(&original, &original).unwrap());
    }

    #[test]
    fn a_stop_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let original = model(folder.path(), "q.gguf", WeightType::Q8_0, 1);
        let path = folder.path().join("f.gguf");

        let error = write_f32_copy(&original, &path, &mut |_, _| false).unwrap_err();

        assert!(matches!(error, BenchError::Cancelled));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
