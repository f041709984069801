//! Finds the pinned source, patches it in memory, proves the result and writes it to `OUT_DIR`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::patch::{self, Tree};
use crate::{Failure, env_path, rerun_if_changed};

/// The parts of the upstream tree that our CMake project needs.
const PARTS: [&str; 10] = [
    "LICENSE",
    "ggml/CMakeLists.txt",
    "ggml/cmake",
    "ggml/include",
    "ggml/src",
    "include/llama.h",
    "include/llama-cpp.h",
    "src",
    "ggml/src/ggml-cpu",
    "ggml/src/ggml-cuda",
];
/// Where `ggml-patches/files/` goes in the tree.
const FILES_TARGET: &str = "ggml/src/ggml-cuda";
const README: &str = "ggml-patches/README.md";
const HASH_LINE: &str = "Series-SHA256: ";

/// The patched source and what is known about it.
pub struct Staged {
    /// Folder with `ggml/`, `src/` and `include/`.
    pub root: PathBuf,
    /// Version of the pinned crate, or `custom` with `GGML_SOURCE_DIR`.
    pub pin: String,
    /// SHA-256 of the patched tree.
    pub hash: String,
    /// Number of patches in the series.
    pub n_patches: usize,
}

/// Stages the source: see the module's documentation.
pub fn stage(manifest_dir: &Path, out_dir: &Path) -> Result<Staged, Failure> {
    let (source, pin) = find_source(manifest_dir)?;
    let mut tree = Tree::new();
    for part in PARTS {
        read_into(&mut tree, &source, part)?;
    }
    let patches_dir = manifest_dir.join("ggml-patches");
    rerun_if_changed(&patches_dir);
    add_files(&mut tree, &patches_dir.join("files"))?;
    let n_patches = apply_series(&mut tree, &patches_dir)?;
    let hash = tree_hash(&tree);
    prove(&hash, &pin, &manifest_dir.join(README))?;
    let root = out_dir.join("staged");
    write_tree(&tree, &root)?;
    Ok(Staged {
        root,
        pin,
        hash,
        n_patches,
    })
}

/// `GGML_SOURCE_DIR`, or the source folder of the crate that `vendor/ggml` pins.
fn find_source(manifest_dir: &Path) -> Result<(PathBuf, String), Failure> {
    println!("cargo::rerun-if-env-changed=GGML_SOURCE_DIR");
    if let Some(dir) = std::env::var_os("GGML_SOURCE_DIR").map(PathBuf::from) {
        if !dir.join("ggml/CMakeLists.txt").is_file() {
            return Err(format!(
                "GGML_SOURCE_DIR={}: no ggml/CMakeLists.txt in it",
                dir.display()
            )
            .into());
        }
        for part in PARTS {
            rerun_if_changed(&dir.join(part));
        }
        return Ok((dir, "custom".to_owned()));
    }
    let pin = manifest_dir.join("vendor/ggml/Cargo.toml");
    rerun_if_changed(&manifest_dir.join("vendor"));
    let output = Command::new(env_path("CARGO")?)
        .args([
            "metadata",
            "--locked",
            "--format-version=1",
            "--manifest-path",
        ])
        .arg(&pin)
        .output()?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!(
            "cannot fetch the pinned ggml source; run once with network access:\n  \
             cargo fetch --locked --manifest-path vendor/ggml/Cargo.toml\n\
             or set GGML_SOURCE_DIR to a llama.cpp checkout\n{stderr}"
        )
        .into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let package = metadata["packages"]
        .as_array()
        .and_then(|all| all.iter().find(|p| p["name"] == "llama-cpp-sys-2"))
        .ok_or("vendor/ggml does not depend on llama-cpp-sys-2")?;
    let manifest = package["manifest_path"]
        .as_str()
        .ok_or("no manifest_path")?;
    let version = package["version"].as_str().ok_or("no version")?;
    Ok((
        Path::new(manifest).with_file_name("llama.cpp"),
        version.to_owned(),
    ))
}

/// Reads a file, or a folder with everything below it; of `ggml/src` only its own files.
fn read_into(tree: &mut Tree, root: &Path, part: &str) -> Result<(), Failure> {
    let path = root.join(part);
    if path.is_file() {
        tree.insert(part.to_owned(), fs::read(&path)?);
        return Ok(());
    }
    for entry in fs::read_dir(&path).map_err(|e| format!("{}: {e}", path.display()))? {
        let entry = entry?;
        let name = entry
            .file_name()
            .into_string()
            .map_err(|n| format!("odd file name {n:?}"))?;
        if entry.file_type()?.is_file() || part != "ggml/src" {
            read_into(tree, root, &format!("{part}/{name}"))?;
        }
    }
    Ok(())
}

/// Adds our own files; one that upstream has too is an error.
fn add_files(tree: &mut Tree, dir: &Path) -> Result<(), Failure> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry
            .file_name()
            .into_string()
            .map_err(|n| format!("odd file name {n:?}"))?;
        if name.starts_with('.') {
            continue;
        }
        let target = format!("{FILES_TARGET}/{name}");
        if tree.insert(target, fs::read(entry.path())?).is_some() {
            return Err(
                format!("ggml-patches/files/{name}: upstream has a file of that name").into(),
            );
        }
    }
    Ok(())
}

fn apply_series(tree: &mut Tree, dir: &Path) -> Result<usize, Failure> {
    let mut series: Vec<PathBuf> = fs::read_dir(dir)?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    series.retain(|path| path.extension().is_some_and(|e| e == "patch"));
    series.sort();
    for path in &series {
        let text = fs::read_to_string(path)?;
        patch::apply(tree, &text).map_err(|e| {
            let name = path.display();
            format!("{name}: {e}\nmake the patch anew against the pin (vendor/README.md says how)")
        })?;
    }
    Ok(series.len())
}

/// SHA-256 over path, length and bytes of every file, in path order.
fn tree_hash(tree: &Tree) -> String {
    let mut hasher = Sha256::new();
    for (path, bytes) in tree {
        hasher.update(format!("{path}\0{}\0", bytes.len()));
        hasher.update(bytes);
    }
    hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Compares with the recorded hash, or records it when `G4_UPDATE_SERIES_HASH=1`.
fn prove(hash: &str, pin: &str, readme: &Path) -> Result<(), Failure> {
    println!("cargo::rerun-if-env-changed=G4_UPDATE_SERIES_HASH");
    let text = fs::read_to_string(readme)?;
    let recorded = text
        .lines()
        .find_map(|line| line.strip_prefix(HASH_LINE))
        .ok_or_else(|| format!("{README}: no line `{HASH_LINE}...`"))?;
    if recorded == hash {
        return Ok(());
    }
    if std::env::var_os("G4_UPDATE_SERIES_HASH").is_some_and(|v| v == "1") {
        let (old, new) = (
            format!("{HASH_LINE}{recorded}"),
            format!("{HASH_LINE}{hash}"),
        );
        fs::write(readme, text.replacen(&old, &new, 1))?;
        return Ok(());
    }
    if pin == "custom" {
        println!(
            "cargo::warning=GGML_SOURCE_DIR: the patched source is not the one recorded in {README}"
        );
        return Ok(());
    }
    Err(format!(
        "the patched source is not the recorded one\n  recorded in {README}: {recorded}\n  \
         found: {hash}\nif the series was changed on purpose, run `make series-hash` and commit"
    )
    .into())
}

/// Writes the files whose bytes differ and deletes those that are not in the tree.
fn write_tree(tree: &Tree, root: &Path) -> Result<(), Failure> {
    for (path, bytes) in tree {
        let target = root.join(path);
        if fs::read(&target).is_ok_and(|found| found == *bytes) {
            continue;
        }
        fs::create_dir_all(target.parent().ok_or("file without folder")?)?;
        fs::write(target, bytes)?;
    }
    delete_stale(tree, root, "")
}

fn delete_stale(tree: &Tree, root: &Path, below: &str) -> Result<(), Failure> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        if entry.file_type()?.is_dir() {
            delete_stale(tree, root, &path)?;
        } else if !tree.contains_key(&path) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
