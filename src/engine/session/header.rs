//! The head of a session file: 136 bytes that say what the file holds and what it is bound to.
//! Bytes in, checked numbers out; `docs/sessions.md` is the table.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::engine::bucket::{KV_PAD, pad_kv};
use crate::engine::{kv_cache, ring};
use crate::gguf::DType;
use crate::model::Config;

/// First bytes of every session file.
pub const SESSION_MAGIC: [u8; 8] = *b"G4PSESSN";
/// Version of the format. Files of any other are refused.
pub(super) const VERSION: u32 = 1;
/// Bytes of the head, its checksum included.
pub(super) const HEADER_BYTES: usize = 136;
/// Bytes of the checksum behind the body.
pub(super) const TRAILER_BYTES: usize = 8;
/// Most tokens or rows that a field may say: positions are signed 32-bit numbers in a graph.
const MAX_ROWS: u64 = 1 << 31;
/// Offset of the first 64-bit number; they stand in the order of [`FIELDS`].
const NUMBERS_AT: usize = 48;

/// The 64-bit numbers, by name.
const FIELDS: [&str; 10] = [
    "chunk",
    "n_swa",
    "ring_rows",
    "n_ctx_rows",
    "n_reserve",
    "n_past",
    "ring_start",
    "n_checkpoints",
    "checkpoint_every",
    "body_bytes",
];

/// Index of `checkpoint_every` in [`FIELDS`].
const EVERY: usize = 8;

/// Why a session file cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionFileError {
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file system has too little room: found before writing.
    #[error("{path}: expected room for {n_bytes} bytes, found {available}")]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes of the file.
        n_bytes: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The file does not begin as a session file does.
    #[error("{path}: expected a session file, found one that begins with {found:02x?}")]
    Magic {
        /// The file.
        path: PathBuf,
        /// Its first bytes.
        found: [u8; 8],
    },
    /// A format that this program does not read.
    #[error("{path}: expected a session file of version {VERSION}, found version {found}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The file ends too early, or goes on too long.
    #[error("{path}: expected {expected} bytes, found {found}")]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// Bytes were changed since they were written.
    #[error("{path}: expected checksum {expected:#018x} of the {part}, found {found:#018x}")]
    Checksum {
        /// The file.
        path: PathBuf,
        /// `head` or `body`.
        part: &'static str,
        /// What the file says.
        expected: u64,
        /// What its bytes give.
        found: u64,
    },
    /// The session was made by another model or with other options.
    #[error("{path}: the session needs {what} {expected}, found {found}")]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the session was made with.
        expected: String,
        /// What the engine has.
        found: String,
    },
    /// A number that contradicts the others or the model.
    #[error("{path}: {field} at byte {offset}: expected {expected}, found {found}")]
    Field {
        /// The file.
        path: PathBuf,
        /// What it is.
        field: String,
        /// Its place in the file.
        offset: u64,
        /// What would be accepted.
        expected: String,
        /// What is there.
        found: u64,
    },
}

/// What a session file is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    /// Fingerprint of the model.
    pub model: [u8; 32],
    /// Type of the caches.
    pub kv_type: DType,
    /// Tokens of a chunk.
    pub chunk: usize,
}

/// The head as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub binding: Binding,
    pub n_swa: usize,
    pub ring_rows: usize,
    pub n_ctx_rows: usize,
    /// Tokens that the session was made for.
    pub n_reserve: usize,
    pub n_past: usize,
    /// First position of the rings' rows in the file.
    pub ring_start: usize,
    pub n_checkpoints: usize,
    pub checkpoint_every: usize,
    /// Bytes between head and trailer.
    pub body_bytes: u64,
}

impl Header {
    /// The head as bytes, checksum included.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(SESSION_MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.binding.kv_type.id().to_le_bytes());
        bytes.extend(self.binding.model);
        let numbers = [
            self.binding.chunk,
            self.n_swa,
            self.ring_rows,
            self.n_ctx_rows,
            self.n_reserve,
            self.n_past,
            self.ring_start,
            self.n_checkpoints,
            self.checkpoint_every,
        ];
        for number in numbers {
            bytes.extend((number as u64).to_le_bytes());
        }
        bytes.extend(self.body_bytes.to_le_bytes());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        let mut out = [0; HEADER_BYTES];
        out.copy_from_slice(&bytes);
        out
    }

    /// Reads a head and compares it with the engine that is to take the session.
    ///
    /// # Errors
    /// Another format, a wrong checksum, another model, type, chunk or ring, numbers that
    /// contradict each other.
    pub fn decode(
        bytes: &[u8; HEADER_BYTES],
        path: &Path,
        binding: &Binding,
        config: &Config,
    ) -> Result<Self, SessionFileError> {
        check_format(bytes, path)?;
        let head = Head { bytes, path };
        head.check_binding(binding)?;
        let [
            _,
            n_swa,
            ring_rows,
            n_ctx_rows,
            n_reserve,
            n_past,
            ring_start,
            n_checkpoints,
            checkpoint_every,
        ] = head.rows()?;
        let header = Self {
            binding: *binding,
            n_swa,
            ring_rows,
            n_ctx_rows,
            n_reserve,
            n_past,
            ring_start,
            n_checkpoints,
            checkpoint_every,
            body_bytes: head.number(9),
        };
        header.check(&head, config)?;
        Ok(header)
    }

    /// Compares the numbers with each other and with the model.
    fn check(&self, head: &Head<'_>, config: &Config) -> Result<(), SessionFileError> {
        if self.n_swa != config.n_swa {
            return Err(head.mismatch("a sliding window of", self.n_swa, config.n_swa));
        }
        let range = |index, ok: bool, expected: String| {
            if ok {
                Ok(())
            } else {
                Err(head.field(index, expected))
            }
        };
        let is_padded = self.n_ctx_rows > 0 && self.n_ctx_rows.is_multiple_of(KV_PAD);
        range(3, is_padded, format!("a multiple of {KV_PAD} above 0"))?;
        range(4, self.n_reserve > 0, "at least 1".to_owned())?;
        let longest = self.n_ctx_rows.max(pad_kv(self.n_reserve));
        let rings = kv_cache::ring_rows_for(config, self.binding.chunk, longest);
        if self.ring_rows != rings {
            return Err(head.mismatch("ring rows of", self.ring_rows, rings));
        }
        let most = self.n_ctx_rows;
        range(5, self.n_past <= most, format!("at most {most}"))?;
        // The rows from here on must be what the next token sees, and no more than a ring holds.
        let last = ring::first_needed(self.n_past, self.n_swa).min(self.n_past);
        let first = ring::first_kept(self.n_past, self.ring_rows);
        let is_inside = (first..=last).contains(&self.ring_start);
        range(6, is_inside, format!("{first} to {last}"))?;
        let most = self.n_past;
        range(7, self.n_checkpoints <= most, format!("at most {most}"))
    }
}

/// Magic, version, checksum: nothing else of a head is looked at before.
fn check_format(bytes: &[u8; HEADER_BYTES], path: &Path) -> Result<(), SessionFileError> {
    let path = || path.to_owned();
    let found: [u8; 8] = take(bytes, 0);
    if found != SESSION_MAGIC {
        return Err(SessionFileError::Magic {
            path: path(),
            found,
        });
    }
    let found = u32::from_le_bytes(take(bytes, 8));
    if found != VERSION {
        return Err(SessionFileError::Version {
            path: path(),
            found,
        });
    }
    let (head, sum) = bytes.split_at(HEADER_BYTES - TRAILER_BYTES);
    let (expected, found) = (u64::from_le_bytes(take(sum, 0)), xxh3_64(head));
    if expected != found {
        return Err(SessionFileError::Checksum {
            path: path(),
            part: "head",
            expected,
            found,
        });
    }
    Ok(())
}

/// `N` bytes at `at`; zeros where there are none.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(bytes) = bytes.get(at..at + N) {
        out.copy_from_slice(bytes);
    }
    out
}

/// A head whose checksum is right.
struct Head<'a> {
    bytes: &'a [u8; HEADER_BYTES],
    path: &'a Path,
}

impl Head<'_> {
    fn number(&self, index: usize) -> u64 {
        u64::from_le_bytes(take(self.bytes, NUMBERS_AT + 8 * index))
    }

    /// The numbers that count tokens, rows or checkpoints.
    fn rows(&self) -> Result<[usize; 9], SessionFileError> {
        let mut rows = [0; 9];
        for (index, out) in rows.iter_mut().enumerate() {
            let number = self.number(index);
            // A distance may be longer than any session.
            let most = if index == EVERY { u64::MAX } else { MAX_ROWS };
            let in_range = usize::try_from(number).ok().filter(|_| number <= most);
            let expected = || self.field(index, format!("at most {most}"));
            *out = in_range.ok_or_else(expected)?;
        }
        Ok(rows)
    }

    fn check_binding(&self, binding: &Binding) -> Result<(), SessionFileError> {
        let model: [u8; 32] = take(self.bytes, 16);
        if model != binding.model {
            let found = hex(&binding.model);
            return Err(self.mismatch("the model with fingerprint", hex(&model), found));
        }
        let kv_type = u32::from_le_bytes(take(self.bytes, 12));
        if kv_type != binding.kv_type.id() {
            let name = DType::from_id(kv_type).map(DType::name);
            let expected = name.map_or_else(|| format!("number {kv_type}"), str::to_owned);
            return Err(self.mismatch("K/V caches of type", expected, binding.kv_type));
        }
        let chunk = self.number(0);
        if chunk != binding.chunk as u64 {
            return Err(self.mismatch("chunks of", chunk, binding.chunk));
        }
        Ok(())
    }

    fn mismatch(
        &self,
        what: &'static str,
        expected: impl ToString,
        found: impl ToString,
    ) -> SessionFileError {
        SessionFileError::Mismatch {
            path: self.path.to_owned(),
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    fn field(&self, index: usize, expected: String) -> SessionFileError {
        SessionFileError::Field {
            path: self.path.to_owned(),
            field: FIELDS.get(index).copied().unwrap_or_default().to_owned(),
            offset: (NUMBERS_AT + 8 * index) as u64,
            expected,
            found: self.number(index),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
