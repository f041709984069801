# Everything a developer or CI does, by name. `make` alone builds.
SHELL := /bin/bash
CARGO ?= cargo
# Features of what is tested and bundled beside the default build.
FEATURES ?= llama

.PHONY: build test check msrv deny miri api patches series-hash vendor-check tools cuda-toolchain cuda-check bundle vocab demo browser-check fuzz memcheck

build:
	$(CARGO) build --release

# A small model and a long text out of nothing; ours against llama.cpp on the same file.
demo:
	@echo "demo: the first time ggml and llama.cpp are built, 10 to 15 minutes on 2 cores; then it runs for about 4"
	$(CARGO) run --release --features $(FEATURES) -- demo

test:
	$(CARGO) test --features $(FEATURES)

# Formatting, lints with and without the peer and of the fuzz targets, documentation, the patch series, the pin.
check: patches vendor-check
	scripts/api-list.sh --check
	$(CARGO) fmt --check
	G4_BINDINGS_ONLY=1 $(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --all-targets --features $(FEATURES) -- -D warnings
	G4_BINDINGS_ONLY=1 $(CARGO) clippy --manifest-path fuzz/Cargo.toml --target-dir target --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --features $(FEATURES)

# clippy with the oldest Rust that is supported, installed with rustup.
msrv:
	scripts/msrv.sh

# Licences, sources, second versions and known faults of all crates, by deny.toml.
deny:
	scripts/deny.sh

# Tests of what calls no C under Miri (docs/fuzzing.md), with a nightly toolchain.
miri:
	scripts/miri.sh

# Lists what src/ggml uses of the C interface: build.rs binds that and nothing else.
api:
	scripts/api-list.sh

# The series against its rules: names, headers, index, call sites. That it applies to the pin
# without offset and gives the recorded tree is proven by every build.
patches:
	scripts/check-patches.sh

# Records the hash of the patched tree after an intended change of ggml-patches/.
series-hash:
	G4_UPDATE_SERIES_HASH=1 $(CARGO) check --lib
	@grep '^Series-SHA256' ggml-patches/README.md

# The pin: the lock file holds the version that the manifest names, with a checksum.
vendor-check:
	scripts/vendor-check.sh

# cmake and libclang from PyPI into .tools/py, for machines without root.
tools:
	python3 -m pip install --quiet --upgrade --target .tools/py 'cmake==3.31.6' 'libclang==18.1.1'

# nvcc 13.0 from PyPI into .tools/cuda: compiles CUDA code, needs no GPU.
cuda-toolchain:
	scripts/cuda-toolchain.sh

# Compiles (does not run) our CUDA files and every .cu file that a patch touches.
cuda-check: cuda-toolchain
	scripts/cuda-check.sh

# A folder for a GPU host without Rust and without network: see scripts/bundle.sh.
bundle:
	scripts/bundle.sh $(FEATURES)

# The real Gemma vocabulary as a GGUF into .tools/vocab, for the ignored tokenizer test.
vocab:
	scripts/vocab.sh

# The profile's page in a real browser: installs Debian's Chromium where no browser is.
browser-check:
	scripts/browser-check.sh

# Fuzz targets, FUZZ_SECONDS each (docs/fuzzing.md): needs a nightly toolchain and cargo-fuzz.
fuzz:
	scripts/fuzz.sh

# The CPU tests under valgrind: half an hour and more.
memcheck:
	scripts/memcheck.sh
