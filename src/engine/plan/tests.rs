use super::*;
use proptest::prelude::*;

const LADDER: Ladder = Ladder {
    chunk: 2048,
    kv_min: 2048,
    kv_steps_per_octave: 4,
    token_steps_per_octave: 8,
};
const NO_LIMIT: Limits = Limits {
    max_logit_rows: usize::MAX,
};

#[derive(Debug, Clone)]
struct Case {
    n_past: usize,
    n_prompt: usize,
    rows: Rows,
    ladder: Ladder,
    n_ctx_rows: usize,
    limits: Limits,
}

impl Case {
    fn wanted(&self) -> Vec<usize> {
        match &self.rows {
            Rows::Last => vec![self.n_prompt - 1],
            Rows::All => (0..self.n_prompt).collect(),
            Rows::List(list) => list.clone(),
        }
    }

    fn plan(&self) -> Result<Vec<Chunk>, PlanError> {
        plan(
            self.n_past,
            self.n_prompt,
            &self.rows,
            &self.ladder,
            self.n_ctx_rows,
            self.limits,
        )
    }
}

fn rows(n_prompt: usize) -> impl Strategy<Value = Rows> {
    let list = proptest::collection::btree_set(0..n_prompt, 0..=n_prompt.min(200));
    let dense =
        (0..n_prompt, 0..n_prompt).prop_map(|(a, b)| Rows::List((a.min(b)..=a.max(b)).collect()));
    prop_oneof![
        Just(Rows::Last),
        Just(Rows::All),
        list.prop_map(|set| Rows::List(set.into_iter().collect())),
        dense,
    ]
}

prop_compose! {
    fn cases()(
        n_past in 0_usize..3000, n_prompt in 1_usize..3000,
    )(
        n_past in Just(n_past), n_prompt in Just(n_prompt), rows in rows(n_prompt),
        chunk in 1_usize..700, kv_min in 0_usize..1500, k in 1_usize..9, t in 1_usize..17,
        slack in 0_usize..20, max_logit_rows in 1_usize..300,
    ) -> Case {
        Case {
            n_past, n_prompt, rows,
            ladder: Ladder { chunk, kv_min, kv_steps_per_octave: k, token_steps_per_octave: t },
            n_ctx_rows: ((n_past + n_prompt).div_ceil(KV_PAD) + slack) * KV_PAD,
            limits: Limits { max_logit_rows },
        }
    }
}

proptest! {
    #[test]
    fn every_token_is_covered_once_in_order(case in cases()) {
        let mut n_past = case.n_past;
        for chunk in case.plan()? {
            prop_assert_eq!(chunk.n_past, n_past);
            prop_assert!(chunk.n_tokens >= 1 && chunk.n_tokens <= case.ladder.chunk);
            n_past += chunk.n_tokens;
        }
        prop_assert_eq!(n_past, case.n_past + case.n_prompt);
    }

    #[test]
    fn every_chunk_fits_its_bucket(case in cases()) {
        for chunk in case.plan()? {
            prop_assert!(chunk.bucket.n_tokens >= chunk.n_tokens);
            prop_assert!(chunk.bucket.n_tokens <= case.ladder.chunk);
            prop_assert!(chunk.bucket.n_kv >= chunk.positions().end);
            prop_assert!(chunk.bucket.n_kv <= case.n_ctx_rows);
            prop_assert_eq!(chunk.bucket.n_kv % KV_PAD, 0);
        }
    }

    #[test]
    fn every_wanted_row_is_computed_once_in_order(case in cases()) {
        let mut found = Vec::new();
        for chunk in case.plan()? {
            let first = chunk.n_past - case.n_past;
            prop_assert!(chunk.wanted.iter().all(|&row| row < chunk.n_tokens));
            found.extend(chunk.wanted.iter().map(|row| first + row));
        }
        prop_assert_eq!(found, case.wanted());
    }

    #[test]
    fn kind_follows_the_wanted_rows_and_the_limit(case in cases()) {
        for chunk in case.plan()? {
            let n_wanted = chunk.wanted.len();
            match chunk.bucket.kind {
                Kind::Body => prop_assert_eq!(n_wanted, 0),
                Kind::Full => prop_assert_eq!(n_wanted, chunk.n_tokens),
                Kind::Tail { n_out } => {
                    prop_assert!(n_wanted > 0 && n_wanted < chunk.n_tokens);
                    prop_assert!(n_out >= n_wanted && n_out <= chunk.bucket.n_tokens);
                }
            }
            prop_assert!(chunk.bucket.n_logit_rows() <= case.limits.max_logit_rows);
        }
    }

    #[test]
    fn only_the_last_chunk_is_padded_and_only_a_little(case in cases()) {
        let chunks = case.plan()?;
        let (last, before) = chunks.split_last().expect("a prompt gives a chunk");

        prop_assert!(before.iter().all(|chunk| chunk.bucket.n_tokens == chunk.n_tokens));
        let n_padding = last.bucket.n_tokens - last.n_tokens;
        prop_assert!(n_padding * case.ladder.token_steps_per_octave < last.n_tokens);
    }

    #[test]
    fn chunks_are_whole_while_few_logits_are_wanted(case in cases()) {
        prop_assume!(case.rows == Rows::Last);

        let n_chunks = case.plan()?.len();

        prop_assert_eq!(n_chunks, case.n_prompt.div_ceil(case.ladder.chunk));
    }

    #[test]
    fn a_bucket_depends_on_position_only_through_the_key_range(case in cases()) {
        let again = Case { n_past: 0, ..case.clone() };
        let shape = |chunk: &Chunk| (chunk.n_tokens, chunk.bucket.n_tokens, chunk.bucket.kind);

        let here: Vec<_> = case.plan()?.iter().map(shape).collect();
        let there: Vec<_> = again.plan()?.iter().map(shape).collect();

        prop_assert_eq!(here, there);
    }
}

#[test]
fn a_long_prompt_runs_bodies_and_one_tail() {
    let chunks = plan(0, 5000, &Rows::Last, &LADDER, 8192, NO_LIMIT).unwrap();

    let kinds: Vec<Kind> = chunks.iter().map(|chunk| chunk.bucket.kind).collect();
    assert_eq!(kinds, [Kind::Body, Kind::Body, Kind::Tail { n_out: 1 }]);
    assert_eq!(chunks[2].wanted, [903]);
    assert_eq!(
        chunks[2].bucket,
        BucketShape {
            n_tokens: 960,
            n_kv: 5120,
            kind: kinds[2]
        }
    );
}

#[test]
fn a_single_token_is_a_full_chunk() {
    let chunks = plan(700, 1, &Rows::Last, &LADDER, 2048, NO_LIMIT).unwrap();

    assert_eq!(chunks.len(), 1);
    assert_eq!(
        chunks[0].bucket,
        BucketShape {
            n_tokens: 1,
            n_kv: 2048,
            kind: Kind::Full
        }
    );
}

#[test]
fn an_empty_list_fills_the_caches_only() {
    let none = Limits { max_logit_rows: 0 };

    let chunks = plan(0, 3000, &Rows::List(vec![]), &LADDER, 4096, none).unwrap();

    assert!(chunks.iter().all(|chunk| chunk.bucket.kind == Kind::Body));
}

#[test]
fn all_rows_shorten_chunks_to_the_logit_limit() {
    let chunks = plan(
        0,
        1300,
        &Rows::All,
        &LADDER,
        2048,
        Limits {
            max_logit_rows: 512,
        },
    )
    .unwrap();

    let n_tokens: Vec<usize> = chunks.iter().map(|chunk| chunk.n_tokens).collect();
    assert_eq!(n_tokens, [512, 512, 276]);
    assert!(chunks.iter().all(|chunk| chunk.bucket.kind == Kind::Full));
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_the_numbers() {
    let error = plan(1000, 1100, &Rows::Last, &LADDER, 2048, NO_LIMIT).unwrap_err();

    assert_eq!(
        error,
        PlanError::PromptTooLong {
            n_past: 1000,
            n_prompt: 1100,
            n_ctx_rows: 2048,
            would_fit: 1048
        }
    );
    assert_eq!(
        error.to_string(),
        "prompt of 1100 tokens after 1000 cached ones does not fit a context of 2048 tokens: \
         1048 tokens would fit"
    );
    assert!(plan(1000, 1048, &Rows::Last, &LADDER, 2048, NO_LIMIT).is_ok());
    assert!(plan(usize::MAX, usize::MAX, &Rows::Last, &LADDER, 2048, NO_LIMIT).is_err());
}

#[test]
fn wrong_rows_are_named() {
    let refused = |list: &[usize]| {
        plan(0, 10, &Rows::List(list.to_vec()), &LADDER, 256, NO_LIMIT).unwrap_err()
    };

    assert_eq!(
        refused(&[3, 3]),
        PlanError::DuplicateRow { row: 3, index: 1 }
    );
    assert_eq!(
        refused(&[1, 5, 4]),
        PlanError::UnsortedRows {
            row: 4,
            index: 2,
            previous: 5
        }
    );
    assert_eq!(
        refused(&[0, 10]),
        PlanError::RowOutOfRange {
            row: 10,
            index: 1,
            n_prompt: 10
        }
    );
}

#[test]
fn sizes_that_admit_no_chunk_are_named() {
    let empty = Ladder { chunk: 0, ..LADDER };
    let none = Limits { max_logit_rows: 0 };

    let refused = |n_prompt, ladder: &Ladder, n_ctx_rows, limits| {
        plan(0, n_prompt, &Rows::Last, ladder, n_ctx_rows, limits).unwrap_err()
    };

    assert_eq!(refused(0, &LADDER, 256, NO_LIMIT), PlanError::EmptyPrompt);
    assert_eq!(refused(5, &empty, 256, NO_LIMIT), PlanError::EmptyChunk);
    assert_eq!(
        refused(5, &LADDER, 100, NO_LIMIT),
        PlanError::CacheNotPadded { n_ctx_rows: 100 }
    );
    assert_eq!(
        refused(5, &LADDER, 256, none),
        PlanError::NoLogitRows { n_wanted: 1 }
    );
}
