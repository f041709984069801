//! What tells one model from another without reading gigabytes.

use sha2::{Digest as _, Sha256};

use super::names::ARCHITECTURE;
use crate::gguf::{GgufFile, TensorEntry};

/// Bytes of each sample of a tensor, one page of the file system's cache.
const SAMPLE_BYTES: usize = 4096;

/// SHA-256 over the configuration (every key of the architecture, in file order), the tensor
/// directory (name, type, shape) and three samples of each tensor: its first, middle and last 4096
/// bytes.
///
/// A file of 60 GB costs about 3,000 pages. Two files that differ only between the samples, or in
/// their tokenizer, have one fingerprint.
pub fn fingerprint(file: &GgufFile) -> [u8; 32] {
    let mut hash = Sha256::new();
    for entry in file.metadata().entries() {
        if entry.key.split('.').next() == Some(ARCHITECTURE) {
            // Debug prints every value of the entry in its type, and floats so that they differ
            // when their bits do.
            hash.update(format!("{}={:?}\n", entry.key, entry.value));
        }
    }
    for tensor in file.tensors() {
        hash.update(format!("{}:{}", tensor.name, tensor.dtype.name()));
        for n in tensor.shape {
            hash.update(n.to_le_bytes());
        }
        for sample in samples(file, tensor) {
            hash.update(sample);
        }
    }
    hash.finalize().into()
}

/// First, middle and last bytes of a tensor.
fn samples<'f>(file: &'f GgufFile, tensor: &TensorEntry) -> [&'f [u8]; 3] {
    let data = file.tensor_data(tensor);
    let last = data.len().saturating_sub(SAMPLE_BYTES);
    [0, last / 2, last].map(|start| {
        let end = data.len().min(start + SAMPLE_BYTES);
        data.get(start..end).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;

    use super::*;

    /// The dense fixture, changed by `change`.
    fn changed(change: impl FnOnce(&GgufFile, &std::fs::File)) -> [u8; 32] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let fixture = "tests/fixtures/c-dense-bf16.gguf";
        std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture), &path).unwrap();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        change(&GgufFile::open(&path).unwrap(), &file);
        fingerprint(&GgufFile::open(&path).unwrap())
    }

    #[test]
    fn same_file_has_the_same_fingerprint() {
        assert_eq!(changed(|_, _| {}), changed(|_, _| {}));
    }

    #[test]
    fn one_byte_of_a_key_of_the_architecture_or_of_a_sample_changes_it() {
        let original = changed(|_, _| {});
        let large = |file: &GgufFile| {
            let large = file.tensors().iter().max_by_key(|t| t.n_bytes).unwrap();
            assert!(large.n_bytes > 3 * SAMPLE_BYTES as u64);
            (large.offset, large.n_bytes)
        };
        for part in 0..3 {
            let sample = changed(|gguf, file| {
                let (offset, n) = large(gguf);
                let at = offset + (n - 1) * part / 2;
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 0x55], at).unwrap();
            });
            assert_ne!(sample, original, "part {part}");
        }
        let eps = changed(|gguf, file| {
            let key = super::super::names::key::RMS_EPS;
            let entry = gguf.metadata().entry(key).unwrap();
            let at = entry.offset;
            let bytes = std::fs::read(gguf.metadata().path()).unwrap();
            let value = 1e-6_f32.to_le_bytes();
            let start = usize::try_from(at).unwrap();
            let found = bytes[start..].windows(4).position(|w| w == value);
            let at = at + found.unwrap() as u64;
            file.write_all_at(&2e-6_f32.to_le_bytes(), at).unwrap();
        });
        assert_ne!(eps, original);
    }

    #[test]
    fn bytes_between_the_samples_do_not_count() {
        let original = changed(|_, _| {});
        let between = changed(|gguf, file| {
            let large = gguf.tensors().iter().max_by_key(|t| t.n_bytes).unwrap();
            assert!(large.n_bytes > 8 * SAMPLE_BYTES as u64);
            let at = large.offset + SAMPLE_BYTES as u64;
            file.write_all_at(&[0x7f; 16], at).unwrap();
        });
        assert_eq!(between, original);
    }
}
