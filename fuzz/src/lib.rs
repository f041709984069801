//! What the fuzz targets share: files in memory, GGUF files as fields, numbers worth trying.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use arbitrary::{Arbitrary, Unstructured};
use g4prefill::gguf::{GgufError, GgufFile};

pub mod fields;

/// A file in memory with a path: the readers map files, so the targets take the same way.
pub struct MemoryFile {
    file: File,
    path: PathBuf,
}

impl MemoryFile {
    /// An empty file.
    pub fn new() -> Self {
        let fd = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        Self { file, path }
    }

    /// Replaces the content by `bytes` and `n_zeros` zeros, which take no memory.
    pub fn set(&mut self, bytes: &[u8], n_zeros: u64) -> &PathBuf {
        self.file.set_len(0).unwrap();
        self.file.rewind().unwrap();
        self.file.write_all(bytes).unwrap();
        self.file.set_len(bytes.len() as u64 + n_zeros).unwrap();
        &self.path
    }
}

impl Default for MemoryFile {
    fn default() -> Self {
        Self::new()
    }
}

thread_local! {
    static FILE: std::cell::RefCell<MemoryFile> = MemoryFile::new().into();
}

/// Opens `bytes` and `n_zeros` zeros as a GGUF file; the file must be dropped before the next.
///
/// # Errors
/// Those of the reader.
pub fn open_gguf(bytes: &[u8], n_zeros: u64) -> Result<GgufFile, GgufError> {
    FILE.with_borrow_mut(|file| GgufFile::open(file.set(bytes, n_zeros)))
}

/// Reads everything that an accepted file offers; each must hold what the reader promises.
pub fn visit(file: &GgufFile) {
    let bytes = file.shard_bytes()[0];
    let mut end_before = 0;
    let mut tensors: Vec<_> = file.tensors().iter().collect();
    tensors.sort_by_key(|t| t.offset);
    for t in tensors {
        let end = t.offset.checked_add(t.n_bytes).unwrap();
        assert!(end <= bytes && t.offset >= end_before, "{t:?}");
        end_before = end;
        assert_eq!(file.tensor_data(t).len() as u64, t.n_bytes);
        assert!(!t.name.is_empty() && t.n_elements() > 0 && t.dims().len() == t.n_dims);
        assert_eq!(file.tensor(&t.name), Some(t));
    }
    let keys = file.metadata();
    for entry in keys.entries() {
        let key = entry.key.as_str();
        assert!(keys.contains(key) && entry.offset < bytes);
        let _ = (keys.opt_u32(key), keys.opt_u64(key), keys.opt_f32(key));
        let _ = (keys.opt_bool(key), keys.opt_str(key), keys.strings(key));
        let _ = (keys.f32s(key), keys.i32s(key), keys.u32s(key));
        let _ = keys.per_layer_u32(key, 3).is_ok_and(|v| {
            assert_eq!(v.len(), 3);
            true
        });
        let _ = keys.per_layer_bool(key, 3);
        assert!(!entry.value.type_name().is_empty());
    }
}

/// A 64-bit number that is small, at a border, or anything.
#[derive(Clone, Copy, Debug)]
pub struct Number(pub u64);

impl<'a> Arbitrary<'a> for Number {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        const BORDERS: [u64; 14] = [
            0,
            1,
            0x7f,
            0x80,
            0xff,
            0xffff,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
            0x1_0000_0000,
            i64::MAX as u64,
            1 << 63,
            u64::MAX - 31,
            u64::MAX,
        ];
        Ok(Self(match u.int_in_range(0..=9)? {
            0..=4 => u8::arbitrary(u)?.into(),
            5 => u16::arbitrary(u)?.into(),
            6 => u32::arbitrary(u)?.into(),
            7 => 1 << u.int_in_range(0..=63)?,
            8 => *u.choose(&BORDERS)?,
            _ => u64::arbitrary(u)?,
        }))
    }
}

impl Number {
    /// The number as a size.
    pub fn size(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}
