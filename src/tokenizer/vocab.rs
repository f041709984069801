//! The token table: texts, types, special ids, and which tokens end a reply.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use foldhash::fast::RandomState;

use super::chars;
use super::error::TokenizerError;
use crate::gguf::{GgufFile, Metadata};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const BOS_ID: &str = "tokenizer.ggml.bos_token_id";
const EOS_ID: &str = "tokenizer.ggml.eos_token_id";
const EOT_ID: &str = "tokenizer.ggml.eot_token_id";
const EOM_ID: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN_ID: &str = "tokenizer.ggml.unknown_token_id";

/// Most tokens a vocabulary may have: ids stay below 2^31, as in ggml's `get_rows`.
const MAX_TOKENS: usize = 1 << 30;

/// Texts that end a reply whatever the file says about their type.
///
/// # Source
/// llama.cpp `llama-vocab.cpp:llama_vocab::impl::load`, the texts that occur in Gemma's and
/// SentencePiece's vocabularies.
const END_TEXTS: [&str; 14] = [
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_turn>",
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "[EOS]",
    "[EOT]",
];

/// Type of a token, as the file gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
    Undefined,
}

impl TokenType {
    /// Reads `tokenizer.ggml.token_type`; other numbers are undefined, as in llama.cpp.
    fn from_file(number: i32) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Undefined,
        }
    }

    /// Whether merges of plain text may end in such a token.
    pub(crate) fn is_text(self) -> bool {
        !matches!(self, Self::Control | Self::Unknown | Self::Byte)
    }
}

/// The plain content of a vocabulary, as it stands in a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct VocabData<'a> {
    pub tokens: &'a [String],
    /// Empty: all tokens are normal.
    pub types: Vec<i32>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unknown: Option<u32>,
}

impl<'a> VocabData<'a> {
    pub(crate) fn from_gguf(file: &'a GgufFile) -> Result<Self, TokenizerError> {
        let keys: &Metadata = file.metadata();
        Ok(Self {
            tokens: keys.strings(TOKENS)?.ok_or_else(|| keys.missing(TOKENS))?,
            types: keys.i32s(TOKEN_TYPES)?.unwrap_or_default(),
            bos: keys.opt_u32(BOS_ID)?,
            eos: keys.opt_u32(EOS_ID)?,
            eot: keys.opt_u32(EOT_ID)?,
            eom: keys.opt_u32(EOM_ID)?,
            unknown: keys.opt_u32(UNKNOWN_ID)?,
        })
    }
}

/// The token table.
#[derive(Debug)]
pub(crate) struct Vocab {
    texts: Vec<Box<[u8]>>,
    file_types: Vec<TokenType>,
    /// Whether the text alone made a control token of it.
    forced_control: BTreeSet<u32>,
    ids: HashMap<Box<[u8]>, u32, RandomState>,
    byte_ids: [Option<u32>; 256],
    ends: BTreeSet<u32>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) unknown: Option<u32>,
    max_text_bytes: usize,
}

impl Vocab {
    pub(crate) fn new(data: &VocabData<'_>, path: &Path) -> Result<Self, TokenizerError> {
        let n = data.tokens.len();
        if n == 0 || n > MAX_TOKENS {
            return Err(TokenizerError::TokenCount {
                path: path.to_path_buf(),
                limit: MAX_TOKENS,
                found: n,
            });
        }
        if !data.types.is_empty() && data.types.len() < n {
            return Err(TokenizerError::ArrayLength {
                path: path.to_path_buf(),
                key: TOKEN_TYPES,
                expected: n,
                found: data.types.len(),
            });
        }
        check_special_ids(data, path)?;
        let file_types = (0..n)
            .map(|i| {
                data.types
                    .get(i)
                    .map_or(TokenType::Normal, |&t| TokenType::from_file(t))
            })
            .collect();
        let (texts, ids) = index(data.tokens, path)?;
        let mut vocab = Self {
            max_text_bytes: texts.iter().map(|t| t.len()).max().unwrap_or(0),
            byte_ids: [None; 256],
            texts,
            file_types,
            forced_control: BTreeSet::new(),
            ids,
            ends: BTreeSet::new(),
            bos: data.bos,
            eos: data.eos,
            unknown: data.unknown,
        };
        vocab.find_bytes();
        vocab.find_ends(data);
        Ok(vocab)
    }

    fn find_bytes(&mut self) {
        for byte in 0..=u8::MAX {
            let id = self.id(format!("<0x{byte:02X}>").as_bytes());
            if let Some(slot) = self.byte_ids.get_mut(usize::from(byte)) {
                *slot = id;
            }
        }
    }

    /// Collects the tokens that end a reply, by text and by key.
    ///
    /// In a Gemma-4 vocabulary `</s>` is an HTML tag; its tool tokens tell.
    fn find_ends(&mut self, data: &VocabData<'_>) {
        let is_html = self.id(b"<|tool_response>").is_some();
        for text in END_TEXTS {
            if let Some(id) = self.id(text.as_bytes()) {
                if text == "</s>" && is_html {
                    if let Some(file_type) = self.file_types.get_mut(to_index(id)) {
                        *file_type = TokenType::Normal;
                    }
                    continue;
                }
                self.ends.insert(id);
                self.forced_control.insert(id);
            }
        }
        self.ends
            .extend([data.eos, data.eot, data.eom].into_iter().flatten());
    }

    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(crate) fn id(&self, text: &[u8]) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The token that plain text may merge into, if `text` is one.
    pub(crate) fn text_id(&self, text: &[u8]) -> Option<u32> {
        if text.len() > self.max_text_bytes {
            return None;
        }
        self.id(text).filter(|&id| self.is_text(id))
    }

    /// Whether plain text may become this token.
    pub(crate) fn is_text(&self, id: u32) -> bool {
        self.file_type(id).is_text()
    }

    pub(crate) fn byte_id(&self, byte: u8) -> Option<u32> {
        self.byte_ids.get(usize::from(byte)).copied().flatten()
    }

    /// Text as in the file, spaces escaped.
    pub(crate) fn text(&self, id: u32) -> Option<&[u8]> {
        self.texts.get(to_index(id)).map(|text| &**text)
    }

    fn file_type(&self, id: u32) -> TokenType {
        self.file_types
            .get(to_index(id))
            .copied()
            .unwrap_or(TokenType::Undefined)
    }

    /// Whether only a template may produce this token: control and unknown tokens, and tokens
    /// whose text ends a reply.
    pub(crate) fn is_control(&self, id: u32) -> bool {
        self.forced_control.contains(&id)
            || matches!(self.file_type(id), TokenType::Control | TokenType::Unknown)
    }

    pub(crate) fn is_user_defined(&self, id: u32) -> bool {
        self.file_type(id) == TokenType::UserDefined
    }

    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.texts).map(|(id, _)| id)
    }

    /// The bytes that a token prints.
    ///
    /// # Source
    /// llama.cpp `llama-vocab.cpp:token_to_piece` with `special` set: special tokens print their
    /// text, unused and undefined ones nothing.
    pub(crate) fn piece(&self, id: u32) -> Vec<u8> {
        let text = self.text(id).unwrap_or(&[]);
        match self.file_type(id) {
            _ if self.is_control(id) => text.to_vec(),
            TokenType::Byte => parse_byte(text).map_or_else(Vec::new, |byte| vec![byte]),
            TokenType::Normal => chars::unescape_spaces(text),
            TokenType::UserDefined => text.to_vec(),
            _ => Vec::new(),
        }
    }
}

/// Reads `<0xXX>`.
fn parse_byte(text: &[u8]) -> Option<u8> {
    let hex = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
}

/// Ids are below [`MAX_TOKENS`], so nothing is lost on any machine with 32-bit addresses.
pub(crate) fn to_index(id: u32) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

fn check_special_ids(data: &VocabData<'_>, path: &Path) -> Result<(), TokenizerError> {
    let ids = [
        (BOS_ID, data.bos),
        (EOS_ID, data.eos),
        (EOT_ID, data.eot),
        (EOM_ID, data.eom),
        (UNKNOWN_ID, data.unknown),
    ];
    for (key, id) in ids {
        if let Some(found) = id
            && to_index(found) >= data.tokens.len()
        {
            return Err(TokenizerError::SpecialId {
                path: path.to_path_buf(),
                key,
                n_vocab: data.tokens.len(),
                found,
            });
        }
    }
    Ok(())
}

type Texts = Vec<Box<[u8]>>;
type Ids = HashMap<Box<[u8]>, u32, RandomState>;

/// Builds both directions; an empty text becomes `[EMPTY_id]`, as in llama.cpp.
fn index(tokens: &[String], path: &Path) -> Result<(Texts, Ids), TokenizerError> {
    let mut texts = Vec::with_capacity(tokens.len());
    let mut ids = HashMap::with_capacity_and_hasher(tokens.len(), RandomState::default());
    for (id, token) in (0u32..).zip(tokens) {
        let text: Box<[u8]> = match token.as_bytes() {
            [] => format!("[EMPTY_{id}]").into_bytes().into(),
            bytes => bytes.into(),
        };
        if let Some(first) = ids.insert(text.clone(), id) {
            return Err(TokenizerError::DuplicateToken {
                path: path.to_path_buf(),
                text: token.clone(),
                first,
                second: id,
            });
        }
        texts.push(text);
    }
    Ok((texts, ids))
}
