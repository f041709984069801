//! Scripted results, right and wrong.

use super::*;
use crate::engine::kv_cache::Side;
use crate::gguf::DType;
use crate::numerics;

/// Rows 3 and 5 of a vocabulary of four, and one row of a cache.
fn outcome() -> Outcome {
    Outcome {
        logits: Logits {
            n_vocab: 4,
            rows: vec![3, 5],
            data: vec![1.0, 9.0, -2.0, 4.0, 8.0, 0.5, 3.0, -1.0],
        },
        kv: vec![KvRow {
            il: 2,
            side: Side::K,
            position: 7,
            dtype: DType::F32,
            bytes: [1.0_f32, 2.0]
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect(),
            n: 2,
        }],
    }
}

fn within(is_moe: bool) -> Expect {
    Expect::Within {
        limit: numerics::limit("own", "q8_0", is_moe, "f16").unwrap(),
        name: "own, q8_0, K/V f16".to_owned(),
    }
}

fn why(verdict: &Verdict) -> &str {
    match verdict {
        Verdict::Wrong { why, .. } => why,
        other => panic!("expected wrong, found {other:?}"),
    }
}

#[test]
fn equal_bits_are_identical_whatever_was_expected() {
    for expect in [Expect::Bits, within(false), within(true)] {
        assert_eq!(judge(&expect, &outcome(), &outcome()), Verdict::Identical);
    }
}

#[test]
fn one_bit_of_a_logit_is_wrong_and_named_where_bits_count() {
    let mut found = outcome();
    found.logits.data[6] = f32::from_bits(3.0_f32.to_bits() ^ 1);

    let verdict = judge(&Expect::Bits, &outcome(), &found);

    assert!(why(&verdict).starts_with("logit 2 of row 5: expected 3, found 3.00"));
    assert!(matches!(
        judge(&within(false), &outcome(), &found),
        Verdict::Within(Measure { of: "logits", .. })
    ));
}

#[test]
fn one_byte_of_a_cache_row_is_wrong_and_named() {
    let mut found = outcome();
    found.kv[0].bytes[0] ^= 1;

    let verdict = judge(&Expect::Bits, &outcome(), &found);

    assert_eq!(why(&verdict), "the K row of position 7 in layer 2 differs");
}

#[test]
fn sign_of_zero_is_a_bit_too() {
    let (mut expected, mut found) = (outcome(), outcome());
    expected.logits.data[7] = 0.0;
    found.logits.data[7] = -0.0;

    assert!(judge(&Expect::Bits, &expected, &found).is_wrong());
}

#[test]
fn nan_and_infinity_are_wrong_on_either_side_and_under_any_limit() {
    for value in [f32::NAN, f32::INFINITY] {
        let mut bad = outcome();
        bad.logits.data[5] = value;
        for expect in [Expect::Bits, within(true)] {
            let found = judge(&expect, &outcome(), &bad);
            assert!(why(&found).starts_with("found logit 1 of row 5 is"));
            let expected = judge(&expect, &bad, &bad);
            assert!(why(&expected).starts_with("expected logit 1 of row 5 is"));
        }
    }
}

#[test]
fn distance_above_the_bound_is_wrong_with_both_numbers() {
    let mut found = outcome();
    found.logits.data[0] += 2.0;

    let verdict = judge(&within(false), &outcome(), &found);

    let text = why(&verdict);
    assert!(
        text.starts_with("NMSE 2.") && text.contains("4.4e-3"),
        "{text}"
    );
    let Verdict::Wrong { measure, .. } = &verdict else {
        panic!("{verdict:?}");
    };
    let measure = measure.as_ref().unwrap();
    assert!(measure.value > measure.bound);
}

#[test]
fn cache_rows_far_off_are_wrong_although_the_logits_are_near() {
    let mut found = outcome();
    found.kv[0].bytes = [1.5_f32, 2.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();

    let verdict = judge(&within(false), &outcome(), &found);

    assert!(
        why(&verdict).contains("of K/V rows is above"),
        "{verdict:?}"
    );
}

#[test]
fn another_most_likely_token_counts_where_its_lead_is_clear() {
    let near = |lead: f32| {
        let mut outcome = outcome();
        // Logits so large that their order costs no distance.
        outcome.logits.data[0] = 100.0;
        outcome.logits.data[1] = 100.0 + lead;
        outcome
    };

    let sure = judge(&within(false), &near(1.3), &near(-0.1));
    let unsure = judge(&within(false), &near(1.1), &near(-0.1));
    let experts = judge(&within(true), &near(1.3), &near(-0.1));

    assert!(
        why(&sure).starts_with("row 3: another most likely token, 0 instead of 1"),
        "{sure:?}"
    );
    assert!(matches!(unsure, Verdict::Within(_)), "{unsure:?}");
    assert!(matches!(experts, Verdict::Within(_)), "{experts:?}");
}

#[test]
fn nothing_in_common_is_wrong() {
    let mut found = outcome();
    found.logits.rows = vec![0, 1];

    for found in [found, Outcome::default()] {
        assert!(judge(&within(false), &outcome(), &found).is_wrong());
    }
}

#[test]
fn rows_that_only_one_side_has_are_left_out() {
    let mut found = outcome();
    found.logits.rows = vec![1, 3, 5];
    found.logits.data.splice(0..0, [0.0; 4]);
    found.kv.clear();

    assert_eq!(judge(&Expect::Bits, &outcome(), &found), Verdict::Identical);
}
