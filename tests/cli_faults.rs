//! Faults of the machine: no memory, no disk, a model file that changes under the program.
//!
//! Ctrl-C is in `cli_signals.rs`, backends that cannot be used in `cli_backends.rs`.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;

use g4prefill::engine::{Engine, EngineOptions, Logits, PrefillControl, Rows};
use g4prefill::ggml::DeviceChoice;

use cli_support::{
    Run, Running, command, finish, ids_file, in_shell, model, names_in, start, text, tiny_command,
};

fn limited(kib: u64, command: &Command) -> Run {
    finish(in_shell(&format!("ulimit -v {kib}; exec \"$@\""), command))
}

/// The limit is lowered from enough to hopeless: each run works or says what was too large.
fn lower_the_limit(kib: impl Iterator<Item = u64>, n_prompt: u32) -> BTreeSet<&'static str> {
    let folder = tempfile::tempdir().unwrap();
    let ids = ids_file(folder.path(), n_prompt, 256);
    let out = folder.path().join("out");
    let args = ["--ids", text(&ids), "-o", text(&out), "--n-ctx", "262144"];
    let logits = tiny_command("logits", &[&args[..], &["--rows", "all"]].concat());
    let mut stages = BTreeSet::new();
    for kib in kib {
        let run = limited(kib, &logits);
        let said = run.stderr();
        assert!(
            run.signal().is_none() || is_small_allocation(&said),
            "{kib} KiB: signal {:?}: {said}",
            run.signal()
        );
        if out.exists() {
            run.code(0);
            std::fs::remove_file(&out).unwrap();
        } else if run.signal().is_none() && said.contains("g4prefill: ") {
            run.code(2);
            assert!(!said.contains(" 0 bytes"), "{said}");
            stages.extend(STAGES.iter().filter(|stage| said.contains(**stage)));
        } else if run.signal().is_none() {
            // Below what the program's own libraries take, the loader speaks.
            assert!(
                said.contains("shared lib") || said.contains("exec"),
                "{kib} KiB: {said}"
            );
        }
        assert_eq!(
            names_in(folder.path()),
            [format!("{n_prompt}.ids")],
            "{kib} KiB"
        );
    }
    stages
}

/// Whether an allocator ended the process over something small, which Rust's always does, and so does
/// an exception of C++.
fn is_small_allocation(said: &str) -> bool {
    const MOST: u64 = 1 << 20;
    let rest = said.split("memory allocation of ").nth(1);
    let n = rest.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    let is_thrown = said.contains("std::bad_alloc") || said.contains("foreign exceptions");
    is_thrown || n.is_some_and(|n| n <= MOST)
}

/// What messages call the stages, in the order in which they come.
const STAGES: [&str; 5] = [
    "cannot map",
    "weights",
    "K/V caches",
    "compute arena",
    "logits",
];

#[test]
fn memory_limit_at_any_stage_is_an_error_that_names_it_and_leaves_nothing() {
    let stages = lower_the_limit((6..60).map(|i| i * 3500), 300);
    assert!(
        stages.contains("weights") && stages.contains("cannot map"),
        "{stages:?}"
    );

    let stages = lower_the_limit([250_000, 400_000].into_iter(), 262_000);
    assert!(stages.contains("K/V caches"), "{stages:?}");
}

#[test]
fn full_device_behind_stdout_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let model = model("tiny", "f32");
    let ids = ids_file(folder.path(), 20, 256);
    let cases: [Vec<&str>; 6] = [
        vec!["run", "-m", text(&model), "-p", "the", "-n", "3"],
        vec!["run", "-m", text(&model), "-p", "the", "-n", "3", "--json"],
        vec!["plan", "-m", text(&model), "--n-prompt", "9", "--json"],
        vec!["inspect", "-m", text(&model)],
        vec!["tokenize", "-m", text(&model), "-p", "the"],
        vec!["logits", "-m", text(&model), "--ids", text(&ids), "-o", "-"],
    ];
    for args in cases {
        let run = finish(in_shell("exec \"$@\" > /dev/full", &command(&args)));
        run.code(2).says("No space left on device");
    }
    let args = ["--ids", text(&ids), "-o", "/dev/full"];
    finish(tiny_command("logits", &args))
        .code(2)
        .says("/dev/full")
        .says("No space left");
}

/// A small file system of its own; `None`, said loudly, where that is not allowed.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(test: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args([
                "-t",
                "tmpfs",
                "-o",
                "size=64k",
                "tmpfs",
                text(folder.path()),
            ])
            .output();
        if mount.is_ok_and(|o| o.status.success()) {
            return Some(Self(folder));
        }
        eprintln!("SKIPPED: {test}: no right to mount a small file system");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn full_disk_is_an_error_that_leaves_the_old_file_or_none() {
    let Some(disk) = SmallDisk::new("full_disk_is_an_error_that_leaves_the_old_file_or_none")
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let ids = ids_file(folder.path(), 100, 256);
    let out = disk.0.path().join("out");
    std::fs::write(&out, "old").unwrap();
    let prompt = "the captain ".repeat(60);
    let writes = [
        command(&["synth", "--preset", "tiny", "-o", text(&out)]),
        tiny_command(
            "logits",
            &["--ids", text(&ids), "-o", text(&out), "--rows", "all"],
        ),
        tiny_command(
            "run",
            &["-p", &prompt, "-n", "1", "--save-session", text(&out)],
        ),
    ];
    for write in writes {
        let run = finish(write);
        run.code(2).says(text(&out));
        assert_eq!(std::fs::read(&out).unwrap(), b"old", "{run:?}");
        assert_eq!(names_in(disk.0.path()), ["out"], "{run:?}");
    }
}

/// A copy of a model with per-layer embeddings, which the host reads from the file all the time
/// with `--ple host`.
fn copy_of_model(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("copy.gguf");
    std::fs::copy(model("tiny", "f32"), &path).unwrap();
    path
}

/// A run that has begun to generate up to `n` tokens.
fn run_that_generates(path: &Path, n: &str, more: &[&str]) -> Running {
    let args = [
        "run",
        "-m",
        text(path),
        "--device",
        "cpu",
        "--ple",
        "host",
        "-p",
        "the",
        "-v",
    ];
    let mut run = start(command(&[&args[..], &["-n", n], more].concat()));
    run.wait_for("generation of at most");
    run
}

fn cpu_options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        ..EngineOptions::default()
    }
}

#[test]
fn file_that_is_shortened_while_it_is_used_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = copy_of_model(folder.path());
    let out = folder.path().join("session");
    let more = ["--n-ctx", "300000", "--save-session", text(&out)];
    let run = run_that_generates(&path, "200000", &more);

    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();

    let run = run.end();
    run.code(2)
        .says(text(&path))
        .says("when it was opened, found 4096")
        .says("must not be written over");
    assert_eq!(names_in(folder.path()), ["copy.gguf"]);
}

#[test]
fn file_that_is_replaced_by_renaming_while_it_is_used_goes_on_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = copy_of_model(folder.path());
    let other = folder.path().join("other");
    std::fs::write(&other, "not a model").unwrap();
    let run = run_that_generates(&path, "400", &[]);

    std::fs::rename(&other, &path).unwrap();

    run.end().code(0);
}

#[test]
fn file_that_is_written_over_while_it_is_loaded_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = copy_of_model(folder.path());
    let bytes = std::fs::read(&path).unwrap();
    let mut is_written = false;
    let result = Engine::load(&path, cpu_options(), &mut |progress| {
        if progress.done_bytes > 0 && !is_written {
            std::fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .and_then(|mut file| std::io::Write::write_all(&mut file, &bytes))
                .unwrap();
            is_written = true;
        }
    });

    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("copy.gguf") && error.contains("written since"),
        "{error}"
    );
}

#[test]
fn file_that_is_written_over_while_its_weights_are_used_gives_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = copy_of_model(folder.path());
    let bytes = std::fs::read(&path).unwrap();
    let engine = Engine::load(&path, cpu_options(), &mut |_| {}).unwrap();
    let mut session = engine.session(64).unwrap();
    let mut read = || -> anyhow::Result<Logits> {
        Ok(session.prefill(&[2, 9], &Rows::Last, &mut PrefillControl::default())?)
    };
    read().unwrap();

    let mut file = OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();

    let error = read().unwrap_err().to_string();
    assert!(
        error.contains("copy.gguf") && error.contains("written since"),
        "{error}"
    );
}

#[test]
fn missing_empty_and_cut_models_are_errors_of_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(model("tiny", "f32")).unwrap();
    let path = folder.path().join("m.gguf");
    for n in [0, 3, 24, 1000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..n]).unwrap();
        for more in [
            &["run", "-p", "a", "-m"][..],
            &["plan", "--n-prompt", "9", "-m"],
            &["tokenize", "-p", "a", "-m"],
            &["inspect", "-m"],
            &["verify", "-m"],
        ] {
            let run = finish(command(&[more, &[text(&path)]].concat()));
            run.code(2).says(text(&path));
            assert_eq!(run.stdout(), "");
        }
    }
}

/// A backend library that ends in the middle: the loader may refuse it, or lose a page of it.
#[test]
fn backend_library_that_was_cut_is_an_error() {
    let Some(library) = cpu_backend() else {
        panic!("no CPU backend beside the program's libraries");
    };
    let bytes = std::fs::read(&library).unwrap();
    for n in [0, 100, 4096, bytes.len() / 2, bytes.len() - 4096] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libggml-cpu.so"), &bytes[..n]).unwrap();
        let mut command = tiny_command("run", &["-p", "a", "-n", "1"]);
        command.env("G4_BACKEND_DIR", folder.path());
        let run = finish(command);
        assert!(
            run.signal().is_none(),
            "{n} of {}: {}",
            bytes.len(),
            run.stderr()
        );
        // Cut behind what is loaded (debug information, section names), a library still works.
        if !run.stderr().contains("prompt: ") {
            run.code(2).says("libggml-cpu");
            assert_eq!(run.stdout(), "");
        }
    }
}

/// The CPU backend that this build uses, found by what the process maps.
fn cpu_backend() -> Option<std::path::PathBuf> {
    g4prefill::ggml::load_backends(None).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    paths.map(std::path::PathBuf::from).find(|path| {
        path.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("libggml-cpu"))
    })
}
