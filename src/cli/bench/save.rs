//! Result files, written whole after every point, and what goes to stdout.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::args::OutArgs;
use crate::bench::{self, Report};
use crate::cli::out_file::{is_stdout, require_apart, target};
use crate::cli::report::{self, Provenance, SCHEMA_VERSION};
use crate::unfinished::{Target, Unfinished};

#[derive(Serialize)]
struct File<'a> {
    schema_version: u32,
    #[serde(flatten)]
    report: &'a Report,
    #[serde(flatten)]
    provenance: Provenance,
}

impl<'a> File<'a> {
    fn new(report: &'a Report) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            report,
            provenance: Provenance::new(),
        }
    }
}

/// Refuses targets that cannot be written, before anything is measured.
pub(super) fn check_targets(out: &OutArgs) -> anyhow::Result<()> {
    let all = [&out.json, &out.md, &out.svg].map(Option::as_deref);
    if let Some(path) = all[1..].iter().flatten().find(|p| is_stdout(p)) {
        bail!(
            "{}: expected a file for --md and --svg, found stdout, which carries the table",
            path.display()
        );
    }
    require_apart(&all, &[])?;
    for path in all.into_iter().flatten().filter(|p| !is_stdout(p)) {
        if target(path)? != Target::Stream {
            Unfinished::create(path).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

/// Writes the result files.
pub(super) fn save(report: &Report, out: &OutArgs) -> anyhow::Result<()> {
    if let Some(path) = out.json.as_deref().filter(|p| !is_stdout(p)) {
        json(path, &File::new(report))?;
    }
    if let Some(path) = &out.md {
        replace(path, bench::markdown(report).as_bytes())?;
    }
    if let (Some(path), Some(chart)) = (&out.svg, bench::svg(report)?) {
        replace(path, chart.as_bytes())?;
    }
    Ok(())
}

/// Writes one JSON object and a newline.
pub(super) fn json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(value).context("make JSON")?;
    text.push(b'\n');
    replace(path, &text)
}

/// Prints the table, or the JSON when that goes to stdout.
pub(super) fn print(report: &Report, out: &OutArgs) -> anyhow::Result<()> {
    if out.json.as_deref().is_some_and(is_stdout) {
        return report::print_json(&File::new(report));
    }
    report::print_text(&bench::table(report))
}

/// Puts a file in its place as a whole; a device or a pipe is written directly.
fn replace(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        if Target::of(path)? == Target::Stream {
            return OpenOptions::new().write(true).open(path)?.write_all(bytes);
        }
        let unfinished = Unfinished::create(path)?;
        unfinished.file().write_all(bytes)?;
        unfinished.finish()
    };
    write().with_context(|| format!("write {}", path.display()))
}
