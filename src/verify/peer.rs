//! The same prompt in llama.cpp, on the same file and device.

use std::path::Path;

use super::Base;
use super::judge::{Expect, Verdict, judge};
use super::outcome::Outcome;
use crate::Result;
use crate::bench::matrix_type;
use crate::engine::kv_cache::Side;
use crate::engine::{CancelToken, EngineError, EngineOptions, Logits};
use crate::gguf::{DType, GgufFile};
use crate::numerics::Rounding;
use crate::peer::{KvLayer, Llama, PeerError, PeerOptions, Rows};

/// Verdicts on logits and on K/V rows.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerVerdict {
    /// Rows of logits all over the prompt.
    pub logits: Verdict,
    /// Rows of the caches of every layer that owns one.
    pub kv: Verdict,
}

/// Reads the prompt with llama.cpp and judges `ours`, which has the rows of
/// [`super::Prompt::spread_rows`], by it. Ours should be unloaded before: the weights are loaded
/// again.
///
/// # Errors
/// As [`Llama::load`] and [`Llama::eval`], but a model that llama.cpp cannot run is skipped.
pub fn against_llama(
    path: &Path,
    options: &EngineOptions,
    base: &Base,
    ours: &Outcome,
    cancel: &CancelToken,
) -> Result<PeerVerdict> {
    let peer = PeerOptions {
        n_ctx: base.prompt.ids.len(),
        flash_attn: options.kv_type != DType::F32,
        kv_type: options.kv_type,
        n_threads: options.n_threads,
        device: options.device,
        use_extra_bufts: false,
        swa_full: true,
        ..PeerOptions::default()
    };
    let mut llama = match Llama::load(path, peer) {
        Ok(llama) => llama,
        Err(error @ (PeerError::DonorRule { .. } | PeerError::TooFewLayers { .. })) => {
            let skipped = Verdict::Skipped {
                why: format!("llama.cpp cannot run this model: {error}"),
            };
            return Ok(PeerVerdict {
                logits: skipped.clone(),
                kv: skipped,
            });
        }
        Err(error) => return Err(error.into()),
    };
    let logits = Outcome {
        logits: logits(&mut llama, base, cancel)?,
        kv: Vec::new(),
    };
    let in_file = Rounding::of(matrix_type(&GgufFile::open(path)?));
    let facts = base.facts.at_least(in_file);
    Ok(PeerVerdict {
        logits: judge(&facts.limit("llama.cpp"), &logits, ours),
        kv: match llama.kv_rows() {
            Ok(layers) => judge_kv(&facts.limit("kv rows"), &layers, ours),
            Err(error) => Verdict::Skipped {
                why: format!("llama.cpp does not give its rows: {error}"),
            },
        },
    })
}

/// Logits of the rows all over the prompt; the prompt goes in by pieces that end with one, so that
/// no other row is kept.
fn logits(llama: &mut Llama, base: &Base, cancel: &CancelToken) -> Result<Logits> {
    let ids = &base.prompt.ids;
    let mut out = Logits {
        n_vocab: llama.n_vocab(),
        ..Logits::default()
    };
    let mut start = 0;
    for &row in &base.prompt.spread_rows {
        if cancel.is_cancelled() {
            return Err(EngineError::Cancelled {
                processed: start,
                total: ids.len(),
            }
            .into());
        }
        let piece = ids.get(start..=row).unwrap_or_default();
        out.data.extend(llama.eval(piece, Rows::Last)?.data);
        out.rows.push(row);
        start = row + 1;
    }
    Ok(out)
}

/// Compares the rows that both caches hold.
fn judge_kv(expect: &Expect, layers: &[KvLayer], ours: &Outcome) -> Verdict {
    let mut pairs = Vec::new();
    for row in &ours.kv {
        let layer = layers.iter().find(|layer| layer.il == row.il);
        let theirs = layer.and_then(|layer| match row.side {
            Side::K => layer.k_row(row.position),
            Side::V => layer.v_row(row.position),
        });
        match theirs {
            Some(theirs) => pairs.push((row.values(), theirs.to_vec())),
            None => {
                return Verdict::Wrong {
                    why: format!("llama.cpp has no {row}"),
                    measure: None,
                };
            }
        }
    }
    super::judge::judge_rows(expect, &pairs)
}
