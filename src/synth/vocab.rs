//! A usable vocabulary of the `gemma4` tokenizer kind, trained on a list of English words.
//!
//! Order: control tokens, `<0x00>`..`<0xFF>`, runs of newlines, single characters, merged pieces
//! (most frequent pair first), then `<unused0>`.. up to the wanted size. Integer arithmetic only.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Control tokens, 256 bytes, newline runs and the printable characters must fit.
pub(super) const MIN_N_VOCAB: u32 = 400;

/// The words, most frequent first; each word's weight falls with its place.
const WORDS: &str = include_str!("words.txt");

/// What stands for a space inside a token.
const SPACE: char = '\u{2581}';

/// The control tokens, from id 0. Ids 0 to 3 are those of the released models.
const CONTROL: [&str; 8] = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|tool_response>",
];

/// Characters beyond ASCII, for vocabularies that have room.
const EXTRA_CHARS: &str = "\u{2018}\u{2019}\u{201c}\u{201d}\u{2013}\u{2014}\u{2026}\u{e0}\u{e2}\
    \u{e4}\u{e6}\u{e7}\u{e8}\u{e9}\u{ea}\u{ee}\u{ef}\u{f1}\u{f3}\u{f4}\u{f6}\u{fb}\u{fc}\u{a3}";

/// Ids with a role.
pub(super) const PAD: u32 = 0;
/// End of sequence.
pub(super) const EOS: u32 = 1;
/// Begin of sequence.
pub(super) const BOS: u32 = 2;
/// Unknown.
pub(super) const UNK: u32 = 3;
/// Mask.
pub(super) const MASK: u32 = 4;

/// The chat template: turns in the released models' form, nothing else.
pub(super) const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
    {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' \
    + message['content'] + '<turn|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}";

/// Tokens, their kinds and scores, and the merges.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Vocab {
    pub(super) tokens: Vec<String>,
    pub(super) types: Vec<i32>,
    pub(super) scores: Vec<f32>,
    pub(super) merges: Vec<String>,
}

/// Kinds of token (`enum llama_token_type`).
mod kind {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

impl Vocab {
    /// Builds a vocabulary of exactly `n_vocab` tokens.
    pub(super) fn new(n_vocab: u32) -> Self {
        let n_vocab = n_vocab as usize;
        let mut vocab = Self::default();
        for name in CONTROL {
            let kind = if name == "<unk>" {
                kind::UNKNOWN
            } else {
                kind::CONTROL
            };
            vocab.push(name.to_owned(), kind);
        }
        for byte in 0..=255_u8 {
            vocab.push(format!("<0x{byte:02X}>"), kind::BYTE);
        }
        let n_newlines = if n_vocab >= 4096 { 16 } else { 4 };
        for n in 1..=n_newlines {
            vocab.push("\n".repeat(n), kind::NORMAL);
        }
        vocab.push(SPACE.to_string(), kind::NORMAL);
        for ascii in '!'..='~' {
            vocab.push(ascii.to_string(), kind::NORMAL);
        }
        if n_vocab >= 1024 {
            for extra in EXTRA_CHARS.chars() {
                vocab.push(extra.to_string(), kind::NORMAL);
            }
        }
        Trainer::new(&vocab).run(&mut vocab, n_vocab);
        for i in 0..n_vocab.saturating_sub(vocab.tokens.len()) {
            vocab.push(format!("<unused{i}>"), kind::UNUSED);
        }
        vocab.tokens.truncate(n_vocab);
        vocab.types.truncate(n_vocab);
        vocab.scores.truncate(n_vocab);
        vocab
    }

    /// Appends a token; normal ones score lower the later they come.
    fn push(&mut self, token: String, kind: i32) {
        #[expect(clippy::cast_precision_loss, reason = "ids are below 2^24")]
        let score = if kind == kind::NORMAL {
            -(self.tokens.len() as f32)
        } else {
            0.0
        };
        self.tokens.push(token);
        self.types.push(kind);
        self.scores.push(score);
    }
}

/// Byte-pair training on weighted words.
struct Trainer {
    /// Token text to id.
    ids: HashMap<String, usize>,
    /// Words as token ids, with weight.
    words: Vec<(Vec<usize>, u64)>,
    /// Weighted count of each neighbouring pair.
    pairs: HashMap<(usize, usize), u64>,
}

impl Trainer {
    /// Splits the word list into the characters of `vocab`.
    fn new(vocab: &Vocab) -> Self {
        let ids: HashMap<String, usize> = vocab
            .tokens
            .iter()
            .enumerate()
            .map(|(id, t)| (t.clone(), id))
            .collect();
        let mut words = Vec::new();
        for (rank, word) in (4_u64..).zip(WORDS.split_whitespace()) {
            for (form, weight) in forms(word, 1_000_000_000 / rank) {
                let spelt: Option<Vec<usize>> = form
                    .chars()
                    .map(|c| ids.get(c.encode_utf8(&mut [0; 4]) as &str).copied())
                    .collect();
                words.extend(spelt.map(|symbols| (symbols, weight)));
            }
        }
        let mut pairs = HashMap::new();
        for (word, weight) in &words {
            for pair in word.windows(2) {
                *pairs.entry((pair[0], pair[1])).or_insert(0) += weight;
            }
        }
        Self { ids, words, pairs }
    }

    /// Merges the most frequent pair until `n_vocab` is reached or no pair is left.
    fn run(mut self, vocab: &mut Vocab, n_vocab: usize) {
        // Two places are kept for runs of spaces.
        while vocab.tokens.len() + 2 < n_vocab {
            // Ties go to the smaller ids, so the order of the map does not matter.
            let best = self
                .pairs
                .iter()
                .filter(|&(_, &n)| n > 0)
                .max_by_key(|&(&(a, b), &n)| (n, std::cmp::Reverse((a, b))));
            let Some((&(left, right), _)) = best else {
                break;
            };
            let product = self.add(vocab, left, right);
            self.replace(left, right, product);
        }
        let space = self
            .ids
            .get(SPACE.encode_utf8(&mut [0; 4]) as &str)
            .copied();
        if let (Some(space), true) = (space, vocab.tokens.len() + 2 <= n_vocab) {
            let two = self.add(vocab, space, space);
            self.add(vocab, two, two);
        }
    }

    /// Records the merge and returns its product's id; the product may exist already.
    fn add(&mut self, vocab: &mut Vocab, left: usize, right: usize) -> usize {
        let product = format!("{}{}", vocab.tokens[left], vocab.tokens[right]);
        vocab
            .merges
            .push(format!("{} {}", vocab.tokens[left], vocab.tokens[right]));
        match self.ids.entry(product) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => {
                let id = vocab.tokens.len();
                let text = free.key().clone();
                free.insert(id);
                vocab.push(text, kind::NORMAL);
                id
            }
        }
    }

    /// Applies one merge to all words and keeps the pair counts up to date.
    fn replace(&mut self, left: usize, right: usize, product: usize) {
        for (word, weight) in &mut self.words {
            if !word.windows(2).any(|p| p == [left, right]) {
                continue;
            }
            for pair in word.windows(2) {
                if let Some(n) = self.pairs.get_mut(&(pair[0], pair[1])) {
                    *n -= *weight;
                }
            }
            let mut merged = Vec::with_capacity(word.len());
            let mut rest = word.as_slice();
            while let [first, tail @ ..] = rest {
                if *first == left && tail.first() == Some(&right) {
                    merged.push(product);
                    rest = &tail[1..];
                } else {
                    merged.push(*first);
                    rest = tail;
                }
            }
            for pair in merged.windows(2) {
                *self.pairs.entry((pair[0], pair[1])).or_insert(0) += *weight;
            }
            *word = merged;
        }
        self.pairs.retain(|_, n| *n > 0);
    }
}

/// The forms in which a word occurs in text, with their weights.
fn forms(word: &str, weight: u64) -> Vec<(String, u64)> {
    let mut capital = String::new();
    let mut chars = word.chars();
    if let Some(first) = chars.next() {
        capital.extend(first.to_uppercase());
        capital.push_str(chars.as_str());
    }
    let mut forms = vec![
        (format!("{SPACE}{word}"), weight),
        (format!("{SPACE}{capital}"), weight / 8),
        (capital, weight / 16),
        (word.to_owned(), weight / 32),
    ];
    if word.len() > 2 {
        let stem = word.strip_suffix('e').unwrap_or(word);
        forms.push((format!("{SPACE}{word}s"), weight / 6));
        forms.push((format!("{SPACE}{stem}ed"), weight / 10));
        forms.push((format!("{SPACE}{stem}ing"), weight / 10));
        forms.push((format!("{SPACE}{word}ly"), weight / 24));
    }
    forms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocabulary_has_the_wanted_size_and_no_token_twice() {
        for n in [MIN_N_VOCAB, 512, 1024, 4096, 20_000] {
            let vocab = Vocab::new(n);
            let mut sorted = vocab.tokens.clone();
            sorted.sort();
            sorted.dedup();

            assert_eq!(vocab.tokens.len(), n as usize);
            assert_eq!(sorted.len(), n as usize, "{n}");
            assert_eq!(vocab.types.len(), n as usize);
            assert_eq!(vocab.scores.len(), n as usize);
        }
    }

    #[test]
    fn ids_with_a_role_are_the_released_ones() {
        let vocab = Vocab::new(512);
        let at = |id: u32| vocab.tokens[id as usize].as_str();

        assert_eq!(
            (at(PAD), at(EOS), at(BOS), at(UNK)),
            ("<pad>", "<eos>", "<bos>", "<unk>")
        );
        assert_eq!(at(MASK), "<mask>");
    }

    #[test]
    fn every_merge_has_both_sides_and_its_product_in_the_vocabulary() {
        let vocab = Vocab::new(4096);
        for merge in &vocab.merges {
            let (left, right) = merge.split_once(' ').unwrap();
            for token in [left.to_owned(), right.to_owned(), format!("{left}{right}")] {
                assert!(vocab.tokens.contains(&token), "{merge}");
            }
        }
    }

    #[test]
    fn common_words_are_single_tokens() {
        let vocab = Vocab::new(4096);
        for word in ["the", "and", "house", "The", "thought", "morning"] {
            assert!(vocab.tokens.contains(&format!("{SPACE}{word}")), "{word}");
        }
        assert!(Vocab::new(512).tokens.contains(&format!("{SPACE}the")));
    }
}
