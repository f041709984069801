//! The environment, read at this edge only: the registry of our own variables, and ggml's, which
//! are recorded in every JSON report.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::CommandFactory as _;

use super::Cli;

/// Our variables that are not the default of an option (those are found in the parser itself).
const KNOWN: &[(&str, &str)] = &[
    ("G4_BACKEND_DIR", "folder with ggml's loadable backends"),
    (
        "G4_DEFAULT_BACKEND_DIR",
        "set by the build: where the backends were built",
    ),
    ("G4_COMMIT", "set by the build: our commit"),
    ("G4_CUDA_VERSION", "set by the build: version of nvcc"),
    ("G4_PATCH_COUNT", "set by the build: patches in the series"),
    ("G4_PIN", "set by the build: version of the pinned ggml"),
    (
        "G4_SERIES_SHA256",
        "set by the build: hash of the patched tree",
    ),
    (
        "G4_UPDATE_SERIES_HASH",
        "build: write the new hash of the patched tree",
    ),
    (
        "G4_REQUIRE_GPU",
        "tests: a missing GPU fails instead of skipping",
    ),
    ("G4_CPU_FEATURES", "build: native, avx2 or all"),
    ("G4_BENCH_MODEL", "tests: GGUF file to measure on a GPU"),
    ("G4_BENCH_N", "tests: prompt lengths to measure, in tokens"),
    ("G4_BENCH_WEIGHTS", "tests: native, or auto when unset"),
    (
        "G4_REQUIRE_MODEL",
        "tests: a missing model fails instead of skipping",
    ),
];

/// Refuses a variable that starts with `G4_` and that we do not know: a misspelt switch must not
/// be silently ignored.
pub fn check_environment(names: impl Iterator<Item = OsString>) -> anyhow::Result<()> {
    let mut known: Vec<String> = KNOWN.iter().map(|(name, _)| (*name).to_owned()).collect();
    collect_option_names(&Cli::command(), &mut known);
    known.sort_unstable();
    known.dedup();
    for name in names {
        let name = name.to_string_lossy();
        if name.starts_with("G4_") && !known.iter().any(|k| *k == name) {
            anyhow::bail!(
                "unknown environment variable {name}; known: {}",
                known.join(", ")
            );
        }
    }
    Ok(())
}

/// Variables that stand behind an option, of a command and its subcommands.
fn collect_option_names(command: &clap::Command, known: &mut Vec<String>) {
    let names = command.get_arguments().filter_map(clap::Arg::get_env);
    known.extend(names.map(|name| name.to_string_lossy().into_owned()));
    for subcommand in command.get_subcommands() {
        collect_option_names(subcommand, known);
    }
}

/// `GGML_*` variables that are set: ggml reads them itself, so a report must show them.
pub fn ggml_environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value))
        .filter(|(name, _)| name.starts_with("GGML_"))
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str]) -> anyhow::Result<()> {
        check_environment(names.iter().map(OsString::from))
    }

    #[test]
    fn foreign_and_known_variables_pass() {
        assert!(check(&["PATH", "GGML_CUDA_DISABLE_GRAPHS", "G4_BACKEND_DIR"]).is_ok());
    }

    #[test]
    fn misspelt_variable_is_refused_with_the_known_names() {
        let error = check(&["G4_BACKEND"]).unwrap_err().to_string();

        assert!(
            error.contains("unknown environment variable G4_BACKEND;"),
            "{error}"
        );
        assert!(error.contains("G4_BACKEND_DIR"), "{error}");
    }
}
