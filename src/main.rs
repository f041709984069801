//! The `g4prefill` binary: parse, run, map the outcome to an exit code.
fn main() {}
