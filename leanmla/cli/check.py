"""``leanmla check``: the grid of cases that breaks attention kernels, and the worst of each kind.

Every case runs three times on a backend: on poisoned storage (NaN wherever nothing may be read), again on the same (bits must
repeat), and on clean storage (bits must not change). The first result is compared with fp64, out and lse, element by element.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .output import Output, new_table
from .words import check_seed, pick_device, resolve_settings

if TYPE_CHECKING:
    import torch

    from ..testing import DecodeCase

__all__ = ["CaseResult", "add_arguments", "check_case", "main"]

SCHEMA = "leanmla-check/1"


@dataclass(frozen=True)
class CaseResult:
    """What one backend did with one case."""

    case: str
    kind: str
    format: str
    backend: str
    ok: bool
    refused: str = ""  #: why the backend cannot run it; then nothing else counts
    worst_ratio: float = math.nan  #: largest error over its bound; at most 1 is right
    relative_error: float = math.nan
    lse_error: float = math.nan
    problems: tuple[str, ...] = field(default=())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla check``."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--backend", default="all", help="names with commas, or all that can run here except reference")
    parser.add_argument("--format", default="all", help="cache formats with commas (default: all)")
    parser.add_argument("--kind", default="all", help="kinds of case with commas, see the table (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data (default: 0)")


def main(args: argparse.Namespace, out: Output) -> int:
    """Run it; 1 if anything is wrong."""
    from ..bench.environment import command_line, environment
    from ..device import describe
    from ..testing import case_grid

    check_seed(args.seed)
    resolve_settings()
    device = pick_device(args.device)
    grid = case_grid(_formats(args.format), _kinds(args.kind))
    names = _backends(args.backend, grid, describe(device))
    results: list[CaseResult] = []
    with out.steps(len(grid), "check") as steps:
        for case in grid:
            steps.now(f"{case.kind}, {case.id}")
            results += check_case(case, names, device, seed=args.seed)
            steps.advance()
    wrong = [r for r in results if not r.ok]
    out.json({
        "schema": SCHEMA, "command": command_line(), "ok": not wrong, "environment": environment(device),
        "results": [{**r.__dict__, "problems": list(r.problems)} for r in results],
    })  # fmt: skip
    _print(out, describe(device).name, names, results)
    return 1 if wrong else 0


def _formats(text: str) -> tuple[str, ...] | None:
    from ..formats import get

    return None if text == "all" else tuple(get(name.strip()).name for name in text.split(","))


def _kinds(text: str) -> tuple[str, ...] | None:
    from ..errors import InvalidArgument
    from ..testing.cases import KINDS

    if text == "all":
        return None
    kinds = tuple(k.strip() for k in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidArgument(f"--kind: expected some of {', '.join(KINDS)}, got {kind!r}.")
    return kinds


def _backends(text: str, grid: list[DecodeCase], info) -> list[str]:
    from .. import backends
    from ..errors import BackendUnavailable

    if text == "all":
        names = [n for n in backends.NAMES if n != "reference"]
        able = [n for n in names if any(backends.why_not(n, problem_of(c), info) is None for c in grid)]
        if not able:
            listing = "; ".join(f"{n}: {backends.why_not(n, problem_of(grid[0]), info)}" for n in names)
            raise BackendUnavailable(f"no backend but reference can run here. {listing}.")
        return able
    names = [n.strip() for n in text.split(",")]
    for name in names:
        if all(backends.why_not(name, problem_of(c), info) is not None for c in grid):
            backends.choose(problem_of(grid[0]), info, name)  # raises, with the reason
    return names


def problem_of(case: DecodeCase):
    """The case as a backend sees it."""
    from ..problem import DecodeProblem

    width = max((-(-n // case.page_size) for n in case.kv_lens), default=0) * case.page_size + case.page_size
    ragged = isinstance(case.q_lens, tuple)
    return DecodeProblem(
        format=case.format, num_heads=case.num_heads, batch=case.batch, total_q=sum(case.rows), max_q_len=max(case.rows, default=0),
        ragged_q=ragged, page_size=1 if case.table == "contiguous" else case.page_size, table_kind=case.table, max_kv_len=width,
        total_kv=width * case.batch, q_dtype=case.q_dtype, causal=case.causal, logit_cap=case.logit_cap, return_lse=True,
        num_kv_splits=case.num_kv_splits, split_size=case.split_size,
    )  # fmt: skip


def check_case(case: DecodeCase, names: list[str], device: torch.device, *, seed: int = 0) -> list[CaseResult]:
    """Run a case on some backends; the definition is computed once."""
    import torch

    from .. import backends
    from ..bench.timing import context_lost
    from ..decode import mla_decode
    from ..device import describe
    from ..errors import BackendUnavailable
    from ..reference import mla_decode_reference
    from ..testing import compare, make_inputs

    info = describe(device)
    results: list[CaseResult] = []
    inputs = clean = exact = None
    for name in names:
        same = (case.id, case.kind, case.format, name)
        reason = backends.why_not(name, problem_of(case), info)
        if reason is not None:
            results.append(CaseResult(*same, ok=True, refused=reason))
            continue
        if inputs is None:
            inputs = make_inputs(case, seed=seed, device=device)
            clean = make_inputs(case, seed=seed, device=device, poison=False)
            exact = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)

        def run(data, backend: str = name) -> tuple[torch.Tensor, torch.Tensor]:
            data.out.fill_(torch.nan)
            out, lse = mla_decode(data.q, data.cache, data.table, **data.options, **data.splits, out=data.out, return_lse=True,
                                  backend=backend)  # fmt: skip
            return out.clone(), lse

        try:
            out, lse = run(inputs)
            report = compare(inputs, out, lse, reference=exact)
            problems = [report.message] if not report.ok else []
            if not _same_bits((out, lse), run(inputs)):
                problems.append("a second call on the same tensors gives other bits")
            if not _same_bits((out, lse), run(clean)):
                problems.append("what lies past the keys, in other pages or in unused table entries changes the result")
        except BackendUnavailable as error:  # the tables' shapes decided
            results.append(CaseResult(*same, ok=True, refused=str(error)))
            continue
        except Exception as error:
            if context_lost(device):
                raise  # nothing after this would mean anything
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            results.append(CaseResult(*same, ok=False, worst_ratio=math.inf, problems=(message,)))
            continue
        results.append(CaseResult(*same, not problems, "", report.worst_ratio, report.relative_error, report.max_lse_error,
                                  tuple(problems)))  # fmt: skip
    return results


def _same_bits(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    import torch

    return all(torch.equal(x.view(_bits(x)), y.view(_bits(y))) for x, y in zip(a, b))


def _bits(t: torch.Tensor) -> torch.dtype:
    import torch

    return torch.int16 if t.element_size() == 2 else torch.int32


def _print(out: Output, device: str, names: list[str], results: list[CaseResult]) -> None:
    formats = list(dict.fromkeys(r.format for r in results))
    kinds = list(dict.fromkeys(r.kind for r in results))
    for name in names:
        table = new_table(f"Backend {name} on {device}", "kind", ">cases", *(f">{f}" for f in formats))
        for kind in kinds:
            cells = [[r for r in results if (r.backend, r.kind, r.format) == (name, kind, f)] for f in formats]
            table.add_row(kind, str(sum(not r.refused for cell in cells for r in cell)), *map(_cell, cells))
        table.add_section()
        mine = [r for r in results if r.backend == name and not r.refused]
        for title, value in (("worst relative error", lambda r: r.relative_error), ("worst lse error", lambda r: r.lse_error)):
            worst = (
                max((value(r) for r in mine if r.format == f and not math.isnan(value(r))), default=math.nan) for f in formats
            )
            table.add_row(title, "", *("" if math.isnan(w) else f"{w:.1e}" for w in worst))
        out.print(table)
        refused = dict.fromkeys(r.refused for r in results if r.backend == name and r.refused)
        for reason in refused:
            count = sum(r.refused == reason for r in results if r.backend == name)
            out.print(f"Not run, {count} {'case' if count == 1 else 'cases'}: {reason}.")
        out.print("")
    wrong = [r for r in results if not r.ok]
    ran = sum(not r.refused for r in results)
    out.print(
        "A figure is the kind's largest error over its bound, which must not pass 1. Unless listed as wrong, every case gave the "
        "same bits when it was run again, and the same with and without NaN in everything it must not read."
    )
    for r in wrong[:30]:
        out.print(f"WRONG {r.backend}, {r.kind}: {r.case}: {'; '.join(r.problems)}")
    if len(wrong) > 30:
        out.print(f"... and {len(wrong) - 30} more (--json has all)")
    out.print(f"{len(wrong)} of {ran} results are wrong." if wrong else f"All {ran} results are right.")


def _cell(cell: list[CaseResult]) -> str:
    ran = [r for r in cell if not r.refused]
    if not ran:
        return "not run" if cell else ""
    wrong = sum(not r.ok for r in ran)
    worst = max((r.worst_ratio for r in ran if not math.isnan(r.worst_ratio)), default=math.nan)
    text = "" if math.isnan(worst) else f"{worst:.2f}" if worst < 1000 else f"{worst:.0e}"
    return f"{text} {wrong} WRONG" if wrong else text
