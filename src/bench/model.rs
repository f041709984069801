//! What identifies a model in a result.

use sha2::{Digest as _, Sha256};

use crate::gguf::{DType, GgufFile, TensorEntry};
use crate::model::names;

/// Bytes of each tensor that go into the fingerprint.
const SAMPLE_BYTES: usize = 4096;

/// SHA-256, in hexadecimal, over name, type, shape and the first 4096 bytes of every tensor: it
/// tells models and seeds apart without reading a file of many gigabytes.
pub fn fingerprint(file: &GgufFile) -> String {
    let mut hash = Sha256::new();
    for tensor in file.tensors() {
        hash.update(tensor.name.as_bytes());
        hash.update(tensor.dtype.name());
        for n in tensor.shape {
            hash.update(n.to_le_bytes());
        }
        let data = file.tensor_data(tensor);
        hash.update(data.get(..SAMPLE_BYTES).unwrap_or(data));
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// The type that most bytes of the matrices of the layers have.
pub(crate) fn matrix_type(file: &GgufFile) -> DType {
    let mut by_type: Vec<(DType, usize)> = Vec::new();
    let in_layer = |t: &&TensorEntry| names::layer_of(&t.name).is_some();
    for tensor in file.tensors().iter().filter(in_layer) {
        let bytes = file.tensor_data(tensor).len();
        match by_type.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
            Some((_, sum)) => *sum += bytes,
            None => by_type.push((tensor.dtype, bytes)),
        }
    }
    let most = by_type.into_iter().max_by_key(|&(_, bytes)| bytes);
    most.map_or(DType::F32, |(dtype, _)| dtype)
}
