//! A folder of backends that cannot be used, and a backend that aborts.
//!
//! The wrong backends are small libraries that the test compiles: no hook in the product.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::Path;
use std::process::Command;

use cli_support::{Run, finish, names_in, text, tiny_command};

/// A backend of another version of ggml's interface: `api_version` is its first field.
const OTHER_VERSION: &str = "static struct { int api_version; void * rest[16]; } reg = { 99, { 0 } };\n\
                             void * ggml_backend_init(void) { return &reg; }\n";

/// A library without the entry point of a backend.
const NO_BACKEND: &str = "int nothing(void) { return 0; }\n";

/// A backend that aborts as a failed assertion of ggml does.
const ABORTING: &str = "void ggml_abort(const char * file, int line, const char * fmt, ...);\n\
                        void * ggml_backend_init(void) {\n\
                            ggml_abort(\"backend.c\", 1, \"no such luck\");\n\
                            return 0;\n\
                        }\n";

/// Compiles a library for the CPU backend's place.
fn library(folder: &Path, source: &str) {
    let file = folder.join("backend.c");
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or("cc".into());
    let out = folder.join("libggml-cpu.so");
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o", text(&out), text(&file)])
        .status();
    assert!(status.expect("start the C compiler").success());
}

fn run_with(folder: &Path, name: &str, more: &[&str]) -> Run {
    let mut command = tiny_command(name, more);
    command.env("G4_BACKEND_DIR", folder);
    finish(command)
}

fn refused(folder: &Path, expected: &[&str]) {
    for (name, more) in [("run", ["-p", "a"]), ("plan", ["--n-prompt", "9"])] {
        let run = run_with(folder, name, &more);
        run.code(2).says("G4_BACKEND_DIR").says(text(folder));
        for part in expected {
            run.says(part);
        }
        assert_eq!(run.stdout(), "");
    }
}

#[test]
fn missing_folder_is_refused() {
    refused(
        Path::new("/nowhere/backends"),
        &["expected a folder", "No such file"],
    );
}

#[test]
fn folder_without_backends_is_refused_with_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), &["libggml-cpu*.so", "an empty folder"]);

    std::fs::write(folder.path().join("notes.txt"), "").unwrap();
    refused(folder.path(), &["libggml-cpu*.so", "found notes.txt"]);
}

#[test]
fn library_that_is_no_backend_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libggml-cpu.so"), "text").unwrap();
    refused(
        folder.path(),
        &["libggml-cpu*.so to be a CPU backend", "libggml-cpu.so"],
    );

    library(folder.path(), NO_BACKEND);
    refused(folder.path(), &["ggml_backend_init"]);
}

#[test]
fn several_variants_none_of_which_can_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libggml-cpu-a.so", "libggml-cpu-b.so"] {
        std::fs::write(folder.path().join(name), "text").unwrap();
    }

    refused(
        folder.path(),
        &["libggml-cpu*.so to be a CPU backend", "libggml-cpu-b.so"],
    );
}

#[test]
fn backend_of_another_version_is_refused_with_both_numbers() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), OTHER_VERSION);

    refused(folder.path(), &["incompatible API version", "backend: 99"]);
}

#[test]
fn abort_of_ggml_ends_with_134_and_says_so() {
    const SIGABRT: i32 = 6;
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), ABORTING);

    let run = run_with(folder.path(), "run", &["-p", "a"]);

    // A shell shows an end by signal 6 as 128 + 6.
    assert_eq!(run.signal(), Some(SIGABRT), "{}", run.stderr());
    run.says("g4prefill: ggml aborted: ").says("no such luck");
    assert_eq!(run.stdout(), "");
}

#[test]
fn abort_of_ggml_leaves_no_unfinished_file() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), ABORTING);
    let results = tempfile::tempdir().unwrap();
    let (ids, out) = (results.path().join("ids"), results.path().join("out"));
    std::fs::write(&ids, "1 2 3").unwrap();

    let run = run_with(
        folder.path(),
        "logits",
        &["--ids", text(&ids), "-o", text(&out)],
    );

    assert!(run.signal().is_some(), "{}", run.stderr());
    assert_eq!(names_in(results.path()), ["ids"]);
}
