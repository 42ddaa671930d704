"""The CPU backend's own parts: vectors, tiles of every format, work items, threads, and its forms of arithmetic."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from leanmla import DecodePlan, LatentCache, PageTable, checks, device, formats
from leanmla.formats import mxfp4_row320
from leanmla.kernels.cpu import backend as cpu
from leanmla.split_plan import plan_splits
from leanmla.testing import DecodeCase, case_grid, compare, make_inputs
from leanmla.testing.inputs import uneven_rows

pytest.importorskip("numba", reason="numba is not installed")

from numba import njit

from leanmla.kernels.cpu import arithmetic, cuts, decode, plan, simd, tiles, workers

X86 = simd.HAS_AVX2 or simd.HAS_AVX512


def address(t: torch.Tensor) -> int:
    assert t.is_contiguous()
    return t.data_ptr()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# -- tiles ------------------------------------------------------------------------------------------------------------

#: Order of the fp32 form: evens of each 32, then odds.
ORDER = torch.arange(576).view(18, 16, 2).transpose(1, 2).flatten()


def find(data, scale, n, page_ids=None, page_size=1):
    """The token list of tokens 0..n-1, from rows [tokens, W] and pages of ``page_size`` of them."""
    tokens = torch.full((tiles.TOKEN_LIST_BYTES // 8,), -7, dtype=torch.int64)
    stride = data.stride(0) * data.element_size()
    scales = (0, 0, 0) if scale is None else (address(scale), scale.stride(0) * page_size, scale.stride(0))
    pages = 0 if page_ids is None else address(page_ids)
    tiles.find_tokens(
        address(tokens), 0, n, data.shape[1], address(data), stride * page_size, stride, *scales, pages, 0, page_size
    )
    return tokens


def tile_of(data: torch.Tensor, scale: torch.Tensor | None, fmt: str, as_bf16: bool) -> torch.Tensor:
    """Rows through load_tile, back in natural order, fp32."""
    n = len(data)
    assert n <= tiles.TILE
    tokens = find(data, scale, n, page_size=1)
    table = torch.zeros(tiles.TABLE_BYTES // 4, dtype=torch.int32)
    tiles.write_e2m1_table(address(table))
    tile = torch.full((n, 576), torch.nan, dtype=torch.bfloat16 if as_bf16 else torch.float32)
    tiles.load_tile(address(tile), as_bf16, tiles.FORMAT_CODES[fmt], address(tokens), address(table))
    if as_bf16:
        return tile.float()
    natural = torch.empty_like(tile)
    natural[:, ORDER] = tile
    return natural


@pytest.mark.parametrize("as_bf16", [False, True])
def test_every_e4m3_byte_in_every_lane(as_bf16):
    # Row r holds byte r everywhere but in a changing place, so fast and careful vectors both occur.
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 576)
    codes[torch.arange(256), torch.arange(256) * 2 % 576] = 0x01
    mixed = torch.stack([torch.arange(576).add(s).to(torch.uint8) for s in range(64)])
    for rows in (*codes.split(64), mixed):
        want = rows.contiguous().view(torch.float8_e4m3fn).float()
        assert same(tile_of(rows.contiguous(), None, "fp8", as_bf16), want)


@pytest.mark.parametrize("as_bf16", [False, True])
def test_every_e2m1_code_under_every_scale(as_bf16):
    nibbles = torch.arange(288) % 256
    for first in range(0, 256, 64):
        data = ((nibbles[None] + torch.arange(64)[:, None] * 5) % 256).to(torch.uint8).contiguous()
        scale = torch.arange(first, first + 64).to(torch.uint8)[:, None].repeat(1, 18).contiguous()
        want = formats.get("mxfp4").dequantize(data, scale)
        assert same(tile_of(data, scale, "mxfp4", as_bf16), want)


@pytest.mark.parametrize("as_bf16", [False, True])
def test_rows_of_320_bytes(as_bf16):
    """Every code in every place, every deficit in every block, every reference exponent; NaN blocks, blocks of zeros."""
    codes = (torch.arange(576) + torch.arange(64)[:, None] * 5).to(torch.uint8) % 16
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    for first in range(0, 256, 64):
        top = torch.arange(first, first + 64)[:, None].clamp(max=254)
        scale = (top - (torch.arange(18) * 3 + torch.arange(64)[:, None]) % 27).clamp(min=0).to(torch.uint8)
        scale[::5, 7], scale[3::7, 17] = 255, 255
        data = packed.clone()
        data[1::3, 32:64] &= 0x88
        rows = mxfp4_row320.from_ocp(data, scale)
        assert same(tile_of(rows, None, "mxfp4_row320", as_bf16), formats.get("mxfp4").dequantize(data, scale))
    rows = formats.get("mxfp4_row320").quantize(uneven_rows()).data
    assert same(tile_of(rows, None, "mxfp4_row320", as_bf16), formats.get("mxfp4_row320").dequantize(rows, None))


@pytest.mark.parametrize("as_bf16", [False, True])
def test_every_bf16_pattern(as_bf16):
    rows = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)[: 113 * 576].view(113, 576)
    for part in rows.split(64):
        assert same(tile_of(part.contiguous(), None, "bf16", as_bf16), part.float())


def test_tile128_rows():
    q = formats.get("fp8_tile128").quantize(torch.randn(50, 576) * torch.logspace(-6, 6, 50)[:, None])
    assert same(tile_of(q.data.contiguous(), None, "fp8_tile128", False), formats.get("fp8_tile128").dequantize(q.data, None))


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_tokens_are_found_through_pages(page_size):
    data = torch.zeros(40 * page_size, 288, dtype=torch.uint8)
    scale = torch.zeros(40 * page_size, 18, dtype=torch.uint8)
    pages = torch.randperm(40).int()[: -(-37 // page_size)].clone()  # ends with the last page in use
    tokens = find(data, scale, 37, pages, page_size)
    slots = pages.long()[torch.arange(37) // page_size] * page_size + torch.arange(37) % page_size
    assert tokens[:2].tolist() == [37, 288]
    first = tiles.TOKENS // 8
    assert torch.equal(tokens[first : first + 37], address(data) + slots * 288)
    assert torch.equal(tokens[first + tiles.TILE :][:37], address(scale) + slots * 18)


def test_spacing_of_tokens():
    tokens = find(torch.zeros(64, 576, dtype=torch.bfloat16), None, 64)
    assert tiles.even_spacing(address(tokens)) == 1152
    tokens[tiles.TOKENS // 8 + 63] += 64
    assert tiles.even_spacing(address(tokens)) == 0


# -- vector arithmetic ------------------------------------------------------------------------------------------------


def over_vectors(function):
    """``function`` (vector of 16 -> vector of 16, fp32) over a tensor."""

    @njit
    def loop(source, target, n):
        for i in range(0, n, 16):
            simd.store_f(target + i * 4, function(simd.load_f(source + i * 4)))

    def apply(x):
        out = torch.empty_like(x)
        loop(address(x), address(out), x.numel())
        return out

    return apply


def test_exp2():
    exp2 = over_vectors(arithmetic.exp2_neg)
    x = torch.linspace(-126, 0, 160000)
    want = torch.exp2(x.double())
    assert ((exp2(x) - want).abs() / want).max() < 2e-7
    special = torch.tensor([0.0, -0.0, -1.0, -126.5, -1e30, -torch.inf, torch.nan, -2.0] * 2)
    assert same(exp2(special), torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0, 0.0, torch.nan, 0.25] * 2))


@pytest.mark.parametrize("cap", [0.01, 30.0, 1e6, 1e30])
def test_capped_logits(cap):
    capped = over_vectors(njit(lambda x: arithmetic.capped(x, cap)))
    x = torch.cat((torch.linspace(-300, 300, 3200), torch.logspace(-20, 2, 160), torch.tensor([torch.nan, 0.0] * 8)))
    want = cap * torch.tanh(x.double() / cap)
    got = capped(x)
    assert torch.equal(got.isnan(), x.isnan())
    assert ((got - want).abs() <= 5e-7 * want.abs() + 1e-37).logical_or(x.isnan()).all()
    assert torch.equal(capped(torch.tensor([torch.inf, -torch.inf] * 8)), torch.tensor([cap, -cap] * 8))


def test_rounding_to_bf16_and_fp16():
    as_bf16 = over_vectors(njit(lambda x: simd.as_float(arithmetic.round_bf16(x))))
    as_fp16 = over_vectors(njit(lambda x: simd.from_half(simd.to_half(x))))
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = torch.arange(0, 2**16, dtype=torch.int64).mul(2**15).to(torch.int32)
    for x in (bits.view(torch.float32), ties.view(torch.float32), torch.tensor([2.0**31 - 1] * 16)):
        assert same(as_bf16(x), x.bfloat16().float())
        assert same(as_fp16(x), x.half().float())


def test_every_fp16_pattern():
    halves = torch.arange(2**16).to(torch.int16)

    @njit
    def widen(source, target):
        for i in range(0, 2**16, 16):
            simd.store_f(target + i * 4, simd.from_half(simd.load_u16(source + i * 2)))

    out = torch.empty(2**16)
    widen(address(halves), address(out))
    assert same(out, halves.view(torch.float16).float())


def test_a_maximum_does_not_take_nan_for_a_number():
    @njit
    def largest(a, b, out):
        simd.store_f(out, simd.maximum(simd.load_f(a), simd.load_f(b)))

    a = torch.tensor([torch.nan, 1.0, -torch.inf, 3.0] * 4)
    b, out = torch.zeros(16), torch.empty(16)
    largest(address(a), address(b), address(out))
    assert torch.equal(out, torch.tensor([0.0, 1.0, 0.0, 3.0] * 4))


def test_bf16_pairs_accumulate_in_fp32():
    zeros = simd.make_zero_block(4)

    @njit
    def product(a, stride, b, out, steps):
        acc = zeros()
        for k in range(steps):
            acc = simd.add_outer_bf16(acc, a + 4 * k, stride, simd.load_i(b + 64 * k))
        simd.store_block(acc, out, 64)

    a, b = torch.randn(4, 64).bfloat16(), torch.randn(64, 16).bfloat16()
    pairs = b.view(32, 2, 16).transpose(1, 2).contiguous()
    out = torch.empty(4, 16)
    product(address(a), 128, address(pairs), address(out), 32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


# -- work items -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{"num_kv_splits": 1}, {"num_kv_splits": 7}, {"split_size": 1}, {"split_size": 100}])
def test_splits_are_those_of_the_planner(mode):
    lens = [0, 1, 63, 64, 65, 500, 8192]
    for item in plan_splits(lens, num_workers=4, granularity=cpu.TILE, **mode).items:
        got = plan.split_range(lens[item.seq], item.num_splits, item.split, mode.get("split_size", 0))
        assert got == (item.kv_start, item.kv_end)


def test_scratch_is_small():
    assert decode.SCRATCH_BYTES < 2**20  # a worker's tile, logits, query and output: what stands in for a dequantised cache


def call_of(inputs, **splits) -> object:
    case = inputs.case
    options = {
        "qo_indptr": None, "causal": True, "logit_cap": 0.0, "max_q_len": None, "check_contents": None, **inputs.options,
        "num_kv_splits": case.num_kv_splits, "split_size": case.split_size, **splits,
    }  # fmt: skip
    args = checks.check_call(inputs.q, inputs.cache, inputs.table, out=inputs.out, return_lse=True, **options)
    return dataclasses.replace(args, lse=torch.full(inputs.q.shape[:2], torch.nan))


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 5}, {"split_size": 96}])
@pytest.mark.parametrize("table", ["csr", "block_table", "contiguous"])
def test_items_cover_every_key_of_every_row_once(table, options):
    case = DecodeCase((700, 0, 1, 5000, 64), num_heads=20, q_lens=(3, 1, 9, 0, 16), table=table)
    inputs = make_inputs(case)
    workspace = cpu.Workspace()
    call = cpu.BACKEND.plan(call_of(inputs, **options), workspace)
    items, merges = workspace.items[: call["num_items"]], workspace.merges[: call["num_merges"]]
    seen = {b: np.zeros((rows * 20, n), dtype=int) for b, (n, rows) in enumerate(zip(case.kv_lens, case.rows, strict=True))}
    first_rows = np.cumsum((0, *case.rows))
    sequence = {int(first_rows[b]): b for b in reversed(range(case.batch)) if case.rows[b]}
    used = np.zeros(call["num_slots"], dtype=int)
    for item in items:
        b = sequence[int(item["first_query"])]
        assert (item["q_len"], item["kv_len"]) == (case.rows[b], case.kv_lens[b])
        assert 0 < item["row_end"] - item["row_start"] <= cpu.MAX_ROWS
        seen[b][item["row_start"] : item["row_end"], item["kv_start"] : item["kv_end"]] += 1
        if item["merge"] >= 0:
            used[item["partial"] : item["partial"] + item["row_end"] - item["row_start"]] += 1
            merge = merges[item["merge"]]
            assert (merge["row_start"], merge["row_end"]) == (item["row_start"], item["row_end"])
            assert (item["partial"] - merge["partial"]) % merge["split_stride"] == 0
    assert all((grid == 1).all() for grid in seen.values())
    assert (used == 1).all()
    assert np.array_equal(np.bincount(items["merge"][items["merge"] >= 0], minlength=len(merges)), merges["pending"])
    assert call["num_pairs"] == sum(grid.size for grid in seen.values())


def test_large_items_come_first():
    inputs = make_inputs(DecodeCase((10, 3000, 40, 5000, 20)))
    workspace = cpu.Workspace()
    call = cpu.BACKEND.plan(call_of(inputs, split_size=1000), workspace)
    sizes = [int(i["kv_end"] - i["kv_start"]) for i in workspace.items[: call["num_items"]]]
    assert sizes == [1000] * 8 + [10, 40, 20]


def test_room_for_items_grows():
    inputs = make_inputs(DecodeCase((300,) * 90, num_heads=1))
    workspace = cpu.Workspace()
    before = len(workspace.items)
    call = cpu.BACKEND.plan(call_of(inputs, split_size=64), workspace)
    assert call["num_items"] == 450 > before and call["num_merges"] == 90


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 5}, {"num_kv_splits": 4096}, {"split_size": 96}])
@pytest.mark.parametrize("case", [
    DecodeCase((8192,)), DecodeCase((5000, 0, 40, 129) * 8), DecodeCase((3000, 9000, 64), num_heads=128, q_lens=3),
    DecodeCase((700, 0, 9000, 64), num_heads=20, q_lens=(3, 1, 17, 2)),
], ids=str)  # fmt: skip
def test_the_plan_that_explain_shows_is_the_one_that_runs(case, options):
    inputs = make_inputs(case)
    args = call_of(inputs, **options)
    workspace = cpu.Workspace()
    call = cpu.BACKEND.plan(args, workspace)
    shown = cpu.BACKEND.host_plan(args.problem, device.describe("cpu"), case.kv_lens, q_lens=case.rows)
    first_rows = np.cumsum((0, *case.rows))
    sequence = {int(first_rows[b]): b for b in range(case.batch)}
    ran = [(sequence[int(i["first_query"])], int(i["kv_start"]), int(i["kv_end"]))
           for i in workspace.items[: call["num_items"]] if i["row_start"] == 0]  # fmt: skip
    assert sorted(ran) == [(i.seq, i.kv_start, i.kv_end) for i in shown.items]
    seen = [np.zeros(n, dtype=int) for n in case.kv_lens]
    for b, (count, start) in enumerate(zip(shown.splits_per_seq, shown.partial_start, strict=True)):
        for split, item in enumerate(shown.items[start : start + count]):
            assert (item.seq, item.split, item.num_splits) == (b, split, count)
            seen[b][item.kv_start : item.kv_end] += 1
    assert all((s == 1).all() for s in seen) and len(shown.items) == sum(shown.splits_per_seq)


def test_the_plan_needs_no_lengths_of_queries():
    case = DecodeCase((5000, 70), num_heads=128, q_lens=2)
    problem = call_of(make_inputs(case)).problem
    here = device.describe("cpu")
    assert cpu.BACKEND.host_plan(problem, here, case.kv_lens) == cpu.BACKEND.host_plan(problem, here, case.kv_lens, case.rows)


def test_splits_without_keys_cost_nothing():
    inputs = make_inputs(DecodeCase((40, 0, 130)))
    workspace = cpu.Workspace()
    call = cpu.BACKEND.plan(call_of(inputs, num_kv_splits=4096), workspace)
    ranges = sorted((int(i["first_query"]), int(i["kv_start"]), int(i["kv_end"])) for i in workspace.items[: call["num_items"]])
    assert ranges == [(0, 0, 40), (1, 0, 0), (2, 0, 64), (2, 64, 128), (2, 128, 130)]
    assert call["num_slots"] == 3 * 16
    run(inputs, num_kv_splits=4096)


CAPACITIES = [
    {}, {"num_kv_splits": 7}, {"num_kv_splits": 4096}, {"split_size": 64},
    {"num_heads": 128}, {"num_heads": 128, "num_kv_splits": 3}, {"num_heads": 7},
]  # fmt: skip


@pytest.mark.parametrize("options", CAPACITIES, ids=str)
def test_a_plans_scratch_holds_every_call_within_its_capacity(options):
    options = {"num_heads": 16, **options}
    plan_of = DecodePlan(format="bf16", page_size=64, max_batch=6, max_kv_len=3000, max_q_len=3, device="cpu", backend="cpu",
                         **options)  # fmt: skip
    workspace = plan_of._workspace
    before = [id(b) for b in (workspace.items, workspace.merges, workspace.partial_out, workspace.partial_lse)]
    for kv_lens, q_lens in [((3000,) * 6, 3), ((3000, 1, 0, 513, 64, 65), 1), ((3000,), 3), ((3000, 10, 700), (3, 0, 2))]:
        inputs = make_inputs(DecodeCase(kv_lens, num_heads=options["num_heads"], q_lens=q_lens, page_size=64))
        plan_of.run(inputs.q, inputs.cache, inputs.table, **{k: v for k, v in inputs.options.items() if k != "max_q_len"})
        now = [id(b) for b in (workspace.items, workspace.merges, workspace.partial_out, workspace.partial_lse)]
        assert now == before, (kv_lens, q_lens)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_bounds_of_a_capacity_hold(threads):
    draw = np.random.default_rng(threads)
    for _ in range(300):
        batch, heads, longest, most_q = (int(draw.integers(1, n)) for n in (9, 129, 60_000, 20))
        capacity = problem(num_heads=heads, batch=batch, max_q_len=most_q, total_q=batch * most_q, max_kv_len=longest,
                           total_kv=batch * longest, ragged_q=True)  # fmt: skip
        kv_lens, q_lens = draw.integers(0, longest + 1, batch).tolist(), draw.integers(0, most_q + 1, batch).tolist()
        rows = [n * heads for n in q_lens]
        chunks = [cuts.row_chunks(r) for r in rows]
        shown = cuts.host_plan(kv_lens, rows, num_threads=threads, num_kv_splits=None, split_size=None)
        needed = (
            sum(s * c for s, c in zip(shown.splits_per_seq, chunks, strict=True)),
            sum(c for s, c in zip(shown.splits_per_seq, chunks, strict=True) if s > 1),
            sum(s * r for s, r in zip(shown.splits_per_seq, rows, strict=True) if s > 1),
        )
        assert all(n <= m for n, m in zip(needed, cuts.most(capacity, threads), strict=True)), (capacity, kv_lens, q_lens)


def test_a_huge_capacity_reserves_little():
    huge = problem(num_heads=128, batch=256, total_q=256, max_kv_len=2**20, total_kv=2**28, split_size=64)
    workspace = cpu.BACKEND.make_workspace(huge, torch.device("cpu"))
    assert workspace.partial_out.nbytes <= cpu.MAX_RESERVED_BYTES and workspace.items.nbytes <= cpu.MAX_RESERVED_BYTES


def test_no_items_without_rows():
    inputs = make_inputs(DecodeCase((5, 70), q_lens=(0, 0)))
    call = cpu.BACKEND.plan(call_of(inputs), cpu.Workspace())
    assert [int(call[n]) for n in ("num_items", "num_merges", "num_slots", "num_pairs")] == [0, 0, 0, 0]


# -- whole calls ------------------------------------------------------------------------------------------------------


def run(inputs, backend=cpu.BACKEND, **splits):
    call = call_of(inputs, **splits)
    backend.run(call, backend.make_workspace(call.problem, inputs.q.device))
    return call.out, call.lse


@pytest.mark.parametrize("bf16_dot", [False, True])
@pytest.mark.parametrize("case", case_grid(("bf16", "fp8", "mxfp4", "mxfp4_row320")), ids=lambda c: f"{c.kind}-{c.id}")
def test_both_forms_of_arithmetic(case, bf16_dot):
    """On a machine with bf16 instructions the fp32 form would otherwise run for few cases, and elsewhere the other."""
    inputs = make_inputs(case, seed=3)
    report = compare(inputs, *run(inputs, cpu.CpuBackend(bf16_dot)))
    assert report.ok, report.message


@pytest.mark.parametrize("bf16_dot", [False, True])
def test_lse_does_not_see_the_rounding_of_p(bf16_dot):
    # 2048 equal logits below one that is larger: every p rounds the same way in bf16.
    q = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    q[..., 512] = 1.0
    keys = torch.zeros(2049, 576)
    keys[:, :512] = 1.0
    keys[1:, 512] = -0.3
    cache = LatentCache.allocate(2049, 1, format="bf16", device="cpu")
    cache.append(keys, torch.arange(2049))
    table = PageTable.contiguous(torch.tensor([0, 2049], dtype=torch.int32))
    call = checks.check_call(
        q, cache, table, sm_scale=1.0, qo_indptr=None, causal=True, logit_cap=0.0, out=torch.empty(1, 1, 512, dtype=q.dtype),
        return_lse=True, num_kv_splits=1, split_size=None, max_q_len=None, check_contents=True,
    )  # fmt: skip
    call = dataclasses.replace(call, lse=torch.empty(1, 1))
    backend = cpu.CpuBackend(bf16_dot)
    backend.run(call, backend.make_workspace(call.problem, q.device))
    small = float(torch.tensor(-0.3).bfloat16())
    want = np.log(1 + 2048 * np.exp(small))
    assert abs(float(call.lse[0, 0]) - want) < 1e-5
    assert (call.out == 1.0).all()


@pytest.mark.parametrize("bf16_dot", [False, True])
@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_a_key_that_a_row_does_not_see_does_not_reach_it(fmt, bf16_dot):
    """0 * NaN is NaN: the last key is NaN, and only the last query row sees it. Heads fill no block of rows."""
    backend = cpu.CpuBackend(bf16_dot)
    for heads, kv in ((5, 64), (16, 65), (3, 131), (128, 66)):
        inputs = make_inputs(DecodeCase((kv,), num_heads=heads, q_lens=3, format=fmt))
        clean = [t.clone() for t in run(inputs, backend)]
        inputs.cache.append(torch.full((1, 576), torch.nan), inputs.table.slots(0)[-1:])
        out, lse = run(inputs, backend)
        assert torch.equal(out[:2], clean[0][:2]) and torch.equal(lse[:2], clean[1][:2])
        assert out[2].isnan().all() and lse[2].isnan().all()


def test_threads_change_no_bit(monkeypatch):
    """With splits given, neither the number of threads nor their kind matters."""
    monkeypatch.setattr(cpu, "MIN_WORK_PER_WORKER", 1)
    inputs = make_inputs(DecodeCase((900, 0, 33, 1500), num_heads=20, q_lens=2, split_size=128))
    results = []
    for openmp in (True, False):
        if not openmp:
            monkeypatch.setattr(workers, "_openmp_parallel", lambda: None)
        for threads in (1, 2, 5):
            monkeypatch.setenv("LEANMLA_CPU_THREADS", str(threads))
            inputs.out.fill_(torch.nan)
            results.append([t.clone() for t in run(inputs)])
    assert all(torch.equal(r[0], results[0][0]) and torch.equal(r[1], results[0][1]) for r in results)


def test_threads_of_torch_are_found():
    if not torch.backends.openmp.is_available() or sys.platform != "linux":
        pytest.skip("torch without OpenMP, or not on Linux")
    assert workers._openmp_parallel() is not None


_FORK = """
import os, torch
from leanmla.kernels.cpu import backend as cpu
from leanmla.testing import DecodeCase, make_inputs
from leanmla import mla_decode
os.environ["LEANMLA_CPU_THREADS"] = "2"
cpu.MIN_WORK_PER_WORKER = 1
inputs = make_inputs(DecodeCase((3000, 3000)))
decode = lambda: mla_decode(inputs.q, inputs.cache, inputs.table, backend="cpu", split_size=256, **inputs.options)
want = decode().clone()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(decode(), want) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_decodes():
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


_OTHER_MACHINE = """
from leanmla.kernels.cpu import simd
from leanmla.kernels.cpu.backend import CpuBackend
from leanmla.testing import DecodeCase, compare, make_inputs
from leanmla import checks, mla_decode
assert simd.HAS_AVX512 == EXPECT_AVX512 and not simd.HAS_BF16_DOT
for fmt in ("bf16", "fp8", "mxfp4", "fp8_tile128", "mxfp4_row320"):
    for dtype in ("bf16", "fp16"):
        inputs = make_inputs(DecodeCase((150, 64, 0), num_heads=20, q_lens=2, format=fmt, q_dtype=dtype))
        out, lse = mla_decode(inputs.q, inputs.cache, inputs.table, backend="cpu", return_lse=True, num_kv_splits=2, **inputs.options)
        report = compare(inputs, out, lse)
        assert report.ok, report.message
"""


@pytest.mark.slow
@pytest.mark.parametrize("avx512", [False, True])
def test_machines_with_fewer_instructions(avx512, tmp_path):
    """Compiled as for a machine with AVX2 only, and for one with AVX-512 but no bf16 instructions."""
    if not (simd.HAS_AVX512 if avx512 else X86):
        pytest.skip("this machine has fewer instructions itself")
    features = "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi2" + (",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd" if avx512 else "")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "skylake-avx512" if avx512 else "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    program = _OTHER_MACHINE.replace("EXPECT_AVX512", str(avx512))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


# -- what the backend says of itself ----------------------------------------------------------------------------------


def problem(**changes):
    return dataclasses.replace(call_of(make_inputs(DecodeCase((64,)))).problem, **changes)


def test_reasons(monkeypatch):
    here = device.describe("cpu")
    assert cpu.BACKEND.why_not(problem(), here) is None
    gpu = device.DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 2**37)
    assert "NVIDIA H200" in cpu.BACKEND.why_not(problem(), gpu)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert "pip install numba" in cpu.BACKEND.why_not(problem(), here)
    with device.override(here, assume_installed=("numba",)):
        assert cpu.BACKEND.why_not(problem(), here) is None


_AUTO = """
import torch
from leanmla import backends
from leanmla.device import describe
from leanmla.problem import DecodeProblem
problem = DecodeProblem("bf16", 16, 1, 1, 1, False, 64, "block_table", 128, 128)
print(backends.choose(problem, describe("cpu")).name, "|", backends.why_not("cpu", problem, describe("cpu")))
"""


@pytest.mark.parametrize(
    ("broken", "environment", "words"),
    [
        (
            "raise ImportError('Numba needs NumPy 2.2 or less.\\nMore.')",
            {},
            "cannot be imported (ImportError: Numba needs NumPy 2.2",
        ),
        ("raise SystemError('initialization failed')", {}, "cannot be imported (SystemError: initialization failed)"),
        ("", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, "unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES"),
        ("", {"NUMBA_DISABLE_JIT": "1"}, "unset NUMBA_DISABLE_JIT"),
    ],
    ids=("numpy", "any error", "features", "interpreted"),
)
def test_where_numba_is_of_no_use_auto_takes_the_reference(broken, environment, words, tmp_path):
    if "NUMBA_CPU_NAME" in environment and not X86:
        pytest.skip("any processor of this kind has what the kernels need")
    if broken:
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(broken)
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", _AUTO], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment})  # fmt: skip
    name, _, reason = done.stdout.strip().partition(" | ")
    assert done.returncode == 0, done.stderr
    assert name == "reference" and words in reason and "\n" not in reason


def test_importing_the_backend_needs_no_numba():
    code = "import sys; import leanmla.kernels.cpu.backend; raise SystemExit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_launch_config_tells_the_form():
    here = device.describe("cpu")
    forms = {
        (backend._bf16_dot, p.q_dtype, p.format): dict(backend.launch_config(p, here).extra)["products"]
        for backend in (cpu.CpuBackend(True), cpu.CpuBackend(False))
        for p in (problem(), problem(q_dtype="fp16"), problem(format="fp8_tile128"))
    }
    assert [key for key, form in forms.items() if form == "bf16"] == [(True, "bf16", "bf16")]
