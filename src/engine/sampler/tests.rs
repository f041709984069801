use super::*;
use proptest::prelude::*;

const DRAW: SamplerOptions = SamplerOptions {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    seed: 7,
};

/// Logits whose softmax is `p`.
fn logits(p: &[f32]) -> Vec<f32> {
    p.iter().map(|p| p.ln() + 3.0).collect()
}

/// Share of each token in many draws.
fn shares(options: SamplerOptions, logits: &[f32], suppress: &[u32]) -> Vec<f64> {
    let n_draws = 20_000;
    let mut sampler = Sampler::new(options, suppress).unwrap();
    let mut counts = vec![0_u32; logits.len()];
    for _ in 0..n_draws {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    counts
        .into_iter()
        .map(|count| f64::from(count) / f64::from(n_draws))
        .collect()
}

/// Bound of five standard deviations of a share of 20,000 draws.
fn assert_shares(found: &[f64], expected: &[f64]) {
    for (token, (found, p)) in found.iter().zip(expected).enumerate() {
        let bound = 5.0 * (p * (1.0 - p) / 20_000.0).sqrt();
        assert!(
            (found - p).abs() <= bound,
            "token {token}: {found}, expected {p} +- {bound}"
        );
    }
}

#[test]
fn draws_follow_the_softmax() {
    assert_shares(
        &shares(DRAW, &logits(&[0.5, 0.3, 0.15, 0.05]), &[]),
        &[0.5, 0.3, 0.15, 0.05],
    );
}

#[test]
fn temperature_sharpens_and_flattens() {
    // Probabilities to the power 1 / temperature, renormalised.
    let p = logits(&[0.6, 0.3, 0.1]);

    let sharp = shares(
        SamplerOptions {
            temperature: 0.5,
            ..DRAW
        },
        &p,
        &[],
    );
    let flat = shares(
        SamplerOptions {
            temperature: 2.0,
            ..DRAW
        },
        &p,
        &[],
    );

    assert_shares(&sharp, &[0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46]);
    let root = [0.6_f64.sqrt(), 0.3_f64.sqrt(), 0.1_f64.sqrt()];
    let sum: f64 = root.iter().sum();
    assert_shares(&flat, &root.map(|r| r / sum));
}

#[test]
fn top_k_keeps_the_k_likeliest() {
    let found = shares(
        SamplerOptions { top_k: 2, ..DRAW },
        &logits(&[0.1, 0.4, 0.2, 0.3]),
        &[],
    );

    assert_shares(&found, &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
}

#[test]
fn top_p_keeps_the_token_that_reaches_the_sum() {
    let p = logits(&[0.1, 0.4, 0.2, 0.3]);

    let two = shares(
        SamplerOptions {
            top_p: 0.65,
            ..DRAW
        },
        &p,
        &[],
    );
    let three = shares(
        SamplerOptions {
            top_p: 0.75,
            ..DRAW
        },
        &p,
        &[],
    );
    let one = shares(SamplerOptions { top_p: 0.0, ..DRAW }, &p, &[]);

    assert_shares(&two, &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    assert_shares(&three, &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
    assert_shares(&one, &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    let p = logits(&[0.5, 0.3, 0.15, 0.05]);

    let found = shares(
        SamplerOptions {
            min_p: 0.25,
            ..DRAW
        },
        &p,
        &[],
    );

    assert_shares(&found, &[50.0 / 95.0, 30.0 / 95.0, 15.0 / 95.0, 0.0]);
}

#[test]
fn filters_look_at_the_distribution_before_the_temperature() {
    // At temperature 10 the likeliest two would hold far less than 0.85.
    let p = logits(&[0.6, 0.3, 0.06, 0.04]);
    let hot = SamplerOptions {
        temperature: 10.0,
        ..DRAW
    };

    let top_p = shares(SamplerOptions { top_p: 0.85, ..hot }, &p, &[]);
    let min_p = shares(SamplerOptions { min_p: 0.4, ..hot }, &p, &[]);

    assert_eq!((top_p[2], top_p[3]), (0.0, 0.0));
    assert_eq!((min_p[2], min_p[3]), (0.0, 0.0));
}

#[test]
fn top_p_counts_what_top_k_left() {
    // Of 0.4, 0.3 kept by top-k the first holds 0.57 of the rest.
    let p = logits(&[0.4, 0.3, 0.2, 0.1]);

    let found = shares(
        SamplerOptions {
            top_k: 2,
            top_p: 0.55,
            ..DRAW
        },
        &p,
        &[],
    );

    assert_eq!(found, [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn suppressed_tokens_are_never_chosen() {
    let p = logits(&[0.5, 0.3, 0.15, 0.05]);

    let drawn = shares(DRAW, &p, &[3, 0, 3, 900]);
    let greedy = Sampler::new(SamplerOptions::default(), &[0])
        .unwrap()
        .sample(&p);

    assert_shares(&drawn, &[0.0, 30.0 / 45.0, 15.0 / 45.0, 0.0]);
    assert_eq!(greedy, Ok(1));
}

#[test]
fn greedy_takes_the_first_of_equals() {
    let mut sampler = Sampler::new(SamplerOptions::default(), &[]).unwrap();

    assert_eq!(sampler.sample(&[1.0, 5.0, 5.0, -2.0]), Ok(1));
    assert_eq!(sampler.sample(&[-0.0, 0.0]), Ok(0));
}

#[test]
fn a_seed_gives_one_sequence_and_another_seed_another() {
    let p = logits(&[0.25; 4]);
    let sequence = |seed| {
        let mut sampler = Sampler::new(SamplerOptions { seed, ..DRAW }, &[]).unwrap();
        (0..64)
            .map(|_| sampler.sample(&p).unwrap())
            .collect::<Vec<_>>()
    };

    assert_eq!(sequence(1), sequence(1));
    assert_ne!(sequence(1), sequence(2));
}

#[test]
fn the_generator_is_the_documented_one() {
    // With four equal tokens a draw is the top two bits of a 64-bit output. These are the first
    // outputs of ChaCha8 with the key that `seed_from_u64` (PCG32) expands from 42, computed
    // apart from this program.
    let p = logits(&[0.25; 4]);
    let mut sampler = Sampler::new(SamplerOptions { seed: 42, ..DRAW }, &[]).unwrap();

    let tokens: Vec<u32> = (0..12).map(|_| sampler.sample(&p).unwrap()).collect();

    assert_eq!(tokens, [2, 3, 1, 2, 1, 0, 1, 3, 3, 0, 2, 3]);
}

#[test]
fn bad_logits_are_named() {
    let mut sampler = Sampler::new(DRAW, &[0]).unwrap();
    let none = SamplerError::NoCandidate {
        n_vocab: 2,
        n_suppressed: 1,
    };

    let nan = sampler.sample(&[0.0, 1.0, f32::NAN]).unwrap_err();

    assert!(matches!(nan, SamplerError::NotFinite { token: 2, .. }));
    assert_eq!(
        sampler.sample(&[0.0, f32::INFINITY]),
        Err(SamplerError::NotFinite {
            token: 1,
            value: f32::INFINITY
        })
    );
    assert_eq!(sampler.sample(&[0.0, f32::NEG_INFINITY]), Err(none));
    assert!(sampler.sample(&[]).is_err());
}

#[test]
fn options_outside_their_range_are_named() {
    let refused = |options| match Sampler::new(options, &[]) {
        Err(SamplerError::InvalidOption { name, .. }) => name,
        other => panic!("expected a refused option, got {other:?}"),
    };

    assert_eq!(
        refused(SamplerOptions {
            temperature: -0.1,
            ..DRAW
        }),
        "temperature"
    );
    assert_eq!(
        refused(SamplerOptions {
            temperature: f32::NAN,
            ..DRAW
        }),
        "temperature"
    );
    assert_eq!(refused(SamplerOptions { top_p: 1.1, ..DRAW }), "top_p");
    assert_eq!(
        refused(SamplerOptions {
            min_p: f32::NAN,
            ..DRAW
        }),
        "min_p"
    );
}

proptest! {
    #[test]
    fn some_token_that_the_filters_keep_is_chosen(
        logits in proptest::collection::vec(-50.0_f32..50.0, 1..60), top_k in 0_usize..70,
        top_p in 0.0_f32..=1.0, min_p in 0.0_f32..=1.0, temperature in 0.0_f32..5.0,
        seed in any::<u64>(),
    ) {
        let options = SamplerOptions { temperature, top_k, top_p, min_p, seed };
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);

        let token = Sampler::new(options, &[])?.sample(&logits)?;

        let logit = logits[token as usize];
        let n_likelier = logits.iter().filter(|&&other| other > logit).count();
        prop_assert!(top_k == 0 || n_likelier < top_k);
        prop_assert!(logit >= max + min_p.ln());
        prop_assert!(temperature > 0.0 || logit == max);
    }

    #[test]
    fn the_random_unit_stays_below_one(bits in any::<u64>()) {
        prop_assert!((0.0..1.0).contains(&unit(bits)));
    }
}
