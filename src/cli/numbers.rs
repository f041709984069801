//! Numbers as typed: what was expected is said in words.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;

/// Parses a whole number from 0 on.
pub(super) fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: ParseIntError| {
        if *error.kind() == IntErrorKind::PosOverflow {
            format!("expected at most {} bits", 8 * size_of::<T>())
        } else {
            "expected a whole number from 0 on".to_owned()
        }
    })
}

/// Parses a count that must not be zero.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    match whole(text) {
        Ok(n) if n > 0 => Ok(n),
        Err(error) if text.starts_with(|c: char| c.is_ascii_digit()) => Err(error),
        _ => Err("expected a whole number from 1 on".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_numbers_are_refused_with_what_was_expected() {
        for (text, message) in [
            ("-1", "from 0 on"),
            ("x", "from 0 on"),
            ("1.5", "from 0 on"),
            ("", "from 0 on"),
            ("4294967296", "32 bits"),
        ] {
            let error = whole::<u32>(text).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
        assert_eq!(whole::<u32>("4294967295"), Ok(u32::MAX));
    }

    #[test]
    fn zero_and_less_are_too_few() {
        assert_eq!(at_least_one("1"), Ok(1));
        for text in ["0", "-1", "x"] {
            let error = at_least_one(text).unwrap_err();
            assert!(error.contains("from 1 on"), "{text}: {error}");
        }
    }
}
