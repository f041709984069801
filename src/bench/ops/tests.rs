use super::*;
use crate::ggml::{Device, DeviceChoice, load_backends};
use crate::gguf::DType;
use crate::synth::Spec;

fn tiny(n_tokens: usize, n_kv: usize) -> Vec<OpCase> {
    let spec = Spec::preset("tiny").expect("a preset");
    cases(&OpShape::new(&spec, n_tokens, n_kv), DType::Q8_0, true).expect("cases")
}

fn case(cases: &[OpCase], name: &str) -> (u64, u64) {
    let case = cases.iter().find(|c| c.name == name).expect("the case");
    (case.bytes, case.flops)
}

#[test]
fn bytes_and_operations_follow_from_the_shape() {
    // tiny: n_embd 256, n_ff 512, heads 4/1/1 of 256 and 512, window 64, 10 layers of 64.
    let cases = tiny(8, 100);

    let weight = 256 * 1024 / 32 * 34;
    let gate_up = (weight + 4 * (256 * 8 + 1024 * 8), 2 * 256 * 1024 * 8);
    assert_eq!(case(&cases, "product gate, up"), gate_up);
    // Eight rows of 93 to 100 keys; 64 each in the window.
    let pairs: u64 = (93..=100).sum();
    assert_eq!(case(&cases, "attention, global").1, 4 * pairs * 512 * 4);
    assert_eq!(
        case(&cases, "attention, sliding").1,
        4 * 8 * 64 * 256 * 4_u64
    );
    assert_eq!(case(&cases, "norm x weight"), (4 * (2 * 256 * 8 + 256), 0));
    let ple = 640 / 32 * 34 + 4 + 4 * 640;
    assert_eq!(case(&cases, "per-layer rows"), (8 * ple, 0));
}

#[test]
fn every_case_runs_on_the_cpu_with_a_cold_cache() {
    load_backends(None).expect("backends");
    let device = Device::find(DeviceChoice::Cpu).expect("a device");
    let backend = Backend::open(device, 1).expect("backend");
    let settings = OpSettings {
        cold_bytes: 1 << 20,
        n_samples: 3,
        sample: Duration::from_micros(1),
    };
    let cases = tiny(8, 100);
    assert_eq!(cases.len(), 10);

    for case in &cases {
        let report = measure(&backend, case, settings).expect("a measurement");

        assert!(report.is_cold, "{case:?}");
        assert!(
            report.n_copies as u64 * report.bytes > settings.cold_bytes,
            "{case:?}"
        );
        assert_eq!(report.samples_us.len(), 3, "{case:?}");
        assert!(report.us.min > 0.0 && report.gb_s > 0.0, "{case:?}");
        assert_eq!(report.flops > 0, report.tflop_s > 0.0, "{case:?}");
    }
}

#[test]
fn a_type_without_noise_is_refused() {
    let spec = Spec::preset("tiny").expect("a preset");
    let refused = cases(&OpShape::new(&spec, 8, 8), DType::Q6_K, true);

    assert!(matches!(
        refused,
        Err(crate::Error::Ggml(crate::ggml::GgmlError::Shape {
            op: "noise",
            ..
        }))
    ));
}

#[test]
fn the_largest_cache_counts() {
    let dir = tempfile::tempdir().expect("a folder");
    for (index, size) in ["32K", "2048K", "1M", "odd", ""].iter().enumerate() {
        let cache = dir.path().join(format!("cache/index{index}"));
        std::fs::create_dir_all(&cache).expect("a folder");
        std::fs::write(cache.join("size"), format!("{size}\n")).expect("a file");
    }

    assert_eq!(cpu_cache_bytes(dir.path()), Some(2 << 20));
    assert_eq!(cpu_cache_bytes(&dir.path().join("none")), None);
}
