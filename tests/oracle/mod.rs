//! What several test programs share.
#![allow(dead_code, reason = "every test program uses its own part")]

pub mod compare;
pub mod fixtures;
pub mod tolerance;
