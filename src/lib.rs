//! Fast long-prompt prefill for Gemma-4 GGUF models on ggml.
//!
//! Data flows one way: GGUF file, then configuration and weights, then the graph, then the
//! engine, then the command line.
//!
//! # Threads
//!
//! [`engine::Engine`], [`gguf::GgufFile`], [`model::Config`], [`tokenizer::Tokenizer`] and
//! [`tokenizer::ChatTemplate`] are `Send` and `Sync`: share them. A [`engine::Session`] is `Send`
//! and not `Sync`: it may move to another thread, one at a time uses it. Several engines, and
//! sessions of several engines, may run at once. ggml's log goes to one place for the whole process
//! ([`ggml::set_log_sink`]).
//!
//! # Panics
//!
//! No call panics on what it is given: files, texts, sizes and orders of calls that make no sense
//! are errors. What ends the process instead of giving an error: an assertion of ggml or a failure
//! of the device driver (abort), memory that the system does not have for small things (Rust's and
//! C++'s allocators abort), and a model file that another process shortens while it is mapped
//! (`SIGBUS`; [`ggml::on_lost_page`] gives a program the last word).
//!
//! # Embedding
//!
//! An [`Engine`](engine::Engine) is a model on a device; a [`Session`](engine::Session) is one
//! sequence with its caches. Nothing prints, reads the environment or ends the process.
//!
//! A program that depends on this crate finds ggml's libraries by a line of its `build.rs`:
//! `println!("cargo::rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_G4GGML_LIB_DIR").unwrap());`
//!
//! **Load, and read a prompt** with progress; another thread may hold the token and cancel. A
//! cancelled prefill leaves the session at the end of a chunk, and the next call goes on there:
//!
//! ```
//! use g4prefill::engine::{CancelToken, Engine, EngineError, EngineOptions, PrefillControl, Rows};
//!
//! # let dir = tempfile::tempdir()?;
//! # let model = dir.path().join("tiny.gguf");
//! # let spec = g4prefill::synth::Spec::preset("tiny")?;
//! # g4prefill::synth::write(&spec, &model, 1, &mut |_| std::ops::ControlFlow::Continue(()))?;
//! let options = EngineOptions { chunk: 64, ..EngineOptions::default() };
//! let engine = Engine::load(&model, options, &mut |_| {})?;
//! let mut session = engine.session(1024)?;
//! let prompt: Vec<u32> = (0..500).map(|i| 5 + i % 400).collect();
//!
//! let cancel = CancelToken::default();
//! let mut progress = |p: g4prefill::engine::Progress| {
//!     println!("{} of {} tokens after {:?}", p.processed, p.total, p.elapsed);
//!     if p.processed >= 128 {
//!         cancel.cancel();
//!     }
//! };
//! let mut control = PrefillControl {
//!     progress: Some(&mut progress),
//!     cancel: Some(&cancel),
//!     ..PrefillControl::default()
//! };
//! let stopped = session.prefill(&prompt, &Rows::Last, &mut control);
//! assert!(matches!(
//!     stopped,
//!     Err(g4prefill::Error::Engine(EngineError::Cancelled { .. }))
//! ));
//! assert_eq!(session.n_past(), 128);
//!
//! let rest = &prompt[session.n_past()..];
//! let logits = session.prefill(rest, &Rows::Last, &mut PrefillControl::default())?;
//! assert_eq!(logits.data.len(), engine.config().n_vocab);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Continue** token by token; **take tokens back** with
//! [`truncate`](engine::Session::truncate):
//!
//! ```
//! use g4prefill::engine::sampler::{Sampler, SamplerOptions};
//! use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
//!
//! # let dir = tempfile::tempdir()?;
//! # let model = dir.path().join("tiny.gguf");
//! # let spec = g4prefill::synth::Spec::preset("tiny")?;
//! # g4prefill::synth::write(&spec, &model, 1, &mut |_| std::ops::ControlFlow::Continue(()))?;
//! let engine = Engine::load(&model, EngineOptions::default(), &mut |_| {})?;
//! let mut session = engine.session(64)?;
//! let mut sampler = Sampler::new(SamplerOptions::default(), &[])?;
//! let mut control = PrefillControl::default();
//!
//! let mut logits = session.prefill(&[2, 17, 42], &Rows::Last, &mut control)?;
//! for _ in 0..8 {
//!     let token = sampler.sample(&logits.data)?;
//!     logits = session.prefill(&[token], &Rows::Last, &mut control)?;
//! }
//! assert_eq!(session.n_past(), 11);
//! session.truncate(3)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Score** the rows of a text: which rows of logits come back is part of the call.
//!
//! ```
//! use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
//!
//! # let dir = tempfile::tempdir()?;
//! # let model = dir.path().join("tiny.gguf");
//! # let spec = g4prefill::synth::Spec::preset("tiny")?;
//! # g4prefill::synth::write(&spec, &model, 1, &mut |_| std::ops::ControlFlow::Continue(()))?;
//! let engine = Engine::load(&model, EngineOptions::default(), &mut |_| {})?;
//! let mut session = engine.session(64)?;
//! let text = [2, 17, 42, 99, 17, 42];
//!
//! let logits = session.prefill(&text, &Rows::All, &mut PrefillControl::default())?;
//! let mut bits = 0.0;
//! for (i, next) in text.iter().skip(1).enumerate() {
//!     let row = logits.row(i).ok_or("every row was asked for")?;
//!     let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
//!     bits += (sum.ln() - f64::from(row[*next as usize])) / f64::ln(2.0);
//! }
//! println!("{:.1} bits per token", bits / 5.0);
//! # assert!(bits > 0.0 && bits.is_finite());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Save** what was read, and go on in another process, bit for bit:
//!
//! ```
//! use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
//!
//! # let dir = tempfile::tempdir()?;
//! # let model = dir.path().join("tiny.gguf");
//! # let spec = g4prefill::synth::Spec::preset("tiny")?;
//! # g4prefill::synth::write(&spec, &model, 1, &mut |_| std::ops::ControlFlow::Continue(()))?;
//! let engine = Engine::load(&model, EngineOptions::default(), &mut |_| {})?;
//! let mut control = PrefillControl::default();
//! let mut session = engine.session(64)?;
//! session.prefill(&[2, 17, 42], &Rows::Last, &mut control)?;
//! let file = dir.path().join("book.session");
//! session.save(&file)?;
//!
//! let mut again = engine.load_session(&file, 64)?;
//! assert_eq!(again.tokens(), [2, 17, 42]);
//! let ours = session.prefill(&[7], &Rows::Last, &mut control)?;
//! let theirs = again.prefill(&[7], &Rows::Last, &mut control)?;
//! assert_eq!(ours, theirs);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! How it is built: `ARCHITECTURE.md`.

pub mod bench;
pub mod cli;
pub mod engine;
pub mod error;
pub mod ggml;
pub mod gguf;
pub mod graph;
pub mod model;
pub mod numerics;
#[cfg(feature = "llama")]
pub mod peer;
pub mod profile;
pub mod synth;
pub mod tokenizer;
pub mod unfinished;
pub mod verify;

pub use error::{Error, Result};
