"""``leanmla info``: versions, hardware, settings, and what each backend can run here."""

from __future__ import annotations

import argparse
import os

from .output import Output, new_table
from .words import pick_device

__all__ = ["add_arguments", "main"]

SCHEMA = "leanmla-info/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla info``."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")


def main(args: argparse.Namespace, out: Output) -> int:
    """Print what is there."""
    from .. import backends, settings
    from ..bench.cases import cases_named
    from ..bench.data import problem_of
    from ..bench.environment import environment
    from ..device import describe
    from ..formats import FORMATS

    device = pick_device(args.device)
    info = describe(device)
    facts = environment(device)
    typical = cases_named("32x8192")[0]
    reasons = {f: backends.reasons(problem_of(typical, f), info) for f in FORMATS}
    chosen = {f: backends.choose(problem_of(typical, f), info).name for f in FORMATS}
    out.json({
        "schema": SCHEMA, "environment": facts, "variables": {n: os.environ.get(n) for n in settings.VARIABLES},
        "typical_problem": str(problem_of(typical, "bf16")), "reasons": reasons, "chosen": chosen,
    })  # fmt: skip
    out.facts(_facts(facts, info))

    table = new_table(
        f"Backends for {typical.label} (batch x kv), 16 heads, on {info.name}", "backend", "can run", "why not otherwise"
    )
    for name in backends.NAMES:
        able = [f for f in FORMATS if reasons[f][name] is None]
        auto = [f for f in able if chosen[f] == name]
        words = ", ".join(f"{f}*" if f in auto else f for f in able)
        why = "; ".join(dict.fromkeys(r for f in FORMATS if (r := reasons[f][name]) is not None))
        table.add_row(name, words or "-", why)
    out.print("", table, "* what auto takes", "")

    table = new_table("Settings (environment variables)", "variable", "value", "meaning")
    for name, meaning in settings.VARIABLES.items():
        table.add_row(name, os.environ.get(name, "not set"), meaning)
    out.print(table)
    return 0


def _facts(facts: dict, info) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    rows = [
        ("leanmla", facts["leanmla"] + (f", commit {facts['commit']}" if facts["commit"] else "")),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("packages", packages),
        ("cpu", f"{facts['cpu']}, {facts['cpu_count']} CPUs, torch uses {facts['cpu_threads']} threads"),
    ]
    if info.kind != "cpu":
        version = f"CUDA {facts.get('cuda')}" if info.kind == "cuda" else f"ROCm {facts.get('hip')}"
        driver = (facts.get("nvidia_smi") or {}).get("driver_version")
        rows.append(("gpu", f"{info.name} ({info.arch}), {info.num_sms} multiprocessors, {version}"
                     + (f", driver {driver}" if driver else "")))  # fmt: skip
    rows.append(
        (
            "memory",
            f"{info.total_memory / 2**30:.0f} GiB, last-level cache {facts['device']['last_level_cache'] / 2**20:.0f} MiB",
        )
    )
    return rows
