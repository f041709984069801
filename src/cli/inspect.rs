//! `inspect`: what is in a GGUF file, where, and whether it can be run.
//!
//! Reads the directory only, never the weights. A file that cannot be read at all is an error; a
//! file that can be read but not run is a result, with the reason in it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

use super::Console;
use crate::gguf::{Array, GgufFile, Value};
use crate::model::{Config, TensorSpec, names};

/// Version of the JSON form.
const SCHEMA_VERSION: u32 = 1;
/// Elements of a metadata array that are shown; the count is always given.
const SHOWN_ELEMENTS: usize = 64;
/// Characters of a string that the text form shows.
const SHOWN_CHARACTERS: usize = 60;

/// Print a GGUF file: keys, tensors, offsets, sizes, and whether it can be run
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Model file (GGUF; the first file of a split model)
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Everything that is printed; field order is the order in the JSON form.
#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    files: Vec<FileReport>,
    gguf_version: u32,
    can_run: bool,
    why_not: Option<String>,
    model: Option<ModelReport>,
    n_keys: usize,
    n_tensors: usize,
    tensor_bytes: u64,
    bytes_by_class: Option<BTreeMap<&'static str, u64>>,
    unused_bytes: Option<u64>,
    bytes_by_type: BTreeMap<&'static str, u64>,
    keys: Vec<KeyReport>,
    tensors: Vec<TensorReport>,
}

#[derive(Debug, Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
}

/// The model's main numbers, when it can be run.
#[derive(Debug, Serialize)]
struct ModelReport {
    name: Option<String>,
    n_layer: usize,
    n_layer_kv: usize,
    n_layer_swa: usize,
    n_embd: usize,
    n_embd_per_layer: usize,
    n_vocab: usize,
    n_ctx_train: usize,
    n_swa: usize,
    n_expert: usize,
    n_expert_used: usize,
    tied_output: bool,
}

#[derive(Debug, Serialize)]
struct KeyReport {
    key: String,
    #[serde(rename = "type")]
    type_name: String,
    offset: u64,
    /// Number of elements of an array.
    n_elements: Option<usize>,
    /// The value, or an array's first elements.
    value: serde_json::Value,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    shape: Vec<u64>,
    file: usize,
    offset: u64,
    bytes: u64,
    /// Group of the tensor; absent when the file cannot be run.
    class: Option<&'static str>,
    /// Whether the engine reads it; absent when the file cannot be run.
    is_used: Option<bool>,
}

/// Runs the subcommand.
///
/// # Errors
/// A file that cannot be opened or is not valid GGUF, and a failing stdout.
pub fn run(args: &Args, _console: &Console) -> anyhow::Result<ExitCode> {
    let file = GgufFile::open(&args.model).context("cannot open the model")?;
    let report = Report::new(&file);
    let text = if args.json {
        format!("{}\n", serde_json::to_string(&report)?)
    } else {
        report.to_text()
    };
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write")?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn new(file: &GgufFile) -> Self {
        let config = Config::from_gguf(file);
        let specs: BTreeMap<String, TensorSpec> = config
            .iter()
            .flat_map(names::tensor_specs)
            .map(|spec| (spec.name.clone(), spec))
            .collect();
        let tensors: Vec<TensorReport> = file
            .tensors()
            .iter()
            .map(|t| TensorReport {
                name: t.name.clone(),
                dtype: t.dtype.name(),
                shape: t.dims().to_vec(),
                file: t.shard,
                offset: t.offset,
                bytes: t.n_bytes,
                class: specs.get(&t.name).map(|spec| spec.class.name()),
                is_used: config
                    .is_ok()
                    .then(|| specs.get(&t.name).is_some_and(|spec| spec.used)),
            })
            .collect();
        let unused = tensors
            .iter()
            .filter(|t| t.is_used == Some(false))
            .map(|t| t.bytes)
            .sum();
        let classes = tensors
            .iter()
            .filter_map(|t| t.class.map(|class| (class, t.bytes)));
        Self {
            schema_version: SCHEMA_VERSION,
            files: file_reports(file),
            gguf_version: file.version(),
            can_run: config.is_ok(),
            why_not: config.as_ref().err().map(ToString::to_string),
            model: config.as_ref().ok().map(model_report),
            n_keys: file.metadata().entries().len(),
            n_tensors: tensors.len(),
            tensor_bytes: tensors.iter().map(|t| t.bytes).sum(),
            bytes_by_class: config.is_ok().then(|| sum(classes)),
            unused_bytes: config.is_ok().then_some(unused),
            bytes_by_type: sum(tensors.iter().map(|t| (t.dtype, t.bytes))),
            keys: file.metadata().entries().iter().map(key_report).collect(),
            tensors,
        }
    }

    fn to_text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> std::fmt::Result {
        for file in &self.files {
            writeln!(out, "file         {} ({} bytes)", file.path, file.bytes)?;
        }
        writeln!(out, "gguf version {}", self.gguf_version)?;
        match &self.why_not {
            None => writeln!(out, "can run      yes")?,
            Some(reason) => writeln!(out, "can run      no: {reason}")?,
        }
        if let Some(m) = &self.model {
            writeln!(
                out,
                "model        {}",
                m.name.as_deref().unwrap_or("(no name)")
            )?;
            writeln!(
                out,
                "layers       {} ({} sliding, {} with K/V), width {}, vocabulary {}",
                m.n_layer, m.n_layer_swa, m.n_layer_kv, m.n_embd, m.n_vocab
            )?;
        }
        writeln!(
            out,
            "\nkeys ({}): byte offset, type, key, value",
            self.n_keys
        )?;
        for key in &self.keys {
            let value = shorten(&key.value.to_string());
            writeln!(
                out,
                "{:>12}  {:<24} {} = {value}",
                key.offset, key.type_name, key.key
            )?;
        }
        writeln!(
            out,
            "\ntensors ({}): file, absolute byte offset, bytes, type, class, name, shape",
            self.n_tensors
        )?;
        for t in &self.tensors {
            let class = match (t.class, t.is_used) {
                (Some(_), Some(false)) => "unused",
                (Some(class), _) => class,
                (None, _) => "-",
            };
            writeln!(
                out,
                "{:>3} {:>14} {:>14}  {:<8} {class:<20} {} {:?}",
                t.file, t.offset, t.bytes, t.dtype, t.name, t.shape
            )?;
        }
        writeln!(out, "\nbytes by type")?;
        for (name, bytes) in &self.bytes_by_type {
            writeln!(out, "{bytes:>18}  {name}")?;
        }
        if let Some(classes) = &self.bytes_by_class {
            writeln!(out, "\nbytes by class")?;
            for (name, bytes) in classes {
                writeln!(out, "{bytes:>18}  {name}")?;
            }
        }
        writeln!(out, "\n{:>18}  all tensors", self.tensor_bytes)?;
        if let Some(bytes) = self.unused_bytes {
            writeln!(out, "{bytes:>18}  of them unused")?;
        }
        Ok(())
    }
}

fn sum(items: impl Iterator<Item = (&'static str, u64)>) -> BTreeMap<&'static str, u64> {
    let mut total = BTreeMap::new();
    for (name, bytes) in items {
        *total.entry(name).or_insert(0) += bytes;
    }
    total
}

fn file_reports(file: &GgufFile) -> Vec<FileReport> {
    let sizes = file.shard_bytes();
    let report = |(path, bytes): (&PathBuf, u64)| FileReport {
        path: path.display().to_string(),
        bytes,
    };
    file.paths().iter().zip(sizes).map(report).collect()
}

fn model_report(c: &Config) -> ModelReport {
    ModelReport {
        name: c.name.clone(),
        n_layer: c.n_layer,
        n_layer_kv: c.layers.iter().filter(|l| l.owns_kv).count(),
        n_layer_swa: c.layers.iter().filter(|l| l.is_swa).count(),
        n_embd: c.n_embd,
        n_embd_per_layer: c.n_embd_per_layer,
        n_vocab: c.n_vocab,
        n_ctx_train: c.n_ctx_train,
        n_swa: c.n_swa,
        n_expert: c.n_expert,
        n_expert_used: c.n_expert_used,
        tied_output: c.tied_output,
    }
}

fn key_report(entry: &crate::gguf::Entry) -> KeyReport {
    let n_elements = match &entry.value {
        Value::Array(array) => Some(array.len()),
        _ => None,
    };
    KeyReport {
        key: entry.key.clone(),
        type_name: entry.value.type_name(),
        offset: entry.offset,
        n_elements,
        value: to_json(&entry.value),
    }
}

/// Turns a value into JSON; arrays are cut, numbers that JSON lacks (NaN) become null.
fn to_json(value: &Value) -> serde_json::Value {
    fn list<T: Serialize>(v: &[T]) -> serde_json::Value {
        v.iter()
            .take(SHOWN_ELEMENTS)
            .map(|x| serde_json::json!(x))
            .collect()
    }
    match value {
        Value::U8(x) => (*x).into(),
        Value::I8(x) => (*x).into(),
        Value::U16(x) => (*x).into(),
        Value::I16(x) => (*x).into(),
        Value::U32(x) => (*x).into(),
        Value::I32(x) => (*x).into(),
        Value::F32(x) => (*x).into(),
        Value::Bool(x) => (*x).into(),
        Value::Str(x) => x.as_str().into(),
        Value::U64(x) => (*x).into(),
        Value::I64(x) => (*x).into(),
        Value::F64(x) => (*x).into(),
        Value::Array(array) => match array {
            Array::U8(v) => list(v),
            Array::I8(v) => list(v),
            Array::U16(v) => list(v),
            Array::I16(v) => list(v),
            Array::U32(v) => list(v),
            Array::I32(v) => list(v),
            Array::F32(v) => list(v),
            Array::Bool(v) => list(v),
            Array::Str(v) => list(v),
            Array::U64(v) => list(v),
            Array::I64(v) => list(v),
            Array::F64(v) => list(v),
        },
    }
}

/// Cuts a value for one line of text.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((at, _)) => format!("{}...", text.get(..at).unwrap_or(text)),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::DType;
    use crate::gguf::testing::{Model, fixture};

    #[test]
    fn runnable_file_reports_classes_that_add_up() {
        let report = Report::new(&fixture("d-moe-q8_0"));

        assert!(report.can_run && report.why_not.is_none());
        let classes = report.bytes_by_class.unwrap();
        assert_eq!(classes.values().sum::<u64>(), report.tensor_bytes);
        assert_eq!(
            report.bytes_by_type.values().sum::<u64>(),
            report.tensor_bytes
        );
        assert!(classes["experts"] > 0 && classes["attention"] > 0);
        assert_eq!(report.unused_bytes, Some(0));
        assert_eq!(report.model.unwrap().n_layer_swa, 6);
    }

    #[test]
    fn unused_tail_tensors_are_counted_apart() {
        let mut model = Model::of(&fixture("a-e4b-q8_0"));
        model.add(&names::attn_k(7), DType::Q8_0, &[128, 128]);

        let report = Report::new(&model.open());

        assert_eq!(report.unused_bytes, Some(128 * 136));
        assert!(report.to_text().contains(" unused "));
    }

    #[test]
    fn file_that_cannot_run_says_why_and_still_lists_everything() {
        let report = Report::new(&Model::small().open());

        assert!(!report.can_run);
        assert!(
            report
                .why_not
                .as_ref()
                .unwrap()
                .contains("expected architecture `gemma4`")
        );
        assert_eq!((report.keys.len(), report.tensors.len()), (16, 2));
        let text = report.to_text();
        assert!(text.contains("can run      no: ") && text.contains("two [64, 3]"));
    }

    #[test]
    fn json_starts_with_the_schema_version_and_gives_absolute_offsets() {
        let file = fixture("c-dense-bf16");
        let json = serde_json::to_string(&Report::new(&file)).unwrap();

        assert!(json.starts_with("{\"schema_version\":1,"));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let offset = json["tensors"][1]["offset"].as_u64().unwrap();
        assert_eq!(offset, file.tensors()[1].offset);
        assert_eq!(json["keys"][13]["value"][5], false);
    }

    #[test]
    fn long_arrays_are_cut_but_counted() {
        let mut model = Model::small();
        model.set("long", Value::Array(Array::U8(vec![1; 1000])));

        let report = Report::new(&model.open());

        let key = report.keys.last().unwrap();
        assert_eq!(key.n_elements, Some(1000));
        assert_eq!(key.value.as_array().unwrap().len(), SHOWN_ELEMENTS);
    }
}
