//! A read-only memory map of a whole file, behind a type that is safe to use.
//!
//! The map lives inside the fence because making one is `unsafe` in Rust. Nothing else of the
//! file format is known here.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// Maps a whole file for reading; unmapped on drop.
///
/// # Aborts
/// A file that another process *truncates* while it is mapped ends this process with `SIGBUS` on
/// the next read of a lost page. That cannot be checked from here; replace model files by
/// renaming, not by writing over them.
#[derive(Debug)]
pub struct Mapping {
    map: Mmap,
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
        // SAFETY: the map is read-only and private to this value, which unmaps it on drop; every
        // borrow of its bytes is bounded by `&self`. Other processes can see and write the file:
        // we only ever hand out plain bytes that are copied or checked before use, so a changed
        // byte is a wrong number, not a broken invariant. Truncation is documented above. The
        // precondition "a file, open for reading" was checked by the two calls above.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// Borrows all bytes of the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks the system to read a range ahead of its first use. A hint: without effect elsewhere.
    pub fn prefetch(&self, range: Range<usize>) {
        #[cfg(unix)]
        let _ = self
            .map
            .advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Takes a range that was copied out of this process's memory; reading it again is slower, not
    /// different. A hint, as above.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is of a file and read-only, so dropped pages are read from the file
            // again; nothing is lost.
            let _ = unsafe {
                self.map
                    .unchecked_advise_range(DontNeed, range.start, range.len())
            };
        }
        #[cfg(not(unix))]
        let _ = range;
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
    fn refuses_a_folder_and_a_missing_file() {
        let dir = tempfile::tempdir().unwrap();

        let folder = Mapping::open(dir.path()).unwrap_err();
        let missing = Mapping::open(&dir.path().join("none")).unwrap_err();

        assert_eq!(folder.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
