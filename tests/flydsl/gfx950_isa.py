"""Read gfx950 ISA text: the instructions of a kernel and of its main loop, counted by kind."""

from __future__ import annotations

import re
from collections import Counter

_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_BRANCH = re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\d+_\d+)")
_INSTRUCTION = re.compile(r"^\s+([a-z]\w*)\b")


def instructions(isa: str) -> list[str]:
    """Mnemonics of the whole text, in order."""
    return [m[1] for line in isa.splitlines() if (m := _INSTRUCTION.match(line)) and not line.lstrip().startswith(".")]


def loop_text(isa: str) -> str:
    """The longest loop: from a label to the last branch back to it or to a label inside."""
    lines = isa.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    spans = []
    for i, line in enumerate(lines):
        m = _BRANCH.match(line)
        if m and labels.get(m[1], i) < i:
            spans.append([labels[m[1]], i])
    merged: list[list[int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if not merged:
        return ""
    low, high = max(merged, key=lambda s: s[1] - s[0])
    return "\n".join(lines[low : high + 1])


def by_kind(names: list[str]) -> Counter[str]:
    """Counts of: mfma, cvt, valu (other vector), salu, and each memory instruction by its name."""
    kinds: Counter[str] = Counter()
    for name in names:
        if name.startswith("v_mfma"):
            kinds["mfma"] += 1
        elif name.startswith("v_cvt"):
            kinds["cvt"] += 1
        elif name.startswith("v_"):
            kinds["valu"] += 1
        elif name.startswith("s_") and name != "s_barrier":
            kinds["salu"] += 1
        else:
            kinds[name] += 1
    return kinds
