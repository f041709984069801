//! Tells the targets where ggml's shared libraries are.

fn main() {
    if let Some(folder) = std::env::var_os("DEP_G4GGML_LIB_DIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}
