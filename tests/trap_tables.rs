//! Traps that are swept over types, models, lengths or options, on the CPU. The bounds come from
//! `docs/numerics.md`; its derivations say from what.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::path::Path;

use g4prefill::engine::kv_cache::Side;
use g4prefill::engine::policy::POOL_LIMIT;
use g4prefill::engine::{Engine, EngineOptions, Place, Rows, Session, Switches};
use g4prefill::ggml::dequantize_row;
use g4prefill::gguf::DType;
use g4prefill::synth::WeightType;
use support::long_attention::{self, PATTERNS};
use support::op;
use support::oracle::Oracle;
use support::synthetic::{model, options};
use support::tolerance::own_bound;
use support::{Fixture, bits, fixtures, load, nmse, prefill, random_tokens};

/// Types of caches that the command line offers, with their bound's id.
const KV_TYPES: [&str; 8] = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"];

fn kv_bound(kv_type: DType) -> f64 {
    match kv_type {
        DType::F32 => own_bound("chunk-size"),
        other => own_bound(&format!("kv-{}", other.name())),
    }
}

/// Row `position` of a cache, as F32.
fn cache_row(
    session: &Session,
    engine: &Engine,
    il: usize,
    side: Side,
    position: usize,
) -> Vec<f32> {
    let (cache, layer) = (session.kv_cache(), &engine.config().layers[il]);
    let slot = if layer.is_swa {
        position % cache.ring_rows
    } else {
        position
    };
    let bytes = cache.row(il, side, slot).expect("a row");
    let mut row = vec![0.0; layer.n_embd_head * layer.n_head_kv];
    dequantize_row(engine.options().kv_type, &bytes, &mut row).expect("a readable type");
    row
}

/// Largest error of storing a block of 32 values in a type.
fn block_error(dtype: DType, block: &[f32]) -> f32 {
    let amax = block.iter().fold(0f32, |m, x| m.max(x.abs()));
    let low = block.iter().copied().fold(f32::INFINITY, f32::min);
    let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Scales and minima are F16 themselves, with an error of 2^-11 each: of the minimum, and of all
    // steps up to the largest value, twice as far.
    let scales = 3.0 * amax / 2048.0;
    scales
        + match dtype {
            DType::F32 => 0.0,
            DType::F16 => amax / 2048.0,
            DType::BF16 => amax / 256.0,
            DType::Q8_0 => amax / 127.0 / 2.0,
            // The sign that is not the extreme's has one level less: a whole step there.
            DType::Q5_0 => amax / 16.0,
            DType::Q4_0 => amax / 8.0,
            DType::Q5_1 => (high - low) / 31.0 / 2.0,
            DType::Q4_1 => (high - low) / 15.0 / 2.0,
            other => panic!("{other:?}"),
        }
}

/// T23: each type of caches runs, with K and V of one type, or is refused at load by name.
///
/// Frozen for the pin: another set is a change of what the CPU can write or read.
#[test]
fn t23_every_cache_type_runs_within_its_bound_or_is_refused_at_load() {
    let fixture = Fixture::load("c-dense-f32");
    let tokens = random_tokens(3 * fixture.window + 7, fixture.n_vocab, 21);
    let all_rows = |kv_type| {
        let loaded = Engine::load(&fixture.gguf, options(64, kv_type), &mut |_| {});
        let engine = loaded.map_err(|error| error.to_string())?;
        let mut session = engine.session(tokens.len()).expect("session");
        Ok::<_, String>(prefill(&mut session, &tokens, &Rows::All).data)
    };
    let exact = all_rows(DType::F32).expect("F32");
    let mut accepted = Vec::new();
    for kv_type in DType::all() {
        match all_rows(kv_type) {
            Ok(found) => {
                let error = nmse(&found, &exact);
                println!("{}: NMSE {error:.1e}", kv_type.name());
                // Types that the command line does not offer are coarse, and no more is asked.
                let is_offered = KV_TYPES.contains(&kv_type.name());
                let bound = if is_offered {
                    kv_bound(kv_type)
                } else {
                    f64::MAX
                };
                assert!(error <= bound, "{}: {error:.1e}", kv_type.name());
                accepted.push(kv_type.name());
            }
            Err(text) => {
                assert!(text.contains(kv_type.name()), "{}: {text}", kv_type.name());
            }
        }
    }
    accepted.sort_unstable();
    let mut expected = KV_TYPES.to_vec();
    expected.extend(["iq4_nl", "mxfp4", "nvfp4", "q2_0"]);
    expected.sort_unstable();
    assert_eq!(accepted, expected);
}

/// T32: in each type, K and V of each layer, and the logits behind the shared ones, are as near to
/// those of F32 caches as the type's blocks allow, for every model, behind wrapped rings.
#[test]
fn t32_quantised_caches_are_right_in_every_layer_of_every_model() {
    for name in fixtures::names() {
        let fixture = Fixture::load(&name);
        // Wider than what an 8-bit product of the weights moves: only F32 weights show the caches.
        if fixture.weights != "f32" {
            continue;
        }
        let n = 3 * fixture.window + 7;
        let tokens = random_tokens(n, fixture.n_vocab, 22);
        let run = |kv_type| {
            let engine = load(&fixture.gguf, options(48, kv_type));
            let mut session = engine.session(n).expect("session");
            let logits = prefill(&mut session, &tokens, &Rows::All);
            (engine, session, logits.data)
        };
        let (exact_engine, exact, exact_logits) = run(DType::F32);
        for kv_type in KV_TYPES[1..]
            .iter()
            .map(|n| DType::from_name(n).expect("a type"))
        {
            let (engine, session, logits) = run(kv_type);
            let label = format!("{name} {}", kv_type.name());
            let bound = kv_bound(kv_type);
            let mut worst = [0f64; 2];
            for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
                let il = layer.il;
                let first = if layer.is_swa {
                    n.saturating_sub(session.kv_cache().ring_rows)
                } else {
                    0
                };
                let rows = |side, engine: &Engine, session: &Session| -> Vec<f32> {
                    let rows = (first..n).map(|p| cache_row(session, engine, il, side, p));
                    rows.flatten().collect()
                };
                let ours = [Side::K, Side::V].map(|side| rows(side, &engine, &session));
                let theirs = [Side::K, Side::V].map(|side| rows(side, &exact_engine, &exact));
                for (i, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                    let error = nmse(ours, theirs);
                    let kind = usize::from(layer.is_swa);
                    worst[kind] = worst[kind].max(error);
                    assert!(error <= bound, "{label} layer {il} side {i}: {error:.1e}");
                    // What no attention has moved yet is within the rounding of its own block.
                    let blocks = ours.chunks(32).zip(theirs.chunks(32));
                    for (at, (ours, theirs)) in blocks.enumerate().filter(|_| il == 0) {
                        let most = block_error(kv_type, theirs);
                        let far = ours
                            .iter()
                            .zip(theirs)
                            .find(|(a, b)| (*a - *b).abs() > most);
                        assert_eq!(far, None, "{label} layer 0 side {i} block {at}: {most}");
                    }
                }
                let apart = nmse(&theirs[0], &theirs[1]);
                assert!(
                    apart > 0.5,
                    "{label} layer {il}: K and V are alike, {apart:.1e}"
                );
            }
            let error = nmse(&logits, &exact_logits);
            println!(
                "{label}: global {:.1e}, sliding {:.1e}, logits {error:.1e}, bound {bound:.1e}",
                worst[0], worst[1]
            );
            assert!(error <= bound, "{label} logits: {error:.1e}");
        }
    }
}

/// T24: the table of per-layer rows in each type, gathered on the device and on the host: the same
/// bits, right by the oracle; only ids go up in the one case, only the rows in the other.
#[test]
fn t24_per_layer_tables_of_every_type_are_gathered_alike_and_by_the_row() {
    let types = [
        WeightType::F32,
        WeightType::F16,
        WeightType::Bf16,
        WeightType::Q8_0,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
    ];
    for ty in types {
        // A layer's part of a row is whole blocks.
        let is_k = matches!(ty, WeightType::Q4K | WeightType::Q5K | WeightType::Q6K);
        let n_per_layer = if is_k { 256 } else { 64 };
        let dir = tempfile::tempdir().expect("a folder");
        let path = model(dir.path(), "tiny", |s| {
            (s.n_layer, s.n_shared_kv, s.pattern) = (4, 2, "SF".to_owned());
            (s.n_embd_per_layer, s.ple_type) = (n_per_layer, Some(ty));
        });
        let oracle = Oracle::open(&path);
        let tokens = random_tokens(150, oracle.config.n_vocab, 23);
        let expected = oracle.forward(&tokens, 4).logits.f32();
        let mut first = None;
        for place in [Place::Device, Place::Host] {
            let switches = Switches {
                ple: place,
                ..Switches::default()
            };
            let options = EngineOptions {
                switches,
                ..options(64, DType::F32)
            };
            let engine = load(&path, options);
            let mut session = engine.session(150).expect("session");
            let logits = prefill(&mut session, &tokens, &Rows::All).data;
            let label = format!("{ty:?} {place:?}");
            let (error, bound) = (nmse(&logits, &expected), own_bound("fixture-f32"));
            assert!(error <= bound, "{label}: {error:.1e}");
            let found = bits(&logits);
            assert!(*first.get_or_insert(found.clone()) == found, "{label}");

            // Masks are filled on the host here; what is left are small inputs and the rows.
            let c = session.counters();
            let without_masks = c.uploaded_bytes - c.host_mask_bytes;
            let row = if place == Place::Host {
                4 * u64::from(n_per_layer) * 4
            } else {
                0
            };
            let least = c.padded_tokens * row;
            let most = c.padded_tokens * (row + 64) * 11 / 10 + c.chunks * 4096;
            assert!(
                (least..=most).contains(&without_masks),
                "{label}: {without_masks} bytes for {c:?}"
            );
        }
    }
}

/// T24: an id list as long as no chunk can be. The longest chunk has 2^15.5 tokens, as its mask
/// stays below 2^31 cells (T34).
#[test]
fn t24_a_gather_of_seventy_thousand_rows_gives_each_its_own() {
    let n = 70_000;
    let ids: Vec<i32> = (0..n).map(|i| (i * 37) % 1000).collect();
    let table: Vec<f32> = (0..1000u16).map(f32::from).collect();
    let inputs = [op::f32s(&[1, 1000], &table), op::i32s(&ids)];
    let found = op::run(&inputs, |b, i| b.get_rows(i[0], i[1])).expect("get_rows");
    assert!(found.iter().zip(&ids).all(|(x, id)| *x == *id as f32));
}

/// T35: the same prompt at each chunk size: divergence of every position, not of the last alone.
#[test]
fn t35_every_position_is_the_same_distribution_at_every_chunk_size() {
    for name in ["a-e4b-f32", "c-dense-f32", "c-dense-bf16"] {
        let fixture = Fixture::load(name);
        let tokens = random_tokens(520, fixture.n_vocab, 24);
        let chunks = [1, 7, 8, 9, 63, 64, 65, 511, 512, 513];
        fixture.assert_same_at_every_chunk(&fixture.weights, &tokens, &chunks, |chunk| {
            options(chunk, DType::F16)
        });
    }
}

/// Prompts of random lengths in one session; run by the test below in a process of its own.
#[test]
#[ignore = "a part of t20_ten_thousand_random_prompts_take_no_more_memory_than_five_hundred"]
fn t20_part() {
    const N_CTX: usize = 1024;
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny", |s| {
        (s.n_layer, s.n_shared_kv, s.pattern) = (4, 2, "SF".to_owned());
        (s.n_embd, s.n_ff, s.head_dim, s.head_dim_swa) = (64, 32, 64, 32);
    });
    let engine = load(&path, options(16, DType::F16));
    let mut session = engine.session(N_CTX).expect("session");
    let n_vocab = engine.config().n_vocab;
    let all = random_tokens(N_CTX, n_vocab, 1);
    let dice = random_tokens(30_000, 1 << 16, 25);
    let mut after_500 = 0;
    let mut device = None;
    for (i, dice) in dice.chunks_exact(3).enumerate() {
        let dice = [dice[0] as usize, dice[1] as usize, dice[2] as usize];
        let n = 1 + if i % 100 == 0 {
            dice[0] % N_CTX
        } else {
            dice[0] % 24
        };
        if session.n_past() + n > N_CTX || dice[1].is_multiple_of(40) {
            session.reset();
        }
        let rows = match dice[2] % 4 {
            0 => Rows::All,
            1 => Rows::List(vec![0, n - 1]),
            _ => Rows::Last,
        };
        let rows = if n == 1 { Rows::Last } else { rows };
        let start = session.n_past();
        let logits = prefill(&mut session, &all[start..start + n], &rows);
        assert!(logits.data.iter().all(|x| x.is_finite()), "prompt {i}");
        assert!(session.pool().len() <= POOL_LIMIT, "prompt {i}");
        if i == 499 {
            after_500 = support::process_bytes("VmRSS");
            device = Some(session.device_bytes());
        }
    }
    let counters = session.counters();
    let grown = support::process_bytes("VmRSS").saturating_sub(after_500);
    println!("{counters:?}; {grown} bytes more than after 500");
    assert!(counters.pool.evicted > 100, "{counters:?}");
    assert!(grown < 8 << 20, "{grown} bytes");
    assert_eq!(Some(session.device_bytes()), device);
    // After all that: the bits of a session that has seen nothing else.
    session.reset();
    let ours = prefill(&mut session, &all[..333], &Rows::Last);
    let mut fresh = engine.session(N_CTX).expect("session");
    let theirs = prefill(&mut fresh, &all[..333], &Rows::Last);
    assert_eq!(bits(&ours.data), bits(&theirs.data));
}

/// T20: neither graphs nor memory grow with the number of prompts, and graphs that had to go come
/// back right.
#[test]
fn t20_ten_thousand_random_prompts_take_no_more_memory_than_five_hundred() {
    let output = support::part("t20_part")
        .arg("--nocapture")
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "{text}");
}

/// T33: sums over many thousands of keys, of a single row, a few and a whole tile.
#[test]
fn t33_attention_over_very_many_keys_is_right_for_every_pattern_of_weights() {
    let cpu = op::cpu(2);
    let bound = own_bound("long-attention");
    let mut wrong = Vec::new();
    for (n_q, n_kv) in [(1, 32_768), (1, 131_072), (7, 32_768), (64, 8192)] {
        for d in [256, 512] {
            // The longest at the width of global layers.
            if n_kv > 32_768 && d < 512 {
                continue;
            }
            for pattern in PATTERNS {
                let (found, right) = long_attention::run(&cpu, (d, 2, n_q), n_kv, pattern);
                let error = found
                    .chunks(d)
                    .map(|row| nmse(row, &right))
                    .fold(0.0, f64::max);
                let label = format!("{pattern:?}, d {d}, {n_q} rows, {n_kv} keys: {error:.1e}");
                println!("{label}");
                if error > bound {
                    wrong.push(label);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// T48: one K/V head, one row at a time, with the keys a shortened view of the cache: the case in
/// which "contiguous" holds although rows are left out.
#[test]
fn t48_one_key_head_read_row_by_row_through_a_shortened_view_is_right() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny-dense", |s| {
        (s.n_layer, s.pattern) = (4, "SF".to_owned());
        (s.n_head, s.n_head_kv, s.n_head_kv_full) = (4, 1, 1);
    });
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(290, oracle.config.n_vocab, 26);
    let expected = oracle.forward(&tokens, 4).logits;
    for kv_type in KV_TYPES.map(|n| DType::from_name(n).expect("a type")) {
        let engine = load(&path, options(64, kv_type));
        // Room for 2048 rows, of which 256 and then 512 are viewed.
        let mut session = engine.session(2048).expect("session");
        prefill(&mut session, &tokens[..200], &Rows::Last);
        let mut found = Vec::new();
        for id in &tokens[200..] {
            found.extend(prefill(&mut session, &[*id], &Rows::Last).data);
        }
        let right: Vec<f32> = (200..290)
            .flat_map(|p| expected.row(p).iter().map(|x| *x as f32))
            .collect();
        let (error, bound) = (
            nmse(&found, &right),
            kv_bound(kv_type).max(own_bound("fixture-f32")),
        );
        println!("{}: {error:.1e}", kv_type.name());
        assert!(error <= bound, "{}: {error:.1e}", kv_type.name());
    }
}

/// T50: the gate is the half that goes through GELU.
#[test]
fn t50_the_gate_is_the_first_operand_and_the_first_half() {
    let (n, rows) = (64, 3);
    let at = |i: usize, k: f32| ((i * 37 % 101) as f32 / 25.0 - 2.0) * k;
    let gate: Vec<f32> = (0..n * rows).map(|i| at(i, 1.0)).collect();
    let up: Vec<f32> = (0..n * rows).map(|i| at(i + 50, 3.0)).collect();
    let right: Vec<f32> = gate
        .iter()
        .zip(&up)
        .map(|(&g, &u)| {
            let (g, u) = (f64::from(g), f64::from(u));
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            (0.5 * g * (1.0 + inner.tanh()) * u) as f32
        })
        .collect();
    let halves: Vec<f32> = gate
        .chunks(n)
        .zip(up.chunks(n))
        .flat_map(|(g, u)| [g, u].concat())
        .collect();
    let split = op::run(
        &[op::f32s(&[n, rows], &gate), op::f32s(&[n, rows], &up)],
        |b, i| b.geglu(i[0], i[1]),
    );
    let joined = op::run(&[op::f32s(&[2 * n, rows], &halves)], |b, i| {
        b.geglu_halves(i[0])
    });
    for found in [split.expect("geglu"), joined.expect("geglu")] {
        let error = nmse(&found, &right);
        assert!(error <= own_bound("gpu-op-gelu"), "{error:.1e}");
    }
}

/// T51: what careless users ask for: chunks of one token, not of a pad, larger than the prompt or
/// the context; a context of just the prompt; a window larger than all of it; more threads than work.
#[test]
fn t51_unusual_options_give_the_usual_answer() {
    let dir = tempfile::tempdir().expect("a folder");
    for n_swa in [8, 32, 4096] {
        let path = model(dir.path(), "tiny", |s| {
            (s.n_layer, s.n_shared_kv, s.pattern) = (4, 2, "SF".to_owned());
            (s.n_swa, s.seed) = (n_swa, u64::from(n_swa));
        });
        let oracle = Oracle::open(&path);
        let n = 257;
        let tokens = random_tokens(n, oracle.config.n_vocab, 27);
        let right = oracle.forward(&tokens, 4).logits.f32();
        for (chunk, n_ctx, n_threads) in [
            (1, 257, 1),
            (3, 257, 3),
            (255, 257, 1),
            (256, 300, 7),
            (257, 257, 1),
            (5000, 0, 2),
            (65_536, 257, 1),
        ] {
            let options = EngineOptions {
                n_ctx,
                n_threads,
                ..options(chunk, DType::F32)
            };
            let engine = load(&path, options);
            let mut session = engine.session(n).expect("session");
            let found = prefill(&mut session, &tokens, &Rows::All).data;
            let error = nmse(&found, &right);
            let label = format!("window {n_swa} chunk {chunk} n_ctx {n_ctx} threads {n_threads}");
            assert!(error <= own_bound("fixture-f32"), "{label}: {error:.1e}");
        }
    }
}

/// T55: two sessions of one engine and one of another model, a piece of each in turn: the bits that
/// each gives alone.
#[test]
fn t55_sessions_in_turns_answer_as_each_does_alone() {
    let load = |name: &str| {
        let fixture = Fixture::load(name);
        (
            load(&fixture.gguf, options(32, DType::F16)),
            fixture.n_vocab,
        )
    };
    let ((first, n_vocab), (second, other_n_vocab)) = (load("a-e4b-q8_0"), load("d-moe-q8_0"));
    let prompts = [
        (&first, random_tokens(300, n_vocab, 28)),
        (&first, random_tokens(300, n_vocab, 29)),
        (&second, random_tokens(300, other_n_vocab, 30)),
    ];
    let alone: Vec<Vec<Vec<u32>>> = prompts
        .iter()
        .map(|(engine, tokens)| {
            let mut session = engine.session(300).expect("session");
            let pieces = tokens.chunks(45);
            pieces
                .map(|ids| bits(&prefill(&mut session, ids, &Rows::Last).data))
                .collect()
        })
        .collect();
    let mut sessions: Vec<Session> = prompts
        .iter()
        .map(|(engine, _)| engine.session(300).expect("session"))
        .collect();
    for start in (0..300).step_by(45) {
        for (i, session) in sessions.iter_mut().enumerate() {
            let ids = &prompts[i].1[start..300.min(start + 45)];
            let found = bits(&prefill(session, ids, &Rows::Last).data);
            assert!(found == alone[i][start / 45], "session {i} at {start}");
        }
    }
}

/// All Rust sources below a folder, as one text.
fn sources(dir: &Path, text: &mut String) {
    for entry in std::fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&std::fs::read_to_string(&path).expect("a text"));
        }
    }
}

/// The page of traps names tests that exist, leaves none open, and has each number once.
#[test]
fn every_test_that_the_page_of_traps_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/traps.md")).expect("the page");
    let mut code = String::new();
    sources(&root.join("tests"), &mut code);
    sources(&root.join("src"), &mut code);
    let mut numbers = Vec::new();
    for row in page.lines().filter(|l| l.starts_with("| T")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, _, tests] = cells[..] else {
            panic!("{row}");
        };
        numbers.push(number);
        // Words in code marks that look like a function of ours: with an underscore, no path.
        let names = tests.split('`').skip(1).step_by(2).filter(|name| {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '*';
            name.contains('_') && name.chars().all(is_word)
        });
        let mut n_names = 0;
        for name in names {
            let start = format!("fn {}", name.trim_end_matches('*'));
            let whole = format!("fn {name}(");
            // The tests of fixtures are made by a macro, from a list.
            let listed = format!("{name}: \"");
            let is_there = match name.ends_with('*') {
                true => code.contains(&start),
                false => code.contains(&whole) || code.contains(&listed),
            };
            assert!(is_there, "{number}: no test {name}");
            n_names += 1;
        }
        assert!(n_names > 0, "{row}");
    }
    let n = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), n);
}
