//! What the engine options mean: typed values become the engine's, with the checks that need more
//! than one of them. Nothing here touches a file or a device.

use anyhow::Context as _;

use super::threads::default_threads;
use super::{DeviceArg, EngineArgs, PlaceArg, ReadbackArg, WeightsArg};
use crate::engine::{EngineOptions, Place, Readback, Switches};
use crate::ggml::DeviceChoice;
use crate::gguf::DType;
use crate::model::weights::WeightsMode;

impl EngineArgs {
    /// The engine's options.
    ///
    /// # Errors
    /// A cache type that no engine knows, or a context that cannot hold one chunk's first token.
    pub fn to_options(&self) -> anyhow::Result<EngineOptions> {
        let kv_type = DType::from_name(&self.kv_type)
            .with_context(|| format!("unknown K/V type {}", self.kv_type))?;
        Ok(EngineOptions {
            device: match self.device {
                DeviceArg::Auto => DeviceChoice::Auto,
                DeviceArg::Cpu => DeviceChoice::Cpu,
                DeviceArg::Cuda(index) => DeviceChoice::Cuda(index),
            },
            n_threads: match self.threads {
                0 => default_threads(),
                n => n,
            },
            chunk: self.chunk,
            n_ctx: self.n_ctx,
            kv_type,
            weights: match self.weights {
                WeightsArg::Auto => WeightsMode::Auto,
                WeightsArg::Native => WeightsMode::Native,
                WeightsArg::Bf16 => WeightsMode::Bf16,
            },
            switches: self.switches(),
            ..EngineOptions::default()
        })
    }

    fn switches(&self) -> Switches {
        Switches {
            replay: self.replay.is_on(),
            mask: to_place(self.mask),
            ple: to_place(self.ple),
            pregrow: self.pregrow.is_on(),
            readback: match self.readback {
                ReadbackArg::Pinned => Readback::Pinned,
                ReadbackArg::Pageable => Readback::Pageable,
            },
            skip_dead_rows: self.skip_dead_rows.is_on(),
            fuse: self.fuse.is_on(),
            attention: self.attention.is_on(),
        }
    }
}

fn to_place(place: PlaceArg) -> Place {
    match place {
        PlaceArg::Device => Place::Device,
        PlaceArg::Host => Place::Host,
    }
}
