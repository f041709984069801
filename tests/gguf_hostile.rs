//! Every structural field of a file made wrong in turn, with what it costs to find out.
//!
//! Single faults with their variant and place are in `src/gguf/tests.rs`; this is the sweep. The
//! memory that a refusal takes is measured, so the tests of this program run one at a time.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use g4prefill::gguf::{Array, DType, GgufError, GgufFile, Value};
use g4prefill::model::{Config, names};
use peak_alloc::PeakAlloc;

/// The writer of the reader's own tests.
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../src/gguf/testing.rs"]
mod testing;

use testing::{Model, Raw, RawKey, Tensor, fixture, fixture_path, string};

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

/// One test at a time: the counter is the process's.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What opening takes on top of what is there, in bytes.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = PEAK.current_usage();
    PEAK.reset_peak_usage();
    let result = work();
    (result, PEAK.peak_usage().saturating_sub(before))
}

/// A kind of structural field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Magic,
    Version,
    /// Number of tensors, keys, elements, dimensions, or bytes of a string.
    Count,
    ValueType,
    TensorType,
    Dim,
    DataOffset,
    Text,
}

/// Where a field is.
#[derive(Clone, Debug)]
struct At {
    kind: Kind,
    offset: usize,
    n_bytes: usize,
    /// Key or tensor.
    name: String,
}

/// Walks a valid file without any check of the reader's.
struct Walk<'a> {
    bytes: &'a [u8],
    pos: usize,
    name: String,
    fields: Vec<At>,
}

impl Walk<'_> {
    fn number(&mut self, kind: Kind, n_bytes: usize) -> u64 {
        self.fields.push(At {
            kind,
            offset: self.pos,
            n_bytes,
            name: self.name.clone(),
        });
        let mut word = [0; 8];
        word[..n_bytes].copy_from_slice(&self.bytes[self.pos..][..n_bytes]);
        self.pos += n_bytes;
        u64::from_le_bytes(word)
    }

    fn size(&mut self, kind: Kind, n_bytes: usize) -> usize {
        usize::try_from(self.number(kind, n_bytes)).unwrap()
    }

    fn text(&mut self) -> String {
        let n = self.size(Kind::Count, 8);
        let offset = self.pos;
        self.pos += n;
        if n > 0 {
            self.fields.push(At {
                kind: Kind::Text,
                offset,
                n_bytes: n,
                name: self.name.clone(),
            });
        }
        String::from_utf8(self.bytes[offset..self.pos].to_vec()).unwrap()
    }

    fn value(&mut self, type_id: u64) {
        match type_id {
            0 | 1 | 7 => self.pos += 1,
            2 | 3 => self.pos += 2,
            4..=6 => self.pos += 4,
            10..=12 => self.pos += 8,
            8 => drop(self.text()),
            9 => {
                let inner = self.number(Kind::ValueType, 4);
                let n = self.size(Kind::Count, 8);
                let n_fields = self.fields.len();
                for i in 0..n {
                    self.value(inner);
                    // Of a long array the first and the last element are enough.
                    if i > 0 && i + 1 < n {
                        self.fields.truncate(n_fields + 2);
                    }
                }
            }
            other => panic!("type {other}"),
        }
    }
}

/// All structural fields of a valid file, and where its tensors' data begins.
fn fields(bytes: &[u8]) -> (Vec<At>, usize) {
    let mut walk = Walk {
        bytes,
        pos: 0,
        name: String::new(),
        fields: Vec::new(),
    };
    walk.number(Kind::Magic, 4);
    walk.number(Kind::Version, 4);
    let n_tensors = walk.number(Kind::Count, 8);
    let n_keys = walk.number(Kind::Count, 8);
    for _ in 0..n_keys {
        walk.name.clear();
        walk.name = walk.text();
        let type_id = walk.number(Kind::ValueType, 4);
        walk.value(type_id);
    }
    for _ in 0..n_tensors {
        walk.name.clear();
        walk.name = walk.text();
        for _ in 0..walk.number(Kind::Count, 4) {
            walk.number(Kind::Dim, 8);
        }
        walk.number(Kind::TensorType, 4);
        walk.number(Kind::DataOffset, 8);
    }
    (walk.fields, walk.pos.next_multiple_of(32))
}

/// What a field is set to: borders, neighbours of what is there, and far too much.
fn wrong_values(at: &At, old: u64) -> Vec<u64> {
    let max = if at.n_bytes == 4 {
        u32::MAX.into()
    } else {
        u64::MAX
    };
    let mut values = vec![
        0,
        1,
        old.wrapping_add(1) & max,
        old.wrapping_sub(1) & max,
        1 << 31,
        max,
        max - 1,
    ];
    if at.n_bytes == 8 {
        values.extend([1 << 32, (1 << 32) + old, 1 << 62, 1 << 63, old + (1 << 63)]);
    }
    values.retain(|&value| value != old);
    values
}

/// The file and its path, written again for each case.
struct Case {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bent.gguf");
        Self {
            _folder: folder,
            path,
        }
    }

    /// Opens `head` followed by zeros up to `n_bytes`.
    ///
    /// A refusal names the file and a place, and takes no more memory than a few times the head;
    /// what is accepted lies within the file.
    fn open(&self, head: &[u8], n_bytes: usize) -> Result<GgufFile, String> {
        let file = std::fs::File::create(&self.path).unwrap();
        std::io::Write::write_all(&mut &file, head).unwrap();
        file.set_len(n_bytes as u64).unwrap();
        let (result, peak) = peak_of(|| GgufFile::open(&self.path));
        assert!(
            peak <= 8 * head.len() + (64 << 10),
            "{peak} bytes of memory for a head of {}: {result:?}",
            head.len()
        );
        match result {
            Ok(file) => {
                for t in file.tensors() {
                    assert_eq!(file.tensor_data(t).len() as u64, t.n_bytes, "{t:?}");
                }
                Ok(file)
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("bent.gguf"), "{text}");
                assert!(
                    text.contains(" at byte ") || text.contains("tensor `"),
                    "no place: {text}"
                );
                Err(text)
            }
        }
    }
}

/// A file of every type, and real directories, as head and length.
fn subjects() -> Vec<(String, Vec<u8>, usize)> {
    let mut subjects = vec![("small".to_owned(), Model::small().raw().bytes())];
    for name in ["c-dense-bf16", "d-moe-q8_0"] {
        let path = fixture_path(name);
        subjects.push((name.to_owned(), std::fs::read(path).unwrap()));
    }
    let cut = |(name, mut bytes): (String, Vec<u8>)| {
        let n_bytes = bytes.len();
        let (_, start) = fields(&bytes);
        bytes.truncate(start);
        (name, bytes, n_bytes)
    };
    subjects.into_iter().map(cut).collect()
}

/// Whether a file with this field changed can still be a file of the format.
fn may_be_valid(at: &At, old: u64, new: u64) -> bool {
    match at.kind {
        Kind::Magic => false,
        Kind::Version => new == 2,
        // Fewer keys or tensors than there are: the rest is taken for what follows. A length that
        // is smaller leaves bytes over that can by chance be what comes next.
        Kind::Count => new < old,
        // Types of one width cannot be told apart.
        Kind::ValueType => new <= 12 && new != 9,
        Kind::TensorType => new < 43,
        // A little more may still fit in front of the next tensor.
        Kind::Dim => 0 < new && new < old + 32,
        Kind::DataOffset => new.is_multiple_of(32) && new < 1 << 32,
        Kind::Text => true,
    }
}

#[test]
fn every_number_of_a_head_made_wrong_is_refused_with_its_place_and_little_memory() {
    let _alone = alone();
    let case = Case::new();
    let mut n_refused = 0;
    for (name, head, n_bytes) in subjects() {
        for at in fields(&head).0 {
            if at.kind == Kind::Text {
                continue;
            }
            let mut word = [0; 8];
            word[..at.n_bytes].copy_from_slice(&head[at.offset..][..at.n_bytes]);
            let old = u64::from_le_bytes(word);
            for new in wrong_values(&at, old) {
                let mut bent = head.clone();
                bent[at.offset..][..at.n_bytes].copy_from_slice(&new.to_le_bytes()[..at.n_bytes]);
                let result = case.open(&bent, n_bytes);
                n_refused += usize::from(result.is_err());
                assert!(
                    result.is_err() || may_be_valid(&at, old, new),
                    "{name}, {}: {at:?} {old} -> {new} was accepted",
                    at.name
                );
            }
        }
    }
    assert!(n_refused > 5000, "{n_refused}");
}

#[test]
fn every_string_of_a_head_must_be_utf8_and_names_are_unique() {
    let _alone = alone();
    let case = Case::new();
    for (name, head, n_bytes) in subjects() {
        for at in fields(&head).0 {
            if at.kind != Kind::Text {
                continue;
            }
            for place in [0, at.n_bytes / 2, at.n_bytes - 1] {
                let mut bent = head.clone();
                bent[at.offset + place] = 0xff;
                let text = case.open(&bent, n_bytes).unwrap_err();
                assert!(text.contains("UTF-8"), "{name}: {at:?}: {text}");
            }
        }
    }
}

#[test]
fn a_file_cut_at_any_border_of_its_structure_is_refused() {
    let _alone = alone();
    let case = Case::new();
    for (name, head, n_bytes) in subjects() {
        let (at, start) = fields(&head);
        let borders = at.iter().flat_map(|at| {
            let end = at.offset + at.n_bytes;
            [at.offset, at.offset + 1, end - 1, end]
        });
        for cut in borders.filter(|&cut| cut < start) {
            assert!(case.open(&head[..cut], cut).is_err(), "{name} cut at {cut}");
        }
        for cut in [start, start + 1, (start + n_bytes) / 2] {
            let text = case.open(&head, cut).unwrap_err();
            assert!(
                text.contains("bytes of data"),
                "{name} cut at {cut}: {text}"
            );
        }
    }
}

/// A file of keys only.
fn keys_only(n: u64) -> Vec<u8> {
    let mut raw = Model::small().raw();
    raw.tensors.clear();
    raw.n_tensors = 0;
    raw.keys = (0..n)
        .map(|i| RawKey::new(&format!("k{i}"), 0, vec![1]))
        .collect();
    raw.n_keys = n;
    raw.bytes()
}

#[test]
fn a_million_keys_are_refused_before_they_are_read_and_the_most_allowed_are_read() {
    let _alone = alone();
    let case = Case::new();
    let million = keys_only(1_000_000);
    std::fs::write(&case.path, &million).unwrap();
    let (result, peak) = peak_of(|| GgufFile::open(&case.path).map(|_| ()));
    let text = result.unwrap_err().to_string();
    assert!(
        text.contains("the key count") && text.contains("at byte 16"),
        "{text}"
    );
    assert!(peak < 4096, "{peak}");

    let most = keys_only(1 << 16);
    std::fs::write(&case.path, &most).unwrap();
    let (file, peak) = peak_of(|| GgufFile::open(&case.path).unwrap());
    assert_eq!(file.metadata().entries().len(), 1 << 16);
    assert!(peak < 16 * most.len(), "{peak} for {}", most.len());
}

#[test]
fn huge_arrays_take_memory_only_in_proportion_to_the_file() {
    let _alone = alone();
    let case = Case::new();
    let n = 1_u64 << 20;
    let array = |type_id: u32, element: &[u8]| {
        let head = [&type_id.to_le_bytes()[..], &n.to_le_bytes()].concat();
        [head, element.repeat(usize::try_from(n).unwrap())].concat()
    };
    for (type_id, element) in [
        (0, vec![7]),
        (7, vec![1]),
        (12, vec![0; 8]),
        (8, string(b"")),
    ] {
        let mut raw = Model::small().raw();
        raw.keys
            .push(RawKey::new("long", 9, array(type_id, &element)));
        raw.n_keys += 1;
        let bytes = raw.bytes();
        std::fs::write(&case.path, &bytes).unwrap();
        let (file, peak) = peak_of(|| GgufFile::open(&case.path).unwrap());
        let Some(Value::Array(found)) = file.metadata().get("long") else {
            panic!("an array");
        };
        assert_eq!(found.len() as u64, n);
        assert!(
            peak < 4 * bytes.len(),
            "type {type_id}: {peak} for {}",
            bytes.len()
        );
        // The same announced, and not there.
        let cut = bytes.len() - raw.data.len() - usize::try_from(n).unwrap() / 2;
        let (result, peak) = peak_of(|| case.open(&bytes[..cut], cut).map(|_| ()));
        assert!(result.unwrap_err().contains("`long`"));
        assert!(peak < 4 * bytes.len(), "type {type_id}: {peak}");
    }
}

/// Writes shard `no` of `n`.
fn shard(folder: &Path, no: u16, n: u16) -> PathBuf {
    let mut model = Model::small();
    model.tensors = vec![Tensor::zeros(&format!("t{no}"), DType::F32, &[8])];
    model.set("split.no", Value::U16(no));
    model.set("split.count", Value::U16(n));
    model.set("split.tensors.count", Value::I32(n.into()));
    let path = folder.join(format!("m-{:05}-of-{n:05}.gguf", no + 1));
    std::fs::write(&path, model.raw().bytes()).unwrap();
    path
}

#[test]
fn shards_that_lead_in_a_circle_or_into_nothing_are_refused() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let first = shard(folder.path(), 0, 3);
    shard(folder.path(), 2, 3);
    let second = folder.path().join("m-00002-of-00003.gguf");
    let open = || GgufFile::open(&first).unwrap_err().to_string();
    let mut said = Vec::new();

    // The second is the first again, by a link; a link to itself; to nothing; a folder; empty.
    std::os::unix::fs::symlink(&first, &second).unwrap();
    said.push(open());
    for target in ["m-00002-of-00003.gguf", "nowhere"] {
        std::fs::remove_file(&second).unwrap();
        std::os::unix::fs::symlink(target, &second).unwrap();
        said.push(open());
    }
    std::fs::remove_file(&second).unwrap();
    std::fs::create_dir(&second).unwrap();
    said.push(open());
    std::fs::remove_dir(&second).unwrap();
    std::fs::write(&second, "").unwrap();
    said.push(open());

    for text in &said {
        assert!(text.contains("m-00002-of-00003.gguf"), "{text}");
    }
    assert!(said[0].contains("split.no"), "{}", said[0]);
}

/// A fixture with tensor data of the size that its entries say, all zeros.
fn laid_out(raw: &mut Raw) -> Vec<u8> {
    let mut next = 0;
    for t in &mut raw.tensors {
        t.offset = next;
        let dtype = DType::from_id(t.type_id).unwrap();
        let rows: u64 = t.dims[1..].iter().product();
        let n_bytes = dtype.row_bytes(t.dims[0]).unwrap() * rows;
        next = (next + n_bytes).next_multiple_of(32);
    }
    raw.data = Vec::new();
    let mut bytes = raw.bytes();
    bytes.resize(bytes.len() + usize::try_from(next).unwrap(), 0);
    bytes
}

/// What the gates before loading say of these bytes.
fn gate(case: &Case, bytes: &[u8]) -> Result<Config, String> {
    let file = case.open(bytes, bytes.len())?;
    let config = Config::from_gguf(&file).map_err(|e| e.to_string())?;
    names::check(&file, &config).map_err(|e| e.to_string())?;
    Ok(config)
}

#[test]
fn a_shape_that_contradicts_the_metadata_is_refused_by_the_tensors_name() {
    let _alone = alone();
    let case = Case::new();
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let mut whole = Model::of(&fixture(name)).raw();
        assert!(gate(&case, &laid_out(&mut whole)).is_ok(), "{name}");
        for i in 0..whole.tensors.len() {
            let tensor = String::from_utf8(whole.tensors[i].name.clone()).unwrap();
            for dim in 0..whole.tensors[i].dims.len() {
                // The vocabulary's size is what this tensor says.
                if tensor.starts_with("token_embd") && dim == 1 {
                    continue;
                }
                let mut raw = whole.clone();
                raw.tensors[i].dims[dim] *= 2;
                let text = gate(&case, &laid_out(&mut raw)).unwrap_err();
                assert!(
                    text.contains(&format!("`{tensor}`")),
                    "{name}: {tensor} {dim}: {text}"
                );
            }
        }
    }
}

/// Keys that no tensor's shape depends on.
const FREE: [&str; 11] = [
    "shared_kv_layers",
    "context_length",
    "sliding_window",
    "rope",
    "eps",
    "softcapping",
    "expert_used_count",
    "general.",
    "tokenizer.",
    "key_length",
    "dimension_count",
];

#[test]
fn a_number_of_the_metadata_that_contradicts_the_tensors_is_refused() {
    let _alone = alone();
    let case = Case::new();
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let whole = Model::of(&fixture(name));
        let start = gate(&case, &laid_out(&mut whole.raw())).unwrap();
        let mut n_refused = 0;
        for (key, value) in &whole.keys {
            let Value::U32(old) = *value else { continue };
            for new in [0, 1, old + 1, old.wrapping_sub(1), 1 << 31, u32::MAX] {
                let mut model = whole.clone();
                model.set(key, Value::U32(new));
                let result = gate(&case, &laid_out(&mut model.raw()));
                let is_free = new == old || FREE.iter().any(|part| key.contains(part));
                match result {
                    Err(text) => {
                        let has_place = text.contains('`') || text.contains(": layer ");
                        assert!(has_place, "{name}: {key} = {new}: {text}");
                        n_refused += 1;
                    }
                    // Accepted: then nothing of a size was changed, unless the key may be.
                    Ok(config) => assert!(
                        is_free || config.layers == start.layers,
                        "{name}: {key} {old} -> {new} was accepted"
                    ),
                }
            }
        }
        assert!(n_refused > 30, "{name}: {n_refused}");
    }
}
