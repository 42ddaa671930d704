"""``leanmla explain``: which backend runs a problem, why not the others, how it is cut, and what it must cost at least."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING

from .output import Output, new_table
from .words import integers, pick_device, size

if TYPE_CHECKING:
    from ..backends import Backend
    from ..device import DeviceInfo
    from ..problem import DecodeProblem, LaunchConfig
    from ..split_plan import SplitItem, SplitPlan

__all__ = ["add_arguments", "draw", "main"]

SCHEMA = "leanmla-explain/1"
#: Backends that do not cut as :mod:`leanmla.split_plan` does. With a ``host_plan`` of their own they are shown exactly.
OWN_PLANNERS = ("hopper", "hopper_cuda")
#: Size of the picture of the schedule.
PICTURE_ROWS, PICTURE_WIDTH = 12, 72
#: Columns before a line of the picture: its worker's number.
PICTURE_MARGIN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla explain``."""
    from .known_devices import KNOWN

    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--q-len", default="1", help="query rows a sequence, one number or a list (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="sequences (default: as many as --kv lists, else 32)")
    parser.add_argument("--kv", default="8192", help="keys a sequence, one number or a list: 17,4096,1 (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page (default: %(default)s)")
    parser.add_argument("--format", default="bf16", help="cache format (default: %(default)s)")
    parser.add_argument(
        "--table", default="block_table", choices=("block_table", "csr", "contiguous"), help="kind of page table"
    )
    parser.add_argument("--q-dtype", default="bf16", choices=("bf16", "fp16"), help="dtype of the query (default: %(default)s)")
    parser.add_argument("--logit-cap", type=float, default=0.0, help="tanh cap of the logits (default: none)")
    parser.add_argument("--no-causal", action="store_true", help="every row sees all keys")
    parser.add_argument("--num-kv-splits", type=int, help="exactly this many splits a sequence")
    parser.add_argument("--split-size", type=int, help="keys a split (reproducible mode)")
    parser.add_argument("--backend", default="auto", help="auto or a backend's name (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--device-like", choices=tuple(KNOWN), help="a device this machine need not have")
    parser.add_argument("--plot", metavar="FILE", help="draw the schedule as a timeline into a .png, .svg or .pdf")


def main(args: argparse.Namespace, out: Output) -> int:
    """Explain it."""
    from .. import backends
    from ..checks import check_options
    from ..device import describe, override
    from ..plots.files import check_target, require_matplotlib
    from .known_devices import KNOWN

    if args.plot:
        require_matplotlib()
        check_target(Path(args.plot), "--plot")
    kv_lens, q_lens = _lengths(args)
    check_options(sm_scale=1.0, logit_cap=args.logit_cap, num_kv_splits=args.num_kv_splits, split_size=args.split_size)
    problem = _problem(args, kv_lens, q_lens)
    like = KNOWN[args.device_like] if args.device_like else None
    info = like.info if like else describe(pick_device(args.device))
    known = like or next((k for k in KNOWN.values() if k.info.name == info.name), None)
    with override(info, assume_installed=like.packages if like else ()):
        reasons = backends.reasons(problem, info)
        backend = backends.choose(problem, info, args.backend)
        config = backend.launch_config(problem, info)
        plan = _plan(backend, problem, info, config, kv_lens, q_lens)
    cost = _cost(problem, kv_lens, q_lens, plan, known.tb_s if known else None)
    out.json(_document(args, problem, info, reasons, config, plan, cost, known))
    if args.plot:
        from ..plots.timeline import plot_timeline

        subject = f"{problem} on {info.name}, {config.backend}: {plan.num_workers} workers, {plan.mode} splits"
        if backend.name in OWN_PLANNERS and not hasattr(backend, "host_plan"):
            subject += " (the common planner's)"
        plot_timeline(plan, Path(args.plot), subject=subject)
    _print(out, problem, info, reasons, backend, config, plan, cost, known)
    if args.plot:
        out.facts([("timeline", f"drawn into {args.plot}")])
    return 0


def _lengths(args: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from ..errors import InvalidArgument

    kv = integers(args.kv, "--kv", 0)
    if args.batch is not None and args.batch < 1:
        raise InvalidArgument(f"--batch: expected a positive integer, got {args.batch}.")
    if len(kv) == 1:
        kv = kv * (args.batch or 32)
    elif args.batch not in (None, len(kv)):
        raise InvalidArgument(f"--kv: lists {len(kv)} sequences, --batch says {args.batch}. Leave --batch out.")
    q = integers(args.q_len, "--q-len", 0)
    if len(q) not in (1, len(kv)):
        raise InvalidArgument(f"--q-len: expected one number or {len(kv)}, one a sequence, got {len(q)}.")
    return kv, q * len(kv) if len(q) == 1 else q


def _problem(args: argparse.Namespace, kv_lens: tuple[int, ...], q_lens: tuple[int, ...]) -> DecodeProblem:
    from ..errors import InvalidArgument
    from ..formats import get
    from ..problem import DecodeProblem

    for option, value in (("--heads", args.heads), ("--page-size", args.page_size)):
        if value < 1:
            raise InvalidArgument(f"{option}: expected a positive integer, got {value}.")
    page = 1 if args.table == "contiguous" else args.page_size
    pages = [-(-n // page) for n in kv_lens]
    # Bounds as a call would know them from its tensors' shapes.
    widest = max(pages) if args.table == "block_table" else sum(pages)
    total = widest * len(kv_lens) if args.table == "block_table" else widest
    return DecodeProblem(
        format=get(args.format).name, num_heads=args.heads, batch=len(kv_lens), total_q=sum(q_lens), max_q_len=max(q_lens),
        ragged_q=len(set(q_lens)) > 1, page_size=page, table_kind=args.table, max_kv_len=widest * page, total_kv=total * page,
        q_dtype=args.q_dtype, causal=not args.no_causal, logit_cap=args.logit_cap, num_kv_splits=args.num_kv_splits,
        split_size=args.split_size,
    )  # fmt: skip


def _plan(
    backend: Backend,
    problem: DecodeProblem,
    info: DeviceInfo,
    config: LaunchConfig,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
) -> SplitPlan:
    """The schedule: the backend's own account of it (``host_plan``), or the common planner's with the backend's figures."""
    from ..split_plan import plan_splits

    own = getattr(backend, "host_plan", None)
    if own is not None:
        if "q_lens" in inspect.signature(own).parameters:
            return own(problem, info, kv_lens, q_lens=q_lens)
        return own(problem, info, kv_lens)
    return plan_splits(kv_lens, num_workers=max(1, config.num_workers), granularity=max(1, config.block_kv),
                       num_kv_splits=problem.num_kv_splits, split_size=problem.split_size)  # fmt: skip


def _cost(problem: DecodeProblem, kv_lens, q_lens, plan: SplitPlan, tb_s: float | None) -> dict:
    """Bytes that must move and products that must be computed."""
    from ..formats import get

    cache = sum(n for n, q in zip(kv_lens, q_lens) if q) * get(problem.format).bytes_per_token
    rows = problem.total_q * problem.num_heads
    split = sum(n * q for n, q in zip(plan.splits_per_seq, q_lens) if n > 1) * problem.num_heads
    partials = 2 * split * (512 + 1) * 4  # fp32 out and lse, written and read again
    total = cache + rows * 2 * (576 + 512) + partials
    flops = sum(2 * (576 + 512) * problem.num_heads * q * n for n, q in zip(kv_lens, q_lens))
    return {
        "cache_bytes": cache, "query_bytes": rows * 2 * 576, "out_bytes": rows * 2 * 512, "partial_bytes": partials,
        "total_bytes": total, "flops": flops, "flops_per_byte": flops / total if total else math.nan,
        "floor_us": total / tb_s / 1e6 if tb_s else math.nan,
    }  # fmt: skip


def _document(args, problem, info, reasons, config, plan: SplitPlan, cost, known) -> dict:
    from ..plots.schedule import timetable

    loads = _loads(plan)
    return {
        "schema": SCHEMA,
        "problem": {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)},
        "device": {f.name: getattr(info, f.name) for f in dataclasses.fields(info)},
        "device_is_real": args.device_like is None,
        "reasons": reasons,
        "backend": config.backend,
        "launch": {f.name: getattr(config, f.name) for f in dataclasses.fields(config)},
        "schedule": {
            "mode": plan.mode, "granularity": plan.granularity, "chunk_blocks": plan.chunk_blocks, "num_workers": plan.num_workers,
            "num_items": len(plan.items), "splits_per_seq": plan.splits_per_seq, "balance": plan.balance,
            "busiest_keys": max(loads), "mean_keys": sum(loads) / len(loads), "timeline": timetable(plan).figures.document(),
            "items": [[i.seq, i.split, i.kv_start, i.kv_end] for i in plan.items],
        },
        "cost": {**cost, "tb_s": known.tb_s if known else None, "tb_s_source": known.source if known else None},
    }  # fmt: skip


def _loads(plan: SplitPlan) -> list[int]:
    """Keys of each worker."""
    return [sum(i.num_keys for i in queue) for queue in plan.workers()]


def _print(out: Output, problem, info, reasons, backend: Backend, config, plan: SplitPlan, cost, known) -> None:
    chosen = backend.name
    own_rules = chosen in OWN_PLANNERS and not hasattr(backend, "host_plan")
    out.print(f"{problem} on {info.name}", "")
    table = new_table("Backends, in the order auto prefers them", "backend", "verdict")
    for name, reason in reasons.items():
        if name == chosen:
            words = "CHOSEN"
        else:
            words = reason if reason is not None else "could run it too"
        table.add_row(name, words)
    out.print(table, "")
    rows = [
        ("kernel", config.kernel),
        ("tile", f"{config.block_rows} query rows (heads x rows) by {config.block_kv} keys"),
        ("workers", f"{config.num_workers} items run at the same time"),
        *config.extra,
        ("because", config.reason),
    ]
    out.facts((key, str(value)) for key, value in rows)
    out.print("")
    _print_schedule(out, plan, config.backend if own_rules else None)
    out.print("")
    floor = "unknown: no bandwidth is on record for this device; leanmla bench measures it"
    if known is not None and known.tb_s:
        floor = f"{cost['floor_us']:.1f} µs at {known.tb_s:g} TB/s ({known.source})"
    out.facts([
        ("reads", f"{size(cost['cache_bytes'])} of cache, {size(cost['query_bytes'])} of queries; writes {size(cost['out_bytes'])}; "
                  f"partial results {size(cost['partial_bytes'])}"),
        ("computes", f"{cost['flops'] / 1e9:.3g} GFLOP, {cost['flops_per_byte']:.0f} FLOP a byte"),
        ("floor", floor),
    ])  # fmt: skip


def _print_schedule(out: Output, plan: SplitPlan, own_rules: str | None) -> None:
    from ..plots.schedule import timetable

    if own_rules:
        out.print(
            f"{own_rules} plans on the device by rules of its own; this is the common planner's schedule for as many workers."
        )
    counts = plan.splits_per_seq
    spread = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    keys = [i.num_keys for i in plan.items]
    loads = _loads(plan)
    chunk = f", chunks of {plan.chunk_blocks * plan.granularity} keys" if plan.chunk_blocks else ""
    idle = sum(load == 0 for load in loads)
    out.facts([
        ("schedule", f"{plan.mode}: {len(plan.items)} items for {len(counts)} sequences, {spread} each{chunk}"),
        ("items", f"{min(keys)} to {max(keys)} keys"),
        ("balance", f"{plan.balance:.0%} of perfect" + (f"; {idle} of {plan.num_workers} workers have no keys" if idle else "")),
        *(("", words) for words in timetable(plan).figures.sentences()),
    ])  # fmt: skip
    out.print("", *draw(plan, min(PICTURE_WIDTH, max(20, out.console.width - PICTURE_MARGIN))))


def draw(plan: SplitPlan, width: int = PICTURE_WIDTH) -> list[str]:
    """A text picture: a line a worker, a letter a sequence, time to the right, dots where a worker is idle."""
    queues = plan.workers()
    longest = max((sum(i.num_keys for i in q) for q in queues), default=0)
    if not longest:
        return ["(no keys at all)"]
    ordered = sorted(range(len(queues)), key=lambda w: -sum(i.num_keys for i in queues[w]))
    if len(ordered) > PICTURE_ROWS:
        step = (len(ordered) - 1) / (PICTURE_ROWS - 1)
        ordered = [ordered[round(i * step)] for i in range(PICTURE_ROWS)]
        head = f"{PICTURE_ROWS} of {len(queues)} workers"
    else:
        head = "Workers"
    lines = [f"{head}, busiest first. A letter is a sequence, | ends an item, . is idle."]
    return lines + [f"  {w:>5} {_line(queues[w], longest, width)}" for w in ordered]


def _line(queue: list[SplitItem], longest: int, room: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    text, done = "", 0
    for item in queue:
        done += item.num_keys
        end = round(done / longest * room)
        width = end - len(text)
        if width > 0:
            text += letters[item.seq % len(letters)] * (width - 1) + "|"
    return text.ljust(room, ".")
