//! Hostile files: bytes built here, one defect each; the variant and its fields are asserted.

use std::path::Path;

use proptest::prelude::*;

use super::testing::{Model, Raw, RawKey, Tensor, fixture, open, string};
use super::*;

/// A small valid file with one field bent.
fn bent(bend: impl FnOnce(&mut Raw)) -> GgufError {
    let mut raw = Model::small().raw();
    bend(&mut raw);
    open(&raw.bytes()).unwrap_err()
}

/// Offset of the first key/value pair: magic, version and two counts.
const FIRST_KEY: u64 = 24;

macro_rules! assert_error {
    ($error:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $error;
        assert!(matches!(&error, $pattern $(if $guard)?), "found {error:?}");
    }};
}

#[test]
fn valid_file_gives_back_every_value_and_tensor() {
    let file = Model::small().open();

    let m = file.metadata();
    for (entry, (key, value)) in m.entries().iter().zip(&Model::small().keys) {
        assert_eq!((&entry.key, &entry.value), (key, value));
    }
    assert_eq!(m.entry("general.architecture").unwrap().offset, FIRST_KEY);
    assert_eq!(m.u32("u8").unwrap(), 200);
    assert_eq!(m.f32("f64").unwrap(), 0.25);
    assert!(m.bool("bool").unwrap());
    assert_eq!(m.i32s("i32s").unwrap().unwrap(), [1, -2]);
    assert_eq!(m.f32s("f32s").unwrap().unwrap(), [0.5]);
    assert_eq!(m.strings("strs").unwrap().unwrap()[2], "ü");
    let two = file.tensor("two").unwrap();
    assert_eq!(
        (two.shape, two.n_dims, two.n_bytes),
        ([64, 3, 1, 1], 2, 204)
    );
    assert_eq!(two.n_elements(), 192);
    assert_eq!(two.offset % 32, 0);
    assert_eq!(file.tensor_data(two).len(), 204);
    assert_eq!((file.version(), file.paths().len()), (3, 1));
}

#[test]
fn version_2_reads_like_version_3() {
    let mut raw = Model::small().raw();
    raw.version = 2;

    assert_eq!(open(&raw.bytes()).unwrap().version(), 2);
}

#[test]
fn stored_fixtures_open_and_their_tensors_cover_the_rest_of_the_file() {
    for name in ["a-e4b-f32", "c-dense-bf16", "d-moe-q8_0"] {
        let file = fixture(name);

        let last = file.tensors().iter().max_by_key(|t| t.offset).unwrap();
        let end = (last.offset + last.n_bytes).next_multiple_of(32);
        assert!(
            end >= file.shard_bytes()[0],
            "{name}: {end} of {}",
            file.shard_bytes()[0]
        );
    }
}

#[test]
fn missing_files_folders_and_empty_files_are_named() {
    let dir = tempfile::tempdir().unwrap();

    assert_error!(
        GgufFile::open(&dir.path().join("none.gguf")).unwrap_err(),
        GgufError::Io { path, .. } if path.ends_with("none.gguf")
    );
    assert_error!(
        GgufFile::open(dir.path()).unwrap_err(),
        GgufError::Io { .. }
    );
    assert_error!(
        open(b"").unwrap_err(),
        GgufError::Truncated {
            offset: 0,
            field: Field::Magic,
            needed: 4,
            available: 0,
            ..
        }
    );
}

#[test]
fn other_magic_version_and_byte_order_are_told_apart() {
    assert_error!(
        bent(|r| r.magic = *b"GGML"),
        GgufError::Magic {
            found: [b'G', b'G', b'M', b'L'],
            ..
        }
    );
    assert_error!(bent(|r| r.version = 1), GgufError::Version { found: 1, .. });
    assert_error!(bent(|r| r.version = 0), GgufError::Version { found: 0, .. });
    assert_error!(bent(|r| r.version = 4), GgufError::Version { found: 4, .. });
    assert_error!(
        bent(|r| r.version = 3_u32.swap_bytes()),
        GgufError::BigEndian { version: 3, .. }
    );
}

#[test]
fn counts_above_their_caps_are_refused_before_anything_is_reserved() {
    assert_error!(
        bent(|r| r.n_tensors = cursor::MAX_TENSORS + 1),
        GgufError::AboveCap {
            offset: 8,
            field: Field::TensorCount,
            limit: cursor::MAX_TENSORS,
            ..
        }
    );
    assert_error!(
        bent(|r| r.n_keys = u64::MAX),
        GgufError::AboveCap {
            offset: 16,
            field: Field::KeyCount,
            found: u64::MAX,
            ..
        }
    );
    assert_error!(
        bent(|r| r.keys[0].key_len = cursor::MAX_KEY_BYTES + 1),
        GgufError::AboveCap {
            offset: FIRST_KEY,
            item: Item::KeyIndex(0),
            field: Field::KeyLength,
            ..
        }
    );
    assert_error!(
        bent(|r| r.keys[0].value[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes())),
        GgufError::AboveCap {
            field: Field::StringLength,
            limit: cursor::MAX_STRING_BYTES,
            ..
        }
    );
    assert_error!(
        bent(|r| r.keys[12].value[4..12].copy_from_slice(&(1_u64 << 60).to_le_bytes())),
        GgufError::AboveCap { item: Item::Key(k), field: Field::ArrayLength, limit: cursor::MAX_ARRAY_LEN, .. }
            if k == "bools"
    );
    assert_error!(
        bent(|r| r.tensors[1].name_len = cursor::MAX_NAME_BYTES + 1),
        GgufError::AboveCap {
            item: Item::TensorIndex(1),
            field: Field::NameLength,
            found: 64,
            ..
        }
    );
}

#[test]
fn counts_within_their_caps_but_beyond_the_file_are_truncations() {
    // The last pair or entry is followed by other bytes, which then are misread; so bend to a
    // count whose first extra entry cannot exist.
    let mut only_keys = Model::small();
    only_keys.tensors.clear();
    let mut raw = only_keys.raw();
    raw.alignment = 1;
    raw.n_keys += 1;
    assert_error!(
        open(&raw.bytes()).unwrap_err(),
        GgufError::Truncated {
            item: Item::KeyIndex(16),
            field: Field::KeyLength,
            needed: 8,
            available: 0,
            ..
        }
    );
    raw.n_keys -= 1;
    raw.n_tensors = 1;
    assert_error!(
        open(&raw.bytes()).unwrap_err(),
        GgufError::Truncated {
            item: Item::TensorIndex(0),
            field: Field::NameLength,
            ..
        }
    );
    let array = |type_id: u32, n: u64| [&type_id.to_le_bytes()[..], &n.to_le_bytes()].concat();
    for (type_id, field) in [
        (7, Field::ArrayBytes),
        (12, Field::ArrayBytes),
        (8, Field::StringLength),
    ] {
        raw = only_keys.raw();
        raw.alignment = 1;
        raw.keys.push(RawKey::new(
            "long",
            9,
            array(type_id, cursor::MAX_ARRAY_LEN),
        ));
        raw.n_keys += 1;
        assert_error!(
            open(&raw.bytes()).unwrap_err(),
            GgufError::Truncated { item: Item::Key(k), field: f, .. } if k == "long" && *f == field
        );
    }
}

#[test]
fn unknown_and_nested_value_types_are_refused_with_their_offset() {
    let at = FIRST_KEY + 8 + "general.architecture".len() as u64;
    assert_error!(
        bent(|r| r.keys[0].type_id = 13),
        GgufError::ValueType { offset, field: Field::ValueType, found: 13, .. } if *offset == at
    );
    assert_error!(
        bent(|r| r.keys[12].value[0] = 13),
        GgufError::ValueType { item: Item::Key(k), field: Field::ElementType, found: 13, .. } if k == "bools"
    );
    assert_error!(
        bent(|r| r.keys[12].value[0] = 9),
        GgufError::NestedArray { item: Item::Key(k), .. } if k == "bools"
    );
}

#[test]
fn booleans_other_than_0_and_1_are_refused() {
    assert_error!(
        bent(|r| r.keys[8].value[0] = 2),
        GgufError::Bool { item: Item::Key(k), found: 2, .. } if k == "bool"
    );
    assert_error!(
        bent(|r| *r.keys[12].value.last_mut().unwrap() = 255),
        GgufError::Bool { item: Item::Key(k), found: 255, .. } if k == "bools"
    );
}

#[test]
fn bool_arrays_are_one_byte_per_element_however_long() {
    // Readers that took a C++ `bool` array for wider elements broke above 48 layers.
    let bools: Vec<bool> = (0..200).map(|i| i % 5 != 4).collect();
    let mut model = Model::small();
    model.set("pattern", Value::Array(Array::Bool(bools.clone())));
    model.set("after", Value::U32(7));

    let file = model.open();

    assert_eq!(
        file.metadata()
            .per_layer_bool("pattern", 200)
            .unwrap()
            .unwrap(),
        bools
    );
    assert_eq!(file.metadata().u32("after").unwrap(), 7);
}

#[test]
fn invalid_utf8_is_refused_in_keys_strings_and_names() {
    assert_error!(
        bent(|r| r.keys[1].key[1] = 0xff),
        GgufError::Utf8 {
            item: Item::KeyIndex(1),
            field: Field::KeyBytes,
            valid_up_to: 1,
            ..
        }
    );
    assert_error!(
        bent(|r| r.keys[0].value[8] = 0xff),
        GgufError::Utf8 {
            field: Field::StringBytes,
            valid_up_to: 0,
            ..
        }
    );
    assert_error!(
        bent(|r| r.tensors[0].name[2] = 0xff),
        GgufError::Utf8 {
            item: Item::TensorIndex(0),
            field: Field::NameBytes,
            valid_up_to: 2,
            ..
        }
    );
}

#[test]
fn empty_names_are_refused() {
    assert_error!(
        bent(|r| (r.keys[2].key_len, r.keys[2].key) = (0, vec![])),
        GgufError::EmptyName {
            item: Item::KeyIndex(2),
            ..
        }
    );
    assert_error!(
        bent(|r| (r.tensors[1].name_len, r.tensors[1].name) = (0, vec![])),
        GgufError::EmptyName {
            item: Item::TensorIndex(1),
            ..
        }
    );
}

#[test]
fn duplicates_are_refused_and_both_places_named() {
    assert_error!(
        bent(|r| r.push("general.architecture", &Value::U8(1))),
        GgufError::DuplicateKey { key, first_offset: FIRST_KEY, offset, .. }
            if key == "general.architecture" && *offset > FIRST_KEY
    );
    assert_error!(
        bent(|r| r.tensors[1].name = b"one".to_vec()),
        GgufError::DuplicateTensor { tensor, .. } if tensor == "one"
    );
}

#[test]
fn alignment_must_be_a_power_of_two_within_its_cap() {
    for found in [0, 1, 4, 24, 33, cursor::MAX_ALIGNMENT * 2, 1 << 31] {
        assert_error!(
            bent(|r| r.push(ALIGNMENT, &Value::U32(u32::try_from(found).unwrap()))),
            GgufError::Alignment { found: f, limit: cursor::MAX_ALIGNMENT, .. } if *f == found
        );
    }
    assert_error!(
        bent(|r| r.push(ALIGNMENT, &Value::Str("32".into()))),
        GgufError::KeyType { key, .. } if key == ALIGNMENT
    );
    assert_error!(
        bent(|r| r.push(ALIGNMENT, &Value::I32(-32))),
        GgufError::KeyRange { key, .. } if key == ALIGNMENT
    );
    let mut raw = Model::small().raw();
    raw.push(ALIGNMENT, &Value::U32(64));
    raw.alignment = 64;
    raw.tensors[1].offset = 64;
    raw.data.resize(64 + 204, 0);
    assert_eq!(
        open(&raw.bytes()).unwrap().tensor("two").unwrap().offset % 64,
        0
    );
}

#[test]
fn dimensions_are_checked_one_by_one_and_as_a_product() {
    assert_error!(
        bent(|r| r.tensors[0].n_dims = 0),
        GgufError::DimCount { found: 0, .. }
    );
    assert_error!(
        bent(|r| r.tensors[0].n_dims = 5),
        GgufError::DimCount { tensor, found: 5, .. } if tensor == "one"
    );
    assert_error!(
        bent(|r| r.tensors[1].dims[1] = 0),
        GgufError::Dim { tensor, dim: 1, found: 0, .. } if tensor == "two"
    );
    assert_error!(
        bent(|r| r.tensors[1].dims[0] = 1 << 63),
        GgufError::Dim {
            dim: 0,
            found: 0x8000_0000_0000_0000,
            ..
        }
    );
    assert_error!(
        bent(|r| r.tensors[1].dims = vec![1 << 32, 1 << 32]),
        GgufError::ShapeOverflow { tensor, shape: [0x1_0000_0000, 0x1_0000_0000, 1, 1], .. } if tensor == "two"
    );
    assert_error!(
        bent(|r| (r.tensors[0].n_dims, r.tensors[0].dims) = (4, vec![1 << 20; 4])),
        GgufError::ShapeOverflow { .. }
    );
    assert_error!(
        bent(|r| r.tensors[0].dims = vec![1 << 62]),
        GgufError::ShapeOverflow { .. }
    );
    assert_error!(
        bent(|r| r.tensors[1].dims[0] = 33),
        GgufError::PartialBlock {
            dtype: DType::Q8_0,
            block_len: 32,
            ne0: 33,
            ..
        }
    );
}

#[test]
fn unknown_and_removed_tensor_types_are_refused() {
    for id in [4, 31, 43, u32::MAX] {
        assert_error!(
            bent(|r| r.tensors[0].type_id = id),
            GgufError::TensorType { tensor, found, .. } if tensor == "one" && *found == id
        );
    }
}

#[test]
fn data_offsets_must_be_aligned_inside_the_file_and_apart() {
    assert_error!(
        bent(|r| r.tensors[1].offset += 1),
        GgufError::Misaligned { tensor, alignment: 32, found: 33, .. } if tensor == "two"
    );
    assert_error!(
        bent(|r| r.tensors[1].offset = 64),
        GgufError::OutOfFile { tensor, n_bytes: 204, .. } if tensor == "two"
    );
    assert_error!(
        bent(|r| r.tensors[1].offset = u64::MAX - 31),
        GgufError::OutOfFile { tensor, .. } if tensor == "two"
    );
    assert_error!(bent(|r| r.tensors[1].offset = 0), GgufError::Overlap { .. });
    assert_error!(
        bent(|r| {
            r.tensors[0].dims[0] = 9;
            r.tensors[1].offset = 32;
        }),
        GgufError::Overlap { tensor, other, other_end, start, .. }
            if tensor == "two" && other == "one" && other_end - start == 4
    );
}

#[test]
fn every_truncation_of_a_valid_file_is_refused() {
    let bytes = Model::small().raw().bytes();

    for n in 0..bytes.len() {
        let error = open(&bytes[..n]).unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::Truncated { .. } | GgufError::OutOfFile { .. }
            ),
            "cut at {n}: {error:?}"
        );
    }
}

#[test]
fn messages_name_file_offset_entry_and_both_sides() {
    let text = bent(|r| r.tensors[1].offset += 1).to_string();

    for part in [
        "test.gguf: tensor `two` at byte ",
        "multiple of 32",
        "found 33",
    ] {
        assert!(text.contains(part), "{part:?} not in {text:?}");
    }
}

#[test]
fn getters_refuse_other_types_and_numbers_that_do_not_fit() {
    let mut model = Model::small();
    model.set("inf", Value::F64(1e300));
    let file = model.open();
    let m = file.metadata();

    assert_error!(m.u32("none").unwrap_err(), GgufError::MissingKey { key, .. } if key == "none");
    assert_error!(m.u32("f32").unwrap_err(), GgufError::KeyType { found, .. } if found == "f32");
    assert_error!(m.u32("bool").unwrap_err(), GgufError::KeyType { .. });
    assert_error!(m.u32("i8").unwrap_err(), GgufError::KeyRange { found, .. } if found == "-3");
    assert_error!(m.u32("u64").unwrap_err(), GgufError::KeyRange { .. });
    assert_error!(m.f32("u32").unwrap_err(), GgufError::KeyType { .. });
    assert_error!(m.f32("inf").unwrap_err(), GgufError::KeyRange { .. });
    assert_error!(m.str("u8").unwrap_err(), GgufError::KeyType { .. });
    assert_error!(m.bool("u8").unwrap_err(), GgufError::KeyType { .. });
    assert_error!(
        m.strings("i32s").unwrap_err(),
        GgufError::KeyType { found, .. } if found == "array of 2 i32"
    );
    assert_error!(
        m.u32s("i32s").unwrap_err(),
        GgufError::KeyRange { index: 1, .. }
    );
    assert_eq!(m.opt_u32("none").unwrap(), None);
}

// Split models.

/// Writes `n` shards with one tensor each; `bend` sees the model of every shard.
fn shards(dir: &Path, n: u64, bend: impl Fn(u64, &mut Model)) -> PathBuf {
    for no in 0..n {
        let mut model = Model::small();
        model.tensors = vec![Tensor::zeros(&format!("t{no}"), DType::F32, &[no + 1])];
        model.set(split::SPLIT_NO, Value::U16(u16::try_from(no).unwrap()));
        model.set(split::SPLIT_COUNT, Value::U16(u16::try_from(n).unwrap()));
        model.set(split::SPLIT_TENSORS, Value::I32(i32::try_from(n).unwrap()));
        bend(no, &mut model);
        let path = dir.join(format!("m{}", split::suffix(no, n)));
        std::fs::write(path, model.raw().bytes()).unwrap();
    }
    dir.join(format!("m{}", split::suffix(0, n)))
}

#[test]
fn split_model_is_one_directory_over_all_shards() {
    let dir = tempfile::tempdir().unwrap();
    let first = shards(dir.path(), 3, |_, _| {});

    let file = GgufFile::open(&first).unwrap();

    assert_eq!(file.paths().len(), 3);
    let names: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["t0", "t1", "t2"]);
    for (shard, t) in file.tensors().iter().enumerate() {
        assert_eq!(
            (t.shard, file.tensor_data(t).len()),
            (shard, 4 * (shard + 1))
        );
    }
}

#[test]
fn missing_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let first = shards(dir.path(), 3, |_, _| {});
    std::fs::remove_file(dir.path().join("m-00003-of-00003.gguf")).unwrap();

    assert_error!(
        GgufFile::open(&first).unwrap_err(),
        GgufError::SplitMissing { path, number: 3, n_split: 3 } if path.ends_with("m-00003-of-00003.gguf")
    );
}

#[test]
fn shards_that_contradict_the_first_are_refused() {
    let cases: [(&str, Value); 3] = [
        (split::SPLIT_NO, Value::U16(2)),
        (split::SPLIT_COUNT, Value::U16(7)),
        (split::SPLIT_TENSORS, Value::I32(9)),
    ];
    for (key, value) in cases {
        let dir = tempfile::tempdir().unwrap();
        let first = shards(dir.path(), 2, |no, m| {
            if no == 1 {
                m.set(key, value.clone());
            }
        });
        assert_error!(
            GgufFile::open(&first).unwrap_err(),
            GgufError::SplitMismatch { path, key: k, .. } if *k == key && path.ends_with("m-00002-of-00002.gguf")
        );
        let first = shards(dir.path(), 2, |no, m| {
            if no == 1 {
                m.drop_key(key);
            }
        });
        assert_error!(
            GgufFile::open(&first).unwrap_err(),
            GgufError::MissingKey { key: k, .. } if *k == key
        );
    }
}

#[test]
fn split_totals_names_and_duplicates_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let total = |_, m: &mut Model| {
        m.set(split::SPLIT_TENSORS, Value::I32(5));
    };
    let first = shards(dir.path(), 2, total);
    assert_error!(
        GgufFile::open(&first).unwrap_err(),
        GgufError::SplitTensors {
            expected: 5,
            found: 2,
            ..
        }
    );

    let first = shards(dir.path(), 2, |_, m| m.tensors[0].name = "same".into());
    assert_error!(
        GgufFile::open(&first).unwrap_err(),
        GgufError::DuplicateTensor { path, tensor, first_path, .. }
            if tensor == "same" && path.ends_with("m-00002-of-00002.gguf") && *first_path == first
    );

    let first = shards(dir.path(), 2, |_, _| {});
    assert_error!(
        GgufFile::open(&dir.path().join("m-00002-of-00002.gguf")).unwrap_err(),
        GgufError::SplitNotFirst { first: f, found: 1, .. } if *f == first
    );
    let renamed = dir.path().join("model.gguf");
    std::fs::rename(&first, &renamed).unwrap();
    assert_error!(
        GgufFile::open(&renamed).unwrap_err(),
        GgufError::SplitName { n_split: 2, expected, .. } if expected == "-00001-of-00002.gguf"
    );
}

#[test]
fn absurd_shard_counts_are_refused_without_looking_for_files() {
    assert_error!(
        bent(|r| {
            r.push(split::SPLIT_COUNT, &Value::U64(u64::MAX));
            r.push(split::SPLIT_NO, &Value::U16(0));
        }),
        GgufError::AboveCap {
            found: u64::MAX,
            limit: cursor::MAX_SPLITS,
            ..
        }
    );
    assert_error!(
        bent(|r| r.push(split::SPLIT_COUNT, &Value::U16(2))),
        GgufError::MissingKey { key, .. } if key == split::SPLIT_NO
    );
}

#[test]
fn a_model_split_into_one_shard_is_a_single_file() {
    let mut raw = Model::small().raw();
    raw.push(split::SPLIT_COUNT, &Value::U16(1));
    raw.push(split::SPLIT_NO, &Value::U16(0));
    raw.push(split::SPLIT_TENSORS, &Value::I32(2));

    assert_eq!(open(&raw.bytes()).unwrap().tensors().len(), 2);
}

#[test]
fn long_strings_up_to_the_cap_are_read() {
    let n = usize::try_from(cursor::MAX_STRING_BYTES).unwrap();
    let mut raw = Model::small().raw();
    raw.keys[0].value = string(&vec![b'x'; n]);
    assert!(open(&raw.bytes()).is_ok());

    raw.keys[0].value = string(&vec![b'x'; n + 1]);
    assert_error!(
        open(&raw.bytes()).unwrap_err(),
        GgufError::AboveCap {
            field: Field::StringLength,
            ..
        }
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    /// Whatever bytes are overwritten, the reader returns, and what it accepts can be read.
    #[test]
    fn random_mutations_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = Model::small().raw().bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(shard) = parse(&bytes, Path::new("mutated"), 0) {
            for t in &shard.tensors {
                let end = usize::try_from(t.offset + t.n_bytes).unwrap();
                prop_assert!(end <= bytes.len());
            }
        }
    }

    /// The same for 64-bit fields, where single bytes rarely reach the large values.
    #[test]
    fn random_large_fields_never_panic(
        at in any::<prop::sample::Index>(),
        value in prop_oneof![Just(u64::MAX), Just(1 << 63), Just(i64::MAX as u64), any::<u64>()],
    ) {
        let mut bytes = Model::small().raw().bytes();
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let _ = parse(&bytes, Path::new("mutated"), 0);
    }
}
