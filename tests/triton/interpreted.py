"""Runs kernels under Triton's interpreter and prints what it found, one JSON line a case.

A program of its own because ``TRITON_INTERPRET=1`` must be set before Triton is imported. Called by test_interpreter.py:
``python interpreted.py decode fp8``, ``... append``, ``... plan``, ``... nan``.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import interpreter
import numpy as np
import torch
import triton
import triton.language as tl

from leanmla import LatentCache, PageTable, checks
from leanmla.device import DeviceInfo
from leanmla.formats import FORMATS
from leanmla.kernels.launch_configs import TritonConfig
from leanmla.kernels.triton import append as append_module
from leanmla.kernels.triton import backend, plan
from leanmla.reference import mla_decode_reference
from leanmla.split_plan import plan_splits
from leanmla.testing import DecodeCase, compare, make_inputs
from leanmla.testing.inputs import hard_rows, uneven_rows

interpreter.mend()
np.seterr(all="ignore")

DEVICE = DeviceInfo("hip", "interpreter", "gfx950", 4, 163840, 0)


def report(case: str, ok: bool, message: str = "") -> None:
    """One line for test_interpreter.py."""
    print(json.dumps({"case": case, "ok": bool(ok), "message": message}), flush=True)


def workspace(problem, config: TritonConfig) -> backend.Workspace:
    """Scratch filled with NaN and absurd numbers."""
    items = backend.max_items(problem, config.block_kv, config.num_workers(DEVICE))
    tiles = items * config.row_tiles * config.rows

    def filled(n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((max(n, 1),), torch.nan if dtype.is_floating_point else 2147480000, dtype=dtype)

    return backend.Workspace(
        capacity=problem,
        partial_out=filled(tiles * 512, torch.float32),
        partial_lse=filled(tiles, torch.float32),
        splits=filled(problem.batch, torch.int32),
        first=filled(problem.batch, torch.int32),
        items=filled(2 * items, torch.int32),
        num_items=filled(1, torch.int32),
        factors=backend._factors(torch.device("cpu")),
    )


def decode(
    inputs, *, swapped: bool = True, rows: int | None = None, block_kv: int = 64, raw: bool = False, plan: str = "inline"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The launcher on CPU tensors."""
    step, args = prepared(inputs, swapped=swapped, rows=rows, block_kv=block_kv, raw=raw, plan=plan)
    if args.problem.total_q:
        step()
    return args.out, args.lse


def prepared(inputs, *, swapped: bool, rows: int | None, block_kv: int, raw: bool, plan: str):
    """(a step to be run any number of times, its arguments)."""
    args = checks.check_call(
        inputs.q, inputs.cache, inputs.table, out=inputs.out, return_lse=True, max_q_len=max(inputs.case.rows, default=1) or 1,
        check_contents=False, **inputs.options, **inputs.splits,
    )  # fmt: skip
    lse = torch.full(inputs.q.shape[:2], torch.nan)
    args = dataclasses.replace(args, out=inputs.out, lse=lse)
    problem = args.problem
    total = max(1, problem.num_heads * problem.max_q_len)
    rows = rows or next((r for r in (16, 32) if r >= total), 64)
    config = TritonConfig(rows, -(-total // rows), block_kv, 4, 1, 1, swapped, "", raw, plan=plan)
    scratch = workspace(problem, config)
    return (lambda: backend.Launches(args, scratch, config, DEVICE)(args, scratch)), args


def run_decode(fmt: str) -> None:
    """Small cases of every kind, against the definition."""
    c = DecodeCase
    cases = [  # in every format
        (c((64,), num_heads=8), {}),
        (c((70, 33)), {"swapped": False, "block_kv": 32}),
        (c((17, 65, 0), num_heads=4), {}),
        (c((0, 1, 2, 3), q_lens=3, num_heads=5, table="csr"), {"swapped": False, "block_kv": 32}),
        (c((70,), q_lens=8, num_heads=2, num_kv_splits=3), {}),
        (c((80, 9, 33), q_lens=(3, 0, 7), num_heads=3, table="csr"), {}),
        (c((70, 33), page_size=16, num_heads=4), {}),
        (c((66, 20), table="contiguous", num_heads=4), {}),
        (c((80, 77), strided=True, q_lens=2, num_heads=8, table="csr", page_size=16), {}),
    ]
    others = [  # in one format each: the code that they exercise is shared
        (c((0, 0)), {}),
        (c((1, 2, 33, 64), num_kv_splits=6), {}),
        (c((200, 65), split_size=128, num_heads=4), {}),
        (c((150, 20), split_size=96, q_lens=2, num_heads=8), {"swapped": False, "block_kv": 32}),
        (c((90,), num_kv_splits=1, num_heads=1), {}),
        (c((97,), num_heads=20), {}),
        (c((97,), num_heads=24), {"rows": 16}),
        (c((40, 33), q_lens=(5, 2), num_heads=4, causal=False), {}),
        (c((100, 33), page_size=1, table="csr", num_heads=4), {}),
        (c((100, 33), page_size=5), {"swapped": False, "block_kv": 32}),
        (c((130, 33), page_size=128, num_heads=4), {}),
        (c((90,), q_std=100.0), {}),
        (c((90,), logit_shift=-30000.0), {}),
        (c((90, 20), logit_shift=1000.0, num_kv_splits=4), {}),
        (c((80,), logit_cap=2.0, q_std=8.0), {}),
        (c((80,), logit_cap=1e6), {}),
        (c((400, 1, 1, 1), table="csr", num_heads=4), {}),
        (c((3,), q_lens=4, num_heads=4), {}),
    ]
    cases += others[backend.FORMATS.index(fmt) :: len(backend.FORMATS)]
    if fmt != "fp8":
        cases += [(c((80, 77), q_dtype="fp16", q_lens=2, num_heads=4), {"swapped": fmt != "bf16"})]
    else:
        cases += [(c((70,), q_dtype="fp16"), {}), (c((90,), cache_scale=0.37), {}), (c((40,), cache_scale=4.0), {})]
    if fmt.startswith("fp8"):
        # Decoded between shared memory and the products.
        raw = {"swapped": False, "raw": True}
        cases += [
            (c((70, 33)), {**raw, "block_kv": 32}),
            (c((80, 9, 33), q_lens=(3, 0, 7), num_heads=3, table="csr", page_size=16), raw),
            (c((17, 65, 0), num_heads=4), raw),
            (c((66, 20), table="contiguous", num_heads=4), raw),
        ]
    for case, options in cases:
        case = case.replace(format=fmt)
        inputs = make_inputs(case)
        out, lse = decode(inputs, **options)
        result = compare(inputs, out, lse)
        order = ("" if options.get("swapped", True) else "-unswapped") + ("-raw" if options.get("raw") else "")
        report(case.id + order, result.ok, result.message)


def run_nan(fmt: str) -> None:
    """A NaN that is read stays NaN, for the rows that see it and for no others."""
    orders = [(True, False), (False, False)] + [(False, True)] * fmt.startswith("fp8")
    for swapped, raw in orders:
        inputs = make_inputs(DecodeCase((70, 40), q_lens=4, num_heads=4, format=fmt))
        slot = inputs.table.slots(0)[68:69]  # the last two of the four rows see key 68
        cache = inputs.cache
        page, offset = slot // cache.page_size, slot % cache.page_size
        if fmt == "bf16":
            cache.data[page, offset, 7] = torch.nan
        elif fmt == "mxfp4":
            cache.scale[page, offset, 0] = 255
        else:
            cache.data[page, offset, 7] = 0xFF
        out, lse = decode(inputs, swapped=swapped, raw=raw)
        want, want_lse = mla_decode_reference(inputs.q, cache, inputs.table, **inputs.options)
        seen = torch.isnan(want_lse)
        assert seen[2:4].all() and not seen[:2].any() and not seen[4:].any()
        ok = bool(torch.isnan(out[seen]).all() and torch.isnan(lse[seen]).all())
        ok &= bool(((out.double() - want)[~seen].norm() / want[~seen].norm()) < 3e-3)
        report(f"nan-{fmt}-swapped{swapped}-raw{raw}", ok, f"{out[0, 0, :3]} {out[3, 0, :3]}")


def run_append() -> None:
    """Bytes and counters equal the host codecs', both forms, both slot dtypes, every input dtype."""
    gen = torch.Generator().manual_seed(0)
    x = hard_rows(12)
    for fmt in FORMATS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rule in ("even", "floor") if fmt.startswith("mxfp4") else ("even",):
                options = {"format": fmt, "mx_scale_rule": rule, **({"scale": 0.037} if fmt == "fp8" else {})}
                host, device, apart = (LatentCache.allocate(4, 5, **options) for _ in range(3))
                slots = torch.randperm(20, generator=gen)[:12]
                slots[9] = -1
                latent = x.to(dtype)
                host.append(latent, slots)
                append_module.append(device, latent, slots.int())
                append_module.append_split(apart, latent[:, :512], latent[:, 512:].contiguous(), slots)
                same = all(
                    torch.equal(host.data.view(torch.uint8), c.data.view(torch.uint8))
                    and (host.scale is None or torch.equal(host.scale, c.scale))
                    and int(host.saturation_counter) == int(c.saturation_counter)
                    for c in (device, apart)
                )
                report(f"append-{fmt}-{dtype}-{rule}", same)
    for fmt in (f for f in FORMATS if f.startswith("mxfp4")):
        host, device = (LatentCache.allocate(12, 4, format=fmt) for _ in range(2))
        host.append(uneven_rows(), torch.arange(48))
        append_module.append(device, uneven_rows(), torch.arange(48))
        same = torch.equal(host.data, device.data) and (host.scale is None or torch.equal(host.scale, device.scale))
        report(f"append-uneven-{fmt}", same and int(host.saturation_counter) == int(device.saturation_counter) > 0)
    # NaN: the block, tile or value is NaN again after decoding.
    for fmt in FORMATS:
        cache = LatentCache.allocate(1, 4, format=fmt, **({"scale": 1.0} if fmt == "fp8" else {}))
        latent = torch.ones(1, 576)
        latent[0, 40] = torch.nan
        append_module.append(cache, latent, torch.tensor([2]))
        value = cache.dequantize()[0, 2]
        report(
            f"append-nan-{fmt}", bool(torch.isnan(value[40]) and not torch.isnan(value[200]) and not torch.isnan(value[570]))
        )


@triton.jit
def _items(
    out_ptr, batch, num_workers, split_size, factors_ptr, seqlens_ptr, FIXED_SIZE: tl.constexpr, BATCH_POW2: tl.constexpr
):  # fmt: skip
    unit = tl.program_id(0)
    b, s, n = plan.find_item(
        unit, batch, num_workers, split_size, factors_ptr, seqlens_ptr, seqlens_ptr, seqlens_ptr,
        "block_table", 64, 64, FIXED_SIZE, BATCH_POW2,
    )  # fmt: skip
    kv_len = tl.load(seqlens_ptr + b, mask=b < batch, other=0)
    start, end = plan.key_range(kv_len, s, tl.maximum(n, 1), split_size, 64, FIXED_SIZE)
    tl.store(out_ptr + unit * 5, b)
    tl.store(out_ptr + unit * 5 + 1, s)
    tl.store(out_ptr + unit * 5 + 2, n)
    tl.store(out_ptr + unit * 5 + 3, start)
    tl.store(out_ptr + unit * 5 + 4, end)


def run_plan() -> None:
    """The device's planner gives the items of leanmla.split_plan, whichever way it is called."""
    gen = torch.Generator().manual_seed(1)
    factors = backend._factors(torch.device("cpu"))
    batches = [[0, 0, 0], [64] * 9, [2048] * 5, [16384] + [1] * 12, [1, 0, 63, 64, 65, 2097]]
    batches += [torch.randint(0, 2000, (n,), generator=gen).tolist() for n in (1, 13, 30)]
    for i, lens in enumerate(batches):
        for workers, size in ((132, None), (7, None), (8, None), (5, 96)):
            if workers == 132 and i not in (2, 3):  # every item is a program that plans anew: dear to interpret
                continue
            want = plan_splits(lens, num_workers=workers, granularity=64, split_size=size)
            expected = [[t.seq, t.split, t.num_splits, t.kv_start, t.kv_end] for t in want.items]
            seqlens = torch.tensor(lens, dtype=torch.int32)
            got = torch.zeros(len(expected) + 2, 5, dtype=torch.int32)
            pow2 = max(16, 1 << (len(lens) - 1).bit_length())
            _items[(len(got),)](
                got, len(lens), workers, size or 1, factors, seqlens, FIXED_SIZE=size is not None, BATCH_POW2=pow2
            )  # fmt: skip
            ok = got[: len(expected)].tolist() == expected and bool((got[len(expected) :, 0] >= len(lens)).all())
            bound = len(lens) + (4 * workers if size is None else sum(lens) // size)
            report(f"plan-inline-{i}-w{workers}-s{size}", ok and len(expected) <= bound, f"{got[:4].tolist()} {expected[:4]}")
            for chunk in sorted({16, pow2}):
                splits, first = torch.zeros(len(lens), dtype=torch.int32), torch.zeros(len(lens), dtype=torch.int32)
                items, count = torch.full((len(expected), 2), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
                plan.plan_kernel[(1,)](
                    splits, first, items, count, seqlens, seqlens, seqlens, factors, len(lens), workers, size or 1,
                    TABLE="block_table", PAGE_SIZE=64, GRANULARITY=64, FIXED_SIZE=size is not None, CHUNK=chunk,
                    ONE_STEP=len(lens) <= chunk, PDL=False,
                )  # fmt: skip
                ok = splits.tolist() == list(want.splits_per_seq) and first.tolist() == list(want.partial_start)
                ok &= items.tolist() == [[t.seq, t.split + (t.num_splits << 15)] for t in want.items]
                ok &= int(count) == len(expected)
                report(f"plan-table-{i}-w{workers}-s{size}-c{chunk}", ok, f"{splits[:4].tolist()} {want.splits_per_seq[:4]}")


def run_large_batch() -> None:
    """Planning by a launch of its own: the table path through plan, decode and combine."""
    inputs = make_inputs(DecodeCase((300, 0, 5, 70), num_heads=4, format="mxfp4"))
    out, lse = decode(inputs, plan="table")
    result = compare(inputs, out, lse)
    report("table-plan", result.ok, result.message)
    # The host's number of splits: one launch, repeated while the lengths change in place, as a CUDA graph repeats it.
    inputs = make_inputs(DecodeCase((300, 310), num_heads=4, format="mxfp4"))
    step, args = prepared(inputs, swapped=True, rows=16, block_kv=64, raw=False, plan="auto")
    for lens in ((300, 310), (1, 310), (0, 65), (300, 0)):
        inputs.table.cache_seqlens.copy_(torch.tensor(lens))
        args.out.fill_(torch.nan), args.lse.fill_(torch.nan)
        step()
        want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
        finite = bool(args.out.isfinite().all()) and bool((args.lse.isneginf() == want_lse.isneginf()).all())
        error = float((args.out.double() - want).norm() / want.norm())
        report(f"even-{lens}", finite and error < 3e-3, f"{args.out[:, 0, :3]} {want[:, 0, :3]}")
    table = PageTable.from_block_table(torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), page_size=64)
    report("empty-batch", table.batch == 0)


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "decode":
        run_decode(sys.argv[2])
        run_nan(sys.argv[2])
    elif mode == "append":
        run_append()
    else:
        run_plan()
        run_large_batch()
