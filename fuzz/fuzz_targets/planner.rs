//! The planner with any sizes: every token once, in order, in a bucket that holds it.
#![no_main]

use arbitrary::Arbitrary;
use g4prefill::engine::Rows;
use g4prefill::engine::bucket::{KV_PAD, Kind, Ladder};
use g4prefill::engine::plan::{Limits, plan};
use g4prefill_fuzz::Number;

#[derive(Arbitrary, Debug)]
struct Input {
    n_past: Number,
    n_prompt: Number,
    rows: Wanted,
    chunk: Number,
    kv_min: Number,
    kv_steps: Number,
    token_steps: Number,
    n_ctx_rows: Number,
    is_padded: bool,
    max_logit_rows: Number,
}

#[derive(Arbitrary, Debug)]
enum Wanted {
    Last,
    All,
    /// Distances between the rows.
    Steps(Vec<u16>),
    List(Vec<Number>),
}

/// Most chunks of a case: more only take longer.
const MAX_CHUNKS: usize = 4096;

libfuzzer_sys::fuzz_target!(|input: Input| {
    let ladder = Ladder {
        chunk: input.chunk.size(),
        kv_min: input.kv_min.size(),
        kv_steps_per_octave: input.kv_steps.size(),
        token_steps_per_octave: input.token_steps.size(),
    };
    let (n_past, n_prompt) = (input.n_past.size(), input.n_prompt.size());
    let n_ctx_rows = if input.is_padded {
        input.n_ctx_rows.size().saturating_mul(KV_PAD) / KV_PAD * KV_PAD
    } else {
        input.n_ctx_rows.size()
    };
    let limits = Limits {
        max_logit_rows: input.max_logit_rows.size(),
    };
    let rows = match input.rows {
        Wanted::Last => Rows::Last,
        Wanted::All => Rows::All,
        Wanted::List(list) => Rows::List(list.iter().map(|n| n.size()).collect()),
        Wanted::Steps(steps) => {
            let sum = |at: &mut usize, &step: &u16| {
                *at += usize::from(step);
                Some(*at)
            };
            Rows::List(steps.iter().scan(0, sum).collect())
        }
    };
    let shortest = ladder.chunk.min(limits.max_logit_rows).max(1) / 2;
    if n_prompt / shortest.max(1) > MAX_CHUNKS || matches!(rows, Rows::All) && n_prompt > 1 << 20 {
        return;
    }
    let Ok(chunks) = plan(n_past, n_prompt, &rows, &ladder, n_ctx_rows, limits) else {
        return;
    };
    let mut at = n_past;
    let mut n_wanted = 0;
    for chunk in &chunks {
        assert_eq!(chunk.n_past, at);
        assert!((1..=ladder.chunk).contains(&chunk.n_tokens));
        at += chunk.n_tokens;
        assert!(chunk.bucket.n_tokens >= chunk.n_tokens && chunk.bucket.n_tokens <= ladder.chunk);
        assert!(chunk.bucket.n_kv >= at && chunk.bucket.n_kv <= n_ctx_rows);
        assert!(chunk.bucket.n_kv.is_multiple_of(KV_PAD));
        assert!(chunk.wanted.is_sorted() && chunk.wanted.iter().all(|&r| r < chunk.n_tokens));
        assert!(chunk.bucket.n_logit_rows() <= limits.max_logit_rows);
        match chunk.bucket.kind {
            Kind::Body => assert!(chunk.wanted.is_empty()),
            Kind::Tail { n_out } => assert!((1..=n_out).contains(&chunk.wanted.len())),
            Kind::Full => assert_eq!(chunk.wanted.len(), chunk.n_tokens),
        }
        n_wanted += chunk.wanted.len();
    }
    assert_eq!(at, n_past + n_prompt);
    assert_eq!(
        n_wanted,
        match rows {
            Rows::Last => 1,
            Rows::All => n_prompt,
            Rows::List(list) => list.len(),
        }
    );
});
