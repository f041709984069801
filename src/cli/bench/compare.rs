//! `bench --compare`: two results and a bar.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use serde::Serialize;

use super::{Args, save};
use crate::bench::{Bar, Comparison, Stored, compare};
use crate::cli::out_file::{is_stdout, require_apart};
use crate::cli::report::{self, SCHEMA_VERSION};

#[derive(Serialize)]
struct File {
    schema_version: u32,
    is_passed: bool,
    #[serde(flatten)]
    comparison: Comparison,
}

/// Compares; the answer is no when a point is worse or cannot be compared.
pub(super) fn run(old: &Path, new: &Path, args: &Args) -> anyhow::Result<ExitCode> {
    require_apart(&[args.out.json.as_deref()], &[old, new])?;
    save::check_targets(&args.out)?;
    let (old, new) = (Stored::read(old)?, Stored::read(new)?);
    let bar = bar(args.compare.bar, new.bar_percent())?;
    let comparison = compare(&old, &new, bar);
    let file = File {
        schema_version: SCHEMA_VERSION,
        is_passed: comparison.is_passed(),
        comparison,
    };
    match args.out.json.as_deref() {
        Some(path) if is_stdout(path) => report::print_json(&file)?,
        Some(path) => save::json(path, &file)?,
        None => {}
    }
    if !args.out.json.as_deref().is_some_and(is_stdout) {
        report::print_text(&file.comparison.describe())?;
    }
    Ok(if file.is_passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// The bar: typed, or written down when the newer result was measured. Both must agree.
fn bar(typed: Option<Bar>, written: Option<f64>) -> anyhow::Result<Bar> {
    match (typed, written) {
        (Some(Bar(typed)), Some(written)) if typed != written => bail!(
            "expected the bar that the newer result was measured with, {written} %, found {typed} %"
        ),
        (Some(bar), _) => Ok(bar),
        (None, Some(written)) => Ok(Bar(written)),
        (None, None) => {
            bail!("expected a bar (--bar 1.5%), found none here and in the newer result")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_is_typed_or_written_and_both_must_agree() {
        let of = |typed: Option<f64>, written| bar(typed.map(Bar), written).map(|b| b.0).ok();

        assert_eq!(of(Some(1.5), None), Some(1.5));
        assert_eq!(of(None, Some(2.0)), Some(2.0));
        assert_eq!(of(Some(2.0), Some(2.0)), Some(2.0));
        assert_eq!(of(Some(1.5), Some(2.0)), None);
        assert_eq!(of(None, None), None);
    }
}
