//! llama.cpp at the pin, in the same process: an oracle for tests, a rival in benchmarks.
//!
//! The library is built from the same staged source as ggml and runs on the same ggml libraries,
//! so a difference is a difference of graphs, not of builds. It reads the model file by itself;
//! our own reader is asked only which layers own K/V, because a saved state does not say.
//!
//! What does not belong here: anything that the engine needs. The peer must stay independent of
//! what it judges.
#![forbid(unsafe_code)]

mod error;
mod options;
pub mod state;

use std::path::Path;
use std::time::{Duration, Instant};

pub use error::PeerError;
pub use options::PeerOptions;
pub use state::{KvLayer, KvOwner};

use crate::ggml::llama::{Handle, Wanted};
use crate::gguf::GgufFile;
use crate::model::Config;
use crate::numerics::argmax;

/// Which rows of logits a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The row of the last token.
    Last,
    /// A row for every token.
    All,
}

/// Logits of some rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Row length in tokens.
    pub n_vocab: usize,
    /// Position of each row in the sequence.
    pub rows: Vec<usize>,
    /// The values, `[n_vocab, rows.len()]`.
    pub data: Vec<f32>,
}

impl Logits {
    /// Returns row `i` of the rows asked for.
    pub fn row(&self, i: usize) -> Option<&[f32]> {
        self.data
            .get(i.checked_mul(self.n_vocab)?..)?
            .get(..self.n_vocab)
    }
}

/// A model loaded by llama.cpp with one sequence.
#[derive(Debug)]
pub struct Llama {
    handle: Handle,
    owners: Vec<KvOwner>,
    n_swa: usize,
    n_past: usize,
}

impl Llama {
    /// Loads a model and makes a context.
    ///
    /// # Errors
    /// [`PeerError`] when the file is not valid, llama.cpp refuses it or would abort on it, or
    /// an option is out of range.
    ///
    /// # Aborts
    /// llama.cpp ends the process when a device fails while it computes.
    pub fn load(path: &Path, options: PeerOptions) -> Result<Self, PeerError> {
        let config = Config::from_gguf(&GgufFile::open(path)?)?;
        refuse_what_aborts(&config)?;
        let owners = config
            .layers
            .iter()
            .filter(|layer| layer.owns_kv)
            .map(|layer| KvOwner {
                il: layer.il,
                is_swa: layer.is_swa,
            })
            .collect();
        Ok(Self {
            handle: Handle::load(path, &options)?,
            owners,
            n_swa: config.n_swa,
            n_past: 0,
        })
    }

    /// Drops the context and makes another on the same weights; the sequence is empty then.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn remake(self, options: PeerOptions) -> Result<Self, PeerError> {
        Ok(Self {
            handle: self.handle.remake(&options)?,
            owners: self.owners,
            n_swa: self.n_swa,
            n_past: 0,
        })
    }

    /// Size of the vocabulary in tokens.
    pub fn n_vocab(&self) -> usize {
        self.handle.n_vocab()
    }

    /// Context in tokens, after llama.cpp's padding.
    pub fn n_ctx(&self) -> usize {
        self.handle.n_ctx()
    }

    /// Tokens evaluated since the last [`clear`](Self::clear).
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// Forgets the sequence and zeroes the caches.
    pub fn clear(&mut self) {
        self.handle.clear();
        self.n_past = 0;
    }

    /// Forgets the tokens from position `n` on. Returns whether the next token still finds all
    /// that it sees; when it does not, the sequence is cleared.
    ///
    /// A sliding layer's cache holds little more than its window and overwrites what has left it.
    pub fn truncate(&mut self, n: usize) -> bool {
        let n = n.min(self.n_past);
        let first_seen = (n + 1).saturating_sub(self.n_swa);
        let first_held = self.handle.truncate(n);
        if n > 0 && first_held.is_some_and(|first| first <= first_seen) {
            self.n_past = n;
            return true;
        }
        self.clear();
        n == 0
    }

    /// Waits until all computation has finished.
    pub fn synchronize(&mut self) {
        self.handle.synchronize();
    }

    /// Evaluates tokens after those already evaluated.
    ///
    /// # Errors
    /// [`PeerError`] when an id is out of range, the context is full or llama.cpp fails. After
    /// a failure of llama.cpp the sequence is cleared.
    pub fn eval(&mut self, ids: &[u32], rows: Rows) -> Result<Logits, PeerError> {
        self.check(ids)?;
        let n_vocab = self.n_vocab();
        let n_rows = if rows == Rows::All { ids.len() } else { 1 };
        let first = self.n_past + ids.len() - n_rows;
        let mut data = Vec::with_capacity(n_rows.saturating_mul(n_vocab));
        if let Err(error) = self.feed(ids, rows, &mut data) {
            self.clear();
            return Err(error);
        }
        Ok(Logits {
            n_vocab,
            rows: (first..first + n_rows).collect(),
            data,
        })
    }

    /// Continues a prompt with the most likely token, `n` times, from an empty sequence.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    pub fn greedy(&mut self, ids: &[u32], n: usize) -> Result<Vec<u32>, PeerError> {
        self.clear();
        let mut out = Vec::with_capacity(n);
        let mut logits = self.eval(ids, Rows::Last)?;
        while out.len() < n {
            let id = logits.row(0).and_then(argmax);
            let id = id.ok_or(PeerError::NoLogits { row: 0 })?;
            out.push(id);
            if out.len() < n {
                logits = self.eval(&[id], Rows::Last)?;
            }
        }
        Ok(out)
    }

    /// Measures a prompt: token ids in host memory to last logits in host memory.
    ///
    /// The caches are cleared before the clock starts; the prompt stays evaluated.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    pub fn time_prefill(&mut self, ids: &[u32]) -> Result<Duration, PeerError> {
        self.clear();
        self.check(ids)?;
        let mut data = Vec::with_capacity(self.n_vocab());
        self.handle.synchronize();
        let start = Instant::now();
        let outcome = self.feed(ids, Rows::Last, &mut data);
        let elapsed = start.elapsed();
        std::hint::black_box(&data);
        if let Err(error) = outcome {
            self.clear();
            return Err(error);
        }
        Ok(elapsed)
    }

    /// Reads the K and V rows of every layer that owns them, ascending by layer.
    ///
    /// A sliding layer has rows only for positions that its cache still holds; load with
    /// `swa_full` for all of them.
    ///
    /// # Errors
    /// [`PeerError::State`] when the saved state is not as this pin writes it, which quantised
    /// caches are not.
    pub fn kv_rows(&mut self) -> Result<Vec<KvLayer>, PeerError> {
        let state = self.handle.state();
        Ok(state::parse(&state, &self.owners)?)
    }

    /// Turns text into token ids with llama.cpp's tokenizer.
    ///
    /// # Errors
    /// [`PeerError::NoTokenizer`], or [`PeerError::TooLong`] beyond 2^31 bytes.
    pub fn tokenize(
        &self,
        text: &[u8],
        add_bos: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, PeerError> {
        self.handle.tokenize(text, add_bos, parse_special)
    }

    /// Turns token ids into text, special tokens included.
    ///
    /// # Errors
    /// [`PeerError::NoTokenizer`], or [`PeerError::TokenOutOfRange`].
    pub fn detokenize(&self, ids: &[u32]) -> Result<Vec<u8>, PeerError> {
        self.check_ids(ids)?;
        self.handle.detokenize(ids)
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), PeerError> {
        let n_vocab = self.n_vocab();
        let bad = |id: &u32| usize::try_from(*id).map_or(true, |id| id >= n_vocab);
        match ids.iter().position(bad) {
            Some(i) => Err(PeerError::TokenOutOfRange {
                id: ids.get(i).copied().unwrap_or_default(),
                position: self.n_past + i,
                n_vocab,
            }),
            None => Ok(()),
        }
    }

    fn check(&self, ids: &[u32]) -> Result<(), PeerError> {
        if ids.is_empty() {
            return Err(PeerError::NoTokens);
        }
        self.check_ids(ids)?;
        let n_ctx = self.n_ctx();
        if ids.len() > n_ctx - self.n_past.min(n_ctx) {
            return Err(PeerError::ContextFull {
                n_past: self.n_past,
                n_new: ids.len(),
                n_ctx,
            });
        }
        Ok(())
    }

    /// Hands checked ids to llama.cpp in batches and appends the wanted rows to `data`.
    fn feed(&mut self, ids: &[u32], rows: Rows, data: &mut Vec<f32>) -> Result<(), PeerError> {
        let n_batch = self.handle.n_batch();
        let n_batches = ids.len().div_ceil(n_batch);
        for (i, batch) in ids.chunks(n_batch).enumerate() {
            let wanted = match rows {
                Rows::All => Wanted::All,
                Rows::Last if i + 1 == n_batches => Wanted::Last,
                Rows::Last => Wanted::None,
            };
            self.handle.decode(batch, self.n_past, wanted, data)?;
            self.n_past += batch.len();
        }
        Ok(())
    }
}

/// Refuses models on which llama.cpp would end the process while it makes a context.
///
/// # Source
/// llama.cpp at the pin: `llama-model.cpp:create_memory` (two own layers at least, one sliding
/// layer at least) and `llama-kv-cache.cpp` (the donor must be in the same cache).
fn refuse_what_aborts(config: &Config) -> Result<(), PeerError> {
    let n_own = config.layers.iter().filter(|layer| layer.owns_kv).count();
    if n_own < 2 {
        return Err(PeerError::TooFewLayers {
            kind: "own K/V",
            expected: 2,
            found: n_own,
        });
    }
    if !config.layers.iter().any(|layer| layer.is_swa) {
        return Err(PeerError::TooFewLayers {
            kind: "sliding window",
            expected: 1,
            found: 0,
        });
    }
    for layer in config.layers.iter().filter(|layer| !layer.owns_kv) {
        let donor = n_own - if layer.is_swa { 2 } else { 1 };
        if config
            .layers
            .get(donor)
            .is_none_or(|found| found.is_swa != layer.is_swa)
        {
            return Err(PeerError::DonorRule {
                layer: layer.il,
                donor,
            });
        }
    }
    Ok(())
}
