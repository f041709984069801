//! The environment, read at this edge only: the registry of our own variables, and ggml's, which
//! are recorded in every JSON report.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::CommandFactory as _;

use super::Cli;

/// Variables of a run that are not the default of an option (those are found in the parser itself).
const RUN: &[&str] = &["G4_BACKEND_DIR"];

/// Variables of build and tests: set in the same shell they do no harm, but no run reads them.
const BUILD_AND_TESTS: &[&str] = &[
    "G4_BENCH_MODEL",
    "G4_BUILD_RESTARTED",
    "G4_COMMIT",
    "G4_CPU_FEATURES",
    "G4_CUDA_PRUNE",
    "G4_CUDA_VERSION",
    "G4_DEFAULT_BACKEND_DIR",
    "G4_PATCH_COUNT",
    "G4_PIN",
    "G4_REQUIRE_GPU",
    "G4_REQUIRE_MODEL",
    "G4_ROWS_CHUNK",
    "G4_ROWS_MODEL",
    "G4_ROWS_SWITCH",
    "G4_SERIES_SHA256",
    "G4_UPDATE_SERIES_HASH",
];

/// Refuses a variable that starts with `G4_` and that we do not know: a misspelt switch must not
/// be silently ignored.
pub fn check_environment(names: impl Iterator<Item = OsString>) -> anyhow::Result<()> {
    let mut known: Vec<String> = RUN.iter().map(|&name| name.to_owned()).collect();
    collect_option_names(&Cli::command(), &mut known);
    known.sort_unstable();
    known.dedup();
    for name in names {
        let name = name.to_string_lossy();
        let is_known = known.iter().any(|k| *k == name) || BUILD_AND_TESTS.contains(&name.as_ref());
        if name.starts_with("G4_") && !is_known {
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
        assert!(error.contains("G4_REPLAY"), "{error}");
    }

    #[test]
    fn variables_of_the_build_pass_and_are_not_offered() {
        assert!(check(&["G4_UPDATE_SERIES_HASH", "G4_CUDA_PRUNE"]).is_ok());

        let error = check(&["G4_BACKEND"]).unwrap_err().to_string();

        for name in BUILD_AND_TESTS {
            assert!(!error.contains(name), "{name}: {error}");
        }
    }
}
