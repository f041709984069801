//! Builds ggml (and, with feature `llama`, llama.cpp's library) from the pinned source, and binds it.
//!
//! Steps: stage the pinned source, apply `ggml-patches/`, cmake, bindgen, link lines.
//!
//! Backends are loadable modules (`libggml-cpu.so`, `libggml-cuda.so`). The program looks for them
//! beside the executable, in `G4_BACKEND_DIR`, or in the folder they were built in, which is
//! compiled in as `env!("G4_DEFAULT_BACKEND_DIR")`. `libggml-base.so`, `libggml.so` and
//! `libllama.so` are found through the rpath: the executable's folder, its `lib/`, the build's.
//!
//! For the crate: `G4_PIN`, `G4_SERIES_SHA256`, `G4_PATCH_COUNT`, `G4_COMMIT`, `G4_CPU_FEATURES`.
//!
//! Read from the environment: `GGML_SOURCE_DIR` (another checkout), `G4_CPU_FEATURES` (`native`,
//! `avx2` or `all`), `G4_BINDINGS_ONLY=1` (compile no C++: enough for clippy and Miri, which link
//! nothing), `G4_UPDATE_SERIES_HASH=1` (record the hash of a changed series), `CC`, `CXX`, `CMAKE`,
//! `LIBCLANG_PATH`, `CUDACXX`, and the CMake variables in `PASSED_ON`. What `make tools` installed
//! in `.tools/` is used when the system has no cmake or libclang.

#[path = "build/patch.rs"]
mod patch;
#[path = "build/stage.rs"]
mod stage;
#[path = "build/tools.rs"]
mod tools;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

/// Any failure of the build; its text is printed as it is.
type Failure = Box<dyn Error>;

fn main() -> ExitCode {
    match build() {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("\ng4prefill build: {failure}\n");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<ExitCode, Failure> {
    let manifest_dir = env_path("CARGO_MANIFEST_DIR")?;
    let out_dir = env_path("OUT_DIR")?;
    for path in ["build.rs", "build"] {
        rerun_if_changed(&manifest_dir.join(path));
    }
    if let Some(code) = tools::restart_with_local_tools(&manifest_dir)? {
        return Ok(code);
    }
    tools::check(feature("CUDA"))?;
    let staged = stage::stage(&manifest_dir, &out_dir)?;
    let lib_dir = out_dir.join("lib");
    let cpu = cpu_features();
    println!("cargo::rerun-if-env-changed=G4_BINDINGS_ONLY");
    if env::var_os("G4_BINDINGS_ONLY").is_none() {
        compile(&manifest_dir, &staged.root, &lib_dir, &cpu)?;
        link(&lib_dir);
    }
    bind(&manifest_dir, &staged.root, &out_dir)?;
    export(&manifest_dir, &staged, &lib_dir, &cpu)?;
    Ok(ExitCode::SUCCESS)
}

/// The value of an environment variable that cargo sets.
pub(crate) fn env_path(name: &str) -> Result<PathBuf, Failure> {
    env::var_os(name)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{name} is not set").into())
}

pub(crate) fn rerun_if_changed(path: &Path) {
    println!("cargo::rerun-if-changed={}", path.display());
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}

/// ggml's CPU options: name in ggml, flag in `/proc/cpuinfo`, compiler flag.
/// AMX is left out: docs/decisions/0004-no-amx.md.
const CPU_FEATURES: [(&str, &str, &str); 11] = [
    ("SSE42", "sse4_2", "-msse4.2"),
    ("AVX", "avx", "-mavx"),
    ("F16C", "f16c", "-mf16c"),
    ("FMA", "fma", "-mfma"),
    ("BMI2", "bmi2", "-mbmi2"),
    ("AVX2", "avx2", "-mavx2"),
    ("AVX_VNNI", "avx_vnni", "-mavxvnni"),
    ("AVX512", "avx512bw", "-mavx512bw"),
    ("AVX512_VBMI", "avx512vbmi", "-mavx512vbmi"),
    ("AVX512_VNNI", "avx512_vnni", "-mavx512vnni"),
    ("AVX512_BF16", "avx512_bf16", "-mavx512bf16"),
];
/// Features of the AVX2 baseline (Haswell and later).
const AVX2_BASELINE: [&str; 6] = ["SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2"];

/// What the CPU backend is compiled for.
enum Cpu {
    /// `feature:flag` of each feature that the code may use.
    Only(Vec<String>),
    /// ggml's full set of variants, chosen when the program starts.
    AllVariants,
}

/// `G4_CPU_FEATURES`, by default the features of the machine that builds.
fn cpu_features() -> Cpu {
    println!("cargo::rerun-if-env-changed=G4_CPU_FEATURES");
    let wanted = env::var("G4_CPU_FEATURES").unwrap_or_default();
    if wanted == "all" {
        return Cpu::AllVariants;
    }
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = info
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|f| f == flag);
    let baseline = wanted == "avx2";
    let chosen = CPU_FEATURES.iter().filter(|(name, flag, _)| {
        if baseline {
            AVX2_BASELINE.contains(name)
        } else {
            has(flag)
        }
    });
    Cpu::Only(
        chosen
            .map(|(name, _, option)| format!("{name}:{option}"))
            .collect(),
    )
}

/// CMake variables that may be set from the environment.
const PASSED_ON: [&str; 5] = [
    "CMAKE_C_COMPILER_LAUNCHER",
    "CMAKE_CXX_COMPILER_LAUNCHER",
    "CMAKE_CUDA_COMPILER_LAUNCHER",
    "CMAKE_CUDA_ARCHITECTURES",
    "G4_CUDA_PRUNE",
];

/// Compiles the staged source as shared libraries, always optimised, into `lib_dir`.
fn compile(manifest_dir: &Path, staged: &Path, lib_dir: &Path, cpu: &Cpu) -> Result<(), Failure> {
    let mut cmake = cmake::Config::new(manifest_dir.join("vendor"));
    cmake
        .profile("Release")
        // Our own git checkout surrounds the staged source: ggml must not ask it for a commit.
        .env("GIT_CEILING_DIRECTORIES", manifest_dir)
        .define("G4_STAGED", staged)
        .define("G4_LIB_DIR", lib_dir)
        .define("BUILD_SHARED_LIBS", "ON")
        .define("GGML_BACKEND_DL", "ON")
        .define("GGML_NATIVE", "OFF")
        .define("GGML_AMX_TILE", "OFF")
        .define("GGML_AMX_INT8", "OFF")
        .define("GGML_LLAMAFILE", "ON")
        .define("GGML_CUDA_GRAPHS", "ON")
        .define("GGML_CUDA_NCCL", "OFF")
        .define("GGML_ALL_WARNINGS", "OFF")
        .define("GGML_CCACHE", "OFF")
        .define("G4_LLAMA", if feature("LLAMA") { "ON" } else { "OFF" })
        .define("GGML_CUDA", if feature("CUDA") { "ON" } else { "OFF" })
        .build_target("g4_libraries");
    for name in CPU_FEATURES.map(|(name, ..)| name) {
        cmake.define(format!("GGML_{name}"), "OFF");
    }
    match cpu {
        Cpu::Only(features) => cmake
            .define("GGML_CPU_ALL_VARIANTS", "OFF")
            .define("G4_CPU_FEATURES", features.join(";")),
        Cpu::AllVariants => cmake
            .define("GGML_CPU_ALL_VARIANTS", "ON")
            .define("G4_CPU_FEATURES", ""),
    };
    if env::var_os("CARGO_CFG_FUZZING").is_some() {
        // Among them rustc's sanitizer, which the C++ compiler has another runtime for.
        cmake.no_default_flags(true);
    }
    for name in PASSED_ON {
        println!("cargo::rerun-if-env-changed={name}");
        if let Ok(value) = env::var(name) {
            cmake.define(name, value);
        }
    }
    cmake.build();
    Ok(())
}

/// The list of what is bound, written by `make api` from the uses in `src/ggml/`.
const API_LIST: &str = "docs/ggml-api.md";

/// Writes `bindings.rs`: C enums become plain integers, layouts are tested.
fn bind(manifest_dir: &Path, staged: &Path, out_dir: &Path) -> Result<(), Failure> {
    let mut builder = bindgen::Builder::default()
        .header(manifest_dir.join("vendor/wrapper.h").to_string_lossy())
        .clang_arg(format!("-I{}", staged.join("ggml/include").display()))
        .clang_arg(format!("-I{}", staged.join("include").display()))
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .layout_tests(true)
        .generate_comments(false)
        // PyPI's libclang comes without the compiler's own headers (stddef.h).
        .clang_args(tools::compiler_headers())
        .rust_target(bindgen::RustTarget::stable(85, 0).map_err(|e| e.to_string())?)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::Prettyplease);
    if feature("LLAMA") {
        builder = builder.clang_arg("-DG4_LLAMA");
    }
    rerun_if_changed(&manifest_dir.join(API_LIST));
    let list = fs::read_to_string(manifest_dir.join(API_LIST))?;
    let name = |line: &str| Some(line.strip_prefix("- [x] `")?.strip_suffix('`')?.to_owned());
    for name in list.lines().filter_map(name) {
        builder = builder.allowlist_item(name);
    }
    let bindings = builder.generate()?.to_string();
    let path = out_dir.join("bindings.rs");
    if !fs::read(&path).is_ok_and(|found| found == bindings.as_bytes()) {
        fs::write(path, bindings)?;
    }
    Ok(())
}

/// Links the shared libraries and tells the executables where to find them.
fn link(lib_dir: &Path) {
    println!("cargo::rustc-link-search=native={}", lib_dir.display());
    let llama = feature("LLAMA").then_some("llama");
    for library in ["ggml", "ggml-base"].into_iter().chain(llama) {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
    for rpath in ["$ORIGIN", "$ORIGIN/lib", &lib_dir.display().to_string()] {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{rpath}");
    }
}

/// Compiles in what `--version` and the backend search need.
fn export(
    manifest_dir: &Path,
    staged: &stage::Staged,
    lib_dir: &Path,
    cpu: &Cpu,
) -> Result<(), Failure> {
    let features = match cpu {
        Cpu::AllVariants => "all variants".to_owned(),
        Cpu::Only(features) => features
            .iter()
            .filter_map(|f| f.split(':').next())
            .collect::<Vec<_>>()
            .join(" "),
    };
    println!("cargo::rustc-env=G4_PIN={}", staged.pin);
    println!("cargo::rustc-env=G4_SERIES_SHA256={}", staged.hash);
    println!("cargo::rustc-env=G4_PATCH_COUNT={}", staged.n_patches);
    println!("cargo::rustc-env=G4_CPU_FEATURES={features}");
    println!(
        "cargo::rustc-env=G4_DEFAULT_BACKEND_DIR={}",
        lib_dir.display()
    );
    println!(
        "cargo::rustc-env=G4_COMMIT={}",
        commit(manifest_dir).unwrap_or("unknown".to_owned())
    );
    // For `make bundle` and `make cuda-check`.
    println!("cargo::metadata=staged={}", staged.root.display());
    // For packages that depend on this one: their executables need the folder as rpath.
    println!("cargo::metadata=lib_dir={}", lib_dir.display());
    Ok(())
}

/// The short commit of our own checkout, if this is one.
fn commit(manifest_dir: &Path) -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .current_dir(manifest_dir)
            .args(args)
            .output()
            .ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success()).then(|| text.trim().to_owned())
    };
    // HEAD names a branch or a commit; its log grows with every commit.
    for file in ["HEAD", "logs/HEAD"] {
        let path = manifest_dir.join(git(&["rev-parse", "--git-path", file])?);
        if path.exists() {
            rerun_if_changed(&path);
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
