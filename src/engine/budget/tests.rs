use super::*;
use proptest::prelude::*;

fn demand() -> Demand {
    Demand {
        weights_native_bytes: 1000,
        weights_bf16_bytes: 4000,
        caches: vec![
            CacheLayer {
                is_swa: true,
                row_bytes: 10,
            },
            CacheLayer {
                is_swa: true,
                row_bytes: 10,
            },
            CacheLayer {
                is_swa: false,
                row_bytes: 30,
            },
        ],
        ring_rows: 512,
        chunk: 100,
        ple_token_bytes: 0,
        n_upload_slots: 0,
        arena_bytes: 5000,
        arena_row_bytes: 0,
        n_logit_rows: 2,
        n_vocab: 50,
    }
}

#[test]
fn every_class_counts_what_it_holds() {
    let budget = demand().at(1024, Resident::Native);

    assert_eq!(budget.weights_bytes, 1000);
    assert_eq!(budget.kv_global_bytes, 30 * 1025, "one scratch row");
    assert_eq!(
        budget.kv_ring_bytes,
        2 * 10 * 513,
        "one scratch row for each ring"
    );
    assert_eq!(budget.io_bytes, 100 * (24 + 2 * (1024 + 512)) + 2 * 4);
    assert_eq!(budget.arena_bytes, 5000);
    assert_eq!(budget.logits_bytes, 2 * 50 * 4);
    let parts = 1000 + 30 * 1025 + 20 * 513 + 100 * 3096 + 8 + 5000 + 400;
    assert_eq!(budget.total_bytes(), parts);
    assert_eq!(
        demand().at(1024, Resident::Bf16).total_bytes(),
        parts + 3000
    );
}

#[test]
fn upload_slots_per_layer_rows_and_conversion_are_counted() {
    let more = Demand {
        ple_token_bytes: 40,
        n_upload_slots: 2,
        arena_row_bytes: 7,
        ..demand()
    };

    let budget = more.at(1024, Resident::Native);

    assert_eq!(budget.io_bytes, 100 * (24 + 40 + 2 * (1024 + 512)) + 2 * 4);
    assert_eq!(budget.staging_bytes, 2 * budget.io_bytes);
    assert_eq!(budget.arena_bytes, 5000 + 7 * 1024);
}

#[test]
fn a_chunk_is_not_longer_than_the_context() {
    let wide = Demand {
        chunk: 4096,
        ..demand()
    };

    assert_eq!(
        wide.at(256, Resident::Native).io_bytes,
        256 * (24 + 2 * 512) + 8
    );
}

#[test]
fn a_ring_is_not_longer_than_the_context() {
    assert_eq!(demand().at(256, Resident::Native).kv_ring_bytes, 20 * 257);
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let needed = demand().at(1024, Resident::Native);
    let total = needed.total_bytes();

    let error = fits(&needed, FreeMemory::Known(total - 1)).unwrap_err();

    assert_eq!(
        error,
        BudgetError::DoesNotFit {
            n_ctx: 1024,
            needed_bytes: total,
            free_bytes: total - 1
        }
    );
    assert_eq!(
        error.to_string(),
        "a context of 1024 tokens needs 348.65 KiB of memory, 348.64 KiB are free (1 B short)"
    );
    assert_eq!(fits(&needed, FreeMemory::Known(total)), Ok(()));
}

#[test]
fn a_failed_query_is_not_a_full_device() {
    let needed = demand().at(1024, Resident::Native);

    assert_eq!(FreeMemory::from_query(0, 0), FreeMemory::Unknown);
    assert_eq!(FreeMemory::from_query(0, 80), FreeMemory::Known(0));
    assert_eq!(FreeMemory::Unknown.less(7), FreeMemory::Unknown);
    assert_eq!(FreeMemory::Known(5).less(7), FreeMemory::Known(0));
    assert!(fits(&needed, FreeMemory::Unknown).is_ok());
    assert!(fits(&needed, FreeMemory::Known(0)).is_err());
}

#[test]
fn bf16_is_chosen_only_where_it_is_known_to_fit() {
    let needed = demand().at(1024, Resident::Bf16).total_bytes();
    let choose = |free| demand().choose_resident(1024, free);

    assert_eq!(choose(FreeMemory::Known(needed)), Resident::Bf16);
    assert_eq!(choose(FreeMemory::Known(needed - 1)), Resident::Native);
    assert_eq!(choose(FreeMemory::Unknown), Resident::Native);
}

#[test]
fn a_mask_of_two_to_the_31_cells_is_refused() {
    let wide = Demand {
        chunk: 8192,
        ..demand()
    };

    assert_eq!(
        wide.check(262_144, Resident::Native, FreeMemory::Unknown),
        Err(BudgetError::MaskTooLarge {
            chunk: 8192,
            n_ctx: 262_144
        })
    );
    assert!(
        wide.check(262_144 - 256, Resident::Native, FreeMemory::Unknown)
            .is_ok()
    );
    let longest = wide.n_ctx_fitting(1 << 20, Resident::Native, FreeMemory::Unknown);
    assert_eq!(longest, Some(262_144 - 256));
}

#[test]
fn overflow_is_too_large_and_not_small() {
    let huge = Demand {
        weights_native_bytes: u64::MAX - 5,
        ..demand()
    };

    assert_eq!(
        huge.at(usize::MAX, Resident::Native).total_bytes(),
        u64::MAX
    );
    let error = fits(&huge.at(256, Resident::Native), FreeMemory::Known(1 << 40));
    assert!(error.is_err());
}

#[test]
fn bytes_are_shown_in_the_largest_whole_unit() {
    let shown = |bytes| Bytes(bytes).to_string();

    assert_eq!(shown(0), "0 B");
    assert_eq!(shown(1023), "1023 B");
    assert_eq!(shown(1024), "1.00 KiB");
    assert_eq!(shown(3 << 19), "1.50 MiB");
    assert_eq!(shown((1 << 30) - 1), "1023.99 MiB");
    assert_eq!(shown(u64::MAX), "17179869183.99 GiB");
}

#[test]
fn the_table_has_every_class_and_the_total() {
    let table = demand().at(1024, Resident::Bf16).to_string();

    assert_eq!(table.lines().count(), 8);
    assert!(
        table.starts_with("weights, bf16      3.90 KiB\n"),
        "{table}"
    );
    assert!(table.ends_with("total            351.58 KiB"), "{table}");
}

proptest! {
    #[test]
    fn the_longest_context_fits_and_the_next_does_not(
        free in 0_u64..40_000_000, n_ctx_max in 0_usize..40_000,
    ) {
        let free = FreeMemory::Known(free);
        let is_refused = |n| demand().check(n, Resident::Native, free).is_err();

        match demand().n_ctx_fitting(n_ctx_max, Resident::Native, free) {
            None => prop_assert!(n_ctx_max < KV_PAD || is_refused(KV_PAD)),
            Some(n_ctx) => {
                prop_assert!(n_ctx % KV_PAD == 0 && n_ctx <= n_ctx_max && !is_refused(n_ctx));
                prop_assert!(n_ctx + KV_PAD > n_ctx_max || is_refused(n_ctx + KV_PAD));
            }
        }
    }

    #[test]
    fn need_grows_with_the_context(a in 1_usize..1_000_000, b in 1_usize..1_000_000) {
        let need = |n| demand().at(n, Resident::Native).total_bytes();

        prop_assert!(need(a.min(b)) <= need(a.max(b)));
    }
}

#[test]
fn growth_counts_both_caches_at_once_and_what_comes_after() {
    let growth = Growth {
        n_ctx_rows: 512,
        kv_held_bytes: 100,
        kv_bytes: 200,
        more_bytes: 50,
    };
    assert_eq!(growth.needed_bytes(), 200, "the copy is the peak");
    let masks = Growth {
        more_bytes: 500,
        ..growth
    };
    assert_eq!(masks.needed_bytes(), 600, "the old caches are gone by then");

    assert_eq!(growth.check(FreeMemory::Known(200)), Ok(()));
    assert_eq!(growth.check(FreeMemory::Unknown), Ok(()));
    let refused = growth.check(FreeMemory::Known(199));
    let expected = BudgetError::GrowthDoesNotFit {
        n_ctx: 512,
        needed_bytes: 200,
        held_bytes: 100,
        free_bytes: 199,
    };
    assert_eq!(refused, Err(expected));
    assert_eq!(
        expected.to_string(),
        "growing the K/V caches to 512 tokens needs 200 B beside the 100 B that they hold until \
         the copy, 199 B are free (1 B short)"
    );
}

#[test]
fn logits_of_all_rows_are_counted_on_the_host() {
    // 1000 rows of a vocabulary of 262,144 take 1,048,576,000 bytes, a run of 256 rows 268,435,456.
    let needed = 1_048_576_000 + 268_435_456;
    let check = |free| logits_fit(1000, 256, 262_144, FreeMemory::Known(free));
    assert_eq!(check(needed), Ok(()));
    assert_eq!(
        check(needed - 1),
        Err(BudgetError::LogitsDoNotFit {
            n_rows: 1000,
            needed_bytes: needed,
            free_bytes: needed - 1,
        })
    );
    assert_eq!(
        logits_fit(usize::MAX, 1, 262_144, FreeMemory::Unknown),
        Ok(())
    );
    assert!(logits_fit(usize::MAX, 1, 262_144, FreeMemory::Known(u64::MAX - 1)).is_err());
}
