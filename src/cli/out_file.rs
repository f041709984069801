//! Logits on their way out: to a file that appears whole or not at all, to a pipe, to stdout.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read as _, Stdout, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::gguf;
use crate::unfinished::{Target, Unfinished};

/// Bytes collected before a write.
const BUFFER_BYTES: usize = 1 << 20;

/// Names of this process' stdout.
const STDOUT: [&str; 4] = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];

/// Whether an output path means stdout.
pub fn is_stdout(path: &Path) -> bool {
    STDOUT.iter().any(|name| path == Path::new(name))
}

/// Refuses outputs that would replace an input, or each other. Stdout and devices replace nothing.
pub fn require_apart(outputs: &[Option<&Path>], inputs: &[&Path]) -> anyhow::Result<()> {
    let mut taken: Vec<PathBuf> = inputs
        .iter()
        .filter_map(|p| p.canonicalize().ok())
        .collect();
    for path in outputs.iter().flatten() {
        let Some(place) = place(path) else { continue };
        if taken.contains(&place) {
            bail!(
                "{}: expected an output of its own, found an input or another output",
                path.display()
            );
        }
        taken.push(place);
    }
    Ok(())
}

/// The file that an output would become, by the name that it has on this machine.
fn place(output: &Path) -> Option<PathBuf> {
    if is_stdout(output) {
        return None;
    }
    let Ok(Target::File(file)) = Target::of(output) else {
        return None;
    };
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
    Some(folder.join(file.file_name()?))
}

/// The first bytes of a file that an output would replace, at most `n`; none where there is no
/// file, or one that cannot be read.
pub(super) fn head(output: &Path, n: u64) -> Vec<u8> {
    let mut found = Vec::new();
    // Opening a pipe would wait for its writer.
    if output.metadata().is_ok_and(|found| found.is_file())
        && let Ok(file) = File::open(output)
    {
        // What cannot be read is told by the write.
        let _ = file.take(n).read_to_end(&mut found);
    }
    found
}

/// Whether there is a model where an output would go.
pub(super) fn holds_model(output: &Path) -> bool {
    head(output, gguf::MAGIC.len() as u64) == gguf::MAGIC
}

/// What an output leads to. A model is not replaced: it may have taken hours to download.
pub fn target(path: &Path) -> anyhow::Result<Target> {
    let target = Target::of(path).with_context(|| format!("write {}", path.display()))?;
    if holds_model(path) {
        bail!(
            "write {}: expected a new name or an older result, found a model (GGUF)",
            path.display()
        );
    }
    Ok(target)
}

/// Bytes or rows of little-endian float32 on their way to a file or to stdout.
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
    Replacing(BufWriter<File>, Unfinished),
}

impl OutFile {
    /// Opens `path` for writing, `-` as stdout: before the work, so that a wrong path costs none.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        if is_stdout(path) {
            let writer = BufWriter::with_capacity(BUFFER_BYTES, std::io::stdout());
            return Ok(Self {
                path: path.to_owned(),
                sink: Sink::Stdout(writer),
            });
        }
        let target = target(path)?;
        let open = || -> std::io::Result<Sink> {
            if target == Target::Stream {
                let file = OpenOptions::new().write(true).open(path)?;
                return Ok(Sink::Direct(BufWriter::with_capacity(BUFFER_BYTES, file)));
            }
            let unfinished = Unfinished::create(path)?;
            let file = unfinished.file().try_clone()?;
            let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
            Ok(Sink::Replacing(writer, unfinished))
        };
        Ok(Self {
            path: path.to_owned(),
            sink: open().with_context(|| format!("write {}", path.display()))?,
        })
    }

    /// Refuses what the file system has no room for.
    pub fn require_room(&self, n_bytes: u64) -> anyhow::Result<()> {
        let Sink::Replacing(_, unfinished) = &self.sink else {
            return Ok(());
        };
        if let Some(available) = unfinished.available().filter(|&n| n < n_bytes) {
            bail!(
                "write {}: expected room for {n_bytes} bytes, found {available}",
                self.path.display()
            );
        }
        Ok(())
    }

    /// Appends values.
    pub fn write(&mut self, values: &[f32]) -> anyhow::Result<()> {
        for value in values {
            self.write_bytes(&value.to_le_bytes())?;
        }
        Ok(())
    }

    /// Appends bytes.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let writer: &mut dyn Write = match &mut self.sink {
            Sink::Stdout(writer) => writer,
            Sink::Direct(writer) | Sink::Replacing(writer, _) => writer,
        };
        writer
            .write_all(bytes)
            .with_context(|| format!("write {}", self.path.display()))
    }

    /// Flushes and puts the file in its place.
    pub fn finish(self) -> anyhow::Result<()> {
        let finished = match self.sink {
            Sink::Stdout(mut writer) => writer.flush(),
            Sink::Direct(mut writer) => writer.flush(),
            Sink::Replacing(mut writer, unfinished) => {
                writer.flush().and_then(|()| unfinished.finish())
            }
        };
        finished.with_context(|| format!("write {}", self.path.display()))
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

    #[test]
    fn more_than_the_file_system_holds_is_refused_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let out = OutFile::create(&folder.path().join("a.f32")).unwrap();

        let error = out.require_room(u64::MAX).unwrap_err().to_string();

        assert!(out.require_room(1).is_ok());
        assert!(error.contains(&u64::MAX.to_string()), "{error}");
        assert!(error.contains("a.f32"), "{error}");
    }

    #[test]
    fn stdout_has_several_names() {
        for name in ["-", "/dev/stdout", "/dev/fd/1"] {
            assert!(is_stdout(Path::new(name)), "{name}");
        }
        assert!(!is_stdout(Path::new("./-")));
    }
}
