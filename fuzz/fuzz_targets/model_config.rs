//! The directory of a real model with keys, shapes and types changed: configuration, tensor table,
//! upload plan and the plan of a prompt.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use g4prefill::engine::report::Request;
use g4prefill::engine::{DeviceTraits, EngineOptions, PlanReport};
use g4prefill::ggml::DeviceChoice;
use g4prefill::gguf::{DType, GgufFile};
use g4prefill::model::{Config, names};
use g4prefill_fuzz::fields::{AnyValue, Fields, Key};
use g4prefill_fuzz::{Number, open_gguf};

#[derive(Arbitrary, Debug)]
enum Edit {
    Set { key: u8, value: AnyValue },
    Drop { key: u8 },
    Scalar { key: u8, value: Number },
    Shape { tensor: u16, dim: u8, n: Number },
    Type { tensor: u16, type_id: u8 },
    Remove { tensor: u16 },
    Rename { tensor: u16, as_other: u16 },
}

#[derive(Arbitrary, Debug)]
struct Input {
    model: u8,
    edits: Vec<Edit>,
    n_prompt: u16,
    n_gen: u8,
    on_gpu: bool,
}

static MODELS: LazyLock<Vec<Fields>> = LazyLock::new(|| {
    let names = ["a-e4b-q8_0", "br-e2b-q8_0", "c-dense-bf16", "d-moe-q8_0", "e-donor-f32"];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let open = |name| {
        let file = GgufFile::open(&folder.join(name).with_extension("gguf")).unwrap();
        Fields::of(&file, "tokenizer.")
    };
    names.into_iter().map(open).collect()
});

fn apply(fields: &mut Fields, edit: &Edit) {
    let (n_keys, n_tensors) = (fields.keys.len(), fields.tensors.len());
    if n_keys == 0 || n_tensors == 0 {
        return;
    }
    match edit {
        Edit::Set { key, value } => {
            let key = &mut fields.keys[usize::from(*key) % n_keys];
            let name = String::from_utf8_lossy(&key.key).into_owned();
            *key = Key::new(&name, &value.0);
        }
        Edit::Drop { key } => {
            fields.keys.remove(usize::from(*key) % n_keys);
        }
        Edit::Scalar { key, value } => {
            let key = &mut fields.keys[usize::from(*key) % n_keys];
            let n = key.value.len().min(8);
            // Strings and arrays keep their shape: only their first element changes.
            if key.type_id < 8 || key.type_id > 9 {
                key.value[..n].copy_from_slice(&value.0.to_le_bytes()[..n]);
            } else if key.value.len() >= 16 && key.type_id == 9 {
                key.value[12..16].copy_from_slice(&value.0.to_le_bytes()[..4]);
            }
        }
        Edit::Shape { tensor, dim, n } => {
            let dims = &mut fields.tensors[usize::from(*tensor) % n_tensors].dims;
            let n_dims = dims.len();
            dims[usize::from(*dim) % n_dims] = n.0;
        }
        Edit::Type { tensor, type_id } => {
            fields.tensors[usize::from(*tensor) % n_tensors].type_id = u32::from(type_id % 48);
        }
        Edit::Remove { tensor } => {
            fields.tensors.remove(usize::from(*tensor) % n_tensors);
        }
        Edit::Rename { tensor, as_other } => {
            let name = fields.tensors[usize::from(*as_other) % n_tensors].name.clone();
            fields.tensors[usize::from(*tensor) % n_tensors].name = name;
        }
    }
}

/// Gives every tensor a place of its own, as far as a file of zeros can be that long.
fn lay_out(fields: &mut Fields) {
    const LONGEST: u64 = 1 << 36;
    let mut next = 0_u64;
    for tensor in &mut fields.tensors {
        tensor.offset = next;
        let [first, rest @ ..] = &tensor.dims[..] else {
            continue;
        };
        let rows = rest.iter().try_fold(1_u64, |n, &d| n.checked_mul(d));
        let row = DType::from_id(tensor.type_id).and_then(|t| t.row_bytes(*first));
        let n = rows.zip(row).and_then(|(n, row)| n.checked_mul(row)).unwrap_or(0);
        next = next.saturating_add(n.min(LONGEST)).next_multiple_of(32).min(LONGEST);
    }
    fields.data_bytes = next;
}

libfuzzer_sys::fuzz_target!(|input: Input| {
    let mut fields = MODELS[usize::from(input.model) % MODELS.len()].clone();
    for edit in &input.edits {
        apply(&mut fields, edit);
    }
    lay_out(&mut fields);
    let Ok(file) = open_gguf(&fields.head(), fields.data_bytes) else {
        return;
    };
    let Ok(config) = Config::from_gguf(&file) else {
        return;
    };
    assert!(config.n_layer > 0 && config.layers.len() == config.n_layer);
    if names::check(&file, &config).is_err() {
        return;
    }
    let choice = if input.on_gpu {
        DeviceChoice::Cuda(0)
    } else {
        DeviceChoice::Cpu
    };
    let request = Request {
        config: &config,
        options: &EngineOptions::default(),
        device: &DeviceTraits::assumed(choice),
        n_prompt: input.n_prompt.into(),
        n_gen: input.n_gen.into(),
    };
    if let Ok(plan) = PlanReport::new(&file, request) {
        assert!(plan.bytes.device_total >= plan.bytes.weights);
    }
});
