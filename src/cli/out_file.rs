//! A result file that appears whole or not at all: written beside its place, then renamed.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Bytes collected before a write.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes little-endian float32 rows to `path`; `-` is stdout.
///
/// A path that exists and is no regular file (a pipe, `/dev/null`) is written directly.
pub fn write_f32(path: &Path, values: impl Iterator<Item = f32>) -> anyhow::Result<()> {
    if path == Path::new("-") {
        let stdout = std::io::stdout().lock();
        return write_values(stdout, values).context("write stdout");
    }
    let describe = || format!("write {}", path.display());
    let is_special = path.metadata().is_ok_and(|m| !m.is_file());
    if is_special {
        let file = OpenOptions::new()
            .write(true)
            .open(path)
            .with_context(describe)?;
        return write_values(file, values).with_context(describe);
    }
    let temporary = Temporary::create(path).with_context(describe)?;
    write_values(&temporary.file, values).with_context(describe)?;
    temporary.persist(path).with_context(describe)
}

fn write_values(to: impl std::io::Write, values: impl Iterator<Item = f32>) -> std::io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, to);
    for value in values {
        out.write_all(&value.to_le_bytes())?;
    }
    out.flush()
}

/// A file beside its final place; removed when dropped before it was renamed.
struct Temporary {
    file: File,
    path: PathBuf,
    is_kept: bool,
}

impl Temporary {
    fn create(target: &Path) -> std::io::Result<Self> {
        let name = target.file_name().ok_or(std::io::ErrorKind::IsADirectory)?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(hidden);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)?;
        Ok(Self {
            file,
            path,
            is_kept: false,
        })
    }

    fn persist(mut self, target: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, target)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept {
            // Nothing can be done about a failure here, and an error is already on its way.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn values_are_little_endian_and_the_temporary_file_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.f32");
        std::fs::write(&path, "old").unwrap();

        write_f32(&path, [1.0, -2.5].into_iter()).unwrap();

        let expected = [1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn failure_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.f32");
        std::fs::write(&path, "old").unwrap();
        let values = (0..4).map(|i| if i == 3 { panic!("stop") } else { 0.0 });

        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| write_f32(&path, values)));

        assert!(result.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn missing_folder_is_an_error_that_names_the_file() {
        let error = write_f32(Path::new("/nowhere/a.f32"), [0.0].into_iter()).unwrap_err();

        assert!(error.to_string().contains("/nowhere/a.f32"), "{error}");
    }

    #[test]
    fn device_file_is_written_directly() {
        write_f32(Path::new("/dev/null"), [0.0].into_iter()).unwrap();
    }
}
