use std::io;

use sha2::{Digest, Sha256};

use super::*;

/// SHA-256 of `synth --preset tiny --seed 1`: a change here changes every recorded result that
/// was made with a synthetic model, so it needs a reason in the changelog.
const GOLDEN: [(WeightType, &str); 2] = [
    (
        WeightType::F32,
        "92008ec5a5f2bf80105b00fd6af4d04a6659ac0fbe2c20e6da5f3592007893bb",
    ),
    (
        WeightType::Q8_0,
        "5fe45ba806934b1757c811df3ea952426bff6603fd6ef80d3aa9f57ce0cda0dc",
    ),
];

fn tiny(weight_type: WeightType) -> Spec {
    Spec {
        seed: 1,
        weight_type,
        ..Spec::preset("tiny").unwrap()
    }
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn sha256(path: &Path) -> String {
    let digest = Sha256::digest(std::fs::read(path).unwrap());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn tiny_has_the_recorded_bytes_with_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    for (ty, want) in GOLDEN {
        for n_threads in [1, 2, 7] {
            write(&tiny(ty), &path, n_threads, &mut go_on).unwrap();
            assert_eq!(sha256(&path), want, "{} {n_threads}", ty.name());
        }
    }
}

#[test]
fn another_seed_gives_other_bytes_and_another_name_does_not_change_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let spec = Spec {
        n_vocab: 400,
        n_layer: 5,
        n_shared_kv: 0,
        ..tiny(WeightType::Q4_0)
    };
    let tail = |spec: &Spec| {
        let n_bytes = write(spec, &path, 2, &mut go_on).unwrap().n_bytes;
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, n_bytes);
        bytes[bytes.len() - 1_000_000..].to_vec()
    };
    let first = tail(&spec);

    assert_ne!(
        first,
        tail(&Spec {
            seed: 2,
            ..spec.clone()
        })
    );
    assert_eq!(
        first,
        tail(&Spec {
            name: "other".to_owned(),
            ..spec
        })
    );
}

#[test]
fn cancelling_leaves_nothing_behind_and_keeps_an_older_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, "older").unwrap();
    let mut n_calls = 0;
    let result = write(&tiny(WeightType::F32), &path, 2, &mut |_| {
        n_calls += 1;
        if n_calls == 5 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });

    assert!(
        matches!(result, Err(SynthError::Cancelled { .. })),
        "{result:?}"
    );
    assert_eq!(names_in(folder.path()), ["m.gguf"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"older");
}

#[test]
fn a_full_device_is_told_apart_and_stops_all_threads() {
    let spec = tiny(WeightType::Q8_0);
    let tensors = layout::tensors(&spec);
    let shards = plan::shards(Path::new("/x/m.gguf"), 1, &[], &tensors);
    let put = |_: usize, offset: u64, _: &[u8]| {
        if offset > 3_000_000 {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        }
    };
    let result = write::write_all(&shards, &tensors, 3, &put, &mut go_on);

    match result {
        Err(SynthError::DiskFull { path, n_bytes }) => {
            assert_eq!(path, Path::new("/x/m.gguf"));
            assert!(n_bytes > 13_000_000);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_slow_device_does_not_delay_the_question_whether_to_go_on() {
    let spec = tiny(WeightType::Q8_0);
    let tensors = layout::tensors(&spec);
    let shards = plan::shards(Path::new("/x/m.gguf"), 1, &[], &tensors);
    let (release, released) = std::sync::mpsc::channel();
    let released = std::sync::Mutex::new(released);
    // A write that ends only once `progress` was asked; the limit turns a hang into a failure.
    let put = |_: usize, _: u64, _: &[u8]| {
        let limit = std::time::Duration::from_secs(60);
        let result = released.lock().unwrap().recv_timeout(limit);
        result.map_err(|_| io::ErrorKind::TimedOut.into())
    };
    let result = write::write_all(&shards, &tensors, 1, &put, &mut |_| {
        release.send(()).unwrap();
        ControlFlow::Break(())
    });

    assert!(
        matches!(result, Err(SynthError::Cancelled { n_done: 0, .. })),
        "{result:?}"
    );
}

#[test]
fn too_little_room_is_found_before_writing() {
    let path = Path::new("/x/m.gguf");

    assert!(write::require_room(path, 10, Some(10)).is_ok());
    assert!(write::require_room(path, 10, None).is_ok());
    let error = write::require_room(path, 8_000_000_000, Some(77)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/x/m.gguf: expected room for 8000000000 bytes, found 77"
    );
}

#[test]
fn a_limit_on_the_size_of_a_file_is_told_with_the_bytes_needed() {
    let error = io::ErrorKind::FileTooLarge.into();
    let error = write::file_error(Path::new("/x/m.gguf"), 999, error).to_string();

    assert!(
        error.contains("/x/m.gguf") && error.contains("999"),
        "{error}"
    );
}

#[test]
fn a_missing_folder_is_an_error_with_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none").join("m.gguf");
    let result = write(&tiny(WeightType::F32), &path, 1, &mut go_on);

    match result {
        Err(SynthError::Io {
            path: named,
            source,
        }) => {
            assert_eq!((named, source.kind()), (path, io::ErrorKind::NotFound));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn shards_hold_the_same_tensor_bytes_as_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Spec {
        n_vocab: 400,
        ..tiny(WeightType::Q5_0)
    };
    let single = write(&whole, &folder.path().join("one.gguf"), 2, &mut go_on).unwrap();
    let split = Spec {
        n_shard: 3,
        ..whole.clone()
    };
    let summary = write(&split, &folder.path().join("m.gguf"), 2, &mut go_on).unwrap();
    assert_eq!(summary.paths.len(), 3);
    assert!(summary.paths[2].ends_with("m-00003-of-00003.gguf"));

    let tensors = layout::tensors(&whole);
    let read = |n_shard, paths: &[PathBuf]| -> Vec<Vec<u8>> {
        let metadata = meta::metadata(&whole);
        let shards = plan::shards(Path::new("m.gguf"), n_shard, &metadata, &tensors);
        let mut all = Vec::new();
        for (shard, path) in shards.iter().zip(paths) {
            let bytes = std::fs::read(path).unwrap();
            for &(i, offset) in &shard.tensors {
                let start = usize::try_from(offset).unwrap();
                let n = usize::try_from(tensors[i].n_bytes()).unwrap();
                all.push(bytes[start..start + n].to_vec());
            }
        }
        all
    };
    assert_eq!(read(1, &single.paths), read(3, &summary.paths));
}

#[test]
fn fused_tensors_hold_the_rows_of_the_separate_ones() {
    let moe = Spec {
        weight_type: WeightType::F32,
        ..Spec::preset("tiny-moe").unwrap()
    };
    let values = |spec: &Spec, name: &str| {
        let tensors = layout::tensors(spec);
        let tensor = tensors.iter().find(|t| t.name == name).unwrap();
        let mut x = vec![0.0; usize::try_from(tensor.n_elements()).unwrap()];
        // In two pieces that do not end where the parts do.
        let (a, b) = x.split_at_mut(100_001);
        write::fill(tensor, 0, a);
        write::fill(tensor, 100_001, b);
        x
    };
    let fused = Spec {
        fused_qkv: true,
        ..moe.clone()
    };
    let apart = Spec {
        split_experts: true,
        ..moe.clone()
    };

    let qkv = values(&fused, "blk.0.attn_qkv.weight");
    let (q, k, v) = (
        values(&moe, "blk.0.attn_q.weight"),
        values(&moe, "blk.0.attn_k.weight"),
        values(&moe, "blk.0.attn_v.weight"),
    );
    assert!(qkv == [q, k, v].concat());

    let both = values(&moe, "blk.1.ffn_gate_up_exps.weight");
    let gate = values(&apart, "blk.1.ffn_gate_exps.weight");
    let up = values(&apart, "blk.1.ffn_up_exps.weight");
    let per_expert = 256 * 128;
    for (expert, rows) in both.chunks(2 * per_expert).enumerate() {
        let at = expert * per_expert..(expert + 1) * per_expert;
        assert!(rows[..per_expert] == gate[at.clone()], "{expert}");
        assert!(rows[per_expert..] == up[at], "{expert}");
    }
}

/// Every preset with its real layers and head widths but narrow and with a small vocabulary.
fn narrow(name: &str) -> Spec {
    let mut spec = Spec::preset(name).unwrap();
    spec.n_embd = 64;
    spec.n_ff = 64;
    spec.n_vocab = 400;
    spec.n_embd_per_layer = spec.n_embd_per_layer.min(32);
    spec.n_expert = spec.n_expert.min(8);
    spec.n_ff_exp = spec.n_ff_exp.min(32);
    spec
}

#[test]
fn every_preset_passes_the_readers_checks() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "tiny",
        "tiny-dense",
        "mini-moe",
        "e2b",
        "e4b",
        "12b",
        "26b-a4b",
    ] {
        let spec = narrow(name);
        let forms = [
            spec.clone(),
            Spec {
                trim_shared: true,
                untied_output: true,
                n_shard: 2,
                ..spec.clone()
            },
            Spec {
                fused_qkv: true,
                split_experts: true,
                array_metadata: true,
                ..spec
            },
        ];
        for (i, spec) in forms.into_iter().enumerate() {
            let summary = write(&spec, &folder.path().join("m.gguf"), 2, &mut go_on).unwrap();
            let file = crate::gguf::GgufFile::open(&summary.paths[0]).unwrap();
            let config = crate::model::Config::from_gguf(&file).unwrap();
            crate::model::names::check(&file, &config).unwrap();

            assert_eq!(file.tensors().len(), summary.n_tensors, "{name} {i}");
            assert_eq!(file.paths().len(), spec.n_shard as usize);
            assert_eq!(config.layers.len(), spec.n_layer as usize);
            for (il, layer) in (0..).zip(&config.layers) {
                assert_eq!(layer.is_swa, spec.is_swa(il), "{name} {il}");
                assert_eq!(layer.owns_kv, spec.owns_kv(il), "{name} {il}");
                assert_eq!(layer.n_embd_head, spec.n_embd_head(il) as usize);
                assert_eq!(layer.n_ff, spec.n_ff_at(il) as usize);
            }
        }
    }
}
