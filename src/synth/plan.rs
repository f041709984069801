//! From a specification to files: which tensor lies where. Arithmetic only.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::header::{self, Info, Value};
use super::layout::Tensor;

/// One file of the model.
#[derive(Debug)]
pub(super) struct Shard {
    /// Final path.
    pub(super) path: PathBuf,
    /// Bytes up to the data section.
    pub(super) header: Vec<u8>,
    /// Index of each tensor and the absolute offset of its data.
    pub(super) tensors: Vec<(usize, u64)>,
    /// Bytes of the whole file.
    pub(super) n_bytes: u64,
}

/// Distributes `tensors` over `n_shard` files of about equal size, in order.
pub(super) fn shards(
    path: &Path,
    n_shard: u32,
    metadata: &[(String, Value)],
    tensors: &[Tensor],
) -> Vec<Shard> {
    let total: u64 = tensors.iter().map(Tensor::n_bytes).sum();
    let mut shards = Vec::new();
    let (mut first, mut n_done) = (0, 0_u64);
    for no in 0..n_shard {
        let goal = total / u64::from(n_shard) * u64::from(no + 1);
        let mut end = first;
        while end < tensors.len() && (n_done < goal || no + 1 == n_shard) {
            n_done += tensors[end].n_bytes();
            end += 1;
        }
        let keys = keys_of(no, n_shard, metadata, tensors.len());
        let path = shard_path(path, no, n_shard);
        shards.push(shard(path, &keys, first, &tensors[first..end]));
        first = end;
    }
    shards
}

/// Lays out one file.
fn shard(path: PathBuf, keys: &[(String, Value)], first: usize, tensors: &[Tensor]) -> Shard {
    let mut infos = Vec::new();
    let mut places = Vec::new();
    let mut offset = 0;
    for (i, t) in tensors.iter().enumerate() {
        infos.push(Info {
            name: &t.name,
            shape: &t.shape,
            type_id: t.ty.id(),
            offset,
        });
        places.push((first + i, offset));
        offset += header::align(t.n_bytes());
    }
    let header = header::encode(keys, &infos);
    let start = header.len() as u64;
    for (_, place) in &mut places {
        *place += start;
    }
    Shard {
        path,
        header,
        tensors: places,
        n_bytes: start + offset,
    }
}

/// The first file carries all keys, the others only their place in the split.
fn keys_of(
    no: u32,
    n_shard: u32,
    metadata: &[(String, Value)],
    n_tensors: usize,
) -> Vec<(String, Value)> {
    let mut keys = if no == 0 {
        metadata.to_vec()
    } else {
        Vec::new()
    };
    if n_shard > 1 {
        // Both are at most 999 and a few thousand: checked by `Spec::validate`.
        let short = |n: u32| Value::U16(u16::try_from(n).unwrap_or(u16::MAX));
        let count = Value::I32(i32::try_from(n_tensors).unwrap_or(i32::MAX));
        keys.push(("split.no".into(), short(no)));
        keys.push(("split.count".into(), short(n_shard)));
        keys.push(("split.tensors.count".into(), count));
    }
    keys
}

/// `name.gguf`, or `name-00001-of-00003.gguf` (llama.cpp's form).
fn shard_path(path: &Path, no: u32, n_shard: u32) -> PathBuf {
    if n_shard == 1 {
        return path.to_owned();
    }
    let is_gguf = path.extension().is_some_and(|e| e == "gguf");
    let stem = if is_gguf {
        path.file_stem()
    } else {
        path.file_name()
    };
    let mut name: OsString = stem.unwrap_or_default().to_owned();
    name.push(format!("-{:05}-of-{n_shard:05}.gguf", no + 1));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::super::{layout, preset::Spec};
    use super::*;

    #[test]
    fn every_tensor_lies_in_one_shard_without_overlap() {
        let tensors = layout::tensors(&Spec::preset("tiny").unwrap());
        for n_shard in [1, 2, 3, 7] {
            let shards = shards(Path::new("/x/m.gguf"), n_shard, &[], &tensors);
            let mut seen = Vec::new();
            for shard in &shards {
                let mut at = shard.header.len() as u64;
                for &(i, offset) in &shard.tensors {
                    assert!(offset >= at && offset % header::ALIGNMENT == 0);
                    at = offset + tensors[i].n_bytes();
                    seen.push(i);
                }
                assert!(shard.n_bytes >= at);
                assert!(!shard.tensors.is_empty(), "{n_shard}");
            }
            assert_eq!(seen, (0..tensors.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn shard_names_are_llama_cpps() {
        let name = |path: &str| shard_path(Path::new(path), 1, 3).display().to_string();

        assert_eq!(name("/x/m.gguf"), "/x/m-00002-of-00003.gguf");
        assert_eq!(name("m"), "m-00002-of-00003.gguf");
        assert_eq!(shard_path(Path::new("m.bin"), 0, 1), Path::new("m.bin"));
    }
}
