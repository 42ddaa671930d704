"""Benchmark documents for tests of pictures and reports: made-up times, written by the real writer."""

import math
from pathlib import Path

from leanmla.bench.cases import BenchCase, contest_cases
from leanmla.bench.ceilings import Ceilings
from leanmla.bench.measure import Measurement
from leanmla.bench.results import write_json
from leanmla.bench.runner import BenchRun
from leanmla.formats import FORMATS

READ_TB_S, MATMUL_TFLOP_S = 4.0, 700.0

#: contender -> (format, peer, share of the floor reached by long cases, microseconds that every call costs)
CONTENDERS = {
    "auto bf16": ("bf16", False, 0.96, 6.0),
    "auto fp8": ("fp8", False, 0.92, 6.5),
    "auto mxfp4": ("mxfp4", False, 0.60, 7.5),
    "flash_mla bf16": ("bf16", True, 0.92, 12.0),
    "flashinfer fa3 fp8": ("fp8", True, 0.15, 20.0),
}


def environment(kind: str = "cuda", name: str = "Example GPU") -> dict:
    return {
        "leanmla": "0.1.0", "commit": "0123456789ab", "python": "3.11.7", "packages": {"torch": "2.13.0", "triton": "3.6.0"},
        "platform": "Linux-6.1-x86_64", "cpu": "Example CPU", "cpu_count": 16, "cpu_threads": 16,
        "device": {"kind": kind, "name": name, "arch": "sm_90" if kind == "cuda" else "cpu", "num_sms": 132, "total_memory": 150 << 30,
                   "last_level_cache": 60 << 20},
        "settings": {}, **({"cuda": "13.0"} if kind == "cuda" else {}),
    }  # fmt: skip


def bench_run(
    *,
    factor: float = 1.0,
    spread: float = 0.004,
    kind: str = "cuda",
    cases: list[BenchCase] | None = None,
    contenders=CONTENDERS,
) -> BenchRun:
    """A run whose times are ``factor`` times a simple model; slower by a thousand on a CPU."""
    slow = 1000.0 if kind == "cpu" else 1.0
    read = READ_TB_S / slow
    run = BenchRun(environment(kind), "leanmla bench --cases contest <made up>", "2026-01-02T03:04:05+00:00",
                   Ceilings(read, "a read kernel", MATMUL_TFLOP_S / slow, None if kind == "cpu" else 1.1))  # fmt: skip
    for case in contest_cases() if cases is None else cases:
        for name, (fmt, peer, share, fixed) in contenders.items():
            size = case.bytes_read(FORMATS[fmt].bytes_per_token)
            time_us = factor * slow * (size / READ_TB_S / 1e6 / share + fixed)
            run.results.append(Measurement(
                case=case.label, batch=case.batch, kv_lens=case.kv_lens[0] if case.uniform else list(case.kv_lens),
                num_heads=case.num_heads, q_len=case.q_len, page_size=case.page_size, format=fmt, contender=name, peer=peer,
                backend="" if peer else "hopper", kernel="" if peer else "leanmla/kernels/hopper/decode.py", time_us=time_us, spread=spread,
                samples_us=[time_us * (1 - spread), time_us, time_us * (1 + spread)], copies=4, cache_bytes=size,
                tb_s=size / time_us / 1e6, read_share=size / time_us / 1e6 / read, relative_error=2.1e-3,
                quantisation_error=0.0 if fmt == "bf16" else 0.03, checked_sequences=6,
            ))  # fmt: skip
    run.seconds = 12.3
    return run


def write_run(path: Path, **options) -> Path:
    """A run's JSON in ``path``."""
    write_json(path, bench_run(**options).document())
    return path


def with_failures(run: BenchRun) -> BenchRun:
    """The same run, in which one kernel was wrong and one peer refused."""
    ours = next(r for r in run.results if not r.peer)
    ours.status, ours.message, ours.time_us, ours.tb_s = "wrong", "out[0, 0, 0] = <1>, expected 2 & more", math.nan, math.nan
    peer = next(r for r in run.results if r.peer)
    peer.status, peer.message, peer.time_us, peer.tb_s = "refused", "takes pages of 64 only", math.nan, math.nan
    return run
