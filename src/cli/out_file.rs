//! A result file that appears whole or not at all: written beside its place, then renamed.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Stdout, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Bytes collected before a write.
const BUFFER_BYTES: usize = 1 << 20;

/// Rows of little-endian float32 on their way to a file or to stdout.
#[derive(Debug)]
pub struct OutFile {
    path: PathBuf,
    sink: Sink,
}

#[derive(Debug)]
enum Sink {
    Stdout(BufWriter<Stdout>),
    /// What exists and is no regular file (a pipe, `/dev/null`) is written directly.
    Direct(BufWriter<File>),
    Replacing(BufWriter<File>, Temporary),
}

impl OutFile {
    /// Opens `path` for writing, `-` as stdout: before the work, so that a wrong path costs none.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let describe = || format!("write {}", path.display());
        let sink = if path == Path::new("-") {
            Sink::Stdout(BufWriter::with_capacity(BUFFER_BYTES, std::io::stdout()))
        } else if path.metadata().is_ok_and(|m| !m.is_file()) {
            let file = OpenOptions::new()
                .write(true)
                .open(path)
                .with_context(describe)?;
            Sink::Direct(BufWriter::with_capacity(BUFFER_BYTES, file))
        } else {
            let (file, temporary) = Temporary::create(path).with_context(describe)?;
            Sink::Replacing(BufWriter::with_capacity(BUFFER_BYTES, file), temporary)
        };
        Ok(Self {
            path: path.to_owned(),
            sink,
        })
    }

    /// Appends values.
    pub fn write(&mut self, values: &[f32]) -> anyhow::Result<()> {
        let describe = || format!("write {}", self.path.display());
        let writer: &mut dyn Write = match &mut self.sink {
            Sink::Stdout(writer) => writer,
            Sink::Direct(writer) | Sink::Replacing(writer, _) => writer,
        };
        for value in values {
            writer
                .write_all(&value.to_le_bytes())
                .with_context(describe)?;
        }
        Ok(())
    }

    /// Flushes and puts the file in its place.
    pub fn finish(self) -> anyhow::Result<()> {
        let path = self.path;
        let finished = match self.sink {
            Sink::Stdout(mut writer) => writer.flush(),
            Sink::Direct(mut writer) => writer.flush(),
            Sink::Replacing(mut writer, temporary) => {
                writer.flush().and_then(|()| temporary.persist(&path))
            }
        };
        finished.with_context(|| format!("write {}", path.display()))
    }
}

/// A file beside its final place; removed when dropped before it was renamed.
#[derive(Debug)]
struct Temporary {
    path: PathBuf,
    is_kept: bool,
}

impl Temporary {
    fn create(target: &Path) -> std::io::Result<(File, Self)> {
        let name = target.file_name().ok_or(std::io::ErrorKind::IsADirectory)?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(hidden);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)?;
        Ok((
            file,
            Self {
                path,
                is_kept: false,
            },
        ))
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

        let mut out = OutFile::create(&path).unwrap();
        out.write(&[1.0]).unwrap();
        out.write(&[-2.5]).unwrap();
        out.finish().unwrap();

        let expected = [1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn unfinished_file_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.f32");
        std::fs::write(&path, "old").unwrap();

        let mut out = OutFile::create(&path).unwrap();
        out.write(&[1.0; 100]).unwrap();
        drop(out);

        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn missing_folder_is_an_error_that_names_the_file() {
        let error = OutFile::create(Path::new("/nowhere/a.f32")).unwrap_err();

        assert!(error.to_string().contains("/nowhere/a.f32"), "{error}");
    }

    #[test]
    fn device_file_is_written_directly() {
        let mut out = OutFile::create(Path::new("/dev/null")).unwrap();

        out.write(&[0.0]).unwrap();
        out.finish().unwrap();
    }

    #[test]
    fn folder_as_target_is_an_error() {
        let folder = tempfile::tempdir().unwrap();

        assert!(OutFile::create(folder.path()).is_err());
    }
}
