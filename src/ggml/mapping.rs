//! A read-only memory map of a whole file, behind a type that is safe to use.
//!
//! The map lives inside the fence because making one is `unsafe` in Rust. Nothing else of the
//! file format is known here.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::callbacks;

// Miri knows no file mappings: under it the bytes are read.
#[cfg(miri)]
type Bytes = Vec<u8>;
#[cfg(not(miri))]
type Bytes = memmap2::Mmap;

/// Files that are mapped now, with their length at that time in bytes.
static MAPPED: Mutex<Vec<(PathBuf, u64)>> = Mutex::new(Vec::new());

/// Maps a whole file for reading; unmapped on drop.
///
/// # Aborts
/// A file that another process *truncates* while it is mapped ends this process with `SIGBUS` on
/// the next read of a lost page, unless [`super::on_lost_page`] says otherwise. Replace model files by
/// renaming, not by writing over them.
#[derive(Debug)]
pub struct Mapping {
    map: Bytes,
    file: File,
    opened: Metadata,
    path: PathBuf,
}

impl Mapping {
    /// Opens and maps the regular file at `path`.
    ///
    /// # Errors
    /// Whatever opening, inspecting or mapping reports; `InvalidInput` when `path` is not a
    /// regular file (a folder, a pipe, a device).
    pub fn open(path: &Path) -> io::Result<Self> {
        // A pipe would block in `open` until a writer comes: look before opening.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        let file = File::open(path)?;
        let opened = file.metadata()?;
        // SAFETY: the map is read-only and private to this value, which unmaps it on drop; every
        // borrow of its bytes is bounded by `&self`. Other processes can see and write the file:
        // we only ever hand out plain bytes that are copied or checked before use, so a changed
        // byte is a wrong number, not a broken invariant. Truncation is documented above. The
        // precondition "a file, open for reading" was checked by the two calls above.
        #[cfg(not(miri))]
        let map = unsafe { Bytes::map(&file)? };
        #[cfg(miri)]
        let map = std::fs::read(path)?;
        let path = path.to_owned();
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.push((path.clone(), map.len() as u64));
        drop(mapped);
        Ok(Self {
            map,
            file,
            opened,
            path,
        })
    }

    /// Whether length and time of the last change are what they were when the file was opened.
    pub fn is_unchanged(&self) -> bool {
        let same = |now: &Metadata| {
            now.len() == self.opened.len() && now.modified().ok() == self.opened.modified().ok()
        };
        self.file.metadata().is_ok_and(|now| same(&now))
    }

    /// Borrows all bytes of the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Bytes of a mapped file that a tensor may use where they are.
#[derive(Clone, Debug)]
pub struct MappedRange {
    /// The file.
    pub mapping: Arc<Mapping>,
    /// Its bytes.
    pub range: Range<usize>,
}

impl MappedRange {
    /// Borrows the bytes; none when the range is not in the file.
    pub fn as_bytes(&self) -> &[u8] {
        let all = self.mapping.as_bytes();
        all.get(self.range.clone()).unwrap_or_default()
    }

    /// Asks the system to read the bytes ahead of their first use. A hint: without effect elsewhere.
    pub fn prefetch(&self) {
        #[cfg(all(unix, not(miri)))]
        let _ = self.mapping.map.advise_range(
            memmap2::Advice::WillNeed,
            self.range.start,
            self.range.len(),
        );
    }

    /// Takes bytes that were copied out of this process's memory; reading them again is slower, not
    /// different. A hint, as above.
    pub fn release(&self) {
        #[cfg(all(unix, not(miri)))]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            let (map, range) = (&self.mapping.map, &self.range);
            // SAFETY: the map is of a file and read-only, so dropped pages are read from the file
            // again; nothing is lost.
            let _ = unsafe { map.unchecked_advise_range(DontNeed, range.start, range.len()) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = mapped.iter().position(|(path, _)| *path == self.path) {
            mapped.swap_remove(at);
        }
    }
}

/// Says which mapped file has lost bytes.
pub(super) fn lost_page() -> String {
    let mapped = MAPPED.try_lock();
    let mapped = mapped.as_deref().map(Vec::as_slice).unwrap_or_default();
    for (path, opened) in mapped {
        let now = std::fs::metadata(path).map_or(0, |m| m.len());
        if now < *opened {
            let path = path.display();
            return format!(
                "{path}: expected the {opened} bytes that were there when it was opened, found \
                 {now}: a model file must not be written over while it is in use"
            );
        }
    }
    let context = callbacks::abort_context();
    let context = if context.is_empty() {
        String::new()
    } else {
        format!(" while {context}")
    };
    let names: Vec<String> = mapped.iter().map(|m| m.0.display().to_string()).collect();
    format!(
        "a page of a mapped file could not be read{context} (SIGBUS): a library or {} was cut, or \
         its disk failed",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_every_byte_and_also_an_empty_file() {
        let dir = tempfile::tempdir().unwrap();
        let full = dir.path().join("full");
        let empty = dir.path().join("empty");
        std::fs::write(&full, b"abc").unwrap();
        std::fs::write(&empty, b"").unwrap();

        assert_eq!(Mapping::open(&full).unwrap().as_bytes(), b"abc");
        assert_eq!(Mapping::open(&empty).unwrap().as_bytes(), b"");
    }

    #[test]
    fn sees_that_a_file_was_written_over_and_not_that_it_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"abc").unwrap();
        let map = Mapping::open(&path).unwrap();
        let other = dir.path().join("b");
        std::fs::write(&other, b"xy").unwrap();

        assert!(map.is_unchanged());
        std::fs::rename(&other, &path).unwrap();
        assert!(map.is_unchanged());
        assert_eq!(map.as_bytes(), b"abc");

        let map = Mapping::open(&path).unwrap();
        std::fs::write(&path, b"xyz").unwrap();
        assert!(!map.is_unchanged());
    }

    #[test]
    fn refuses_a_folder_and_a_missing_file() {
        let dir = tempfile::tempdir().unwrap();

        let folder = Mapping::open(dir.path()).unwrap_err();
        let missing = Mapping::open(&dir.path().join("none")).unwrap_err();

        assert_eq!(folder.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
