"""Strategies for inputs that are almost right, and for text that is not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD = ("", " ", "nan", "inf", "-inf", "-0", "-1", "0", "1", "2", "1e308", "1e400", "1e-400", "0x10", "1_000", "9" * 30,
       "9" * 5000, "true", "None", "~", "~nobody-is-this/x", "/", ".", "..", "/dev/null", "/dev/zero", "\0", "a\0b.npz",
       "\ud800", "x" * 5000, "é\u202e\x1b[31m", "a=b", "[", "{}", "%s", "$HOME", "auto", "digits")  # fmt: skip
words = st.sampled_from(ODD) | st.text(max_size=20)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, -0.0])
scalars = st.none() | st.booleans() | numbers | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))
"""What JSON and TOML may hold."""


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content, mostly with a few bytes that are others, lost or added."""
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        what = draw(st.sampled_from(["flip", "set", "cut", "lose", "add", "repeat", "number"]))
        if what == "flip" and content:
            flipped = content[at] ^ (1 << draw(st.integers(0, 7)))
            content = content[:at] + bytes([flipped]) + content[at + 1 :]
        elif what == "set":
            new = draw(st.binary(min_size=1, max_size=4))
            content = content[:at] + new + content[at + len(new) :]
        elif what == "number":
            new = draw(
                st.sampled_from([b"\xff" * 4, b"\x00" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff" * 8])
            )
            content = content[:at] + new + content[at + len(new) :]
        elif what == "cut":
            content = content[:at]
        elif what == "lose":
            content = content[:at] + content[at + draw(st.integers(1, 64)) :]
        elif what == "repeat":
            content = content[:at] + content[at : at + 32] * draw(st.integers(2, 30)) + content[at:]
        else:
            content = content[:at] + draw(st.binary(max_size=16)) + content[at:]
    return content


@st.composite
def replaced(draw: st.DrawFn, tree: Any, strange: st.SearchStrategy[Any] = values) -> Any:
    """The tree of lists and dicts with one of its parts, at any depth, lost or replaced by something else."""
    keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))] if isinstance(tree, list) else []
    if not keys or draw(st.integers(0, 3)) == 0:
        return draw(strange)
    key, changed = draw(st.sampled_from(keys)), tree.copy()
    if draw(st.integers(0, 5)) == 0:
        del changed[key]
    else:
        changed[key] = draw(replaced(tree[key], strange))
    return changed


def as_json(value: Any) -> str:
    """As Python writes it; lone surrogates are escaped."""
    return json.dumps(value)


def toml_of(value: Any) -> str:
    """A value as TOML, which is almost JSON; what it cannot hold (null) is left in."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
