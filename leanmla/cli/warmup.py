"""``leanmla warmup``: compiles the usual kernels now, so that the first call of a server does not."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .output import Output, new_table
from .words import integers, pick_device, resolve_settings

if TYPE_CHECKING:
    import torch

    from ..testing import DecodeCase

__all__ = ["Compiled", "add_arguments", "main", "usual_cases"]

SCHEMA = "leanmla-warmup/1"
TABLES = ("block_table", "csr", "contiguous")
#: Keys of each sequence: past one tile, and no multiple of one.
KEYS = 100


@dataclass(frozen=True)
class Compiled:
    """One case that was run, so that its kernels are compiled and cached."""

    backend: str
    format: str
    heads: int
    q_len: int
    batch: int
    page_size: int
    table: str
    seconds: float  #: of the first call; a kernel that was cached already takes a fraction of a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla warmup``."""
    parser.add_argument("--format", default="all", help="cache formats with commas (default: all)")
    parser.add_argument("--heads", default="16", help="query heads with commas (default: %(default)s)")
    parser.add_argument("--q-len", default="1", help="query rows a sequence, with commas (default: %(default)s)")
    parser.add_argument(
        "--batch", default="1,64,256", help="batch sizes; kernels differ by powers of two (default: %(default)s)"
    )
    parser.add_argument("--page-size", default="64", help="tokens a page, with commas (default: %(default)s)")
    parser.add_argument(
        "--table", default="block_table", help=f"kinds of page table: {', '.join(TABLES)} (default: %(default)s)"
    )
    parser.add_argument("--no-lse", action="store_true", help="calls that do not ask for lse (default: calls that do)")
    parser.add_argument("--backend", default="auto", help="auto, or names with commas (default: what auto would pick)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")


def main(args: argparse.Namespace, out: Output) -> int:
    """Compile it: each case is run once on a few keys."""
    from .. import backends
    from ..bench.environment import command_line, environment
    from ..device import describe
    from .check import problem_of

    resolve_settings()
    device = pick_device(args.device)
    info = describe(device)
    if device.type == "cpu":
        out.print(
            "This compiles the CPU kernels only: kernels for a GPU are compiled where that GPU is, because their cache is made "
            "for it and its driver. Run leanmla warmup there, or leanmla build for code objects of a gfx950."
        )
    cases = usual_cases(
        _formats(args.format), heads=integers(args.heads, "--heads", 1), q_lens=integers(args.q_len, "--q-len", 1),
        batches=integers(args.batch, "--batch", 1), page_sizes=integers(args.page_size, "--page-size", 1), tables=_tables(args.table),
    )  # fmt: skip
    work: list[tuple[DecodeCase, str]] = []
    for case, name in itertools.product(cases, [n.strip() for n in args.backend.split(",")]):
        chosen = backends.choose(problem_of(case), info, name).name  # a name that cannot run it is refused, with the reason
        if chosen != "reference" and (case, chosen) not in work:
            work.append((case, chosen))
    compiled: list[Compiled] = []
    with out.steps(len(work), "compile") as steps:
        for case, name in work:
            steps.now(f"{name}, {case.id}")
            seconds = _first_call(case, name, device, return_lse=not args.no_lse)
            rows = case.q_lens
            assert isinstance(rows, int)
            compiled.append(Compiled(name, case.format, case.num_heads, rows, case.batch, case.page_size, case.table, seconds))
            steps.advance()
    caches = cache_folders(device)
    out.json({
        "schema": SCHEMA, "command": command_line(), "environment": environment(device), "caches": caches,
        "compiled": [c.__dict__ for c in compiled],
    })  # fmt: skip
    _print(out, info.name, compiled, caches)
    return 0


def usual_cases(
    formats, *, heads=(16,), q_lens=(1,), batches=(1, 64, 256), page_sizes=(64,), tables=("block_table",)
) -> list[DecodeCase]:
    """Small cases that need the kernels of larger ones: what is compiled depends on all these, and not on the keys."""
    from ..testing import DecodeCase

    return [
        DecodeCase((KEYS,) * b, num_heads=h, q_lens=q, page_size=1 if t == "contiguous" else p, format=f, table=t)
        for f, h, q, p, t, b in itertools.product(formats, heads, q_lens, page_sizes, tables, batches)
        if not (t == "contiguous" and p != page_sizes[0])
    ]


def cache_folders(device: torch.device) -> dict[str, str]:
    """Where compiled kernels are kept, by compiler."""
    folders = {"numba": os.environ.get("NUMBA_CACHE_DIR", "beside the package's files")}
    if device.type == "cuda":
        folders = {"triton": os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))}
    return folders


def _first_call(case: DecodeCase, backend: str, device: torch.device, *, return_lse: bool) -> float:
    import torch

    from ..decode import mla_decode
    from ..testing import make_inputs

    inputs = make_inputs(case, device=device)
    start = time.perf_counter()
    mla_decode(inputs.q, inputs.cache, inputs.table, **inputs.options, out=inputs.out, return_lse=return_lse, backend=backend)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _formats(text: str) -> tuple[str, ...]:
    from ..formats import FORMATS, get

    return tuple(FORMATS) if text == "all" else tuple(get(name.strip()).name for name in text.split(","))


def _tables(text: str) -> tuple[str, ...]:
    from ..errors import InvalidArgument

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in TABLES:
            raise InvalidArgument(f"--table: expected some of {', '.join(TABLES)}, got {name!r}.")
    return names


def _print(out: Output, device: str, compiled: list[Compiled], caches: dict[str, str]) -> None:
    table = new_table(
        f"Kernels ready on {device}", "backend", "cache", ">heads", ">rows", ">batch", ">page", "table", ">first call, s"
    )
    for c in compiled:
        table.add_row(
            c.backend, c.format, str(c.heads), str(c.q_len), str(c.batch), str(c.page_size), c.table, f"{c.seconds:.2f}"
        )
    out.print(table)
    where = "; ".join(f"{compiler}: {folder}" for compiler, folder in caches.items())
    out.print(f"{len(compiled)} cases in {sum(c.seconds for c in compiled):.1f} s. Compiled code is kept on disk ({where}).")
