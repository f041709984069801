//! Running the built binary in tests: clean environment, full report on failure, small models
//! made by the binary itself.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::thread::JoinHandle;

/// The built binary with our own variables cleared, except where ggml's backends are.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_g4prefill"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        if text.starts_with("G4_") && text != "G4_BACKEND_DIR" {
            command.env_remove(&name);
        }
    }
    // Tests run side by side: more threads than cores make ggml wait for itself.
    command
        .env("G4_THREADS", "1")
        .args(args)
        .stdin(Stdio::null());
    command
}

/// Runs the binary to its end.
pub fn g4prefill(args: &[&str]) -> Run {
    finish(command(args))
}

/// The subcommand `name` on the tiny model and the CPU, with `more` behind.
pub fn tiny_command(name: &str, more: &[&str]) -> Command {
    let model = model("tiny", "f32");
    command(&[&[name, "-m", text(&model), "--device", "cpu"], more].concat())
}

/// Runs the subcommand `name` on the tiny model and the CPU to its end.
pub fn tiny(name: &str, more: &[&str]) -> Run {
    finish(tiny_command(name, more))
}

/// As [`tiny`], with `input` on stdin.
pub fn tiny_with_input(name: &str, more: &[&str], input: &[u8]) -> Run {
    finish_with_input(tiny_command(name, more), input)
}

/// The command run by a shell after `setup`, with its words as `"$@"`.
pub fn in_shell(setup: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(setup).arg("sh");
    behind(shell, command)
}

/// The command with the signals of a terminal as by default: who runs the tests in the background
/// may ignore them, and children inherit that.
fn with_default_signals(command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=INT,TERM,HUP,QUIT");
    behind(env, command)
}

/// A program that runs the command, with the command's environment.
fn behind(mut runner: Command, command: &Command) -> Command {
    runner.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => runner.env(name, value),
            None => runner.env_remove(name),
        };
    }
    runner
}

/// Runs a prepared command to its end.
pub fn finish(mut command: Command) -> Run {
    let output = command.output().expect("start g4prefill");
    Run::new(&command, output)
}

/// Runs a prepared command with `input` on stdin.
pub fn finish_with_input(mut command: Command, input: &[u8]) -> Run {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start g4prefill");
    // The program may end before it has read everything: that is its answer, not our failure.
    let _ = child
        .stdin
        .take()
        .expect("stdin was piped")
        .write_all(input);
    let output = child.wait_with_output().expect("wait for g4prefill");
    Run::new(&command, output)
}

/// Runs a prepared command whose reader has gone before it writes: success, and no word.
#[track_caller]
pub fn ends_well_with_closed_stdout(mut command: Command) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start g4prefill");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("wait for g4prefill");
    let run = Run::new(&command, output);
    run.code(0);
    assert_eq!(run.stderr(), "");
}

/// A run that goes on: its stderr is read line by line, signals can be sent.
pub struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: BufReader<ChildStderr>,
    seen: String,
    args: Vec<String>,
}

/// Starts a prepared command.
pub fn start(command: Command) -> Running {
    let mut child = with_default_signals(&command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start g4prefill");
    let stderr = BufReader::new(child.stderr.take().expect("stderr was piped"));
    let mut stdout = child.stdout.take().expect("stdout was piped");
    // Read all the time: a full pipe would stop the program.
    let stdout = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).expect("read stdout");
        bytes
    });
    Running {
        child,
        stdout,
        stderr,
        seen: String::new(),
        args: arguments(&command),
    }
}

impl Running {
    /// Reads stderr up to a line that begins with `text`.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        loop {
            let before = self.seen.len();
            let n = self.stderr.read_line(&mut self.seen).expect("read stderr");
            assert!(n > 0, "no line begins with {text:?}: {}", self.seen);
            if self.seen[before..].starts_with(text) {
                return;
            }
        }
    }

    /// Sends a signal, such as `INT`.
    pub fn signal(&self, name: &str) {
        let (signal, pid) = (format!("-{name}"), self.child.id().to_string());
        let status = Command::new("kill").args([signal, pid]).status();
        assert!(status.expect("start kill").success(), "kill -{name}");
    }

    /// Waits for the end.
    pub fn end(mut self) -> Run {
        self.stderr
            .read_to_string(&mut self.seen)
            .expect("read stderr");
        let output = Output {
            status: self.child.wait().expect("wait for g4prefill"),
            stdout: self.stdout.join().expect("stdout was read"),
            stderr: self.seen.into_bytes(),
        };
        Run {
            args: self.args,
            output,
        }
    }
}

fn arguments(command: &Command) -> Vec<String> {
    let text = |arg: &std::ffi::OsStr| arg.to_string_lossy().into_owned();
    command.get_args().map(text).collect()
}

/// A finished run.
#[derive(Debug)]
pub struct Run {
    args: Vec<String>,
    output: Output,
}

impl Run {
    fn new(command: &Command, output: Output) -> Self {
        Self {
            args: arguments(command),
            output,
        }
    }

    /// The signal that ended the process, if one did.
    pub fn signal(&self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.output.status)
    }

    /// Asserts the exit code; a failure shows the whole run.
    #[track_caller]
    pub fn code(&self, expected: i32) -> &Self {
        assert_eq!(
            self.output.status.code(),
            Some(expected),
            "{}",
            self.describe()
        );
        self
    }

    /// stdout as text.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    /// stdout as bytes.
    pub fn stdout_bytes(&self) -> &[u8] {
        &self.output.stdout
    }

    /// stderr as text.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// stdout as one JSON object with a newline behind it and `schema_version` first.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        let text = self.stdout();
        assert!(
            text.starts_with("{\"schema_version\":1,"),
            "{}",
            self.describe()
        );
        assert_eq!(text.matches('\n').count(), 1, "{}", self.describe());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {}", self.describe()))
    }

    /// Asserts that stderr holds `text`.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        assert!(
            self.stderr().contains(text),
            "no {text:?} on stderr: {}",
            self.describe()
        );
        self
    }

    fn describe(&self) -> String {
        format!(
            "g4prefill {}\nstatus: {}\n--- stdout\n{}\n--- stderr\n{}",
            self.args.join(" "),
            self.output.status,
            self.stdout(),
            self.stderr()
        )
    }
}

/// A synthetic model of this preset and type, made once and kept for the next run.
pub fn model(preset: &str, dtype: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{preset}-{dtype}.gguf"));
    if !path.exists() {
        // Written beside its place and renamed, so two tests at once do no harm.
        let out = path.to_str().expect("UTF-8 path");
        g4prefill(&[
            "synth", "--preset", preset, "--type", dtype, "--seed", "7", "-o", out,
        ])
        .code(0);
    }
    path
}

/// Names in a folder, sorted.
pub fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("read the folder");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

/// The path as text for the command line.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A file of token ids below `n_vocab`: the same numbers each time.
pub fn ids_file(folder: &Path, n: u32, n_vocab: u32) -> PathBuf {
    let path = folder.join(format!("{n}.ids"));
    let ids: Vec<String> = (0..n)
        .map(|i| ((i.wrapping_mul(2_654_435_761) >> 7) % n_vocab).to_string())
        .collect();
    std::fs::write(&path, ids.join(" ")).expect("write ids");
    path
}

/// Reads a file of little-endian float32.
pub fn read_f32(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("read logits");
    f32s(&bytes)
}

/// Little-endian float32 values.
pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    assert_eq!(bytes.len() % 4, 0);
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// The most likely token.
pub fn argmax(row: &[f32]) -> u64 {
    g4prefill::numerics::argmax(row).expect("a row").into()
}
