//! The files that `profile` writes: opened before the work, so that a wrong path costs none.

use anyhow::{Context as _, anyhow};

use super::super::out_file::OutFile;
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
        let open =
            |path: &Option<std::path::PathBuf>| path.as_deref().map(OutFile::create).transpose();
        Ok(Self {
            trace: open(&args.trace)?,
            html: open(&args.html)?,
            dot: open(&args.dot)?,
            graph_json: open(&args.graph_json)?,
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

fn finish(mut file: OutFile, text: &str) -> anyhow::Result<()> {
    file.write_bytes(text.as_bytes())?;
    file.write_bytes(b"\n")?;
    file.finish()
}
