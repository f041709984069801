#!/usr/bin/env bash
# Opens the page of `g4prefill profile --html` in headless Chromium and checks what it drew. Installs
# Chromium from Debian's packages (needs root) where no browser is.
set -euo pipefail
cd "$(dirname "$0")/.."

found=no
for name in chromium chromium-browser google-chrome; do
    ! command -v "$name" >/dev/null || found=yes
done
if [ $found = no ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
fi
${CARGO:-cargo} test --features "${FEATURES:-llama}" --test cli_profile -- --ignored browser
