//! T14: engines that are fast because they are wrong. Each is our engine beside llama.cpp on the
//! same file, with one thing broken; the harness must give none of them a speed.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::*;
use crate::bench::{Facts, LlamaCpp, Ours, PointReport, Work, random_ids, token_pool};
use crate::engine::{CancelToken, Engine, EngineOptions};
use crate::ggml::DeviceChoice;
use crate::peer::PeerOptions;
use crate::synth::{self, Spec, WeightType};

const N_PROMPT: usize = 150;
const CHUNK: usize = 64;
const WINDOW: u32 = 32;

/// What a mutant runs in place of the prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutation {
    /// Nothing is wrong.
    None,
    /// All tokens but those of the last chunk.
    SkipsTheLastChunk,
    /// The last token only: the others are in the caches before the clock runs.
    ReusesThePrefix,
    /// The prompt, with an engine whose windows are narrower than the model's.
    HasAnotherMask,
}

/// Our engine with a mutation.
struct Mutant {
    ours: Ours,
    mutation: Mutation,
    counts: bool,
}

impl Contestant for Mutant {
    fn name(&self) -> &str {
        "mutant"
    }

    fn settings(&self) -> BTreeMap<String, String> {
        self.ours.settings()
    }

    fn prepare(&mut self, point: &Point, ids: &[u32]) -> Result<()> {
        let n_prompt = ids.len();
        let (work, ids) = match self.mutation {
            Mutation::None | Mutation::HasAnotherMask => (point.work, ids),
            Mutation::SkipsTheLastChunk => {
                let n_prompt = n_prompt - n_prompt % CHUNK;
                (Work::Prefill { n_prompt }, &ids[..n_prompt])
            }
            Mutation::ReusesThePrefix => {
                let start_pos = n_prompt - 1;
                (
                    Work::Chunk {
                        start_pos,
                        n_prompt: 1,
                    },
                    ids,
                )
            }
        };
        let label = point.label.clone();
        self.ours.prepare(&Point { label, work }, ids)
    }

    fn run(&mut self) -> Result<Run> {
        let run = self.ours.run()?;
        let n_tokens = run.n_tokens.filter(|_| self.counts);
        Ok(Run { n_tokens, ..run })
    }
}

fn model(dir: &Path, name: &str, n_swa: u32) -> PathBuf {
    let mut spec = Spec::preset("tiny-dense").unwrap();
    spec.weight_type = WeightType::F32;
    (spec.n_embd, spec.n_ff, spec.n_vocab) = (128, 64, 416);
    (spec.head_dim, spec.head_dim_swa, spec.n_swa) = (128, 64, n_swa);
    let path = dir.join(name);
    synth::write(&spec, &path, 1, &mut |_| ControlFlow::Continue(())).unwrap();
    path
}

fn mutant(path: &Path, mutation: Mutation, counts: bool) -> Mutant {
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        chunk: CHUNK,
        ..EngineOptions::default()
    };
    let engine = Engine::load(path, options, &mut |_| {}).unwrap();
    Mutant {
        ours: Ours::new(engine, CancelToken::default(), None),
        mutation,
        counts,
    }
}

/// Measures a mutant beside llama.cpp on `path`.
fn measure(path: &Path, mutant: &mut Mutant, with_peer: bool) -> PointReport {
    let engine = std::sync::Arc::clone(mutant.ours.engine());
    let pool = token_pool(engine.file(), engine.config()).unwrap();
    let options = PeerOptions {
        n_ctx: N_PROMPT,
        n_threads: 1,
        ..PeerOptions::default()
    };
    let mut llama = LlamaCpp::load(path, options).unwrap();
    let harness = Harness {
        schedule: Schedule {
            warmup: Duration::ZERO,
            samples: 3,
            min_time: Duration::ZERO,
            measures_noise: true,
        },
        limits: Limits::of(&engine),
        now: &|| Duration::ZERO,
        used_bytes: &|| None,
        is_cancelled: &|| false,
        note: &|_| {},
        progress: &|_| {},
    };
    let point = Point {
        label: "m".to_owned(),
        work: Work::Prefill { n_prompt: N_PROMPT },
    };
    let ids = random_ids(&pool, N_PROMPT, 1);
    let peer = with_peer.then_some(&mut llama as &mut dyn Contestant);
    let timings = harness.run(&point, &ids, mutant, peer).unwrap();
    let facts = Facts {
        ours: ("mutant".to_owned(), BTreeMap::new()),
        peer: timings
            .peer
            .as_ref()
            .map(|_| ("llama.cpp".to_owned(), BTreeMap::new())),
        clocks_before: None,
        clocks_after: None,
    };
    PointReport::new(&point, &timings, facts)
}

#[test]
fn t14_a_wrong_or_cached_answer_has_no_speed_and_the_right_one_has() {
    let dir = tempfile::tempdir().unwrap();
    let right = model(dir.path(), "right.gguf", WINDOW);
    let narrow = model(dir.path(), "narrow.gguf", WINDOW - 1);
    // With the engine's own count, and by the logits alone.
    let cases = [
        (Mutation::None, true, None),
        (
            Mutation::SkipsTheLastChunk,
            true,
            Some("128 tokens were computed, 150 are timed"),
        ),
        (Mutation::SkipsTheLastChunk, false, Some("against the peer")),
        (
            Mutation::ReusesThePrefix,
            true,
            Some("1 tokens were computed, 150 are timed"),
        ),
        (Mutation::HasAnotherMask, true, Some("against the peer")),
    ];
    for (mutation, counts, why) in cases {
        let path = if mutation == Mutation::HasAnotherMask {
            &narrow
        } else {
            &right
        };

        let report = measure(&right, &mut mutant(path, mutation, counts), true);

        assert_eq!(report.valid, why.is_none(), "{mutation:?}: {report:?}");
        assert_eq!(report.ours.tok_s.is_some(), why.is_none(), "{mutation:?}");
        let said = report.why_invalid.unwrap_or_default();
        assert!(
            said.contains(why.unwrap_or_default()),
            "{mutation:?}: {said}"
        );
    }
    // What a cache gave is seen without a peer as well.
    let report = measure(
        &right,
        &mut mutant(&right, Mutation::ReusesThePrefix, true),
        false,
    );
    assert!(!report.valid && report.ours.tok_s.is_none(), "{report:?}");
}
