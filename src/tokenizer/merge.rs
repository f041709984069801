//! The two merge schemes, over one heap: pairs by rank (`gemma4`) or by score (`llama`).
//!
//! A text is first cut where no rule can join the two characters that meet; that changes no
//! result, and it keeps the heap as small as a word in ordinary text. One piece of n characters
//! costs O(n log n) time and about 40 bytes per character.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::path::Path;

use foldhash::fast::RandomState;

use super::chars;
use super::error::TokenizerError;
use super::vocab::{Vocab, to_index};

const SCORES: &str = "tokenizer.ggml.scores";

/// An id that no text has.
const NONE: u32 = u32::MAX;

/// What joins two neighbours, and in which order.
#[derive(Debug)]
pub(crate) enum Rules {
    /// Byte-pair merges by rank. Parts that are no tokens have ids from `n_vocab` on.
    Ranks {
        pairs: HashMap<(u32, u32), Merge, RandomState>,
        extra_ids: HashMap<Box<[u8]>, u32, RandomState>,
    },
    /// SentencePiece-style: any two neighbours that make a token, the highest score first.
    Scores {
        /// Per token; lower comes first.
        keys: Vec<u32>,
    },
}

/// What two neighbours become.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    /// Lower comes first.
    key: u32,
    product: u32,
}

/// Pairs of characters, packed, that some rule joins.
type Joins = HashSet<(u32, u32), RandomState>;

/// The merge scheme of a vocabulary.
#[derive(Debug)]
pub(crate) struct Merger {
    rules: Rules,
    joins: Joins,
}

impl Merger {
    /// Reads merge rules, best first.
    ///
    /// A rule counts only if its product is a token that text may become: otherwise the merge
    /// would end in bytes. The first of two equal rules wins.
    ///
    /// # Source
    /// llama.cpp `llama-vocab.cpp`, model `gemma4`: the rule is cut at the first space after its
    /// first byte.
    pub(crate) fn from_merges(
        merges: &[String],
        vocab: &Vocab,
        path: &Path,
    ) -> Result<Self, TokenizerError> {
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), RandomState::default());
        let mut extra_ids = HashMap::with_hasher(RandomState::default());
        let mut next_extra = u32::try_from(vocab.len()).unwrap_or(NONE);
        let mut intern = |part: &[u8]| match vocab.id(part) {
            Some(id) => id,
            None => *extra_ids.entry(part.into()).or_insert_with(|| {
                let id = next_extra;
                next_extra = next_extra.saturating_add(1);
                id
            }),
        };
        let mut joins = Joins::default();
        let mut product_text = Vec::new();
        for (key, rule) in (0u32..).zip(merges) {
            let Some((left, right)) = split_rule(rule.as_bytes()) else {
                return Err(TokenizerError::Merge {
                    path: path.to_path_buf(),
                    index: to_index(key),
                    found: rule.clone(),
                });
            };
            product_text.clear();
            product_text.extend_from_slice(left);
            product_text.extend_from_slice(right);
            let Some(product) = vocab.text_id(&product_text) else {
                continue;
            };
            joins.insert((last_char(left), chars::pack(chars::first_char(right))));
            pairs
                .entry((intern(left), intern(right)))
                .or_insert(Merge { key, product });
        }
        let rules = Rules::Ranks { pairs, extra_ids };
        Ok(Self { rules, joins })
    }

    /// Takes one score per token.
    pub(crate) fn from_scores(
        scores: &[f32],
        vocab: &Vocab,
        path: &Path,
    ) -> Result<Self, TokenizerError> {
        if scores.len() < vocab.len() {
            return Err(TokenizerError::ArrayLength {
                path: path.to_path_buf(),
                key: SCORES,
                expected: vocab.len(),
                found: scores.len(),
            });
        }
        if let Some(index) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::NanScore {
                path: path.to_path_buf(),
                index,
            });
        }
        let mut joins = Joins::default();
        for id in vocab.ids().filter(|&id| vocab.is_text(id)) {
            let mut rest = vocab.text(id).unwrap_or(&[]);
            let mut left = None;
            while !rest.is_empty() {
                let character = chars::first_char(rest);
                let right = chars::pack(character);
                if let Some(left) = left {
                    joins.insert((left, right));
                }
                left = Some(right);
                rest = rest.get(character.len()..).unwrap_or(&[]);
            }
        }
        let keys = scores.iter().map(|&score| score_key(score)).collect();
        let rules = Rules::Scores { keys };
        Ok(Self { rules, joins })
    }

    /// Whether runs of newlines stand alone and are taken whole where they are a token.
    fn splits_newlines(&self) -> bool {
        matches!(self.rules, Rules::Ranks { .. })
    }

    fn symbol_id(&self, vocab: &Vocab, character: &[u8]) -> u32 {
        let id = vocab.id(character).or_else(|| match &self.rules {
            Rules::Ranks { extra_ids, .. } => extra_ids.get(character).copied(),
            Rules::Scores { .. } => None,
        });
        id.unwrap_or(NONE)
    }
}

/// Cuts a rule into its parts.
fn split_rule(rule: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = 1 + rule.get(1..)?.iter().position(|&b| b == b' ')?;
    let left = rule.get(..space)?;
    let right = rule.get(space + 1..)?;
    (!right.is_empty()).then_some((left, right))
}

/// The last character, packed; characters are counted from the front as in a text.
fn last_char(text: &[u8]) -> u32 {
    let mut rest = text;
    loop {
        let character = chars::first_char(rest);
        rest = rest.get(character.len()..).unwrap_or(&[]);
        if rest.is_empty() {
            return chars::pack(character);
        }
    }
}

/// Maps a score to a number that is lower for higher scores; -0 equals 0.
fn score_key(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    !ascending
}

/// One part of a piece; parts that were merged away have no bytes.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    n_bytes: u32,
    prev: u32,
    next: u32,
    id: u32,
}

/// A possible merge: ordered by key, then from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    key: u32,
    left: u32,
    right: u32,
    product: u32,
    n_bytes: u32,
}

/// Encodes plain text; keeps its buffers from piece to piece.
#[derive(Debug)]
pub(crate) struct Encoder<'t> {
    vocab: &'t Vocab,
    merger: &'t Merger,
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl<'t> Encoder<'t> {
    pub(crate) fn new(vocab: &'t Vocab, merger: &'t Merger) -> Self {
        Self {
            vocab,
            merger,
            symbols: Vec::new(),
            heap: BinaryHeap::new(),
        }
    }

    /// Appends the ids of `text`, in which spaces are escaped already.
    pub(crate) fn encode(&mut self, text: &[u8], ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let limit = to_index(NONE - 1);
        if text.len() > limit {
            return Err(TokenizerError::TextTooLong {
                limit,
                found: text.len(),
            });
        }
        let mut start = 0;
        let mut end = 0;
        let mut left: Option<&[u8]> = None;
        while let Some(rest) = text.get(end..).filter(|rest| !rest.is_empty()) {
            let right = chars::first_char(rest);
            if left.is_some_and(|left| self.is_cut(left, right)) {
                self.encode_piece(text.get(start..end).unwrap_or(&[]), ids)?;
                start = end;
            }
            end += right.len();
            left = Some(right);
        }
        self.encode_piece(text.get(start..).unwrap_or(&[]), ids)
    }

    /// Whether no rule can join two characters that meet.
    fn is_cut(&self, left: &[u8], right: &[u8]) -> bool {
        if self.merger.splits_newlines() && (left == b"\n" || right == b"\n") {
            return left != right;
        }
        !self
            .merger
            .joins
            .contains(&(chars::pack(left), chars::pack(right)))
    }

    pub(super) fn encode_piece(
        &mut self,
        piece: &[u8],
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        if self.merger.splits_newlines()
            && piece.first() == Some(&b'\n')
            && let Some(id) = self.vocab.text_id(piece)
        {
            ids.push(id);
            return Ok(());
        }
        self.split(piece);
        for right in 1..self.symbols.len() {
            self.offer(piece, index_u32(right - 1), index_u32(right));
        }
        while let Some(Reverse(candidate)) = self.heap.pop() {
            self.apply(piece, candidate);
        }
        for i in 0..self.symbols.len() {
            if let Some(&symbol) = self.symbols.get(i)
                && symbol.n_bytes > 0
            {
                self.emit(piece, symbol, ids)?;
            }
        }
        Ok(())
    }

    /// Makes one symbol per character.
    fn split(&mut self, piece: &[u8]) {
        self.symbols.clear();
        self.heap.clear();
        let mut start = 0;
        while let Some(rest) = piece.get(start..).filter(|rest| !rest.is_empty()) {
            let character = chars::first_char(rest);
            let i = index_u32(self.symbols.len());
            self.symbols.push(Symbol {
                start: index_u32(start),
                n_bytes: index_u32(character.len()),
                prev: i.wrapping_sub(1),
                next: i + 1,
                id: self.merger.symbol_id(self.vocab, character),
            });
            start += character.len();
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
    }

    fn symbol(&self, i: u32) -> Option<Symbol> {
        self.symbols.get(to_index(i)).copied()
    }

    /// Puts a pair of neighbours on the heap, if a rule joins it.
    fn offer(&mut self, piece: &[u8], left: u32, right: u32) {
        let (Some(l), Some(r)) = (self.symbol(left), self.symbol(right)) else {
            return;
        };
        let merge = match &self.merger.rules {
            Rules::Ranks { pairs, .. } => pairs.get(&(l.id, r.id)).copied(),
            Rules::Scores { keys } => {
                let text = piece.get(to_index(l.start)..to_index(r.start + r.n_bytes));
                let product = text.and_then(|text| self.vocab.text_id(text));
                product.map(|product| Merge {
                    key: keys.get(to_index(product)).copied().unwrap_or(NONE),
                    product,
                })
            }
        };
        if let Some(Merge { key, product }) = merge {
            self.heap.push(Reverse(Candidate {
                key,
                left,
                right,
                product,
                n_bytes: l.n_bytes + r.n_bytes,
            }));
        }
    }

    /// Joins a pair, unless one of its sides was merged in the meantime.
    fn apply(&mut self, piece: &[u8], candidate: Candidate) {
        let Candidate { left, right, .. } = candidate;
        let (Some(l), Some(r)) = (self.symbol(left), self.symbol(right)) else {
            return;
        };
        let is_stale =
            l.n_bytes == 0 || r.n_bytes == 0 || l.n_bytes + r.n_bytes != candidate.n_bytes;
        if is_stale {
            return;
        }
        if let Some(l) = self.symbols.get_mut(to_index(left)) {
            l.n_bytes = candidate.n_bytes;
            l.next = r.next;
            l.id = candidate.product;
        }
        if let Some(r) = self.symbols.get_mut(to_index(right)) {
            r.n_bytes = 0;
        }
        if let Some(next) = self.symbols.get_mut(to_index(r.next)) {
            next.prev = left;
        }
        self.offer(piece, l.prev, left);
        self.offer(piece, left, r.next);
    }

    /// Appends the token of a symbol, or one token per byte.
    fn emit(&self, piece: &[u8], symbol: Symbol, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let is_token = to_index(symbol.id) < self.vocab.len() && self.vocab.is_text(symbol.id);
        if is_token {
            ids.push(symbol.id);
            return Ok(());
        }
        let start = to_index(symbol.start);
        let bytes = piece.get(start..start + to_index(symbol.n_bytes));
        for &byte in bytes.unwrap_or(&[]) {
            let id = self.vocab.byte_id(byte).or_else(|| self.vocab.id(&[byte]));
            let id = id.or(self.vocab.unknown);
            ids.push(id.ok_or(TokenizerError::NoByteToken { byte })?);
        }
        Ok(())
    }
}

/// Positions fit: [`Encoder::encode`] refuses longer texts.
fn index_u32(i: usize) -> u32 {
    u32::try_from(i).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_cut_at_the_first_space_after_its_first_byte() {
        assert_eq!(split_rule(b"a b"), Some((&b"a"[..], &b"b"[..])));
        assert_eq!(split_rule(b"  b"), Some((&b" "[..], &b"b"[..])));
        assert_eq!(split_rule(b"ab"), None);
        assert_eq!(split_rule(b"a "), None);
        assert_eq!(split_rule(b""), None);
    }

    #[test]
    fn higher_scores_get_lower_keys() {
        let scores = [
            f32::INFINITY,
            2.5,
            1e-30,
            0.0,
            -1e-30,
            -7.0,
            f32::NEG_INFINITY,
        ];
        assert!(scores.map(score_key).is_sorted());
        assert_eq!(score_key(0.0), score_key(-0.0));
    }
}
