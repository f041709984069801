//! Sessions on disk: written beside their place and renamed, read in large pieces straight into the
//! caches. The format is in `docs/sessions.md`.
//!
//! Nothing of a file is trusted: the head is checked before it is used, the length of the file
//! before anything is allocated, and a session exists only when the last checksum was right.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Advice, fadvise};
use xxhash_rust::xxh3::Xxh3;

use super::Session;
use super::checkpoint::{self, Checkpoint};
use super::header::{Binding, HEADER_BYTES, Header, SessionFileError, TRAILER_BYTES, take};
use crate::Result;
use crate::engine::bucket::pad_kv;
use crate::engine::kv_cache::{self, PIECE_BYTES, Part, part_row_bytes};
use crate::engine::{Engine, EngineError, policy, ring};
use crate::ggml::{host_resize, host_room};
use crate::unfinished::Unfinished;

/// Bytes of a token id.
const TOKEN_BYTES: usize = size_of::<u32>();
/// Bytes that the system is asked to read ahead.
const AHEAD_BYTES: Option<NonZeroU64> = NonZeroU64::new(4 * PIECE_BYTES as u64);
/// Bytes of a checkpoint's position.
const POSITION_BYTES: usize = size_of::<u64>();

impl Session {
    /// Writes the session to `path`: tokens, position, the rows of all caches that can still be
    /// read, checkpoints. [`Engine::load_session`] reads it.
    ///
    /// The file appears under its name when it is complete; an existing one is replaced then.
    ///
    /// # Errors
    /// [`SessionFileError`]: a path that cannot be written, too little room.
    ///
    /// # Example
    /// ```
    /// use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
    ///
    /// # let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/c-dense-bf16.gguf");
    /// # let folder = tempfile::tempdir()?;
    /// # let file = folder.path().join("book.session");
    /// let engine = Engine::load(model.as_ref(), EngineOptions::default(), &mut |_| {})?;
    /// let mut session = engine.session(4096)?;
    /// session.prefill(&[2, 17, 42], &Rows::Last, &mut PrefillControl::default())?;
    /// session.save(&file)?;
    ///
    /// let mut again = engine.load_session(&file, 0)?;
    /// assert_eq!(again.tokens(), [2, 17, 42]);
    /// again.prefill(&[7], &Rows::Last, &mut PrefillControl::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save(&self, path: &Path) -> Result<()> {
        let file = Unfinished::create(path).map_err(|e| failed(path, e))?;
        self.save_into(file, path)
    }

    /// [`Self::save`] into a file that was created before the work, so that a wrong path was found
    /// then; `path` is for the errors.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_into(&self, file: Unfinished, path: &Path) -> Result<()> {
        let header = self.header();
        let n_bytes = file_bytes(header.body_bytes);
        require_room(path, n_bytes, file.available())?;
        let mut out = Writer {
            file: file.file(),
            path,
            hash: Xxh3::new(),
        };
        out.raw(&header.encode())?;
        let tokens: Vec<u8> = self.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        out.put(&tokens)?;
        for checkpoint in &self.checkpoints.list {
            out.put(&(checkpoint.n_past as u64).to_le_bytes())?;
        }
        // What is queued on the device may still write.
        self.backend.synchronize();
        let mut buffer = Vec::new();
        for (part, rows) in header.parts() {
            for piece in self.kv.pieces(self.engine.config(), part, rows) {
                host_resize(&mut buffer, piece.len, "piece of a session")?;
                self.kv.read(piece, &mut buffer)?;
                out.put(&buffer)?;
            }
        }
        for checkpoint in &self.checkpoints.list {
            out.put(&checkpoint.bytes)?;
        }
        let sum = out.hash.digest();
        out.raw(&sum.to_le_bytes())?;
        file.finish().map_err(|e| failed(path, e))?;
        Ok(())
    }

    /// Bytes that [`Self::save`] would write.
    pub fn saved_bytes(&self) -> u64 {
        file_bytes(self.header().body_bytes)
    }

    fn header(&self) -> Header {
        let config = self.engine.config();
        let first_kept = ring::first_kept(self.n_written, self.kv.ring_rows);
        let mut header = Header {
            binding: self.engine.session_binding(),
            n_swa: config.n_swa,
            ring_rows: self.kv.ring_rows,
            n_ctx_rows: self.kv.n_ctx_rows,
            n_reserve: self.n_reserve,
            n_past: self.n_past,
            ring_start: first_kept.min(self.n_past),
            n_checkpoints: self.checkpoints.list.len(),
            checkpoint_every: self.checkpoints.every,
            body_bytes: 0,
        };
        header.body_bytes = body_bytes(&self.engine, &header, &self.checkpoints());
        header
    }
}

impl Header {
    /// The rows in the file, in its order.
    fn parts(&self) -> [(Part, Range<usize>); 2] {
        [
            (Part::Linear, 0..self.n_past),
            (Part::Rings, self.ring_start..self.n_past),
        ]
    }
}

/// Bytes of a whole file.
fn file_bytes(body_bytes: u64) -> u64 {
    body_bytes.saturating_add((HEADER_BYTES + TRAILER_BYTES) as u64)
}

/// Bytes of the tokens and of the positions of checkpoints.
fn index_bytes(header: &Header) -> u64 {
    (header.n_past * TOKEN_BYTES + header.n_checkpoints * POSITION_BYTES) as u64
}

/// Bytes between head and trailer, with checkpoints at `positions`.
fn body_bytes(engine: &Engine, header: &Header, positions: &[usize]) -> u64 {
    let (config, kv_type) = (engine.config(), header.binding.kv_type);
    let parts = header.parts().into_iter().map(|(part, rows)| {
        part_row_bytes(config, part, kv_type).saturating_mul(rows.len() as u64)
    });
    let parts = parts.fold(index_bytes(header), u64::saturating_add);
    let checkpoints = positions
        .iter()
        .map(|&n_past| checkpoint::bytes(config, n_past, kv_type));
    checkpoints.fold(parts, u64::saturating_add)
}

/// Refuses to begin what cannot end: `available` is what the file system says, if it does.
fn require_room(path: &Path, n_bytes: u64, available: Option<u64>) -> Result<(), EngineError> {
    match available {
        Some(available) if available < n_bytes => Err(SessionFileError::NoRoom {
            path: path.to_owned(),
            n_bytes,
            available,
        }
        .into()),
        _ => Ok(()),
    }
}

/// A failed file operation.
fn failed(path: &Path, source: std::io::Error) -> EngineError {
    let path = path.to_owned();
    SessionFileError::Io { path, source }.into()
}

/// Writes a file from front to back and sums its body.
struct Writer<'a> {
    file: &'a File,
    path: &'a Path,
    hash: Xxh3,
}

impl Writer<'_> {
    fn raw(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        self.file.write_all(bytes).map_err(|e| failed(self.path, e))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        self.hash.update(bytes);
        self.raw(bytes)
    }
}

/// Reads a file from front to back and sums its body.
struct Reader {
    file: File,
    path: PathBuf,
    n_bytes: u64,
    /// Bytes read so far.
    n_read: u64,
    hash: Xxh3,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens a regular file and reads its head.
    fn open(path: &Path) -> Result<(Self, [u8; HEADER_BYTES]), EngineError> {
        // A pipe would block in `open` until a writer comes: look before opening.
        if !path.metadata().map_err(|e| failed(path, e))?.is_file() {
            let error =
                std::io::Error::new(std::io::ErrorKind::InvalidInput, "expected a regular file");
            return Err(failed(path, error));
        }
        let file = File::open(path).map_err(|e| failed(path, e))?;
        let n_bytes = file.metadata().map_err(|e| failed(path, e))?.len();
        let mut reader = Self {
            file,
            path: path.to_owned(),
            n_bytes,
            n_read: 0,
            hash: Xxh3::new(),
            buffer: Vec::new(),
        };
        reader.require(n_bytes >= HEADER_BYTES as u64, HEADER_BYTES as u64)?;
        let mut head = [0; HEADER_BYTES];
        reader.fill(&mut head)?;
        Ok((reader, head))
    }

    fn require(&self, ok: bool, expected: u64) -> Result<(), EngineError> {
        if ok {
            return Ok(());
        }
        Err(SessionFileError::Length {
            path: self.path.clone(),
            expected,
            found: self.n_bytes,
        }
        .into())
    }

    /// Reads the next bytes; the disk goes on with those behind them while these are used.
    fn fill(&mut self, out: &mut [u8]) -> Result<(), EngineError> {
        self.n_read += out.len() as u64;
        // A file system that does not read ahead is only slower.
        let _ = fadvise(&self.file, self.n_read, AHEAD_BYTES, Advice::WillNeed);
        self.file.read_exact(out).map_err(|e| failed(&self.path, e))
    }

    /// A number of the body that cannot be; `at` is its offset in the body.
    fn wrong(&self, field: String, at: usize, expected: String, found: u64) -> crate::Error {
        EngineError::from(SessionFileError::Field {
            path: self.path.clone(),
            field,
            offset: (HEADER_BYTES + at) as u64,
            expected,
            found,
        })
        .into()
    }

    /// The next `len` bytes of the body, not more than a piece at a time.
    fn next(&mut self, len: usize) -> Result<&[u8]> {
        let mut buffer = std::mem::take(&mut self.buffer);
        host_resize(&mut buffer, len, "piece of a session")?;
        let read = self.fill(&mut buffer);
        self.buffer = buffer;
        read?;
        self.hash.update(&self.buffer);
        Ok(&self.buffer)
    }

    /// The next `len` bytes of the body in memory of their own.
    fn collect(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut out = host_room(len, "checkpoint or tokens of a session")?;
        while out.len() < len {
            let n = PIECE_BYTES.min(len - out.len());
            out.extend_from_slice(self.next(n)?);
        }
        Ok(out)
    }

    /// Compares the sum of the body with the trailer.
    fn finish(mut self) -> Result<(), EngineError> {
        let mut trailer = [0; TRAILER_BYTES];
        self.fill(&mut trailer)?;
        let (expected, found) = (u64::from_le_bytes(trailer), self.hash.digest());
        if expected == found {
            return Ok(());
        }
        Err(SessionFileError::Checksum {
            path: self.path,
            part: "body",
            expected,
            found,
        }
        .into())
    }
}

impl Engine {
    /// Reads a session that [`Session::save`] wrote, with room for `n_reserve` tokens, or 0: as
    /// much as it had.
    ///
    /// The file is bound to the model (its fingerprint, [`crate::model::fingerprint`]), the type of
    /// the caches, the chunk and the rings. With `n_reserve` 0, the same device and the same
    /// options, the session continues bit for bit as the saved one would have. On another device,
    /// with other weights or another reserve it continues within rounding.
    ///
    /// # Errors
    /// [`SessionFileError`]: no session file, another version, changed or missing bytes, another
    /// model, type or layout, always with what was expected and found. More tokens than the
    /// context, out of memory. No session exists then.
    ///
    /// # Example
    /// See [`Session::save`].
    pub fn load_session(self: &Arc<Self>, path: &Path, n_reserve: usize) -> Result<Session> {
        let (mut reader, head) = Reader::open(path)?;
        let header = Header::decode(&head, path, &self.session_binding(), self.config())
            .map_err(EngineError::from)?;
        let expected = file_bytes(header.body_bytes);
        reader.require(reader.n_bytes == expected, expected)?;
        let least = index_bytes(&header);
        reader.require(header.body_bytes >= least, file_bytes(least))?;
        let (tokens, positions) = self.read_index(&mut reader, &header)?;
        let expected = file_bytes(body_bytes(self, &header, &positions));
        reader.require(reader.n_bytes == expected, expected)?;
        let sizes = positions
            .iter()
            .map(|&n_past| checkpoint::bytes(self.config(), n_past, header.binding.kv_type));
        let free = checkpoint::host_memory()?;
        checkpoint::require_room(positions.len(), sizes.sum(), free)?;
        let mut session = self.session_for(&header, n_reserve)?;
        session.tokens = tokens;
        session.set_end(header.n_past, header.ring_start);
        for (part, rows) in header.parts() {
            for piece in session.kv.pieces(self.config(), part, rows) {
                let bytes = reader.next(piece.len)?;
                session.kv.write(piece, bytes)?;
            }
        }
        session.checkpoints.every = header.checkpoint_every;
        for n_past in positions {
            let n = checkpoint::bytes(self.config(), n_past, header.binding.kv_type);
            let bytes = reader.collect(usize::try_from(n).unwrap_or(usize::MAX))?;
            session.checkpoints.list.push(Checkpoint {
                n_past,
                bytes: Arc::new(bytes),
            });
        }
        reader.finish()?;
        Ok(session)
    }

    /// What a session file of this engine is bound to.
    pub(super) fn session_binding(&self) -> Binding {
        Binding {
            model: self.fingerprint(),
            kv_type: self.options().kv_type,
            chunk: self.options().chunk,
        }
    }

    /// Reads tokens and positions of checkpoints; the file was found to be long enough for them.
    fn read_index(&self, reader: &mut Reader, header: &Header) -> Result<(Vec<u32>, Vec<usize>)> {
        self.check_context(header.n_past)?;
        let n_vocab = self.config().n_vocab;
        let bytes = reader.collect(header.n_past * TOKEN_BYTES)?;
        let mut tokens = Vec::with_capacity(header.n_past);
        for (i, bytes) in bytes.chunks_exact(TOKEN_BYTES).enumerate() {
            let token = u32::from_le_bytes(take(bytes, 0));
            if token as usize >= n_vocab {
                let expected = format!("an id below {n_vocab}");
                let at = i * TOKEN_BYTES;
                return Err(reader.wrong(format!("token {i}"), at, expected, token.into()));
            }
            tokens.push(token);
        }
        let bytes = reader.collect(header.n_checkpoints * POSITION_BYTES)?;
        let mut positions = Vec::with_capacity(header.n_checkpoints);
        let mut least = 1;
        for (i, bytes) in bytes.chunks_exact(POSITION_BYTES).enumerate() {
            let found = u64::from_le_bytes(take(bytes, 0));
            let position = usize::try_from(found).unwrap_or(usize::MAX);
            if !(least..=header.n_past).contains(&position) {
                let expected = format!("a position from {least} to {}", header.n_past);
                let at = header.n_past * TOKEN_BYTES + i * POSITION_BYTES;
                return Err(reader.wrong(format!("checkpoint {i}"), at, expected, found));
            }
            least = position + 1;
            positions.push(position);
        }
        Ok((tokens, positions))
    }

    /// An empty session with caches for what the head says.
    fn session_for(self: &Arc<Self>, header: &Header, n_reserve: usize) -> Result<Session> {
        let limit = self.context_limit();
        let (n, rows) = if n_reserve == 0 {
            (header.n_reserve, header.n_ctx_rows)
        } else {
            let n = n_reserve.max(header.n_past);
            let first = pad_kv(policy::first_context(self.options(), n));
            (n, policy::rows_for(first, n, header.n_past, limit))
        };
        let n = self.check_context(n)?;
        if rows > pad_kv(limit) {
            self.check_context(rows)?;
        }
        let backend = self.open_backend()?;
        self.check_memory(&backend, rows)?;
        let chunk = self.options().chunk;
        let rings = kv_cache::ring_rows_for(self.config(), chunk, rows.max(pad_kv(n)));
        Session::with_caches(self, backend, (rows, rings), n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_room_is_refused_with_both_numbers() {
        let check = |available| require_room(Path::new("a.session"), 145, available);

        assert!(check(None).is_ok() && check(Some(145)).is_ok());
        let error = check(Some(144)).unwrap_err().to_string();
        assert_eq!(error, "a.session: expected room for 145 bytes, found 144");
    }
}
