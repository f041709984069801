//! Small synthetic models of our own, and changes of their tensors in place.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use g4prefill::engine::EngineOptions;
use g4prefill::gguf::{DType, GgufFile};
use g4prefill::synth::{self, Spec, WeightType};

use super::cpu_options;

/// Options of an engine on the CPU that compares every graph with its fingerprint.
pub fn options(chunk: usize, kv_type: DType) -> EngineOptions {
    EngineOptions {
        chunk,
        kv_type,
        audit: true,
        ..cpu_options()
    }
}

/// A small synthetic model in F32, with `change` applied to a preset.
pub fn model(dir: &Path, preset: &str, change: impl FnOnce(&mut Spec)) -> PathBuf {
    let mut spec = Spec::preset(preset).expect("a preset");
    spec.weight_type = WeightType::F32;
    (spec.n_embd, spec.n_ff, spec.n_vocab) = (128, 64, 416);
    (spec.head_dim, spec.head_dim_swa, spec.n_swa) = (128, 64, 32);
    change(&mut spec);
    let path = dir.join(format!("{preset}-{}-{}.gguf", spec.pattern, spec.seed));
    synth::write(&spec, &path, 1, &mut |_| ControlFlow::Continue(())).expect("a model");
    path
}

/// Rewrites an F32 tensor of a file in place: `value(index, old)`.
pub fn patch(path: &Path, tensor: &str, value: impl Fn(usize, f32) -> f32) {
    let file = GgufFile::open(path).expect("a file");
    let entry = file.tensor(tensor).unwrap_or_else(|| panic!("{tensor}"));
    assert_eq!(entry.dtype, DType::F32, "{tensor}");
    let start = usize::try_from(entry.offset).expect("small");
    let len = usize::try_from(entry.n_bytes).expect("small");
    drop(file);
    let mut bytes = std::fs::read(path).expect("a file");
    for (i, b) in bytes[start..start + len].chunks_exact_mut(4).enumerate() {
        let old = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        b.copy_from_slice(&value(i, old).to_le_bytes());
    }
    std::fs::write(path, bytes).expect("a file");
}
