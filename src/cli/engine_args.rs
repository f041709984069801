//! Engine options as typed: shared by every subcommand that loads a model.
//!
//! Each value may also come from a `G4_*` variable; the command line wins. What the values mean
//! together is checked in `options.rs`.

use std::str::FromStr;

use clap::{Args, ValueEnum};

pub(super) use super::numbers::at_least_one;
use super::numbers::whole;

/// Engine options of `run`, `logits`, `plan` and `demo`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub struct EngineArgs {
    /// Where to compute: auto (the first GPU, else the CPU), cpu, cuda0, cuda1, ...
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "G4_DEVICE")]
    pub device: DeviceArg,
    /// Most prompt tokens computed in one graph run, in tokens; 0: 2048 on a GPU, 256 on the CPU
    #[arg(long, value_name = "N", default_value_t = 0, env = "G4_CHUNK", value_parser = whole::<usize>)]
    pub chunk: usize,
    /// Capacity of the K/V cache, in tokens; 0: as much as this run needs, up to what the model was
    /// trained for. A larger number is taken with a warning
    #[arg(long, value_name = "N", default_value_t = 0, env = "G4_N_CTX", value_parser = whole::<usize>)]
    pub n_ctx: usize,
    /// Type of the K/V cache
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "G4_KV_TYPE",
          value_parser = ["f16", "f32", "bf16", "q8_0"])]
    pub kv_type: String,
    /// Type of the resident matrices: as in the file, BF16, or whichever the device multiplies
    /// faster and has room for
    #[arg(
        long,
        value_name = "MODE",
        value_enum,
        default_value_t,
        env = "G4_WEIGHTS"
    )]
    pub weights: WeightsArg,
    /// Threads of the CPU backend; 0: one per physical core
    #[arg(long, value_name = "N", default_value_t = 0, env = "G4_THREADS", value_parser = whole::<usize>)]
    pub threads: usize,
    /// Keep the graph of each bucket and run it again instead of building a new one
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = OnOff::On, env = "G4_REPLAY")]
    pub replay: OnOff,
    /// Where attention masks are filled; the CPU backend always takes the host
    #[arg(
        long,
        value_name = "PLACE",
        value_enum,
        default_value_t,
        env = "G4_MASK"
    )]
    pub mask: PlaceArg,
    /// Where per-layer embedding rows are gathered
    #[arg(
        long,
        value_name = "PLACE",
        value_enum,
        default_value_t,
        env = "G4_PLE"
    )]
    pub ple: PlaceArg,
    /// Give K/V buffers their final size before the first chunk
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = OnOff::On, env = "G4_PREGROW")]
    pub pregrow: OnOff,
    /// Host memory that logits are read into
    #[arg(
        long,
        value_name = "MEMORY",
        value_enum,
        default_value_t,
        env = "G4_READBACK"
    )]
    pub readback: ReadbackArg,
    /// Compute a row only as far as something reads it
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = OnOff::On, env = "G4_SKIP_DEAD_ROWS")]
    pub skip_dead_rows: OnOff,
    /// On a GPU: run chains of element-wise operations as one kernel each
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = OnOff::On, env = "G4_FUSE")]
    pub fuse: OnOff,
    /// On a GPU: let prompt attention walk the visible keys only
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = OnOff::On, env = "G4_ATTENTION")]
    pub attention: OnOff,
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// Enabled.
    On,
    /// Disabled.
    Off,
}

impl OnOff {
    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// Which side does the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PlaceArg {
    /// The device that computes.
    #[default]
    Device,
    /// The host.
    Host,
}

/// Kind of host memory for results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReadbackArg {
    /// Page-locked.
    #[default]
    Pinned,
    /// Ordinary memory.
    Pageable,
}

/// Type of the resident matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WeightsArg {
    /// BF16 where that is faster and fits, else native
    #[default]
    Auto,
    /// As in the file
    Native,
    /// Dequantised to BF16 at load
    Bf16,
}

/// Where to compute, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// The first GPU, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this index.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let index = |digits: &str| digits.parse().ok().map(Self::Cuda);
        match text {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            _ => text.strip_prefix("cuda").and_then(index),
        }
        .ok_or_else(|| "expected auto, cpu, cuda0, cuda1, ...".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn parse(args: &[&str]) -> Result<EngineArgs, clap::Error> {
        Only::try_parse_from([&["test"], args].concat()).map(|only| only.engine)
    }

    #[test]
    fn defaults_are_the_fast_settings() {
        let args = parse(&[]).unwrap();

        assert_eq!(
            (args.device, args.chunk, args.n_ctx),
            (DeviceArg::Auto, 0, 0)
        );
        assert_eq!(
            (args.kv_type.as_str(), args.weights),
            ("f16", WeightsArg::Auto)
        );
        assert!(
            [
                args.replay,
                args.pregrow,
                args.skip_dead_rows,
                args.fuse,
                args.attention
            ]
            .iter()
            .all(|s| s.is_on())
        );
        assert_eq!((args.mask, args.ple), (PlaceArg::Device, PlaceArg::Device));
        assert_eq!(args.readback, ReadbackArg::Pinned);
    }

    #[test]
    fn device_is_auto_cpu_or_an_indexed_cuda_device() {
        for (text, device) in [
            ("cpu", DeviceArg::Cpu),
            ("cuda0", DeviceArg::Cuda(0)),
            ("cuda12", DeviceArg::Cuda(12)),
        ] {
            assert_eq!(parse(&["--device", text]).unwrap().device, device);
        }
        for text in ["gpu", "cuda", "cuda-1", "CPU", ""] {
            assert!(parse(&["--device", text]).is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn chunk_is_a_number() {
        assert!(parse(&["--chunk", "-1"]).is_err());
        assert_eq!(parse(&["--chunk", "1"]).unwrap().chunk, 1);
    }

    #[test]
    fn kv_type_outside_the_list_is_refused() {
        assert_eq!(parse(&["--kv-type", "f32"]).unwrap().kv_type, "f32");
        assert!(parse(&["--kv-type", "iq2_xs"]).is_err());
    }

    #[test]
    fn each_switch_can_be_turned() {
        let args = parse(&[
            "--replay",
            "off",
            "--mask",
            "host",
            "--ple",
            "host",
            "--pregrow",
            "off",
            "--readback",
            "pageable",
            "--skip-dead-rows",
            "off",
            "--fuse",
            "off",
            "--attention",
            "off",
            "--weights",
            "bf16",
            "--threads",
            "3",
            "--n-ctx",
            "4096",
        ])
        .unwrap();

        assert!(
            [
                args.replay,
                args.pregrow,
                args.skip_dead_rows,
                args.fuse,
                args.attention
            ]
            .iter()
            .all(|s| !s.is_on())
        );
        assert_eq!((args.mask, args.ple), (PlaceArg::Host, PlaceArg::Host));
        assert_eq!(
            (args.readback, args.weights),
            (ReadbackArg::Pageable, WeightsArg::Bf16)
        );
        assert_eq!((args.threads, args.n_ctx), (3, 4096));
    }
}
