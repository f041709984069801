//! File names of split models: `<prefix>-00001-of-00003.gguf`.
//!
//! # Source
//! `llama.cpp:llama_split_path` and `llama_split_prefix`: five digits, counted from 1 in the name
//! and from 0 in `split.no`.

use std::path::{Path, PathBuf};

/// Key with a shard's number, counted from 0.
pub(super) const SPLIT_NO: &str = "split.no";
/// Key with the number of shards.
pub(super) const SPLIT_COUNT: &str = "split.count";
/// Key with the number of tensors in all shards.
pub(super) const SPLIT_TENSORS: &str = "split.tensors.count";

/// Returns the ending that shard `no` (from 0) of `n_split` must have.
pub(super) fn suffix(no: u64, n_split: u64) -> String {
    format!("-{:05}-of-{n_split:05}.gguf", no.saturating_add(1))
}

/// Returns the path of shard `other` beside the file of shard `no`.
///
/// `None` when the name of `path` does not end as shard `no` of `n_split` must.
pub(super) fn sibling(path: &Path, no: u64, other: u64, n_split: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let prefix = name.strip_suffix(&suffix(no, n_split))?;
    Some(path.with_file_name(format!("{prefix}{}", suffix(other, n_split))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sibling_keeps_folder_and_prefix() {
        let first = Path::new("/models/g-00001-of-00012.gguf");

        let last = sibling(first, 0, 11, 12);

        assert_eq!(
            last.as_deref(),
            Some(Path::new("/models/g-00012-of-00012.gguf"))
        );
    }

    #[test]
    fn names_that_do_not_fit_have_no_sibling() {
        assert_eq!(sibling(Path::new("g.gguf"), 0, 1, 2), None);
        assert_eq!(sibling(Path::new("g-00001-of-00003.gguf"), 0, 1, 2), None);
        assert_eq!(sibling(Path::new("g-00002-of-00002.gguf"), 0, 1, 2), None);
    }
}
