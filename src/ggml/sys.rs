//! The raw C interface, made by bindgen from `vendor/wrapper.h`. Private to this folder.
//!
//! Only what `docs/ggml-api.md` lists is bound. A name is missing here? Write its use as
//! `sys::name`, then run `make api`.

#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    reason = "generated code"
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
