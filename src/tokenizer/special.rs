//! Finds special tokens in a text.

use std::path::Path;

use aho_corasick::{AhoCorasick, MatchKind};

use super::chars;
use super::error::TokenizerError;
use super::vocab::Vocab;

/// Part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'a> {
    /// Bytes to encode.
    Text(&'a [u8]),
    /// A token that stood there by name.
    Token(u32),
}

/// One set of special tokens.
#[derive(Debug)]
struct Set {
    ids: Vec<u32>,
    longest: AhoCorasick,
}

/// The special tokens of a vocabulary, in two classes.
///
/// *Markers* are control and unknown tokens, tokens that end a reply, and user-defined tokens
/// in the form of a Gemma-4 marker (`<|name>` or `name|>`, such as those around tool calls):
/// they are found only when asked for, so that user text cannot open a turn or call a tool.
/// llama.cpp finds the user-defined ones of these always. The other user-defined tokens (HTML
/// tags, runs of white space) are ordinary text and always found, as there.
#[derive(Debug)]
pub(crate) struct Specials {
    ordinary: Set,
    all: Set,
    /// Every occurrence of a marker, also inside another.
    markers: AhoCorasick,
}

impl Specials {
    pub(crate) fn new(vocab: &Vocab, path: &Path) -> Result<Self, TokenizerError> {
        let (mut ordinary, mut markers) = (Vec::new(), Vec::new());
        for id in vocab.ids() {
            let text = vocab.text(id).unwrap_or(&[]);
            let is_user_defined = vocab.is_user_defined(id);
            if vocab.is_control(id) || is_user_defined && has_marker_form(text) {
                // A marker of one character could not be told apart from text.
                if chars::first_char(text).len() < text.len() {
                    markers.push(id);
                }
            } else if is_user_defined {
                ordinary.push(id);
            }
        }
        let all = ordinary.iter().chain(&markers).copied().collect();
        let fail = |error: aho_corasick::BuildError| TokenizerError::SpecialTokens {
            path: path.to_path_buf(),
            reason: error.to_string(),
        };
        let texts = |ids: &[u32]| -> Vec<Vec<u8>> {
            ids.iter()
                .filter_map(|&id| vocab.text(id))
                .map(<[u8]>::to_vec)
                .collect()
        };
        let longest = |ids: Vec<u32>| -> Result<Set, TokenizerError> {
            let longest = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(texts(&ids))
                .map_err(fail)?;
            Ok(Set { ids, longest })
        };
        Ok(Self {
            markers: AhoCorasick::new(texts(&markers)).map_err(fail)?,
            ordinary: longest(ordinary)?,
            all: longest(all)?,
        })
    }

    /// Cuts a text at special tokens: the leftmost first, of those the longest.
    pub(crate) fn split<'a>(
        &'a self,
        text: &'a [u8],
        parse_special: bool,
    ) -> impl Iterator<Item = Fragment<'a>> {
        let set = if parse_special {
            &self.all
        } else {
            &self.ordinary
        };
        let mut start = 0;
        let mut matches = set.longest.find_iter(text);
        let mut pending = None;
        let mut is_done = false;
        std::iter::from_fn(move || {
            if let Some(token) = pending.take() {
                return Some(token);
            }
            while !is_done {
                let (before, token) = match matches.next() {
                    Some(found) => {
                        let before = text.get(start..found.start());
                        start = found.end();
                        let id = set.ids.get(found.pattern().as_usize());
                        (before, id.map(|&id| Fragment::Token(id)))
                    }
                    None => {
                        is_done = true;
                        (text.get(start..), None)
                    }
                };
                match before.filter(|before| !before.is_empty()) {
                    Some(before) => {
                        pending = token;
                        return Some(Fragment::Text(before));
                    }
                    None if token.is_some() => return token,
                    None => {}
                }
            }
            None
        })
    }

    /// Puts `guard` behind the first character of every marker in `text`, so that it is none.
    pub(crate) fn guard(&self, text: &str, guard: char) -> String {
        let bytes = text.as_bytes();
        let mut cuts: Vec<usize> = self
            .markers
            .find_overlapping_iter(text)
            .filter_map(|found| bytes.get(found.start()..))
            .map(|rest| bytes.len() - rest.len() + chars::first_char(rest).len())
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut guarded = String::with_capacity(text.len() + cuts.len() * guard.len_utf8());
        let mut start = 0;
        for cut in cuts {
            guarded.push_str(text.get(start..cut).unwrap_or_default());
            guarded.push(guard);
            start = cut;
        }
        guarded.push_str(text.get(start..).unwrap_or_default());
        guarded
    }
}

/// Whether a text looks like a Gemma-4 marker.
fn has_marker_form(text: &[u8]) -> bool {
    text.starts_with(b"<|") || text.ends_with(b"|>")
}
