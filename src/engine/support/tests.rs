use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::engine::{Engine, LoadProgress, Switches};
use crate::ggml::{Backend, DeviceChoice, GgmlError, NodeInfo};
use crate::gguf::DType;
use crate::synth::{self, Spec};

const PRESETS: [&str; 3] = ["tiny", "tiny-dense", "tiny-moe"];

fn model(dir: &tempfile::TempDir, preset: &str) -> PathBuf {
    let spec = Spec::preset(preset).unwrap();
    let path = dir.path().join(format!("{preset}.gguf"));
    synth::write(&spec, &path, 1, &mut |_| ControlFlow::Continue(())).unwrap();
    path
}

fn options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        chunk: 64,
        n_ctx: 2048,
        ..EngineOptions::default()
    }
}

fn load(
    path: &Path,
    options: EngineOptions,
    supports: &dyn Fn(&Backend, &Node<'_>) -> bool,
) -> Result<Arc<Engine>> {
    let mut progress = |_: LoadProgress| std::ops::ControlFlow::Continue(());
    Engine::load_asking(path, options, &mut progress, supports)
}

/// The error of a load on a device that refuses what `refuses` names.
fn refusal(path: &Path, refuses: impl Fn(&NodeInfo) -> bool) -> GgmlError {
    match load(path, options(), &|_, node| !refuses(&node.info())) {
        Err(crate::Error::Ggml(e)) => e,
        other => panic!("{other:?}"),
    }
}

#[test]
fn t22_loading_names_the_operation_that_the_device_refuses_at_one_shape_only() {
    let dir = tempfile::tempdir().unwrap();
    for preset in PRESETS {
        let path = model(&dir, preset);
        // Attention over the whole context, of a chunk: head 512, 64 rows, 2048 keys.
        let is_it = |n: &NodeInfo| {
            n.op == "FLASH_ATTN_EXT"
                && n.shapes.contains("[512, 64, ")
                && n.shapes.contains("f16[512, 2048, ")
        };
        let error = refusal(&path, is_it);
        let GgmlError::Unsupported {
            device,
            op,
            sources,
            shapes,
            ..
        } = &error
        else {
            panic!("{error:?}");
        };
        assert_eq!((device.as_str(), op.as_str()), ("CPU", "FLASH_ATTN_EXT"));
        assert!(sources.contains("g4_cache_k-"), "{preset}: {sources}");
        assert!(shapes.contains("f16[2048, 64, 1, 1]"), "{preset}: {shapes}");
        let text = error.to_string();
        assert!(text.contains(op) && text.contains(shapes), "{text}");
    }
}

/// A device that refuses any one operation is caught, whichever it is.
#[test]
fn t22_no_operation_of_the_graphs_is_left_unasked() {
    let dir = tempfile::tempdir().unwrap();
    for preset in PRESETS {
        let path = model(&dir, preset);
        let asked = RefCell::new(BTreeSet::new());
        load(&path, options(), &|backend, node| {
            asked.borrow_mut().insert(node.info().op);
            backend.supports(node)
        })
        .unwrap();
        let asked = asked.into_inner();
        for op in ["FLASH_ATTN_EXT", "SET_ROWS", "MUL_MAT", "ROPE", "GEGLU"] {
            assert!(asked.contains(op), "{preset}: {asked:?}");
        }
        for op in asked {
            let error = refusal(&path, |n| n.op == op);
            assert!(error.to_string().contains(&op), "{preset} {op}: {error}");
        }
    }
}

/// Every node that a session runs was asked about at load with the same operation, and the same
/// types and shapes up to rows and keys.
#[test]
fn t22_what_a_session_runs_was_asked_about_at_load() {
    // Rows and keys differ between buckets; everything else may not.
    let class = |info: &NodeInfo| {
        let types: Vec<&str> = info
            .shapes
            .split(" <- ")
            .map(|part| part.split('[').next().unwrap_or_default())
            .collect();
        let heads = info.dims.ne(0);
        (info.op.clone(), types.join(" "), heads)
    };
    let dir = tempfile::tempdir().unwrap();
    for preset in PRESETS {
        let path = model(&dir, preset);
        let asked = RefCell::new(BTreeSet::new());
        let engine = load(&path, options(), &|backend, node| {
            asked.borrow_mut().insert(class(&node.info()));
            backend.supports(node)
        })
        .unwrap();
        let asked = asked.into_inner();
        let mut session = engine.session(600).unwrap();
        let ids: Vec<u32> = (0..300).map(|i| i % 400).collect();
        let mut control = crate::engine::PrefillControl::default();
        for rows in [crate::engine::Rows::Last, crate::engine::Rows::All] {
            session.prefill(&ids, &rows, &mut control).unwrap();
        }
        session
            .truncate(590)
            .and_then(|()| {
                let rows = crate::engine::Rows::Last;
                session.prefill(&ids[..1], &rows, &mut control)
            })
            .unwrap();
        for (shape, graph) in session.pool().graphs() {
            for info in graph.graph.describe() {
                assert!(
                    asked.contains(&class(&info)),
                    "{preset} {shape:?}: {info:?}"
                );
            }
        }
    }
}

/// No closure: the CPU itself has no way to write this type of cache.
#[test]
fn t22_a_cache_type_that_the_device_cannot_write_is_refused_at_load() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(&dir, "tiny");
    let kv_type = DType::from_name("iq3_xxs").unwrap();
    let options = EngineOptions {
        kv_type,
        ..options()
    };
    let error = Engine::load(&path, options, &mut |_| {}).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("SET_ROWS") && text.contains("iq3_xxs["),
        "{text}"
    );
}

#[test]
fn every_kind_is_asked_about_at_one_row_and_a_whole_chunk_over_few_and_all_keys() {
    let dir = tempfile::tempdir().unwrap();
    let file = crate::gguf::GgufFile::open(&model(&dir, "tiny")).unwrap();
    let config = Config::from_gguf(&file).unwrap();
    for chunk in [1, 3, 8, 16, 17, 2048] {
        let options = EngineOptions {
            chunk,
            switches: Switches::default(),
            ..options()
        };
        let shapes = shapes(&options, &config);
        let has = |n_tokens, n_kv, kind| {
            shapes.contains(&BucketShape {
                n_tokens,
                n_kv,
                kind,
            })
        };
        for n_kv in [256, 2048] {
            assert!(has(1, n_kv, Kind::Full) && has(1, n_kv, Kind::Body));
            assert!(has(chunk, n_kv, Kind::Full) && has(chunk, n_kv, Kind::Body));
            assert!(chunk == 1 || has(chunk, n_kv, Kind::Tail { n_out: 1 }));
        }
        assert!(shapes.iter().all(|s| s.n_tokens <= chunk), "{shapes:?}");
        assert!(shapes.len() <= 30, "{}", shapes.len());
    }
}
