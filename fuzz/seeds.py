#!/usr/bin/env python3
"""Writes the corpora that the targets over plain bytes start from, out of tests/fixtures.

usage: fuzz/seeds.py [FOLDER]   (default: fuzz/corpus beside this script)

The other targets take random bytes as fields and need no start.
"""

import json
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "tests" / "fixtures"
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# A head longer than this makes every run slow.
LONGEST_HEAD = 64 << 10


def head_of(data):
    """Returns the keys and the offset of the tensor data."""
    at = 24
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    keys = {}

    def number(form):
        nonlocal at
        value = struct.unpack_from(form, data, at)[0]
        at += struct.calcsize(form)
        return value

    def text():
        nonlocal at
        n = number("<Q")
        at += n
        return data[at - n : at]

    def skip(kind):
        nonlocal at
        nonlocal at
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = number("<I"), number("<Q")
            for _ in range(n):
                skip(inner)
        else:
            at += SIZES[kind]
        return None

    for _ in range(n_keys):
        key = text().decode()
        keys[key] = skip(number("<I"))
    for _ in range(n_tensors):
        text()
        n_dims = number("<I")
        at += 8 * n_dims + 12
    return keys, (at + 31) // 32 * 32


def all_types():
    """A small file with a key of every type and two tensors."""
    def s(b):
        return struct.pack("<Q", len(b)) + b

    values = [
        (0, b"\x07"), (1, b"\xfd"), (2, b"\x01\x02"), (3, b"\xff\xff"), (4, b"\x20\0\0\0"), (5, b"\xff" * 4),
        (6, struct.pack("<f", 1.5)), (7, b"\x01"), (8, s(b"text")), (10, b"\x01" * 8), (11, b"\xff" * 8),
        (12, struct.pack("<d", 0.25)),
    ]
    pairs = [(f"k{kind}", kind, value) for kind, value in values]
    pairs += [(f"a{kind}", 9, struct.pack("<IQ", kind, 2) + 2 * value) for kind, value in values]
    out = b"GGUF" + struct.pack("<IQQ", 3, 2, len(pairs))
    for key, kind, value in pairs:
        out += s(key.encode()) + struct.pack("<I", kind) + value
    out += s(b"one") + struct.pack("<IQIQ", 1, 5, 0, 0)
    out += s(b"two") + struct.pack("<IQQIQ", 2, 64, 3, 8, 32)
    return out + b"\0" * (-len(out) % 32)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "corpus"
    folders = {name: out / name for name in ["gguf_bytes", "tokenizer_text", "chat_template"]}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    put = lambda target, name, data: (folders[target] / name).write_bytes(data)

    # The first byte asks for zeros in place of the tensor data, in 64 KiB.
    put("gguf_bytes", "all-types", b"\x01" + all_types())
    templates = set()
    for path in sorted(FIXTURES.rglob("*.gguf")):
        data = path.read_bytes()
        keys, start = head_of(data)
        templates.add(keys.get("tokenizer.chat_template"))
        if start <= LONGEST_HEAD:
            n = (len(data) - start + 0xFFFF) >> 16
            put("gguf_bytes", path.stem, bytes([n]) + data[:start])
    for i, template in enumerate(sorted(t for t in templates if t)):
        put("chat_template", f"fixture-{i}", template)
    snippets = [
        "{% for m in messages %}{{ m.role | upper }}: {{ m['content'].strip() }}\n{% endfor %}",
        "{% macro f(d) %}{% for k, v in d | dictsort %}{{ k }}={{ v | tojson(indent=2) }}{% endfor %}{% endmacro %}{{ f({'a': [1]}) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ raise_exception('no') }}{{ strftime_now('%d %b %Y') }}{{ messages[0:1] | length }}{{ 'a' ~ 1 | string }}",
        "{% if messages is defined and messages[0].get('role') == 'system' %}{% set x = messages[0].content.split('\\n') %}{% endif %}{{ x | join(',') | indent(2) }}",
    ]
    for i, snippet in enumerate(snippets):
        put("chat_template", f"snippet-{i}", snippet.encode())
    # The first byte says vocabulary and options.
    cases = json.loads((FIXTURES / "tokenizer" / "full.json").read_text())["cases"]
    for i, case in enumerate(cases):
        for how in (0, 13, 30):
            put("tokenizer_text", f"{i}-{how}", bytes([how]) + bytes.fromhex(case["hex"])[:4096])


if __name__ == "__main__":
    main()
