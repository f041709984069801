//! Token ids in text form: whitespace-separated decimal numbers; and lists of prompt rows.

use std::str::FromStr;

/// Most bytes of a wrong word that an error repeats.
const SHOWN_BYTES: usize = 24;

/// Why a text is no list of token ids.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdsError {
    /// Something else than a decimal number up to 2^32 - 1.
    #[error("expected a token id, found {found:?} in line {line}, column {column}")]
    NotAnId {
        /// The word, shortened.
        found: String,
        /// Line, from 1.
        line: usize,
        /// Byte column, from 1.
        column: usize,
    },
    /// The id does not exist in the model.
    #[error("expected token ids below {n_vocab}, found {id} at index {index}")]
    OutOfVocabulary {
        /// The id.
        id: u32,
        /// Its index in the list, from 0.
        index: usize,
        /// Entries of the vocabulary.
        n_vocab: usize,
    },
    /// No id at all.
    #[error("expected at least one token id, found none")]
    Empty,
}

/// Parses whitespace-separated token ids.
pub fn parse_ids(bytes: &[u8]) -> Result<Vec<u32>, IdsError> {
    let mut ids = Vec::new();
    for (i, line) in bytes.split(|&b| b == b'\n').enumerate() {
        let mut rest = line;
        while let Some(start) = rest.iter().position(|b| !b.is_ascii_whitespace()) {
            rest = &rest[start..];
            let end = rest
                .iter()
                .position(u8::is_ascii_whitespace)
                .unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let column = line.len() - rest.len() + 1;
            ids.push(parse_id(word).ok_or_else(|| IdsError::NotAnId {
                found: String::from_utf8_lossy(&word[..word.len().min(SHOWN_BYTES)]).into_owned(),
                line: i + 1,
                column,
            })?);
            rest = after;
        }
    }
    if ids.is_empty() {
        Err(IdsError::Empty)
    } else {
        Ok(ids)
    }
}

/// Digits only: no sign, which `u32::from_str` would take.
fn parse_id(word: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(word).ok()?;
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// Refuses an id that the model does not have.
pub fn check_ids(ids: &[u32], n_vocab: usize) -> Result<(), IdsError> {
    let is_outside = |&id: &u32| usize::try_from(id).is_ok_and(|id| id >= n_vocab);
    match ids.iter().position(is_outside) {
        Some(index) => Err(IdsError::OutOfVocabulary {
            id: ids[index],
            index,
            n_vocab,
        }),
        None => Ok(()),
    }
}

/// Prompt rows whose logits are wanted, as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsArg {
    /// The last row.
    Last,
    /// Every row.
    All,
    /// These rows, in this order.
    List(Vec<usize>),
}

/// Most rows that a range of a list may stand for, so that a slip cannot fill the memory.
const MAX_LISTED_ROWS: usize = 1 << 20;

impl FromStr for RowsArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "last" => return Ok(Self::Last),
            "all" => return Ok(Self::All),
            _ => {}
        }
        let number = |word: &str| {
            let is_plain = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
            let row = is_plain.then(|| word.parse::<usize>().ok()).flatten();
            row.ok_or_else(|| {
                format!("expected last, all or a list such as 0,7,20-29, found {word:?}")
            })
        };
        let mut rows = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if last < first {
                return Err(format!("range {part} runs backwards"));
            }
            if last - first >= MAX_LISTED_ROWS - rows.len().min(MAX_LISTED_ROWS) {
                return Err(format!("more than {MAX_LISTED_ROWS} rows; use all"));
            }
            rows.extend(first..=last);
        }
        Ok(Self::List(rows))
    }
}

impl RowsArg {
    /// The rows of a prompt of `n_prompt` tokens, in the order asked for; the first row outside
    /// the prompt is the error.
    pub fn resolve(&self, n_prompt: usize) -> Result<Vec<usize>, usize> {
        match self {
            Self::Last => Ok(n_prompt.checked_sub(1).into_iter().collect()),
            Self::All => Ok((0..n_prompt).collect()),
            Self::List(rows) => match rows.iter().find(|&&row| row >= n_prompt) {
                Some(&row) => Err(row),
                None => Ok(rows.clone()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn any_ascii_whitespace_separates() {
        assert_eq!(
            parse_ids(b" 2\t7\r\n\n106 4294967295\n").unwrap(),
            [2, 7, 106, u32::MAX]
        );
    }

    #[test]
    fn wrong_word_is_named_with_line_and_column() {
        let error = parse_ids(b"1 2\n3 x4 5").unwrap_err();

        let found = "x4".to_owned();
        assert_eq!(
            error,
            IdsError::NotAnId {
                found,
                line: 2,
                column: 3
            }
        );
    }

    #[test]
    fn signs_commas_fractions_and_too_large_ids_are_refused() {
        for text in [
            "-1",
            "+1",
            "1,2",
            "1.0",
            "0x10",
            "4294967296",
            "\u{663}",
            "\0",
        ] {
            let result = parse_ids(text.as_bytes());
            assert!(
                matches!(result, Err(IdsError::NotAnId { .. })),
                "{text:?}: {result:?}"
            );
        }
    }

    #[test]
    fn binary_file_is_refused_with_a_short_message() {
        let error = parse_ids(&[0xff; 4096]).unwrap_err().to_string();

        assert!(error.len() < 400, "{error}");
    }

    #[test]
    fn no_id_is_an_error() {
        assert_eq!(parse_ids(b" \n"), Err(IdsError::Empty));
    }

    #[test]
    fn id_outside_the_vocabulary_is_named() {
        assert_eq!(check_ids(&[0, 9], 10), Ok(()));
        let error = IdsError::OutOfVocabulary {
            id: 10,
            index: 1,
            n_vocab: 10,
        };
        assert_eq!(check_ids(&[0, 10], 10), Err(error));
    }

    #[test]
    fn rows_are_last_all_or_a_list_in_the_order_asked_for() {
        assert_eq!("last".parse(), Ok(RowsArg::Last));
        assert_eq!("all".parse(), Ok(RowsArg::All));
        assert_eq!("9,0,3-5".parse(), Ok(RowsArg::List(vec![9, 0, 3, 4, 5])));
        for text in [
            "",
            "5-3",
            "1,,2",
            "-1",
            "+1",
            "first",
            "1-",
            "0-99999999999",
        ] {
            assert!(text.parse::<RowsArg>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn rows_resolve_inside_the_prompt_only() {
        assert_eq!(RowsArg::Last.resolve(5), Ok(vec![4]));
        assert_eq!(RowsArg::All.resolve(3), Ok(vec![0, 1, 2]));
        assert_eq!(RowsArg::List(vec![4, 4, 0]).resolve(5), Ok(vec![4, 4, 0]));
        assert_eq!(RowsArg::List(vec![0, 5]).resolve(5), Err(5));
    }

    proptest! {
        #[test]
        fn printed_ids_parse_to_themselves(ids in prop::collection::vec(any::<u32>(), 1..50)) {
            let text: Vec<String> = ids.iter().map(u32::to_string).collect();

            prop_assert_eq!(parse_ids(text.join("\n").as_bytes()).unwrap(), ids);
        }

        #[test]
        fn any_bytes_give_ids_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ids_or_error = parse_ids(&bytes);
        }
    }
}
