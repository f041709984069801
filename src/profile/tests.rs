//! A scripted recording of two chunks, from records to tables, trace and page.

use std::collections::HashMap;

use super::attribution::{Graphs, Model, of_nodes, of_window, transfers};
use super::class::Class;
use super::layers::Place;
use super::report::{Inputs, Method, Profile, why_no_replay};
use super::roofline::Peaks;
use super::testing::{call, kernel, launched, leaf, node, tensor};
use super::trace::{self, Trace};
use super::{Window, html, render};
use crate::engine::bucket::{BucketShape, Kind};
use crate::engine::plan::Chunk;
use crate::engine::{ChunkRun, How};
use crate::ggml::{GpuActivity, GpuRecord, NodeFact};
use crate::gguf::{DType, testing};
use crate::model::Config;

const BUCKET: BucketShape = BucketShape {
    n_tokens: 4,
    n_kv: 256,
    kind: Kind::Body,
};

/// Embedding, a product and a norm of layer 0.
fn nodes() -> Vec<NodeFact> {
    let x = tensor(10, "inp_scaled", DType::F32, &[64, 4]);
    let table = leaf(0, "token_embd.weight", DType::F32, &[64, 100]);
    let ids = leaf(1, "inp_tokens", DType::I32, &[4]);
    let w = leaf(2, "blk.0.attn_q.weight", DType::BF16, &[64, 32]);
    let q = tensor(11, "node_1", DType::F32, &[32, 4]);
    vec![
        node("GET_ROWS", x.clone(), vec![table, ids]),
        node("MUL_MAT", q.clone(), vec![w, x]),
        node(
            "RMS_NORM",
            tensor(12, "Qcur_normed-0", DType::F32, &[32, 4]),
            vec![q],
        ),
    ]
}

fn run(n_past: usize, times: (u64, u64), how: How) -> ChunkRun {
    ChunkRun {
        chunk: Chunk {
            n_past,
            n_tokens: 4,
            wanted: Vec::new(),
            bucket: BUCKET,
        },
        start_ns: times.0,
        end_ns: times.1,
        how,
        is_built: how == How::Direct,
        uploads: (1, 64),
        read_bytes: 0,
        change: None,
        node_times: Vec::new(),
    }
}

fn upload(start: u64, correlation: u32) -> GpuRecord {
    GpuRecord {
        activity: GpuActivity::HostToDevice,
        name: "".into(),
        bytes: 64,
        is_pinned: true,
        ..launched("", start, start + 5, correlation)
    }
}

/// Two chunks of 100 ns each: upload, gather, cast, product, norm. The second is a replay.
fn script() -> (Window, Vec<ChunkRun>) {
    let mut records = Vec::new();
    for (i, at) in [1000, 1100].into_iter().enumerate() {
        let first = 10 * i as u32;
        records.push(call("cudaMemcpyAsync", at + 1, at + 2, first + 1));
        records.push(call("cudaGraphLaunch", at + 3, at + 4, first + 2));
        records.push(upload(at + 10, first + 1));
        let chain = [
            ("void k_get_rows_float<float>(float const*)", 15, 25),
            (
                "void convert_unary<float, __nv_bfloat16>(void const*)",
                25,
                30,
            ),
            ("nvjet_sm90_tst_64x32", 30, 70),
            ("void rms_norm_f32<256, false, false>(float const*)", 72, 80),
        ];
        for (name, start, end) in chain {
            records.push(launched(name, at + start, at + end, first + 2));
        }
    }
    let runs = vec![
        run(0, (1000, 1050), How::Direct),
        run(4, (1100, 1150), How::Replayed),
    ];
    (Window::new(&records, 1000, 1200), runs)
}

fn config() -> Config {
    Config::from_gguf(&testing::fixture("a-e4b-f32")).unwrap()
}

fn graphs() -> Graphs {
    HashMap::from([(BUCKET, nodes())])
}

fn peaks() -> Peaks {
    Peaks {
        tflop_s: 1.0,
        tb_s: 0.1,
        source: "given".into(),
    }
}

fn profile() -> (Profile, Trace) {
    profile_of(200)
}

/// The script with a wall of `wall_ns`.
fn profile_of(wall_ns: u64) -> (Profile, Trace) {
    let (window, runs) = script();
    let (config, graphs) = (config(), graphs());
    let model = Model {
        config: &config,
        graphs: &graphs,
    };
    let items = of_window(&window, &runs, model);
    let profile = Profile::new(Inputs {
        window: Some(&window),
        wall_ns,
        items: &items,
        runs: &runs,
        config: &config,
        peaks: &peaks(),
    });
    let trace = trace::of_window(&window, &items, &runs);
    (profile, trace)
}

#[test]
fn shares_refer_to_the_sum_of_nodes_where_it_is_longer_than_the_wall() {
    let (profile, _) = profile_of(50);

    assert_eq!((profile.wall_ns, profile.sum_ns), (50, 136));
    let shares: f64 = profile.classes.iter().map(|r| r.share).sum();
    assert!((shares - 1.0).abs() < 1e-12, "{shares}");
}

#[test]
fn kernels_find_their_chunk_node_and_layer() {
    let (window, runs) = script();
    let (config, graphs) = (config(), graphs());
    let model = Model {
        config: &config,
        graphs: &graphs,
    };

    let items = of_window(&window, &runs, model);

    let found: Vec<_> = items
        .iter()
        .map(|i| (i.chunk, i.class, i.node.as_deref(), i.place))
        .collect();
    let layer = Some(Place::Layer(0));
    for (chunk, part) in found.chunks(5).enumerate() {
        let chunk = Some(chunk);
        assert_eq!(
            part,
            [
                (chunk, Class::Copy, None, None),
                (
                    chunk,
                    Class::Gather,
                    Some("inp_scaled"),
                    Some(Place::Embedding)
                ),
                (chunk, Class::Cast, None, layer),
                (chunk, Class::WeightGemm, Some("node_1"), layer),
                (chunk, Class::Elementwise, Some("Qcur_normed-0"), layer),
            ]
        );
    }
    assert_eq!(transfers(&window, &runs), [[(1, 64), (0, 0)]; 2]);
}

#[test]
fn kernel_without_a_launch_stays_without_a_chunk() {
    let (mut window, runs) = script();
    window
        .device
        .push(kernel("nvjet_sm90_tst_64x32", 1190, 1195));
    let (config, graphs) = (config(), graphs());
    let model = Model {
        config: &config,
        graphs: &graphs,
    };

    let items = of_window(&window, &runs, model);

    let last = items.last().unwrap();
    assert_eq!((last.chunk, last.place, last.work), (None, None, None));
    assert_eq!(last.class, Class::WeightGemm);
}

#[test]
fn tables_add_up() {
    let (profile, _) = profile();

    assert_eq!(profile.method, Method::Cupti);
    let usage = profile.usage.unwrap();
    // Each chunk: 5 copy, 10 + 5 + 40 + 8 kernels.
    assert_eq!(
        (usage.wall_ns, usage.kernel_ns, usage.copy_ns),
        (200, 126, 10)
    );
    let class = |c: Class| profile.classes.iter().find(|r| r.class == Some(c)).unwrap();
    let product = class(Class::WeightGemm);
    assert_eq!((product.n, product.ns, product.known_ns), (2, 80, 80));
    assert_eq!(product.flops, 2.0 * (2 * 64 * 32 * 4) as f64);
    let figure = product.figure.unwrap();
    // 16384 FLOPs in 40 ns at 1 TFLOP/s: ideal 16.384 ns; 5632 bytes at 0.1 TB/s: 56.32 ns.
    assert!((figure.ideal_ns - 2.0 * 56.32).abs() < 1e-9, "{figure:?}");
    assert_eq!(class(Class::Cast).figure, None);
    let rows: u64 = profile.classes.iter().map(|r| r.ns).sum();
    assert_eq!(rows, profile.sum_ns);
    let kinds: Vec<&str> = profile
        .layer_kinds
        .iter()
        .filter_map(|r| r.layer_kind.as_deref())
        .collect();
    assert_eq!(kinds, ["sliding", "embedding"]);
    assert!((profile.placed_share - 126.0 / 136.0).abs() < 1e-12);
    let idle = profile.idle.unwrap();
    let sum = idle.edge_ns + idle.host_ns + idle.recurring_ns + idle.one_time_ns;
    assert_eq!(sum, usage.idle_ns);
    assert_eq!(idle.recurring_ns, 2 * 2);
    assert_eq!(profile.kernels[0].name, "nvjet_sm90_tst_64x32");
    assert_eq!(profile.chunks[1].how, "replayed");
    assert_eq!(profile.chunks[1].kernel_ns, 63);
}

#[test]
fn text_names_every_class_and_the_peak() {
    let (profile, _) = profile();

    let text = render::text(&profile);

    for expected in [
        "GPU busy",
        "weight_gemm",
        "gather",
        "cast",
        "sliding elementwise",
        "nvjet_sm90_tst_64x32",
        "(given)",
        "4 n_embd_head n_head pairs",
        "replayed",
    ] {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
}

#[test]
fn trace_survives_a_round_trip_through_its_file() {
    let (_, trace) = profile();

    let text = serde_json::to_string(&trace).unwrap();
    let read: Trace = serde_json::from_str(&text).unwrap();

    assert_eq!(read, trace);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    let product = events
        .iter()
        .find(|e| e["name"] == "nvjet_sm90_tst_64x32")
        .unwrap();
    assert_eq!(product["ph"], "X");
    // Microseconds after the begin.
    assert_eq!(
        (&product["ts"], &product["dur"]),
        (&0.03.into(), &0.04.into())
    );
    assert_eq!(product["args"]["node"], "node_1");
    let stretches = events.iter().filter(|e| e["ph"] == "X").count();
    // Two chunks, four calls, ten records.
    assert_eq!(stretches, 2 + 4 + 10);
}

#[test]
fn page_is_self_contained_and_its_data_are_json() {
    let (profile, trace) = profile();

    let page = html::page("a </script> b", &profile, &trace).unwrap();

    for outside in ["http://", "https://", " src=", "@import", "url("] {
        let rest = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!rest.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("</script>").count(), 1);
    let data = page
        .lines()
        .find_map(|l| l.strip_prefix("const data = ")?.strip_suffix(';'))
        .unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["title"], "a </script> b");
    assert_eq!(data["timeline"]["stretches"].as_array().unwrap().len(), 16);
    assert_eq!(data["profile"]["wall_ns"], 200);
}

#[test]
fn run_node_by_node_has_the_time_and_work_of_each_node() {
    let mut run = run(0, (0, 100), How::ByNode);
    run.node_times = [10, 50, 20].map(std::time::Duration::from_nanos).to_vec();
    let (config, graphs) = (config(), graphs());
    let model = Model {
        config: &config,
        graphs: &graphs,
    };

    let items = of_nodes(&[run], model);

    let found: Vec<_> = items.iter().map(|i| (i.class, i.ns)).collect();
    assert_eq!(
        found,
        [
            (Class::Gather, 10),
            (Class::WeightGemm, 50),
            (Class::Elementwise, 20)
        ]
    );
    assert_eq!(items[1].work.unwrap().flops, (2 * 64 * 32 * 4) as f64);
}

#[test]
fn audit_says_why_a_chunk_was_no_replay() {
    assert_eq!(why_no_replay(&run(0, (0, 1), How::Replayed)), None);
    let first = why_no_replay(&run(0, (0, 1), How::Direct)).unwrap();
    assert_eq!(first, "first run of this graph; built in this chunk");
    let second = why_no_replay(&run(0, (0, 1), How::Captured)).unwrap();
    assert!(second.starts_with("second run"), "{second}");
}
