use super::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    n_cols: usize,
    positions: Vec<i32>,
    end: usize,
    ring_rows: Option<usize>,
    n_swa: Option<usize>,
}

impl Case {
    fn filled(&self) -> Result<Vec<u16>, MaskError> {
        // A pattern that is neither value: a cell left alone would show.
        let mut mask = vec![0x7E00; self.n_cols * self.positions.len()];
        fill(
            &mut mask,
            self.n_cols,
            &self.positions,
            self.end,
            self.ring_rows,
            self.n_swa,
        )?;
        Ok(mask)
    }

    fn scalar(&self) -> Vec<u16> {
        let held = |col| match self.ring_rows {
            Some(rows) => ring::slot_position(col, self.end, rows),
            None => (col < self.end).then_some(col),
        };
        let cell = |p, col| visible(p, held(col), self.n_swa);
        (self.positions.iter())
            .map(|&p| usize::try_from(p).expect("not negative"))
            .flat_map(|p| (0..self.n_cols).map(move |col| (p, col)))
            .map(|(p, col)| if cell(p, col) { VISIBLE } else { HIDDEN })
            .collect()
    }
}

fn positions(n_past: usize, n_tokens: usize, n_padding: usize) -> Vec<i32> {
    let last = n_past + n_tokens - 1;
    (n_past..=last)
        .chain(std::iter::repeat_n(last, n_padding))
        .map(|p| i32::try_from(p).expect("small"))
        .collect()
}

prop_compose! {
    fn ring_cases()(
        n_swa in 1_usize..20, chunk in 1_usize..24, slack in 0_usize..9, behind in 0_usize..5,
        n_past in 0_usize..120, n_tokens in 1_usize..24, n_padding in 0_usize..9,
    ) -> Case {
        let rows = n_swa - 1 + chunk + slack;
        let n_tokens = n_tokens.min(chunk);
        Case {
            n_cols: rows + behind,
            positions: positions(n_past, n_tokens, n_padding),
            end: n_past + n_tokens,
            ring_rows: Some(rows),
            n_swa: Some(n_swa),
        }
    }
}

prop_compose! {
    fn linear_cases()(
        n_swa in proptest::option::of(1_usize..40), behind in 0_usize..9,
        n_past in 0_usize..120, n_tokens in 1_usize..24, n_padding in 0_usize..9,
    ) -> Case {
        Case {
            n_cols: n_past + n_tokens + behind,
            positions: positions(n_past, n_tokens, n_padding),
            end: n_past + n_tokens,
            ring_rows: None,
            n_swa,
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    prop_oneof![ring_cases(), linear_cases()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn runs_equal_the_scalar_specification(case in cases()) {
        prop_assert_eq!(case.filled()?, case.scalar());
    }

    #[test]
    fn no_row_is_ever_fully_hidden(case in cases()) {
        let mask = case.filled()?;

        for row in mask.chunks_exact(case.n_cols) {
            prop_assert!(row.contains(&VISIBLE));
        }
    }

    #[test]
    fn every_row_sees_exactly_its_window(case in cases()) {
        let mask = case.filled()?;

        for (row, &p) in mask.chunks_exact(case.n_cols).zip(&case.positions) {
            let n_past_and_self = usize::try_from(p).expect("not negative") + 1;
            let expected = n_past_and_self.min(case.n_swa.unwrap_or(usize::MAX));
            prop_assert_eq!(row.iter().filter(|&&c| c == VISIBLE).count(), expected);
        }
    }
}

#[test]
fn all_small_rings_equal_the_scalar_specification() {
    for n_past in 0..100 {
        for n_tokens in 1..=17 {
            let case = Case {
                n_cols: 24,
                positions: positions(n_past, n_tokens, 3),
                end: n_past + n_tokens,
                ring_rows: Some(24),
                n_swa: Some(8),
            };
            assert_eq!(case.filled().unwrap(), case.scalar(), "{case:?}");
        }
    }
}

#[test]
fn a_short_session_may_read_a_part_of_the_ring() {
    let case = Case {
        n_cols: 16,
        positions: positions(4, 6, 2),
        end: 10,
        ring_rows: Some(24),
        n_swa: Some(8),
    };

    assert_eq!(case.filled().unwrap(), case.scalar());
}

#[test]
fn a_ring_that_lost_keys_is_refused() {
    let mut mask = [0; 8 * 4];

    let error = fill(&mut mask, 8, &[10, 11, 12, 13], 14, Some(8), Some(8)).unwrap_err();

    assert_eq!(
        error,
        MaskError::KeysOverwritten {
            row: 0,
            first_needed: 3,
            first_kept: 6
        }
    );
}

#[test]
fn a_full_window_over_a_wrapped_ring_is_refused() {
    let mut mask = [0; 8];

    let error = fill(&mut mask, 8, &[13], 14, Some(8), None).unwrap_err();

    assert_eq!(
        error,
        MaskError::KeysOverwritten {
            row: 0,
            first_needed: 0,
            first_kept: 6
        }
    );
}

#[test]
fn sizes_that_disagree_are_named() {
    let refused = |n_cells: usize, n_cols, positions: &[i32], end, n_swa| {
        fill(&mut vec![0; n_cells], n_cols, positions, end, None, n_swa).unwrap_err()
    };

    assert_eq!(
        refused(7, 4, &[0, 1], 2, None),
        MaskError::WrongLength {
            n_cells: 7,
            n_rows: 2,
            n_cols: 4
        }
    );
    assert_eq!(
        refused(8, 4, &[3, 4], 5, None),
        MaskError::TooNarrow {
            n_cols: 4,
            n_keys: 5
        }
    );
    assert_eq!(
        refused(8, 4, &[0, 2], 2, None),
        MaskError::PositionOutOfRange {
            row: 1,
            position: 2,
            end: 2
        }
    );
    assert_eq!(
        refused(8, 4, &[-1, 0], 2, None),
        MaskError::PositionOutOfRange {
            row: 0,
            position: -1,
            end: 2
        }
    );
    assert_eq!(refused(8, 4, &[0, 1], 2, Some(0)), MaskError::EmptyWindow);
}

#[test]
fn a_mask_of_two_to_the_31_cells_is_refused() {
    let at_limit = MaskError::TooLarge {
        n_rows: 8192,
        n_cols: 262_144,
    };

    assert_eq!(checked_cells(8192, 262_144), Err(at_limit));
    assert_eq!(checked_cells(8191, 262_144), Ok(8191 * 262_144));
    assert!(checked_cells(usize::MAX, 2).is_err());
}
