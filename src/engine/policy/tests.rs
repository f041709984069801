use super::*;
use crate::engine::Switches;

fn gpu(compute_cap: u32, memory: Option<(u64, u64)>) -> DeviceTraits {
    DeviceTraits {
        compute_cap: Some(compute_cap),
        memory,
        ..DeviceTraits::assumed(DeviceChoice::Cuda(0))
    }
}

fn config() -> Config {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/a-e4b-q8_0.gguf"
    );
    Config::from_gguf(&crate::gguf::GgufFile::open(path.as_ref()).unwrap()).unwrap()
}

#[test]
fn auto_takes_bf16_only_on_a_hopper_gpu_where_it_fits() {
    let auto = |device: &DeviceTraits| choose_weights(WeightsMode::Auto, 300, device).0;

    assert_eq!(auto(&gpu(900, Some((400, 500)))), Resident::Bf16);
    assert_eq!(auto(&gpu(900, Some((399, 500)))), Resident::Native);
    assert_eq!(auto(&gpu(890, Some((400, 500)))), Resident::Native);
    assert_eq!(auto(&gpu(900, None)), Resident::Native);
    assert_eq!(
        auto(&DeviceTraits::assumed(DeviceChoice::Cpu)),
        Resident::Native
    );
}

#[test]
fn a_failed_memory_query_is_not_a_device_without_memory() {
    let (resident, why) = choose_weights(WeightsMode::Auto, 300, &gpu(900, Some((0, 0))));

    assert_eq!(resident, Resident::Native);
    assert_eq!(why, "the device does not report its memory");
    assert_eq!(gpu(900, Some((0, 0))).free(), FreeMemory::Unknown);
}

#[test]
fn an_explicit_weight_type_is_taken_anywhere() {
    let cpu = DeviceTraits::assumed(DeviceChoice::Cpu);

    let take = |mode| choose_weights(mode, u64::MAX, &cpu).0;

    assert_eq!(take(WeightsMode::Bf16), Resident::Bf16);
    assert_eq!(take(WeightsMode::Native), Resident::Native);
}

#[test]
fn only_long_calls_on_a_gpu_take_the_coarse_ladder() {
    assert_eq!(ladder(2048, false, 1024).kv_min, 8192);
    assert_eq!(ladder(2048, false, 1023).kv_min, 256);
    assert_eq!(ladder(2048, true, 100_000).kv_min, 256);
}

#[test]
fn logit_rows_of_a_run_are_bounded_by_bytes_and_chunk() {
    assert_eq!(limits(262_144, 2048).max_logit_rows, 256);
    assert_eq!(limits(512, 48).max_logit_rows, 48);
    assert_eq!(limits(usize::MAX, 2048).max_logit_rows, 1);
    assert_eq!(limits(0, 0).max_logit_rows, 1);
}

#[test]
fn a_context_beyond_the_limit_is_refused_with_its_source() {
    let mut options = EngineOptions {
        n_ctx: 300,
        ..EngineOptions::default().for_device(false)
    };
    let config = config();

    let error = check_context(&options, &config, 301).unwrap_err();

    assert_eq!(
        error.to_string(),
        "301 tokens do not fit: the context is 300 tokens (the n_ctx option)"
    );
    options.n_ctx = 0;
    let (limit, source) = context_limit(&options, &config);
    assert_eq!(limit, config.n_ctx_train);
    assert_eq!(source, "the model's training");
    assert_eq!(check_context(&options, &config, 0).unwrap(), 1);
}

#[test]
fn caches_have_their_final_size_at_once_with_pregrow_and_after_one_growth_without() {
    let config = config();
    let mut options = EngineOptions {
        chunk: 256,
        n_ctx: 3000,
        ..EngineOptions::default().for_device(false)
    };

    assert_eq!(context_rows(&options, &config, 1000, 1100), (1280, 1280));
    options.switches = Switches {
        pregrow: false,
        ..Switches::default()
    };
    // 256, then all that was reserved: the same buckets as with pre-grow.
    assert_eq!(context_rows(&options, &config, 1000, 1024), (1024, 1024));
    assert_eq!(context_rows(&options, &config, 1000, 1025), (1280, 1280));
    assert_eq!(context_rows(&options, &config, 200, 2900), (256, 3072));
    // Past the reserve the rows double, up to the limit.
    assert_eq!(rows_for(1280, 1280, 1281, 3000), 2560);
    assert_eq!(rows_for(2560, 1280, 2561, 3000), 3072);
}

#[test]
fn growth_never_exceeds_the_limit_unless_asked_to() {
    assert_eq!(grown_context(512, 600, 4096), 1024);
    assert_eq!(grown_context(512, 600, 700), 700);
    assert_eq!(grown_context(512, 2000, 4096), 2000);
    assert_eq!(grown_context(usize::MAX, 7, usize::MAX), usize::MAX);
}

#[test]
fn the_host_fills_masks_where_the_device_cannot() {
    assert!(host_masks(Place::Device, false));
    assert!(host_masks(Place::Host, true));
    assert!(!host_masks(Place::Device, true));
}

#[test]
fn demand_counts_host_memory_on_the_cpu_only() {
    let config = config();
    let options = EngineOptions::default().for_device(false);
    let cpu = DeviceTraits::assumed(DeviceChoice::Cpu);

    let on_cpu = demand(&config, &options, &cpu, Resident::Native, 100);
    let on_gpu = demand(&config, &options, &gpu(900, None), Resident::Native, 100);

    assert_eq!((on_cpu.n_upload_slots, on_cpu.n_logit_rows), (1, 1));
    assert_eq!((on_gpu.n_upload_slots, on_gpu.n_logit_rows), (0, 0));
    assert_eq!(on_cpu.chunk, 100);
    assert_eq!(on_cpu.caches, on_gpu.caches);
    assert_eq!(on_cpu.arena_row_bytes, 0);
}

#[test]
fn caches_of_another_type_than_f16_are_converted_on_a_gpu() {
    let config = config();
    let options = EngineOptions {
        kv_type: DType::Q8_0,
        ..EngineOptions::default().for_device(false)
    };
    let row_bytes = |device: &DeviceTraits| {
        demand(&config, &options, device, Resident::Native, 100).arena_row_bytes
    };

    assert!(row_bytes(&gpu(900, None)) > 0);
    assert_eq!(row_bytes(&DeviceTraits::assumed(DeviceChoice::Cpu)), 0);
}

#[test]
fn a_gpu_keeps_memory_aside_for_its_pools_and_the_cpu_none() {
    let config = config();
    let reserve = |device: &DeviceTraits, chunk| reserve_bytes(&config, device, chunk);

    assert_eq!(reserve(&DeviceTraits::assumed(DeviceChoice::Cpu), 2048), 0);
    let (short, long) = (reserve(&gpu(900, None), 64), reserve(&gpu(900, None), 2048));
    assert!(short > 256 << 20 && long > short);
}
