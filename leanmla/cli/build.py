"""``leanmla build``: code objects for a GPU that need not be here, with a manifest that tells any launcher how to run them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .output import Output, new_table
from .words import integers, size

if TYPE_CHECKING:
    from ..kernels.flydsl.build import BuiltKernel
    from ..problem import DecodeProblem

__all__ = ["add_arguments", "main"]

ALL_HEADS = (16, 32, 64, 128)
ALL_Q_LENS = (1, 4)
COMPILERS = ("flydsl", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla build``."""
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write: new, empty, or an earlier build")
    parser.add_argument("--target", default="gfx950", help="architecture (default: %(default)s, MI350X and MI355X)")
    parser.add_argument("--compiler", default="flydsl", help="flydsl or triton (default: %(default)s)")
    parser.add_argument("--format", default="bf16", help="cache formats, with commas, or all (default: %(default)s)")
    parser.add_argument("--heads", default="16", help="query heads, with commas, or all: 16,32,64,128 (default: %(default)s)")
    parser.add_argument("--q-len", default="1", help="query rows a sequence, with commas, or all: 1,4 (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences, at most (default: %(default)s)")
    parser.add_argument("--kv", type=int, default=8192, help="keys a sequence, at most (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page (default: %(default)s)")
    parser.add_argument(
        "--table", default="block_table", choices=("block_table", "csr", "contiguous"), help="kind of page table"
    )
    parser.add_argument("--q-dtype", default="bf16", choices=("bf16", "fp16"), help="dtype of the query (default: %(default)s)")
    parser.add_argument("--ragged-q", action="store_true", help="query rows differ by sequence, --q-len is the most")
    parser.add_argument("--logit-cap", type=float, default=0.0, help="tanh cap of the logits (default: none)")
    parser.add_argument("--no-causal", action="store_true", help="every row sees all keys")
    parser.add_argument("--num-kv-splits", type=int, help="exactly this many splits a sequence")
    parser.add_argument("--split-size", type=int, help="keys a split (reproducible mode)")
    parser.add_argument("--small-cache", action="store_true", help="triton: the cache is below 2 GiB, which saves registers")
    parser.add_argument(
        "--precision",
        default="16bit",
        help="16bit, or a8: queries rounded to fp8, errors of 2.5e-2 (fp8 caches, flydsl; default: %(default)s)",
    )


def main(args: argparse.Namespace, out: Output) -> int:
    """Build them."""
    from ..checks import check_options
    from ..errors import InvalidArgument
    from ..kernels.flydsl.build import TARGETS
    from ..kernels.flydsl.manifest import check_folder, manifest, write_manifest
    from ..kernels.flydsl.spec import PRECISIONS

    _one_of("--target", args.target, TARGETS)
    _one_of("--compiler", args.compiler, COMPILERS)
    _one_of("--precision", args.precision, PRECISIONS)
    if args.small_cache and args.compiler != "triton":
        raise InvalidArgument("--small-cache: is for --compiler triton; flydsl's kernels address caches of any size alike.")
    check_options(sm_scale=1.0, logit_cap=args.logit_cap, num_kv_splits=args.num_kv_splits, split_size=args.split_size)
    problems, build_one = _problems(args), _builder(args)
    folder = Path(args.out)
    check_folder(folder, "--out")
    _needs(args.compiler)
    kernels = []
    with out.steps(len(problems), "building") as steps:
        for problem in problems:
            steps.now(str(problem))
            kernels.append(build_one(problem))
            steps.advance()
    path = write_manifest(kernels, folder)
    out.json(manifest(kernels) | {"folder": args.out})
    _print(out, kernels, path)
    return 0


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    from ..errors import InvalidArgument

    if value not in known:
        raise InvalidArgument(f"{option}: expected {' or '.join(known)}, got {value!r}.")


def _problems(args: argparse.Namespace) -> list[DecodeProblem]:
    """One for each combination of format, heads and q_len.

    Raises:
        InvalidArgument: an option's value; the message names the option. BackendUnavailable: the compiler's kernels do not run it.
    """
    from ..errors import BackendUnavailable, InvalidArgument
    from ..problem import DecodeProblem

    for option, value in (("--batch", args.batch), ("--kv", args.kv), ("--page-size", args.page_size)):
        if value < 1:
            raise InvalidArgument(f"{option}: expected a positive integer, got {value}.")
    page = 1 if args.table == "contiguous" else args.page_size
    keys = -(-args.kv // page) * page
    problems: list[DecodeProblem] = []
    refusals: dict[str, str] = {}
    heads = ALL_HEADS if args.heads == "all" else integers(args.heads, "--heads", 1)
    q_lens = ALL_Q_LENS if args.q_len == "all" else integers(args.q_len, "--q-len", 1)
    for format in _formats(args):
        for num_heads in dict.fromkeys(heads):
            for q_len in dict.fromkeys(q_lens):
                problem = DecodeProblem(
                    format=format, num_heads=num_heads, batch=args.batch, total_q=args.batch * q_len, max_q_len=q_len,
                    ragged_q=args.ragged_q, page_size=page, table_kind=args.table, max_kv_len=keys, total_kv=args.batch * keys,
                    q_dtype=args.q_dtype, causal=not args.no_causal, logit_cap=args.logit_cap, return_lse=True,
                    num_kv_splits=args.num_kv_splits, split_size=args.split_size,
                )  # fmt: skip
                reason = _why_not(args.compiler, problem)
                if reason is None:
                    problems.append(problem)
                else:
                    refusals.setdefault(format, reason)
    # "all" leaves out what the compiler has no kernel for; what was named is never left out.
    if refusals and (args.format != "all" or not problems):
        other = next(c for c in COMPILERS if c != args.compiler)
        raise BackendUnavailable(f"--compiler {args.compiler} {next(iter(refusals.values()))}. Try --compiler {other}.")
    return problems


def _formats(args: argparse.Namespace) -> tuple[str, ...]:
    from ..errors import InvalidArgument
    from ..formats import FORMATS

    names = tuple(FORMATS) if args.format == "all" else tuple(dict.fromkeys(args.format.split(",")))
    for name in names:
        if name not in FORMATS:
            raise InvalidArgument(f"--format: expected all or {', '.join(FORMATS)}, got {name!r}.")
    if args.precision == "a8":
        if args.compiler != "flydsl":
            raise InvalidArgument("--precision: a8 needs --compiler flydsl.")
        if args.format not in ("fp8", "all"):
            raise InvalidArgument(f"--precision: a8 multiplies fp8 caches. Say --format fp8 instead of {args.format}.")
        return ("fp8",)
    return names


def _why_not(compiler: str, problem: DecodeProblem) -> str | None:
    """Why the compiler's kernels do not cover a problem, or None; whether the compiler is installed does not matter here."""
    from ..device import override
    from ..kernels.flydsl.backend import unsupported
    from ..kernels.flydsl.build_triton import MI355X
    from ..kernels.triton.backend import BACKEND

    if compiler == "flydsl":
        return unsupported(problem)
    with override(MI355X, assume_installed=("triton",)):
        return BACKEND.why_not(problem, MI355X)


def _needs(compiler: str) -> None:
    """Refuse where the compiler is not installed.

    Raises:
        BackendUnavailable: says what to install.
    """
    from ..device import triton_missing
    from ..errors import BackendUnavailable
    from ..kernels.flydsl.toolchain import flydsl_missing, linker_missing

    if compiler == "triton":
        reason, install, other = triton_missing(), "leanmla[triton]", "flydsl"
    else:
        reason, install, other = flydsl_missing() or linker_missing(), "leanmla[amd]", "triton"
    if reason:
        raise BackendUnavailable(f"--compiler {compiler} {reason}. Run pip install '{install}', or use --compiler {other}.")


def _builder(args: argparse.Namespace) -> Callable[[DecodeProblem], BuiltKernel]:
    from ..kernels.flydsl.build import build
    from ..kernels.flydsl.build_triton import build_triton

    if args.compiler == "triton":
        return lambda problem: build_triton(problem, args.target, small_cache=args.small_cache)
    return lambda problem: build(problem, args.target, precision=args.precision)


def _print(out: Output, kernels: list[BuiltKernel], path: Path) -> None:
    table = new_table(
        f"Kernels for {kernels[0].target}", "problem", "launch", ">grid", ">block", ">VGPRs", ">SGPRs", ">spills", ">scratch",
        ">LDS", ">blocks a CU",
    )  # fmt: skip
    for kernel in kernels:
        p = kernel.problem
        name = f"{p.format} h{p.num_heads} q{p.max_q_len}" + ("" if kernel.precision == "16bit" else f" {kernel.precision}")
        for stage, k in (("plan", kernel.plan), ("decode", kernel), ("combine", kernel.combine)):
            if k is not None:
                used = k.resources
                spills = used["vgpr_spills"] + used["sgpr_spills"]
                row = (k.grid[0], k.block[0], used["vgprs"], used["sgprs"], spills, used["scratch_bytes"], k.lds_bytes)
                table.add_row(name, stage, *(str(n) for n in row), str(k.occupancy["blocks_per_cu"]))
                name = ""
    out.print(table)
    files = {launch.file: len(launch.hsaco) for k in kernels for launch in k.launches}
    out.print(f"{path}: {len(kernels)} problems, {len(files)} code objects, {size(sum(files.values()))}. Not run on a card.")
