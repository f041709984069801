//! A result file that appears whole or not at all: written under a temporary name beside its
//! place, then renamed. Below everything that writes files; knows nothing of their content.
//!
//! Temporary files are removed when their [`Unfinished`] is dropped, and by [`remove_all`] when the
//! process has to end without unwinding.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::TempPath;

/// Temporary files that exist now.
static LIVE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Symbolic links that are followed before a chain of them counts as a circle, as Linux does.
const MAX_LINKS: usize = 40;

/// Mode of a new file, before the user's mask.
const NEW_MODE: u32 = 0o666;

/// Removes every temporary file of this process: for an end that drops nothing.
pub fn remove_all() {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    for path in live.drain(..) {
        // Nothing more can be done about a file that cannot be removed.
        let _ = std::fs::remove_file(path);
    }
}

/// [`remove_all`] for a handler of a signal: waits for nothing and allocates nothing.
pub(crate) fn unlink_all() {
    let Ok(live) = LIVE.try_lock() else { return };
    for path in live.iter() {
        // Nothing more can be done about a file that cannot be removed.
        let _ = rustix::fs::unlink(path);
    }
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A regular file or a free name, symbolic links followed: to be replaced as a whole.
    File(PathBuf),
    /// A device, a pipe or an open file of a process (`/dev/stdout`): to be written directly.
    Stream,
}

impl Target {
    /// Follows `path`.
    ///
    /// # Errors
    /// A folder, a circle of links, a place that cannot be looked at.
    pub fn of(path: &Path) -> io::Result<Self> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            // What lies in /proc/self/fd are open files, which a rename would miss.
            let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
            if folder.is_some_and(|folder| folder.starts_with("/proc")) {
                return Ok(Self::Stream);
            }
            let found = match path.symlink_metadata() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                found => Some(found?),
            };
            match found {
                Some(found) if found.is_symlink() => {
                    let link = std::fs::read_link(&path)?;
                    path = path.parent().unwrap_or(Path::new("")).join(link);
                }
                Some(found) if found.is_dir() => {
                    return Err(io::Error::new(
                        io::ErrorKind::IsADirectory,
                        "expected a file, found a folder",
                    ));
                }
                Some(found) if !found.is_file() => return Ok(Self::Stream),
                _ => return Ok(Self::File(path)),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "expected a file, found a circle of symbolic links",
        ))
    }
}

/// A file on its way to its place; removed when dropped before [`Unfinished::finish`].
#[derive(Debug)]
pub struct Unfinished {
    file: File,
    temporary: TempPath,
    target: PathBuf,
}

impl Unfinished {
    /// Creates the temporary file of `path`. A symbolic link is followed: what it names is
    /// replaced, not the link. An existing file keeps its mode.
    ///
    /// # Errors
    /// No regular file, a file that must not be written, a missing or read-only folder.
    pub fn create(path: &Path) -> io::Result<Self> {
        let Target::File(target) = Target::of(path)? else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "expected a new name or a regular file, found a device or a pipe",
            ));
        };
        let old = match target.metadata() {
            Ok(old) => Some(require_writable(&target, &old).map(|()| old)?),
            Err(_) => None,
        };
        let name = target.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        let folder = match target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, temporary) = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".part")
            .permissions(Permissions::from_mode(NEW_MODE))
            .tempfile_in(folder)
            .map_err(without_path)?
            .into_parts();
        live.push(temporary.to_path_buf());
        drop(live);
        let unfinished = Self {
            file,
            temporary,
            target,
        };
        if let Some(old) = old {
            unfinished.file.set_permissions(old.permissions())?;
        }
        Ok(unfinished)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes that the file system has left, or `None` when it does not say.
    pub fn available(&self) -> Option<u64> {
        let stat = rustix::fs::fstatvfs(&self.file).ok()?;
        (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Gives the file its final name.
    ///
    /// # Errors
    /// The folder refuses the new name.
    pub fn finish(self) -> io::Result<()> {
        std::fs::rename(&self.temporary, &self.target)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Dropping the path removes the file, if it still has that name.
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|path| *path != *self.temporary);
    }
}

/// Refuses a file that a plain write would refuse, and one without any write permission even where
/// the user might (root).
fn require_writable(path: &Path, metadata: &Metadata) -> io::Result<()> {
    if metadata.permissions().readonly() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "expected a file that may be written, found a read-only one",
        ));
    }
    OpenOptions::new().write(true).open(path).map(drop)
}

/// The error without the temporary name that `tempfile` adds behind it.
fn without_path(error: io::Error) -> io::Error {
    let text = error.to_string();
    let reason = text.split(" at path ").next().unwrap_or_default();
    io::Error::new(error.kind(), reason.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: &Path, text: &str) -> io::Result<()> {
        let unfinished = Unfinished::create(path)?;
        unfinished.file().write_all(text.as_bytes())?;
        unfinished.finish()
    }

    fn entries(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn finished_file_has_its_name_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");

        write(&path, "new").unwrap();

        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn dropped_file_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "old").unwrap();

        let unfinished = Unfinished::create(&path).unwrap();
        assert_eq!(entries(folder.path()), 2);
        drop(unfinished);

        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn links_are_followed_even_to_a_name_that_is_free() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("there")).unwrap();
        let (first, second) = (folder.path().join("first"), folder.path().join("second"));
        symlink("second", &first).unwrap();
        symlink("there/a", &second).unwrap();

        write(&first, "1").unwrap();
        write(&first, "2").unwrap();

        assert!(first.is_symlink() && second.is_symlink());
        assert_eq!(std::fs::read(folder.path().join("there/a")).unwrap(), b"2");
        assert_eq!(entries(folder.path()), 3);
    }

    #[test]
    fn circle_of_links_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        symlink("a", &path).unwrap();

        let error = Unfinished::create(&path).unwrap_err();

        assert!(error.to_string().contains("circle"), "{error}");
    }

    #[test]
    fn read_only_file_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();

        let error = Unfinished::create(&path).unwrap_err();

        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn replaced_file_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();

        write(&path, "new").unwrap();

        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn streams_are_told_from_files() {
        assert_eq!(Target::of(Path::new("/dev/null")).unwrap(), Target::Stream);
        for name in ["/proc/self/fd/1", "/dev/fd/1", "/dev/stdout"] {
            assert_eq!(
                Target::of(Path::new(name)).unwrap(),
                Target::Stream,
                "{name}"
            );
        }
        assert!(Target::of(Path::new("/")).is_err());
        assert!(Unfinished::create(Path::new("/dev/null")).is_err());
    }

    #[test]
    fn missing_folder_is_told_as_such() {
        let error = Unfinished::create(Path::new("/nowhere/a")).unwrap_err();

        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(!error.to_string().contains(".part"), "{error}");
    }
}
