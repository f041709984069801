#!/usr/bin/env bash
# The rules of ggml-patches/ that a machine can check. That the series applies without offset and
# gives the recorded tree is proven by build.rs.
set -euo pipefail
cd "$(dirname "$0")/../ggml-patches"

bad=0
fail() { echo "patches: $*" >&2; bad=1; }
fields=(From Date Subject Base Numerics Upstream Test Bench Drop-when)
for patch in *.patch; do
    number=${patch%%-*}
    grep -Eqx '[0-9]{3}0-(cuda|backend|alloc|core|build)-[a-z0-9-]+\.patch' <<<"$patch" || fail "$patch: name"
    for field in "${fields[@]}"; do
        grep -q "^$field:  *[^ ]" "$patch" || fail "$patch: no line $field"
    done
    changed=$(grep -c '^[+-][^+-]' "$patch")
    [ "$changed" -le 150 ] || fail "$patch: $changed changed lines, more than 150 belong in files/"
    grep -q "g4prefill: $number" "$patch" || fail "$patch: no call site is marked g4prefill: $number"
    grep -q "^| $number " README.md || fail "$patch: not in the index of README.md"
done
for number in $(sed -n 's/^| \([0-9]\{4\}\) .*/\1/p' README.md); do
    compgen -G "$number-*.patch" >/dev/null || grep -q "^| $number .*retired" README.md ||
        fail "README.md: $number has no patch and is not marked retired"
done
twice=$(ls ./*.patch | sed 's|./||; s/-.*//' | sort | uniq -d)
[ -z "$twice" ] || fail "numbers used twice: $twice"
# A number stays with its purpose: in all of history it has had one name.
names=$(git log --format= --name-only --diff-filter=A -- '*.patch' 2>/dev/null | sed 's|.*/||' | sort -u)
reused=$(sed 's/-.*//' <<<"$names" | uniq -d)
[ -z "$reused" ] || fail "numbers that changed their name in git history: $reused"
for file in files/*; do
    head -3 "$file" | grep -q 'SPDX-License-Identifier: MIT' || fail "$file: no licence line"
done
[ $bad = 0 ] && echo "patches: $(ls ./*.patch | wc -l) patches, $(ls files | wc -l) files"
exit $bad
