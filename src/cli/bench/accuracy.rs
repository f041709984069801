//! `bench --accuracy`: the reference is our own engine on the CPU, with a float32 copy of the model
//! and float32 K/V. `docs/numerics.md` has its distance from `transformers`.

use std::path::Path;

use anyhow::{Context as _, bail};

use super::Args;
use crate::bench::{Accuracy, Contestant, Ours, accuracy, is_f32_copy, write_f32_copy};
use crate::cli::{Console, Unit, drive};
use crate::engine::{Engine, EngineOptions};
use crate::ggml::DeviceChoice;
use crate::gguf::{DType, GgufFile};
use crate::model::weights::WeightsMode;

/// Measures both sides over `ids`.
pub(super) fn measure<'a>(
    ids: &[u32],
    ours: &'a mut Ours,
    peer: Option<&'a mut dyn Contestant>,
    (args, console): (&Args, &Console),
) -> anyhow::Result<Accuracy> {
    let path = reference(args)?;
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        kv_type: DType::F32,
        weights: WeightsMode::Native,
        ..drive::options(&args.engine)?
    };
    console.note(format_args!("load the reference {}", path.display()));
    let engine = Engine::load(path, options, &mut |_| {}).context("load the reference")?;
    let cancel = console.interrupt().cancel_token().clone();
    let mut reference = Ours::new(engine, cancel, None);
    let label = super::label(ours.engine().file().metadata().path());
    let bar = console.progress("accuracy", ids.len() as u64, Unit::Tokens);
    let mut sides: Vec<&mut dyn Contestant> = vec![ours];
    sides.extend(peer);
    accuracy(&label, ids, &mut reference, sides, &mut |done| {
        bar.set(done as u64);
        !console.interrupt().is_requested()
    })
    .context("measure accuracy")
}

fn reference(args: &Args) -> anyhow::Result<&Path> {
    let path = args.accuracy_ref.as_deref();
    path.context("expected --accuracy-ref, found none")
}

/// Writes the float32 copy if it is missing, and checks it if it is there: before anything is
/// measured.
pub(super) fn prepare(model: &GgufFile, (args, console): (&Args, &Console)) -> anyhow::Result<()> {
    let path = reference(args)?;
    if path.exists() {
        let copy = GgufFile::open(path).with_context(|| format!("open {}", path.display()))?;
        if !is_f32_copy(model, &copy)? {
            bail!(
                "{}: expected the float32 copy of {}, found another model",
                path.display(),
                model.metadata().path().display()
            );
        }
        return Ok(());
    }
    let bar = console.progress("float32 copy", 0, Unit::Bytes);
    write_f32_copy(model, path, &mut |done, all| {
        bar.set_total(all);
        bar.set(done);
        !console.interrupt().is_requested()
    })
    .with_context(|| format!("write {}", path.display()))
}
