//! Checks for the tools that the build needs and names the command that installs what is missing.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::{env, fs};

use crate::Failure;

/// Marks the second start of the build script.
const RESTARTED: &str = "G4_BUILD_RESTARTED";

/// Runs this program again with the paths of `.tools/` (see `make tools`) when the system lacks
/// a tool that is there. Changing our own environment would be unsafe, a child's is not.
pub fn restart_with_local_tools(manifest_dir: &Path) -> Result<Option<ExitCode>, Failure> {
    for name in ["CMAKE", "LIBCLANG_PATH", "CUDACXX"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let wheels = manifest_dir.join(".tools/py");
    let mut extra: Vec<(&str, PathBuf)> = Vec::new();
    let cmake = wheels.join("cmake/data/bin/cmake");
    if !runs(cmake_program()) && runs(&cmake) {
        extra.push(("CMAKE", cmake));
    }
    if !has_system_libclang() {
        extra.extend(wheel_libclang(&wheels).map(|dir| ("LIBCLANG_PATH", dir)));
    }
    let nvcc = manifest_dir.join(".tools/cuda/bin/nvcc");
    if crate::feature("CUDA") && !runs(nvcc_program()) && runs(&nvcc) {
        extra.push(("CUDACXX", nvcc));
    }
    if extra.is_empty() || env::var_os(RESTARTED).is_some() {
        return Ok(None);
    }
    let status = Command::new(env::current_exe()?)
        .envs(extra)
        .env(RESTARTED, "1")
        .status()?;
    Ok(Some(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }))
}

/// Fails with the install command of the first tool that is missing.
pub fn check(cuda: bool) -> Result<(), Failure> {
    if !runs(cmake_program()) {
        return missing("cmake", "apt-get install cmake", "make tools");
    }
    let compiler = env::var_os("CXX").unwrap_or("c++".into());
    if !runs(compiler) {
        return missing(
            "a C++ compiler",
            "apt-get install g++ make",
            "set CXX to one",
        );
    }
    if !has_system_libclang() && env::var_os("LIBCLANG_PATH").is_none() {
        return missing("libclang", "apt-get install libclang-dev", "make tools");
    }
    if cuda && !runs(nvcc_program()) {
        let hint = "make cuda-toolchain, or set CUDACXX to an nvcc";
        return missing(
            "nvcc (feature `cuda`)",
            "apt-get install nvidia-cuda-toolkit",
            hint,
        );
    }
    Ok(())
}

fn missing(what: &str, install: &str, other: &str) -> Result<(), Failure> {
    Err(format!("{what} is missing; install it:\n  {install}\nor, without root: {other}").into())
}

fn cmake_program() -> std::ffi::OsString {
    env::var_os("CMAKE").unwrap_or("cmake".into())
}

fn nvcc_program() -> std::ffi::OsString {
    env::var_os("CUDACXX").unwrap_or("nvcc".into())
}

fn runs(program: impl AsRef<OsStr>) -> bool {
    let quiet = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

fn has_system_libclang() -> bool {
    env::var_os("LIBCLANG_PATH").is_some()
        || bindgen_libclang_dirs()
            .iter()
            .any(|dir| holds_libclang(dir))
}

/// The folders in which bindgen's loader looks on Linux.
fn bindgen_libclang_dirs() -> Vec<PathBuf> {
    let fixed = [
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
    ];
    let mut dirs: Vec<PathBuf> = fixed.iter().map(PathBuf::from).collect();
    for entry in fs::read_dir("/usr/lib").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("llvm") {
            dirs.push(entry.path().join("lib"));
        }
    }
    dirs
}

fn holds_libclang(dir: &Path) -> bool {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libclang.so") || name.starts_with("libclang-") && name.contains(".so")
        })
}

/// The library folder of PyPI's `libclang` wheel.
fn wheel_libclang(wheels: &Path) -> Option<PathBuf> {
    Some(wheels.join("clang/native")).filter(|dir| holds_libclang(dir))
}

/// The C compiler's own include folder, as the last place to look in.
pub fn compiler_headers() -> Vec<String> {
    let compiler = env::var_os("CC").unwrap_or("cc".into());
    let output = Command::new(compiler)
        .arg("-print-file-name=include")
        .output();
    let dir = output
        .ok()
        .filter(|o| o.status.success())
        .and_then(|o| String::from_utf8(o.stdout).ok());
    dir.map(|dir| format!("-idirafter{}", dir.trim()))
        .into_iter()
        .collect()
}
