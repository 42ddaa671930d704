"""The README's support table, from what backends themselves say: ``python -m leanmla.cli.support --write README.md``.

Neither a GPU nor the packages that backends need have to be here: devices and packages are assumed (``device.override``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from .. import backends
from ..device import override
from ..errors import InvalidArgument, LeanMLAError
from ..formats import FORMATS
from ..problem import DecodeProblem
from .known_devices import KNOWN, KnownDevice

__all__ = ["BEGIN", "END", "insert_table", "main", "support_table"]

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"

#: Columns: a representative of each architecture, and how to call it.
COLUMNS: dict[str, str] = {
    "cpu": "CPU",
    "a100": "NVIDIA sm_80 (A100)",
    "h200": "NVIDIA sm_90 (H100, H200)",
    "mi300x": "AMD gfx942 (MI300X)",
    "mi355x": "AMD gfx950 (MI355X)",
}

_TYPICAL = DecodeProblem(
    format="bf16", num_heads=16, batch=32, total_q=32, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
    max_kv_len=8192, total_kv=32 * 8192,
)  # fmt: skip


def _probes(format: str) -> list[DecodeProblem]:
    """Variations of the typical problem that a backend may refuse."""
    typical = _TYPICAL.replace(format=format)
    probes = [typical.replace(num_heads=h) for h in (1, 6, 8, 20, 24, 32, 64, 96, 128)]
    probes += [typical.replace(max_q_len=n, total_q=32 * n) for n in (2, 3, 4, 8, 16)]
    probes += [typical.replace(max_q_len=4, total_q=70, ragged_q=True)]
    probes += [typical.replace(page_size=p) for p in (1, 5, 16, 32, 128)]
    probes += [typical.replace(table_kind="csr"), typical.replace(table_kind="contiguous", page_size=1)]
    probes += [typical.replace(q_dtype="fp16"), typical.replace(logit_cap=30.0), typical.replace(causal=False)]
    probes += [typical.replace(num_kv_splits=4), typical.replace(split_size=512), typical.replace(return_lse=True)]
    probes += [typical.replace(num_heads=128, max_q_len=4, total_q=128)]
    return probes


def support_table() -> str:
    """Markdown: for each cache format and architecture the backends that run it, the one ``auto`` takes first."""
    notes: dict[str, int] = {}
    rows = [[f"`{name}` ({fmt.bytes_per_token} B a token)"] for name, fmt in FORMATS.items()]
    for key, (row, fmt) in itertools.product(COLUMNS, zip(rows, FORMATS)):
        row.append(_cell(KNOWN[key], fmt, notes))
    lines = [
        "| cache format | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        'The first backend in a cell is the one `backend="auto"` takes. `reference` (fp64, slow) runs everywhere. Heads 1 to 128, '
        "any page size, CSR, block and contiguous tables, ragged q, causal or not, logit cap, lse and fp16 queries everywhere"
        + (", except:" if notes else "."),
    ]
    if notes:
        lines += ["", *(f"{n}. {note}" for note, n in notes.items())]
    return "\n".join(lines) + "\n"


def _cell(known: KnownDevice, format: str, notes: dict[str, int]) -> str:
    typical = _TYPICAL.replace(format=format)
    words = []
    with override(known.info, assume_installed=known.packages):
        for name in backends.NAMES:
            if name == "reference" or backends.why_not(name, typical, known.info) is not None:
                continue
            refusals = dict.fromkeys(r for p in _probes(format) if (r := backends.why_not(name, p, known.info)) is not None)
            marks = [notes.setdefault(f"`{name}` {reason}.", len(notes) + 1) for reason in refusals]
            words.append(name + (f" <sup>{', '.join(map(str, marks))}</sup>" if marks else ""))
    return ", ".join(words) or "reference"


def insert_table(text: str, table: str) -> str:
    """``text`` with the table between its markers.

    Raises:
        InvalidArgument: the markers are not there once each, in order.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed or BEGIN in rest:
        raise InvalidArgument(f"README: expected one {BEGIN} and one {END} after it. Put them where the table belongs.")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Print the table, write it into a file, or check that a file has it."""
    parser = argparse.ArgumentParser(prog="python -m leanmla.cli.support", description="The README's support table.")
    parser.add_argument("--write", metavar="FILE", type=Path, help=f"put the table between {BEGIN} and {END}")
    parser.add_argument("--check", metavar="FILE", type=Path, help="exit 1 if the file's table is not this one")
    args = parser.parse_args(argv)
    table = support_table()
    if args.write is None and args.check is None:
        print(table, end="")
        return 0
    path = args.write or args.check
    try:
        text = path.read_text(encoding="utf-8")
        new = insert_table(text, table)
    except (OSError, LeanMLAError) as error:
        print(f"support: {error}", file=sys.stderr)
        return 2
    if args.write is not None:
        path.write_text(new, encoding="utf-8")
        return 0
    if new != text:
        print(
            f"support: the table in {path} is out of date. Run python -m leanmla.cli.support --write {path}.", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
