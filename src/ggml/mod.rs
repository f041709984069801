//! ggml (to be written).
