//! The peer of a model, loaded with our own options.

use std::path::Path;
use std::sync::Arc;

use super::args::{Args, PeerArg};
use crate::bench::{Contestant, PeerCommand, Point, SweepReport};
use crate::cli::{Console, WITHOUT_LLAMA};
use crate::engine::Engine;

/// Who runs beside us, if anybody, and what was found out about it first.
pub(super) struct Peer {
    contestant: Option<Box<dyn Contestant>>,
    pub sweep: Vec<SweepReport>,
}

impl Peer {
    /// Loads what was asked for.
    pub fn load(
        path: &Path,
        engine: &Arc<Engine>,
        points: &[Point],
        ids: &[u32],
        (args, console): (&Args, &Console),
    ) -> anyhow::Result<Self> {
        let none = Self {
            contestant: None,
            sweep: Vec::new(),
        };
        if let Some(command) = &args.peer.peer_cmd {
            return Ok(Self {
                contestant: Some(Box::new(PeerCommand::new(command, path))),
                ..none
            });
        }
        match args.peer.peer {
            Some(PeerArg::None) => Ok(none),
            Some(PeerArg::Llama) => llama(path, engine, points, ids, (args, console)),
            None if cfg!(feature = "llama") => llama(path, engine, points, ids, (args, console)),
            None => {
                console.warning(format_args!("no peer: {WITHOUT_LLAMA}"));
                Ok(none)
            }
        }
    }

    /// The peer as the harness takes it.
    pub fn contestant(&mut self) -> Option<&mut dyn Contestant> {
        match &mut self.contestant {
            Some(contestant) => Some(contestant.as_mut()),
            None => None,
        }
    }
}

/// Longest prompt of the sweep, in tokens.
#[cfg(feature = "llama")]
const N_SWEEP: usize = 8192;

#[cfg(feature = "llama")]
fn llama(
    path: &Path,
    engine: &Arc<Engine>,
    points: &[Point],
    ids: &[u32],
    (args, console): (&Args, &Console),
) -> anyhow::Result<Peer> {
    use anyhow::Context as _;

    use super::args::FlashArg;
    use crate::bench::{LlamaCpp, Ubatch};
    use crate::peer::PeerOptions;

    let ubatch = args.peer.peer_ubatch;
    let options = engine.options();
    let n_sweep = ids.len().min(N_SWEEP);
    let peer_options = PeerOptions {
        n_ctx: n_sweep,
        n_ubatch: match ubatch {
            Ubatch::Auto => PeerOptions::default().n_ubatch,
            Ubatch::Fixed(n) => n,
        },
        flash_attn: args.peer.peer_flash_attn != FlashArg::Off,
        kv_type: options.kv_type,
        n_threads: options.n_threads,
        device: options.device,
        ..PeerOptions::default()
    };
    let mut llama = LlamaCpp::load(path, peer_options).context("load the model into llama.cpp")?;
    let mut sweep = Vec::new();
    // Decoding alone does not depend on the ubatch.
    let has_prompts = points.iter().any(|p| !p.work.is_decode());
    if ubatch == Ubatch::Auto && has_prompts {
        let tries_without_flash =
            args.peer.peer_flash_attn == FlashArg::Auto && engine.device().is_cpu();
        sweep = llama.sweep(
            ids.get(..n_sweep).unwrap_or(ids),
            tries_without_flash,
            &|| console.interrupt().is_requested(),
            &|tried| {
                console.note(format_args!(
                    "sweep: llama.cpp {}: {:.1} tok/s at {n_sweep}",
                    tried.setting(),
                    tried.tok_s
                ));
            },
        )?;
    }
    Ok(Peer {
        contestant: Some(Box::new(llama)),
        sweep,
    })
}

#[cfg(not(feature = "llama"))]
fn llama(
    _path: &Path,
    _engine: &Arc<Engine>,
    _points: &[Point],
    _ids: &[u32],
    _rest: (&Args, &Console),
) -> anyhow::Result<Peer> {
    anyhow::bail!("--peer llama: {WITHOUT_LLAMA}")
}
