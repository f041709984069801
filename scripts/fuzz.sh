#!/usr/bin/env bash
# Runs the fuzz targets one after another: scripts/fuzz.sh [TARGET...]
#
# FUZZ_SECONDS   seconds for each target (default 60)
# FUZZ_RUNS      most executions of each target (default: no limit)
#
# Needs a nightly toolchain and cargo-fuzz. A finding ends the script with 1 and lies in
# fuzz/artifacts/TARGET; docs/fuzzing.md says what to do with it.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-60}
runs=${FUZZ_RUNS:--1}
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cd fuzz && cargo fuzz list --fuzz-dir .)

fuzz/seeds.py
mkdir -p fuzz/logs
cargo +nightly fuzz build --fuzz-dir fuzz
failed=0
for target in "${targets[@]}"; do
    log=fuzz/logs/$target.log
    # The limits on time and memory of one input are findings, too.
    options=(-max_total_time="$seconds" -runs="$runs" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1)
    if [ "$target" = tokenizer_text ]; then
        options+=(-max_len=65536)
    fi
    if cargo +nightly fuzz run --fuzz-dir fuzz "$target" -- "${options[@]}" >"$log" 2>&1; then
        executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
        echo "$target: $executions executions, $rate a second, no finding"
    else
        failed=1
        echo "$target: FINDING: $log"
        grep -aE 'panicked|ERROR|SUMMARY|Test unit written' "$log" | head -5
    fi
done
exit "$failed"
