//! Command line: what was typed (here) and what is meant (`options.rs`); one file per subcommand.
