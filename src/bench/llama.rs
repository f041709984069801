//! llama.cpp at the pin as a contestant, at its best ubatch, on the CPU also with or without flash
//! attention.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{BenchError, Contestant, Point, Result, Run, SweepReport, Work};
use crate::ggml::Device;
use crate::peer::{Llama, PeerError, PeerOptions, Rows};

/// Tokens per graph run that the sweep tries.
const UBATCHES: [usize; 4] = [512, 1024, 2048, 4096];
/// llama.cpp's default for the tokens of one `llama_decode` call.
const N_BATCH: usize = 2048;
/// Timed runs of each candidate; the fastest counts.
const SWEEP_RUNS: usize = 2;

/// A model in llama.cpp.
pub struct LlamaCpp {
    // Taken while a context is made anew; gone when that fails.
    llama: Option<Llama>,
    options: PeerOptions,
    device: String,
    current: Option<(Work, Vec<u32>)>,
}

impl LlamaCpp {
    /// Loads a model.
    ///
    /// # Errors
    /// As [`Llama::load`].
    pub fn load(path: &Path, options: PeerOptions) -> Result<Self> {
        let options = PeerOptions {
            n_batch: options.n_ubatch.max(N_BATCH),
            ..options
        };
        Ok(Self {
            llama: Some(Llama::load(path, options).map_err(failed)?),
            device: Device::find(options.device)
                .map_err(crate::Error::from)?
                .name(),
            options,
            current: None,
        })
    }

    /// Runs a prompt with each candidate and keeps the fastest: each ubatch, and the fastest once
    /// more without flash attention where `tries_without_flash`.
    ///
    /// # Errors
    /// As [`Llama::load`]; [`BenchError::Cancelled`].
    pub fn sweep(
        &mut self,
        ids: &[u32],
        tries_without_flash: bool,
        is_cancelled: &dyn Fn() -> bool,
        note: &dyn Fn(&SweepReport),
    ) -> Result<Vec<SweepReport>> {
        // A ubatch longer than the prompt computes the same as one of its length.
        let n_useful = UBATCHES
            .iter()
            .position(|&n| n >= ids.len())
            .map_or(UBATCHES.len(), |i| i + 1);
        let mut results = Vec::new();
        for n_ubatch in UBATCHES.into_iter().take(n_useful) {
            self.options.n_ubatch = n_ubatch;
            results.push(self.try_prompt(ids, is_cancelled, note)?);
        }
        self.keep_fastest(&results);
        if tries_without_flash {
            self.options.flash_attn = false;
            results.push(self.try_prompt(ids, is_cancelled, note)?);
            self.keep_fastest(&results);
        }
        Ok(results)
    }

    /// Speed of a prompt with the current options.
    fn try_prompt(
        &mut self,
        ids: &[u32],
        is_cancelled: &dyn Fn() -> bool,
        note: &dyn Fn(&SweepReport),
    ) -> Result<SweepReport> {
        self.remake(ids.len())?;
        let mut best = Duration::MAX;
        for run in 0..=SWEEP_RUNS {
            if is_cancelled() {
                return Err(BenchError::Cancelled);
            }
            let llama = self.llama.as_mut().ok_or_else(not_prepared)?;
            let time = llama.time_prefill(ids).map_err(failed)?;
            if run > 0 {
                best = best.min(time);
            }
        }
        let result = SweepReport {
            n_ubatch: self.options.n_ubatch,
            flash_attn: self.options.flash_attn,
            n_prompt: ids.len(),
            tok_s: ids.len() as f64 / best.as_secs_f64(),
        };
        note(&result);
        Ok(result)
    }

    fn keep_fastest(&mut self, results: &[SweepReport]) {
        let fastest = results.iter().max_by(|a, b| a.tok_s.total_cmp(&b.tok_s));
        if let Some(fastest) = fastest {
            self.options.n_ubatch = fastest.n_ubatch;
            self.options.flash_attn = fastest.flash_attn;
        }
    }

    /// A new context on the same weights.
    fn remake(&mut self, n_ctx: usize) -> Result<()> {
        let options = PeerOptions {
            n_ctx,
            n_batch: self.options.n_ubatch.max(N_BATCH),
            ..self.options
        };
        let llama = self.llama.take().ok_or_else(not_prepared)?;
        self.llama = Some(llama.remake(options).map_err(failed)?);
        Ok(())
    }

    /// Goes back to the state in front of the timed region.
    fn rewind(&mut self) -> Result<()> {
        let (Some((work, ids)), Some(llama)) = (&self.current, &mut self.llama) else {
            return Err(not_prepared());
        };
        let start = work.start_pos();
        if start > 0 && llama.n_past() >= start && llama.truncate(start) {
            return Ok(());
        }
        llama.clear();
        if start > 0 {
            let prefix = ids.get(..start).unwrap_or_default();
            llama.eval(prefix, Rows::Last).map_err(failed)?;
        }
        Ok(())
    }
}

impl Contestant for LlamaCpp {
    fn name(&self) -> &str {
        "llama.cpp"
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let options = &self.options;
        let settings = [
            ("device", self.device.clone()),
            ("n_ubatch", options.n_ubatch.to_string()),
            ("n_batch", options.n_ubatch.max(N_BATCH).to_string()),
            ("kv_type", options.kv_type.name().to_owned()),
            ("weights", "native".to_owned()),
            ("threads", options.n_threads.to_string()),
            (
                "flash_attn",
                if options.flash_attn { "on" } else { "off" }.to_owned(),
            ),
        ];
        settings
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }

    fn prepare(&mut self, point: &Point, ids: &[u32]) -> Result<()> {
        self.current = None;
        self.remake(point.work.n_total())?;
        self.current = Some((point.work, ids.to_vec()));
        self.rewind()
    }

    fn begin_scoring(&mut self, n_total: usize) -> Result<bool> {
        self.current = None;
        self.remake(n_total)?;
        Ok(true)
    }

    fn score(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let llama = self.llama.as_mut().ok_or_else(not_prepared)?;
        Ok(llama.eval(ids, Rows::All).map_err(failed)?.data)
    }

    fn run(&mut self) -> Result<Run> {
        self.rewind()?;
        let (Some((work, ids)), Some(llama)) = (&self.current, &mut self.llama) else {
            return Err(not_prepared());
        };
        let ids = ids.get(work.start_pos()..).unwrap_or_default();
        let step = if work.is_decode() {
            1
        } else {
            ids.len().max(1)
        };
        let mut logits = None;
        llama.synchronize();
        let start = Instant::now();
        for ids in ids.chunks(step) {
            logits = Some(llama.eval(ids, Rows::Last).map_err(failed)?.data);
        }
        Ok(Run {
            duration: start.elapsed(),
            logits,
            n_tokens: None,
            graphs: None,
        })
    }
}

fn not_prepared() -> BenchError {
    BenchError::NotPrepared {
        name: "llama.cpp".to_owned(),
    }
}

fn failed(error: PeerError) -> BenchError {
    crate::Error::from(error).into()
}
