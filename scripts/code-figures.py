#!/usr/bin/env python3
"""Sizes of files and functions, density of docs and comments, for docs/review.md. Tests are left out."""
import glob
import re
import statistics


def source(path):
    """The text in front of inline tests, whose module comes last in a file."""
    text = open(path).read()
    return re.split(r"#\[cfg\(test\)\]\nmod \w+ \{", text)[0]


def is_test(path):
    return path.endswith("tests.rs") or path.endswith("testing.rs") or "mutations" in path


def density(name, paths):
    code = docs = comments = 0
    for line in "\n".join(source(p) for p in paths).split("\n"):
        line = line.strip()
        if line.startswith(("///", "//!")):
            docs += 1
        elif line.startswith("//"):
            comments += 1
        elif line:
            code += 1
            comments += " // " in line
    print(f"{name}: {code} code lines, {100 * docs / code:.0f} doc and {100 * comments / code:.0f} comment lines per 100")


def functions(path):
    """Name and lines of each function, by the indentation of its closing brace."""
    lines = source(path).split("\n")
    head = re.compile(r"(\s*)(?:pub(?:\([a-z:]+\))? )?(?:const )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)")
    for i, line in enumerate(lines):
        found = head.match(line)
        if found and not line.rstrip().endswith((";", "}")):
            end = next((j for j in range(i, len(lines)) if lines[j] == found[1] + "}"), i)
            yield end - i + 1, f"{path}: {found[2]}"


rust = [p for p in glob.glob("src/**/*.rs", recursive=True) if not is_test(p)]
sizes = sorted((source(p).count("\n"), p) for p in rust)
print(f"files: {len(rust)}, median {statistics.median(n for n, _ in sizes):.0f} lines, largest {sizes[-1]}")
lengths = sorted(f for p in rust for f in functions(p))
long = [f for f in lengths if f[0] > 60]
print(f"functions: {len(lengths)}, median {statistics.median(n for n, _ in lengths):.0f} lines, "
      f"{len(long)} above 60 ({100 * len(long) / len(lengths):.1f} %), longest {lengths[-1]}")
density("library", [p for p in rust if not p.startswith("src/cli/")])
density("graph", [p for p in rust if p.startswith("src/graph/")])
density("ops", [p for p in rust if p.startswith("src/ggml/ops")])
density("kernels", glob.glob("ggml-patches/files/*.cu"))
