//! `--version`: which build this is.

use std::sync::LazyLock;

static LONG: LazyLock<String> = LazyLock::new(|| {
    let or_unknown = |value: Option<&'static str>| value.unwrap_or("unknown");
    format!(
        "{version}\ncommit: {commit}\nggml pin: llama-cpp-sys-2 {pin}\npatches: {count}\n\
         patch series sha256: {series}\ncuda: {cuda}",
        version = env!("CARGO_PKG_VERSION"),
        commit = or_unknown(option_env!("G4_COMMIT")),
        pin = or_unknown(option_env!("G4_PIN")),
        count = or_unknown(option_env!("G4_PATCH_COUNT")),
        series = or_unknown(option_env!("G4_SERIES_SHA256")),
        cuda = cuda(),
    )
});

/// Version, commit, pin, patch count and series hash, CUDA, one per line.
pub(super) fn long() -> &'static str {
    LONG.as_str()
}

/// What is known at build time about CUDA: the backend itself is found at run time.
fn cuda() -> &'static str {
    match option_env!("G4_CUDA_VERSION") {
        Some(version) => version,
        None if cfg!(feature = "cuda") => "built in, version unknown",
        None => "not built; a libggml-cuda.so beside the binary is used when present",
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_version_names_every_part_of_the_build() {
        let text = super::long();

        for part in [
            "commit: ",
            "ggml pin: ",
            "patches: ",
            "patch series sha256: ",
            "cuda: ",
        ] {
            assert!(text.contains(part), "{part:?} missing in {text:?}");
        }
    }
}
