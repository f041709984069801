//! The invariants of the engine on the CPU: topology, poison, switches, sessions, growth.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use g4prefill::Error;
use g4prefill::engine::{
    CancelToken, Engine, EngineError, EngineOptions, PrefillControl, Rows, Switches,
};
use g4prefill::ggml::GgmlError;
use g4prefill::gguf::DType;
use support::tolerance::own_bound;
use support::{
    Fixture, bit_neutral_switches, bits, cpu_options, load, nmse, prefill, random_tokens,
};

fn long_prompt(fixture: &Fixture) -> &[u32] {
    &fixture.cases.last().expect("case").tokens
}

fn options(chunk: usize) -> EngineOptions {
    EngineOptions {
        chunk,
        audit: true,
        ..cpu_options()
    }
}

/// I1: position, prompt and session history are data, never topology. The audit runs before each
/// graph and fails on any difference.
#[test]
fn i1_a_pooled_graph_is_the_same_for_every_position_prompt_and_session() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(64));
    let mut session = engine.session(2048).expect("session");
    for seed in 0..3 {
        session.reset();
        prefill(
            &mut session,
            &random_tokens(700, fixture.n_vocab, seed),
            &Rows::Last,
        );
        for token in random_tokens(40, fixture.n_vocab, seed + 9) {
            prefill(&mut session, &[token], &Rows::Last);
        }
    }
    let counters = session.counters();
    assert!(counters.pool.reused > 30, "{counters:?}");
    assert_eq!(counters.pool.stale, 0, "{counters:?}");
    for (shape, graph) in session.pool().graphs() {
        graph.graph.audit(&format!("{shape:?}")).expect("unchanged");
    }
}

#[test]
fn i1_a_graph_that_was_changed_is_caught_before_it_runs() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(64));
    let mut session = engine.session(256).expect("session");
    prefill(&mut session, &long_prompt(&fixture)[..64], &Rows::Last);
    session.reset();
    session.pool_mut().tamper_for_test();

    let result = session.prefill(
        &long_prompt(&fixture)[..64],
        &Rows::Last,
        &mut PrefillControl::default(),
    );

    let error = result.expect_err("the audit must fail");
    assert!(
        matches!(error, Error::Ggml(GgmlError::FingerprintChanged { .. })),
        "{error}"
    );
}

/// I2, I5, I6, T06, T09: nothing a run does not write itself may reach its result.
#[test]
fn poison_in_arena_inputs_staging_and_caches_changes_no_bit() {
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let fixture = Fixture::load(name);
        let tokens = long_prompt(&fixture);
        let engine = load(&fixture.gguf, options(48));
        let rows = Rows::List(vec![0, 47, 48, 300, tokens.len() - 1]);
        let mut clean = engine.session(1024).expect("session");
        let expected = prefill(&mut clean, tokens, &rows);
        // 0xff bytes are NaN as F16, F32 and as scales of quantised blocks.
        for byte in [0xff, 0x7e] {
            let mut session = engine.session(1024).expect("session");
            session.poison_kv_for_test(byte).expect("poison");
            for n in [64, 30, 200] {
                session.reset();
                prefill(&mut session, &tokens[..n], &Rows::Last);
                session.poison_for_test(byte);
            }
            session.reset();
            let logits = prefill(&mut session, tokens, &rows);
            assert!(
                logits.data.iter().all(|v| v.is_finite()),
                "{name} byte {byte:#x}"
            );
            assert_eq!(
                bits(&logits.data),
                bits(&expected.data),
                "{name} byte {byte:#x}"
            );
        }
    }
}

/// I6: two graphs of one arena, in turns.
#[test]
fn i6_buckets_in_turns_give_the_same_bits_each_time() {
    let fixture = Fixture::load("b-e2b-f32");
    let tokens = long_prompt(&fixture);
    let engine = load(&fixture.gguf, options(64));
    let mut session = engine.session(1024).expect("session");
    let mut runs = vec![Vec::new(), Vec::new()];
    for _ in 0..3 {
        for (i, n) in [5, 180].into_iter().enumerate() {
            session.reset();
            runs[i].push(bits(&prefill(&mut session, &tokens[..n], &Rows::Last).data));
            session.poison_for_test(0xff);
        }
    }
    for run in runs {
        assert!(run.iter().all(|bits| bits == &run[0]));
    }
}

/// I8: the first five switches change no bit; the last stays within ggml's own noise.
#[test]
fn i8_switches_change_no_bit() {
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let fixture = Fixture::load(name);
        let tokens = long_prompt(&fixture);
        let run = |switches: Switches| {
            let engine = load(
                &fixture.gguf,
                EngineOptions {
                    switches,
                    ..options(64)
                },
            );
            let mut session = engine.session(tokens.len()).expect("session");
            let rows = Rows::List(vec![3, 64, tokens.len() - 1]);
            (prefill(&mut session, tokens, &rows), session.counters())
        };
        let on = Switches::default();
        let (base, counters) = run(on);
        assert_eq!(counters.kv_growths, 0, "pre-grow leaves nothing to grow");
        for (label, switches) in bit_neutral_switches() {
            let (other, counters) = run(switches);
            assert_eq!(bits(&base.data), bits(&other.data), "{name}: {label}");
            if label == "pregrow" {
                assert!(counters.kv_growths > 0, "{name}: growth was exercised");
            }
            if label == "replay" {
                assert_eq!(counters.pool.reused, 0, "{name}: nothing was reused");
            }
        }
        let (full, _) = run(Switches {
            skip_dead_rows: false,
            ..on
        });
        let error = nmse(&full.data, &base.data);
        let bound = own_bound("switch-skip-dead-rows");
        assert!(
            error < bound,
            "{name}: skip_dead_rows off: NMSE {error:.2e}"
        );
    }
}

/// Dead rows: a chunk without wanted rows computes nothing behind the last K/V write.
#[test]
fn body_graphs_stop_at_the_last_kv_write() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(64));
    let mut session = engine.session(256).expect("session");
    prefill(&mut session, &long_prompt(&fixture)[..130], &Rows::Last);
    let last = engine.config().last_kv_layer();
    let n_owners = engine.config().layers.iter().filter(|l| l.owns_kv).count();
    let mut n_bodies = 0;
    for (shape, graph) in session.pool().graphs() {
        let nodes = graph.graph.describe();
        let writes = nodes.iter().filter(|n| n.op == "SET_ROWS").count();
        assert_eq!(
            writes,
            2 * n_owners,
            "{shape:?}: one K and one V write per owning layer (T31)"
        );
        if shape.kind != g4prefill::engine::bucket::Kind::Body {
            continue;
        }
        n_bodies += 1;
        for node in &nodes {
            let il = node
                .name
                .rsplit_once('-')
                .and_then(|(_, il)| il.parse::<usize>().ok());
            assert!(
                il.is_none_or(|il| il <= last),
                "{} is behind layer {last}",
                node.name
            );
            assert!(node.name != "result_output", "no head in {shape:?}");
            assert!(
                !node.name.starts_with(&format!("attn_out-{last}")),
                "no attention of {last}"
            );
        }
        let n_attention = nodes.iter().filter(|n| n.op == "FLASH_ATTN_EXT").count();
        assert_eq!(n_attention, last, "{shape:?}");
        assert!(graph.logits.is_none());
    }
    assert!(n_bodies > 0);
}

/// T42: the head sees the wanted rows only.
#[test]
fn t42_the_head_computes_one_row_for_the_last_token() {
    let fixture = Fixture::load("c-dense-bf16");
    let engine = load(&fixture.gguf, options(64));
    let mut session = engine.session(256).expect("session");
    prefill(&mut session, &long_prompt(&fixture)[..100], &Rows::Last);
    let outputs: Vec<_> = session
        .pool()
        .graphs()
        .flat_map(|(_, graph)| graph.graph.describe())
        .filter(|node| node.name == "result_output")
        .collect();
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].dims.ne(1), 1);
}

/// I9, T11: an earlier, longer prompt leaves nothing behind.
#[test]
fn t11_a_reset_session_answers_like_a_new_one() {
    let fixture = Fixture::load("a-e4b-f32");
    let engine = load(&fixture.gguf, options(64));
    let old = random_tokens(1000, fixture.n_vocab, 1);
    let new = random_tokens(40, fixture.n_vocab, 2);
    let mut used = engine.session(1100).expect("session");
    prefill(&mut used, &old, &Rows::Last);
    used.reset();
    let a = prefill(&mut used, &new, &Rows::All);
    let mut fresh = engine.session(1100).expect("session");
    let b = prefill(&mut fresh, &new, &Rows::All);
    assert_eq!(bits(&a.data), bits(&b.data));
}

/// T04: caches that grow take their rows along and no graph keeps the old address.
#[test]
fn t04_growth_in_the_middle_of_a_session_changes_no_bit() {
    let fixture = Fixture::load("a-e4b-f32");
    let tokens = random_tokens(1500, fixture.n_vocab, 3);
    let run = |reserve: usize, pregrow: bool| {
        let switches = Switches {
            pregrow,
            ..Switches::default()
        };
        let engine = load(
            &fixture.gguf,
            EngineOptions {
                switches,
                ..options(64)
            },
        );
        let mut session = engine.session(reserve).expect("session");
        let mut out = Vec::new();
        for part in tokens.chunks(250) {
            out.extend(bits(&prefill(&mut session, part, &Rows::Last).data));
        }
        (out, session.counters().kv_growths)
    };
    let (grown, n) = run(64, false);
    assert!(n >= 2, "{n} growths");
    let (reserved, none) = run(1500, true);
    assert_eq!(none, 0);
    assert_eq!(grown, reserved);
}

/// T03, T35: chunk size changes rounding only, at every row.
#[test]
fn t03_chunks_that_cross_window_and_ring_agree_with_one_chunk() {
    let fixture = Fixture::load("a-e4b-f32");
    let tokens = random_tokens(420, fixture.n_vocab, 4);
    let all = |chunk: usize| {
        let engine = load(
            &fixture.gguf,
            EngineOptions {
                kv_type: DType::F32,
                ..options(chunk)
            },
        );
        let mut session = engine.session(tokens.len()).expect("session");
        prefill(&mut session, &tokens, &Rows::All).data
    };
    let whole = all(2048);
    for chunk in [1, 31, 32, 33, 63, 64, 65, 128] {
        let error = nmse(&all(chunk), &whole);
        assert!(
            error < own_bound("chunk-size"),
            "chunk {chunk}: NMSE {error:.2e}"
        );
    }
}

#[test]
fn another_engine_over_the_same_weights_answers_like_one_that_loaded_them() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let tokens = &long_prompt(&fixture)[..200];
    let engine = load(&fixture.gguf, options(64));
    let shared = engine.with_options(options(48)).expect("an engine");
    let loaded = load(&fixture.gguf, options(48));
    drop(engine);

    let [a, b] = [shared, loaded].map(|engine| {
        let mut session = engine.session(200).expect("session");
        bits(&prefill(&mut session, tokens, &Rows::Last).data)
    });

    assert_eq!(a, b);
}

#[test]
fn another_engine_takes_no_other_device_weights_or_size_of_nothing() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(64));
    for (name, changed) in [
        (
            "device",
            EngineOptions {
                device: g4prefill::ggml::DeviceChoice::Cuda(0),
                ..options(64)
            },
        ),
        (
            "weights",
            EngineOptions {
                weights: g4prefill::model::weights::WeightsMode::Bf16,
                ..options(64)
            },
        ),
        ("chunk", options(65_537)),
    ] {
        let error = engine.with_options(changed).expect_err(name);
        assert!(
            matches!(error, Error::Engine(EngineError::Option { option, .. }) if option == name),
            "{error}"
        );
    }
}

/// T01: padding rows write to scratch rows only.
#[test]
fn t01_padding_rows_touch_no_live_cell() {
    use g4prefill::engine::kv_cache::Side;
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(64));
    let tokens = random_tokens(130, fixture.n_vocab, 5);
    for n in [1, 9, 33, 63, 64, 65, 100, 130] {
        let mut session = engine.session(256).expect("session");
        prefill(&mut session, &tokens[..n], &Rows::Last);
        for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
            for row in 0..256 {
                for side in [Side::K, Side::V] {
                    let bytes = session.kv_cache().row(layer.il, side, row).expect("row");
                    let written = bytes.iter().any(|b| *b != 0);
                    assert_eq!(
                        written,
                        row < n,
                        "n {n} layer {} row {row} {side:?}",
                        layer.il
                    );
                }
            }
        }
    }
}

/// T26: rolling back and continuing is like never having gone there.
#[test]
fn t26_truncate_then_continue_equals_a_fresh_prefill() {
    let fixture = Fixture::load("a-e4b-f32");
    let engine = load(&fixture.gguf, options(64));
    let tokens = random_tokens(140, fixture.n_vocab, 6);
    let drafts = random_tokens(8, fixture.n_vocab, 7);
    for total in [28, 31, 32, 33, 60, 64, 100, 139] {
        let mut session = engine.session(256).expect("session");
        prefill(&mut session, &tokens[..total], &Rows::Last);
        prefill(&mut session, &drafts, &Rows::All);
        session
            .truncate(total)
            .expect("the ring has room for a draft");
        let a = prefill(&mut session, &tokens[total..=total], &Rows::Last);
        let mut fresh = engine.session(256).expect("session");
        prefill(&mut fresh, &tokens[..total], &Rows::Last);
        let b = prefill(&mut fresh, &tokens[total..=total], &Rows::Last);
        assert_eq!(bits(&a.data), bits(&b.data), "total {total}");
    }
    let mut session = engine.session(1024).expect("session");
    prefill(
        &mut session,
        &random_tokens(1000, fixture.n_vocab, 8),
        &Rows::Last,
    );
    let error = session.truncate(100).expect_err("the ring has wrapped");
    assert!(
        matches!(error, Error::Engine(EngineError::Ring(_))),
        "{error}"
    );
}

#[test]
fn bad_input_is_refused_with_its_numbers() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(
        &fixture.gguf,
        EngineOptions {
            n_ctx: 300,
            ..options(64)
        },
    );
    let error = engine.session(301).expect_err("too long");
    assert!(
        matches!(
            error,
            Error::Engine(EngineError::ContextExceeded {
                n: 301,
                n_ctx: 300,
                ..
            })
        ),
        "{error}"
    );
    let mut session = engine.session(10).expect("session");
    let n_vocab = u32::try_from(fixture.n_vocab).expect("small");
    let control = &mut PrefillControl::default();
    let error = session
        .prefill(&[1, n_vocab], &Rows::Last, control)
        .expect_err("token");
    assert!(
        matches!(
            error,
            Error::Engine(EngineError::TokenOutOfRange { index: 1, .. })
        ),
        "{error}"
    );
    let error = session
        .prefill(&[], &Rows::Last, control)
        .expect_err("empty");
    assert!(
        matches!(error, Error::Engine(EngineError::Plan(_))),
        "{error}"
    );
    assert_eq!(session.n_past(), 0);
    prefill(&mut session, &[1, 2, 3], &Rows::Last);
    for n_ctx in [1 << 31, usize::MAX] {
        let options = EngineOptions {
            n_ctx,
            ..options(64)
        };
        let error = Engine::load(&fixture.gguf, options, &mut |_| {}).expect_err("too long");
        let text = format!("n_ctx: expected up to 2147483647 tokens, found {n_ctx}");
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn t47_a_cancelled_prefill_leaves_a_session_that_continues() {
    let fixture = Fixture::load("a-e4b-f32");
    let engine = load(&fixture.gguf, options(64));
    let tokens = random_tokens(320, fixture.n_vocab, 10);
    let mut session = engine.session(512).expect("session");
    let cancel = CancelToken::default();
    let mut seen = Vec::new();
    let mut progress = |p: g4prefill::engine::Progress| {
        seen.push(p.processed);
        if p.processed >= 128 {
            cancel.cancel();
        }
    };
    let mut control = PrefillControl {
        progress: Some(&mut progress),
        cancel: Some(&cancel),
        ..PrefillControl::default()
    };
    let error = session
        .prefill(&tokens, &Rows::Last, &mut control)
        .expect_err("cancelled");
    assert!(
        matches!(
            error,
            Error::Engine(EngineError::Cancelled {
                processed: 128,
                total: 320
            })
        ),
        "{error}"
    );
    assert_eq!(seen, [64, 128]);
    assert_eq!(session.n_past(), 128);
    let rest = prefill(&mut session, &tokens[128..], &Rows::Last);
    let mut whole = engine.session(512).expect("session");
    let expected = prefill(&mut whole, &tokens, &Rows::Last);
    assert_eq!(bits(&rest.data), bits(&expected.data));
}
