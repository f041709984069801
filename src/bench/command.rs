//! Another program as a contestant: anything that prints llama-bench's JSON.
//!
//! The command is run once for every sample, in its turn, with the point's numbers behind it. It
//! loads the model and warms up by itself each time, and it draws its own token ids.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::{BenchError, Contestant, Point, Result, Run, Summary, Work};

/// Bytes of a failed command's stderr that an error repeats.
const SHOWN_BYTES: usize = 400;

/// A command line and the model it is run on.
pub struct PeerCommand {
    command: String,
    model: PathBuf,
    current: Option<Work>,
    found: BTreeMap<String, String>,
}

/// One result of llama-bench.
///
/// # Source
/// `struct test` in `tools/llama-bench/llama-bench.cpp` of llama.cpp.
#[derive(Debug, Deserialize)]
struct Entry {
    n_prompt: usize,
    n_gen: usize,
    #[serde(default)]
    n_depth: usize,
    samples_ns: Vec<u64>,
    #[serde(flatten)]
    rest: BTreeMap<String, serde_json::Value>,
}

/// Fields of an entry that decide its speed.
const SETTINGS: [&str; 10] = [
    "build_commit",
    "gpu_info",
    "backends",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "flash_attn",
];

impl PeerCommand {
    /// A command for the shell; the point's options are put behind it.
    pub fn new(command: &str, model: &Path) -> Self {
        Self {
            command: command.to_owned(),
            model: model.to_owned(),
            current: None,
            found: BTreeMap::new(),
        }
    }

    /// What is put behind the command.
    fn arguments(&self, work: Work) -> Vec<String> {
        let (n_prompt, n_gen) = if work.is_decode() {
            (0, work.n_timed())
        } else {
            (work.n_timed(), 0)
        };
        let mut arguments = vec!["-m".to_owned(), self.model.display().to_string()];
        let numbers = [
            ("-p", n_prompt),
            ("-n", n_gen),
            ("-d", work.start_pos()),
            ("-r", 1),
        ];
        for (name, n) in numbers {
            // An old llama-bench does not know -d, and needs none for an empty cache.
            if name != "-d" || n > 0 {
                arguments.extend([name.to_owned(), n.to_string()]);
            }
        }
        arguments.extend(["-o".to_owned(), "json".to_owned()]);
        arguments
    }

    fn execute(&self, work: Work) -> Result<Entry> {
        let failed = |detail: String| BenchError::Command {
            command: self.command.clone(),
            detail,
        };
        let output = Command::new("sh")
            .arg("-c")
            .arg(format!("{} \"$@\"", self.command))
            .arg("sh")
            .args(self.arguments(work))
            .output()
            .map_err(|e| failed(e.to_string()))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let shown = stderr.trim().chars().rev().take(SHOWN_BYTES);
            let shown: String = shown.collect::<Vec<_>>().into_iter().rev().collect();
            return Err(failed(format!("{}: {shown}", output.status)));
        }
        self.parse(&output.stdout, work)
    }

    /// The entry of the point.
    fn parse(&self, stdout: &[u8], work: Work) -> Result<Entry> {
        let bad = |expected: String, found: String| BenchError::Output {
            command: self.command.clone(),
            expected,
            found,
        };
        let entries: Vec<Entry> = serde_json::from_slice(stdout)
            .map_err(|e| bad("llama-bench's JSON".to_owned(), e.to_string()))?;
        let found: Vec<String> = entries
            .iter()
            .map(|e| format!("{} + {} at {}", e.n_prompt, e.n_gen, e.n_depth))
            .collect();
        let is_point = |e: &Entry| {
            let n = if work.is_decode() {
                e.n_gen
            } else {
                e.n_prompt
            };
            n == work.n_timed()
                && e.n_prompt + e.n_gen == n
                && e.n_depth == work.start_pos()
                && !e.samples_ns.is_empty()
        };
        let expected = format!("one result for {work}");
        let mut matching = entries.into_iter().filter(is_point);
        match (matching.next(), matching.next()) {
            (Some(entry), None) => Ok(entry),
            _ => Err(bad(expected, found.join(", "))),
        }
    }
}

impl Contestant for PeerCommand {
    fn name(&self) -> &str {
        "command"
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = self.found.clone();
        settings.insert("command".to_owned(), self.command.clone());
        settings.insert("token_ids".to_owned(), "its own".to_owned());
        settings
    }

    fn prepare(&mut self, point: &Point, _ids: &[u32]) -> Result<()> {
        self.current = Some(point.work);
        Ok(())
    }

    fn run(&mut self) -> Result<Run> {
        let work = self.current.ok_or_else(|| BenchError::NotPrepared {
            name: self.command.clone(),
        })?;
        let entry = self.execute(work)?;
        for name in SETTINGS {
            if let Some(value) = entry.rest.get(name) {
                let text = value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned);
                self.found.insert(name.to_owned(), text);
            }
        }
        let samples: Vec<f64> = entry.samples_ns.iter().map(|&ns| ns as f64 / 1e9).collect();
        let median = Summary::of(&samples).map_or(0.0, |s| s.median);
        Ok(Run {
            duration: Duration::from_secs_f64(median),
            logits: None,
            n_tokens: None,
            graphs: None,
        })
    }

    fn warms_up_itself(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: Work = Work::Chunk {
        start_pos: 100,
        n_prompt: 20,
    };

    fn prepared(command: &str, work: Work) -> PeerCommand {
        let mut peer = PeerCommand::new(command, Path::new("a model.gguf"));
        let label = "m".to_owned();
        peer.prepare(&Point { label, work }, &[]).unwrap();
        peer
    }

    /// A shell command that prints the arguments it got where llama-bench prints a commit.
    fn stub(n_prompt: usize, n_gen: usize, n_depth: usize) -> String {
        format!(
            "f() {{ printf '[{{\"n_prompt\":{n_prompt},\"n_gen\":{n_gen},\"n_depth\":{n_depth},\
             \"samples_ns\":[2000000,4000000,3000000],\"type_k\":\"f16\",\
             \"build_commit\":\"%s\"}}]' \"$*\"; }}; f --flag"
        )
    }

    #[test]
    fn command_gets_the_point_and_its_samples_are_read() {
        let mut peer = prepared(&stub(20, 0, 100), CHUNK);

        let run = peer.run().unwrap();

        assert_eq!(run.duration, Duration::from_millis(3));
        assert!(run.logits.is_none() && peer.warms_up_itself());
        let settings = peer.settings();
        assert_eq!(
            settings["build_commit"],
            "--flag -m a model.gguf -p 20 -n 0 -d 100 -r 1 -o json"
        );
        assert_eq!(settings["type_k"], "f16");
    }

    #[test]
    fn decoding_is_asked_for_without_a_prompt() {
        let work = Work::Decode {
            start_pos: 0,
            n_gen: 8,
        };
        let mut peer = prepared(&stub(0, 8, 0), work);

        peer.run().unwrap();

        assert!(peer.settings()["build_commit"].contains("-p 0 -n 8 -r 1"));
    }

    #[test]
    fn results_of_another_point_are_refused() {
        let error = prepared(&stub(512, 0, 0), CHUNK).run().unwrap_err();

        let text = error.to_string();
        assert!(
            text.contains("20 at 100") && text.contains("512 + 0 at 0"),
            "{text}"
        );
    }

    #[test]
    fn failure_and_foreign_output_are_errors_with_what_was_said() {
        let error = prepared("f() { echo no device >&2; exit 3; }; f", CHUNK).run();
        let text = error.unwrap_err().to_string();
        assert!(text.contains("no device") && text.contains('3'), "{text}");

        let error = prepared("f() { echo hello; }; f", CHUNK).run().unwrap_err();
        assert!(error.to_string().contains("llama-bench's JSON"), "{error}");
    }
}
