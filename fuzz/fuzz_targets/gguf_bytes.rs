//! Any bytes as a GGUF file; the first says how many 64 KiB of zeros follow the others.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((&n, bytes)) = data.split_first() else {
        return;
    };
    if let Ok(file) = g4prefill_fuzz::open_gguf(bytes, u64::from(n) << 16) {
        g4prefill_fuzz::visit(&file);
    }
});
