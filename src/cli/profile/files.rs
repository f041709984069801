//! The files that `profile` writes: opened before the work, so that a wrong path costs none.

use std::path::Path;

use anyhow::{Context as _, anyhow, bail};

use super::super::out_file::{OutFile, is_stdout, require_apart};
use super::Args;
use super::measure::Measured;
use crate::profile::{drawing, html};

/// The files that were asked for.
pub(super) struct Outputs {
    trace: Option<OutFile>,
    html: Option<OutFile>,
    dot: Option<OutFile>,
    graph_json: Option<OutFile>,
}

impl Outputs {
    pub fn create(args: &Args) -> anyhow::Result<Self> {
        let all = [&args.trace, &args.html, &args.dot, &args.graph_json];
        require_apart(&all.map(Option::as_deref), &[])?;
        Ok(Self {
            trace: open("--trace", args.trace.as_deref())?,
            html: open("--html", args.html.as_deref())?,
            dot: open("--dot", args.dot.as_deref())?,
            graph_json: open("--graph-json", args.graph_json.as_deref())?,
        })
    }

    /// Writes all of them.
    pub fn write(self, measured: &Measured, title: &str, bucket: usize) -> anyhow::Result<()> {
        if let Some(file) = self.trace {
            let text = serde_json::to_string(&measured.trace).context("make the trace")?;
            finish(file, &text)?;
        }
        if let Some(file) = self.html {
            let page = html::page(title, &measured.profile, &measured.trace);
            finish(file, &page.context("make the page")?)?;
        }
        if self.dot.is_none() && self.graph_json.is_none() {
            return Ok(());
        }
        let (shape, nodes) = measured.graph(bucket).ok_or_else(|| {
            let n = measured.n_graphs();
            anyhow!("--bucket: expected the number of a bucket whose graph was kept, below {n}, found {bucket}")
        })?;
        let name = format!("{shape:?}");
        if let Some(file) = self.dot {
            finish(file, &drawing::dot(&name, nodes))?;
        }
        if let Some(file) = self.graph_json {
            let text = serde_json::to_string(&drawing::json(&name, nodes));
            finish(file, &text.context("make the graph's JSON")?)?;
        }
        Ok(())
    }
}

fn open(option: &str, path: Option<&Path>) -> anyhow::Result<Option<OutFile>> {
    if path.is_some_and(is_stdout) {
        bail!("{option}: expected a file, found stdout, which carries the report");
    }
    path.map(OutFile::create).transpose()
}

fn finish(mut file: OutFile, text: &str) -> anyhow::Result<()> {
    file.write_bytes(text.as_bytes())?;
    file.write_bytes(b"\n")?;
    file.finish()
}
