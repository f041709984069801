use super::*;
use crate::engine::mask::visible;
use proptest::prelude::*;

/// The ring as memory: what each slot really holds, updated write by write.
struct Memory {
    slots: Vec<Option<usize>>,
    end: usize,
    end_max: usize,
}

impl Memory {
    fn new(rows: usize) -> Self {
        Self {
            slots: vec![None; rows + 1],
            end: 0,
            end_max: 0,
        }
    }

    fn write(&mut self, n_tokens: usize, n_padding: usize) {
        let rows = self.slots.len() - 1;
        let mut index = vec![-7; n_tokens + n_padding];
        fill_write_rows(&mut index, self.end, n_tokens, rows);
        for (i, row) in index.into_iter().enumerate() {
            let row = usize::try_from(row).expect("never negative");
            self.slots[row] = (i < n_tokens).then_some(self.end + i);
        }
        self.end += n_tokens;
        self.end_max = self.end_max.max(self.end);
    }
}

proptest! {
    #[test]
    fn slot_position_tells_what_the_memory_holds(
        rows in 1_usize..40, sizes in proptest::collection::vec((1_usize..9, 0_usize..5), 0..20),
    ) {
        let mut memory = Memory::new(rows);
        for (n_tokens, n_padding) in sizes {
            memory.write(n_tokens.min(rows), n_padding);
        }

        for (s, held) in memory.slots.iter().take(rows).enumerate() {
            prop_assert_eq!(slot_position(s, memory.end, rows), *held);
            prop_assert!(held.is_none_or(|p| p >= first_kept(memory.end, rows)));
        }
        prop_assert_eq!(slot_position(rows, memory.end, rows), None, "scratch is never read");
    }

    #[test]
    fn a_chunk_finds_every_key_of_its_windows(
        n_swa in 1_usize..20, chunk in 1_usize..20, extra in 0_usize..5,
        sizes in proptest::collection::vec((1_usize..20, 0_usize..5), 1..20),
    ) {
        let rows = n_swa - 1 + chunk + extra;
        check_rows(rows, n_swa, chunk, usize::MAX)?;
        let mut memory = Memory::new(rows);

        for (n_tokens, n_padding) in sizes {
            let n_past = memory.end;
            memory.write(n_tokens.min(chunk), n_padding);
            for p in n_past..memory.end {
                for key in first_needed(p, n_swa)..=p {
                    prop_assert_eq!(memory.slots[slot(key, rows)], Some(key));
                }
            }
        }
    }

    #[test]
    fn truncation_is_allowed_exactly_while_the_keys_are_there(
        n_swa in 1_usize..12, chunk in 1_usize..12,
        steps in proptest::collection::vec((1_usize..12, 0_usize..200), 1..25),
    ) {
        let rows = n_swa - 1 + chunk;
        let mut memory = Memory::new(rows);
        for (n_tokens, new_end) in steps {
            memory.write(n_tokens.min(chunk), 0);
            let new_end = new_end % (memory.end + 1);
            let window = first_needed(new_end, n_swa)..new_end;
            let is_whole = window.clone().all(|key| memory.slots[slot(key, rows)] == Some(key));

            let allowed = can_truncate(memory.end_max, new_end, rows, n_swa);

            prop_assert!(allowed.is_err() || is_whole, "{} of {}", new_end, memory.end_max);
            prop_assert!(memory.end < memory.end_max || allowed.is_ok() == is_whole);
            if allowed.is_ok() {
                memory.end = new_end;
            }
        }
    }

    #[test]
    fn after_a_rollback_no_visible_slot_holds_a_dropped_token(
        n_swa in 1_usize..12, chunk in 1_usize..12,
        steps in proptest::collection::vec((1_usize..12, 0_usize..12), 1..40),
    ) {
        let rows = n_swa - 1 + chunk;
        let mut memory = Memory::new(rows);
        for (n_tokens, n_dropped) in steps {
            let n_past = memory.end;
            memory.write(n_tokens.min(chunk), 0);
            for p in n_past..memory.end {
                for s in 0..rows {
                    let position = slot_position(s, memory.end, rows);
                    if visible(p, position, Some(n_swa)) {
                        prop_assert_eq!(memory.slots[s], position);
                    }
                }
            }
            let new_end = memory.end.saturating_sub(n_dropped);
            if can_truncate(memory.end_max, new_end, rows, n_swa).is_ok() {
                memory.end = new_end;
            }
        }
    }

    #[test]
    fn a_whole_chunk_can_always_be_rolled_back(
        n_swa in 1_usize..2000, chunk in 1_usize..4000, end in 0_usize..100_000,
    ) {
        let rows = ring_rows(n_swa, chunk);

        prop_assert!(rows >= n_swa - 1 + chunk && rows.is_multiple_of(256));
        prop_assert!(can_truncate(end, end.saturating_sub(chunk), rows, n_swa).is_ok());
    }
}

#[test]
fn rollback_past_the_ring_names_the_positions() {
    let error = can_truncate(1000, 900, 128, 64).unwrap_err();

    assert_eq!(
        error,
        RingError::KeysOverwritten {
            new_end: 900,
            n_swa: 64,
            first_needed: 837,
            first_kept: 872,
            rows: 128
        }
    );
    assert_eq!(can_truncate(1000, 935, 128, 64), Ok(()));
    assert_eq!(can_truncate(1000, 0, 128, 64), Ok(()));
    assert_eq!(
        can_truncate(10, 11, 128, 64),
        Err(RingError::BeyondEnd {
            new_end: 11,
            end: 10
        })
    );
}

#[test]
fn a_ring_below_window_and_chunk_is_refused() {
    assert!(check_rows(127, 64, 64, 10_000).is_ok());
    assert_eq!(
        check_rows(126, 64, 64, 10_000),
        Err(RingError::TooSmall {
            rows: 126,
            n_swa: 64,
            chunk: 64,
            expected: 127
        })
    );
    assert!(
        check_rows(100, 64, 64, 100).is_ok(),
        "a session of 100 tokens never wraps"
    );
}

#[test]
fn padding_rows_write_to_the_scratch_row_in_both_caches() {
    let mut index = [-1; 5];

    fill_write_rows(&mut index, 6, 3, 8);
    assert_eq!(index, [6, 7, 0, 8, 8]);

    fill_write_rows_linear(&mut index, 6, 3, 256);
    assert_eq!(index, [6, 7, 8, 256, 256]);
}

proptest! {
    #[test]
    fn runs_are_the_slots_of_the_positions_in_order(start in 0usize..5000, n in 0usize..600, rows in 1usize..600) {
        let n = n.min(rows);
        let slots: Vec<usize> = runs(start..start + n, rows).into_iter().flatten().collect();
        let expected: Vec<usize> = (start..start + n).map(|pos| slot(pos, rows)).collect();
        prop_assert_eq!(slots, expected);
    }
}
