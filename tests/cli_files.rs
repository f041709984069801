//! Where output files go: links, read-only files, devices, pipes, full file systems.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use cli_support::{
    Run, command, f32s, finish, finish_with_input, g4prefill, in_shell, model, names_in, read_f32,
    text, tiny_command, tiny_with_input,
};

fn logits_to(out: &Path) -> Run {
    tiny_with_input("logits", &["--ids", "-", "-o", text(out)], b"2 5 9")
}

fn synth_to(out: &Path) -> Run {
    g4prefill(&[
        "synth",
        "--preset",
        "tiny",
        "--type",
        "q4_0",
        "-o",
        text(out),
    ])
}

#[test]
fn link_is_followed_and_stays() {
    for write in [logits_to, synth_to] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("there")).unwrap();
        std::fs::write(folder.path().join("there/file"), "old").unwrap();
        let link = folder.path().join("link");
        symlink("there/file", &link).unwrap();

        write(&link).code(0);

        assert!(link.is_symlink());
        assert!(std::fs::metadata(&link).unwrap().len() > 100);
        assert_eq!(names_in(&folder.path().join("there")), ["file"]);
    }
}

#[test]
fn read_only_file_is_refused_before_the_work_and_kept() {
    for write in [logits_to, synth_to] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();

        write(&path).code(2).says(text(&path)).says("read-only");

        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(names_in(folder.path()), ["file"]);
    }
}

#[test]
fn missing_folder_is_found_before_the_model_is_loaded() {
    let args = "logits -m /nowhere/m.gguf --ids - -o /nowhere/out.f32";
    let args: Vec<&str> = args.split(' ').collect();

    finish_with_input(command(&args), b"1 2 3")
        .code(2)
        .says("/nowhere/out.f32");
}

#[test]
fn logits_go_to_stdout_by_each_of_its_names_and_to_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.f32");
    logits_to(&out).code(0);
    let expected = read_f32(&out);

    for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        let run = logits_to(Path::new(name));
        run.code(0);
        assert_eq!(f32s(run.stdout_bytes()), expected, "{name}");
    }
    let fifo = folder.path().join("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        move || read_f32(&fifo)
    });
    logits_to(&fifo).code(0);
    assert_eq!(reader.join().unwrap(), expected);
    assert_eq!(names_in(folder.path()), ["fifo", "out.f32"]);
}

#[test]
fn stdout_that_is_a_file_is_written_behind_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let (out, ids) = (folder.path().join("out"), folder.path().join("ids"));
    std::fs::write(&out, "keep").unwrap();
    std::fs::write(&ids, "2 5 9").unwrap();
    let logits = tiny_command("logits", &["--ids", text(&ids), "-o", "/dev/stdout"]);
    let setup = format!("exec \"$@\" >> {}", text(&out));

    finish(in_shell(&setup, &logits)).code(0);

    let bytes = std::fs::read(&out).unwrap();
    assert!(bytes.starts_with(b"keep") && bytes.len() > 4);
    assert_eq!(names_in(folder.path()), ["ids", "out"]);
}

#[test]
fn report_and_logits_cannot_share_stdout() {
    for name in ["-", "/dev/stdout"] {
        let args = ["--ids", "-", "-o", name, "--json"];
        tiny_with_input("logits", &args, b"1").code(2).says(name);
    }
}

#[test]
fn model_needs_the_name_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["-", "/dev/stdout", "/dev/null"] {
        let mut command = command(&["synth", "--preset", "tiny", "-o", name]);
        command.current_dir(folder.path());

        let run = finish(command);

        run.code(2).says(name).says("expected").says("file");
        assert_eq!(run.stdout(), "");
        assert_eq!(names_in(folder.path()), [""; 0]);
    }
}

#[test]
fn limit_on_the_size_of_a_file_is_an_error_with_the_bytes_needed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let synth = command(&[
        "synth",
        "--preset",
        "tiny",
        "--type",
        "f32",
        "-o",
        text(&path),
    ]);

    let run = finish(in_shell("ulimit -f 64; exec \"$@\"", &synth));

    run.code(2)
        .says("write the model")
        .says(text(&path))
        .says("limit on the size of a file")
        .says(" bytes are needed");
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn limit_on_the_size_of_logits_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (out, ids) = (folder.path().join("out"), folder.path().join("ids"));
    let list = vec!["7"; 300].join(" ");
    std::fs::write(&ids, list).unwrap();
    let args = ["--ids", text(&ids), "-o", text(&out), "--rows", "all"];
    let logits = tiny_command("logits", &args);

    let run = finish(in_shell("ulimit -f 8; exec \"$@\"", &logits));

    run.code(2).says(text(&out));
    assert_eq!(names_in(folder.path()), ["ids"]);
}

/// What one run of a command that ends at once writes nowhere else than where it may.
fn refused_and_kept(kept: &Path, args: &[&str], message: &str) {
    let before = std::fs::read(kept).unwrap();

    g4prefill(args).code(2).says(text(kept)).says(message);

    assert!(std::fs::read(kept).unwrap() == before, "{args:?}");
}

#[test]
fn no_output_replaces_a_model_or_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let tiny = std::fs::read(model("tiny", "f32")).unwrap();
    let m = file("m.gguf", &tiny);
    let other = file("other.gguf", &tiny);
    let book = file("book.txt", b"the old captain");
    let ids = file("ids", b"1 2 3");
    let (m, ids_name) = (text(&m), text(&ids));
    for kept in [Path::new(m), &other] {
        let to = text(kept);
        let found = "found a model (GGUF)";
        let bench = ["bench", "-m", m, "--n-prompt", "8"];
        for option in ["--json", "--md", "--svg"] {
            refused_and_kept(kept, &[&bench[..], &[option, to]].concat(), found);
        }
        let profile = ["profile", "-m", m, "--n-prompt", "8"];
        for option in ["--trace", "--html", "--dot", "--graph-json"] {
            refused_and_kept(kept, &[&profile[..], &[option, to]].concat(), found);
        }
        let run = ["run", "-m", m, "-p", "a", "--save-session", to];
        refused_and_kept(kept, &run, "or an older session");
    }
    let logits = |to| ["logits", "-m", m, "--ids", ids_name, "-o", to];
    refused_and_kept(&other, &logits(text(&other)), "found a model (GGUF)");
    for kept in [Path::new(m), &ids] {
        refused_and_kept(kept, &logits(text(kept)), "an output of its own");
    }
    let run = ["run", "-m", m, "-f", text(&book), "--save-session"];
    let run = [&run[..], &[text(&book)]].concat();
    refused_and_kept(&book, &run, "or an older session");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/c-dense-bf16.gguf");
    let real = file("real.gguf", &std::fs::read(fixture).unwrap());
    let synth = |to| ["synth", "--preset", "tiny", "-q", "-o", to];
    refused_and_kept(&real, &synth(text(&real)), "an older synthetic model");
    g4prefill(&synth(text(&other))).code(0);
    assert_eq!(
        names_in(folder.path()),
        ["book.txt", "ids", "m.gguf", "other.gguf", "real.gguf"]
    );
}

#[test]
fn a_model_is_found_behind_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let model = model("tiny", "f32");
    let link = folder.path().join("link");
    symlink(&model, &link).unwrap();

    let args = ["run", "-m", text(&model), "-p", "a", "--save-session"];
    refused_and_kept(
        &link,
        &[&args[..], &[text(&link)]].concat(),
        "found another",
    );

    assert!(link.is_symlink());
}

#[test]
fn outputs_of_one_command_have_names_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let (file, same) = (folder.path().join("a"), folder.path().join("./a"));
    let (file, same) = (text(&file), text(&same));
    for args in [
        ["bench", "--json", file, "--md", same],
        ["bench", "--md", same, "--svg", file],
        ["profile", "--html", file, "--trace", same],
    ] {
        let more = ["-m", "/nowhere/m.gguf", "--n-prompt", "8"];
        g4prefill(&[&args[..], &more].concat())
            .code(2)
            .says("another output");
    }
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn targets_of_bench_are_looked_at_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let bench = ["bench", "-m", "/nowhere/m.gguf", "--json"];

    g4prefill(&[&bench[..], &[text(folder.path())]].concat())
        .code(2)
        .says("expected a file, found a folder");
    g4prefill(&["bench", "-m", "/nowhere/m.gguf", "--md", "-"])
        .code(2)
        .says("found stdout, which carries the table");
}

#[test]
fn comparison_does_not_replace_a_result() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old.json");
    std::fs::write(&old, "{}").unwrap();
    let args = ["bench", "--compare", text(&old), text(&old), "--json"];

    refused_and_kept(&old, &[&args[..], &[text(&old)]].concat(), "an input");
}
