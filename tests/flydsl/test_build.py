"""The kernels compile for gfx950 without a GPU, and their ISA is what was designed: counted, not guessed."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

pytest.importorskip("flydsl", reason="needs flydsl (pip install leanmla[amd]) to build for gfx950")

from gfx950_isa import by_kind, instructions, loop_text

from leanmla.errors import BackendUnavailable, InvalidArgument
from leanmla.kernels.flydsl.build import BuiltKernel, build
from leanmla.kernels.flydsl.spec import LDS_LIMIT, DecodeSpec
from leanmla.problem import DecodeProblem

#: (cache format, precision)
KERNELS = (("bf16", "16bit"), ("fp8", "16bit"), ("mxfp4", "16bit"), ("fp8_tile128", "16bit"), ("fp8", "a8"))
#: With LEANMLA_TEST_EVERYTHING=1 every variant is built for every format, otherwise each for one.
EVERYTHING = os.environ.get("LEANMLA_TEST_EVERYTHING") == "1"
#: Loads of the next tile in the loop, a wave: (mnemonic, count).
TILE_LOADS = {
    "bf16": {"global_load_dwordx4": 18},
    "fp8": {"global_load_dwordx4": 9},
    # 9 pieces of 8 bytes; 18 scale bytes as 5 aligned words.
    "mxfp4": {"global_load_dwordx2": 9, "global_load_dwordx4": 1, "global_load_dword": 1},
    # 5 operands of 16 bytes; scales as above.
    "mxfp4 scaled": {"global_load_dwordx4": 6, "global_load_dword": 1},
    "fp8 scaled": {"global_load_dwordx4": 9},
    # 8 pieces of e4m3, 2 of rope, a scale.
    "fp8_tile128": {"global_load_dwordx4": 10, "global_load_dword": 1},
}
#: Selects in the loop besides those of the scores: the zero row for keys past the end, pages, E8M0 bytes.
OTHER_SELECTS = {"bf16": 4, "fp8": 2, "mxfp4": 13, "fp8_tile128": 2}
BF16_MFMA = "v_mfma_f32_16x16x32_bf16"
SCALED_MFMA = "v_mfma_scale_f32_16x16x128_f8f6f4"


def problem(format: str, heads: int, q_len: int, **changes) -> DecodeProblem:
    base = DecodeProblem(
        format=format, num_heads=heads, batch=4, total_q=4 * q_len, max_q_len=q_len, ragged_q=False, page_size=64,
        table_kind="block_table", max_kv_len=8192, total_kv=4 * 8192,
    )  # fmt: skip
    return base.replace(**changes)


def check_resources(kernel: BuiltKernel, sgpr_spills: int = 0) -> None:
    used = kernel.resources
    assert used["vgpr_spills"] == used["scratch_bytes"] == 0
    assert used["sgpr_spills"] <= sgpr_spills
    assert not [name for name in instructions(kernel.isa) if name.startswith("scratch_")]
    assert kernel.lds_bytes <= LDS_LIMIT and kernel.dynamic_lds_bytes == 0
    assert used["vgprs"] <= 512


def check_decode(kernel: BuiltKernel, spec: DecodeSpec, sgpr_spills: int = 0) -> None:
    check_resources(kernel, sgpr_spills)
    assert kernel.name == spec.name and kernel.lds_bytes == spec.lds.size
    # Registers allow the occupancy that the splits count on: 512 a lane, shared by the waves of a SIMD.
    assert kernel.resources["vgprs"] * spec.blocks_per_cu <= 512
    names = instructions(kernel.isa)
    mfma = [n for n in names if n.startswith("v_mfma")]
    # Values: 8 blocks of 16 dims, 2 chunks of 32 keys, twice where a probability times a scale is two bf16. Scores: 18 steps of 32
    # dims for each 16-key subtile, or 5 of 128 for each term of the query.
    values = 32 if spec.tile_scales else 16
    wanted = {BF16_MFMA: spec.row_tiles * (18 + values)}
    if spec.scaled_scores:
        wanted = {BF16_MFMA: values, SCALED_MFMA: 5 if spec.precision == "a8" else 10}
    assert Counter(mfma) == wanted

    loop = loop_text(kernel.isa)
    counts = by_kind(instructions(loop))
    assert counts["mfma"] == len(mfma)
    assert counts["s_barrier"] == 4
    assert counts["ds_read_b64_tr_b16"] == 32
    # Keys for scores (from LDS unless scaled), the maxima, 2 chunks of probabilities a row tile; the branch that drops what is not
    # finite reads a thread's 18 pieces once more.
    keys_read = 0 if spec.scaled_scores else 18 * spec.row_tiles
    # fp8_tile128: probabilities are fp32, and there are scales: of 4 tiles a subtile, and for each chunk.
    read = keys_read + 1 + (8 * spec.row_tiles + 4 if spec.tile_scales else 2 * spec.row_tiles)
    assert counts["ds_read_b128"] == read + (18 if spec.hides_keys else 0)
    loads = {n: c for n, c in counts.items() if n.startswith(("global_load", "buffer_load", "flat_load"))}
    pages = {} if spec.tile_in_page or spec.table_kind == "contiguous" else {"global_load_dword": 2 if spec.format == "bf16" else 1}
    data = TILE_LOADS[spec.format + (" scaled" if spec.scaled_scores else "")]
    expected = {n: data.get(n, 0) + pages.get(n, 0) for n in {*data, *pages}}
    assert loads == expected

    # Masking selects, twice a score (sentinel before the maximum, zero after the exponential), and never with infinity.
    assert "0xff800000" not in loop
    assert len(re.findall(r"v_cndmask_b32", loop)) >= 8 * spec.row_tiles
    assert len(re.findall(r"v_cmp_\w+", loop)) >= 4 * spec.row_tiles
    # The next tile's loads stay in flight over the whole computation: going round from the last of them, every MFMA comes before
    # anything waits for memory.
    lines = loop.splitlines()
    last_load = max(i for i, line in enumerate(lines) if "global_load" in line)
    around = "\n".join(lines[last_load + 1 :] + lines[:last_load])
    assert around.split("vmcnt")[0].count("v_mfma") == len(mfma)
    print(f"{kernel.name}: {kernel.resources}, {512 // kernel.resources['vgprs']} waves a SIMD; loop {dict(counts)}")


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(("format", "precision"), KERNELS)
def test_isa(format, precision, heads, q_len):
    p = problem(format, heads, q_len)
    kernel = build(p, precision=precision)
    spec = DecodeSpec.for_problem(p, "balanced", precision)
    check_decode(kernel, spec)
    assert kernel.plan is not None and kernel.combine is not None
    assert kernel.launches == (kernel.plan, kernel, kernel.combine)
    check_resources(kernel.plan)
    check_resources(kernel.combine)
    # Ten selects a row tile: two for each of a lane's four scores (before the maximum, after the exponential) and two more; the branch
    # that drops what is not finite has one for each of a thread's 144 values. Fewer mean a mask that the compiler took away.
    hidden = {"fp8_tile128": 145}.get(format, 144) if spec.hides_keys else 0
    assert loop_text(kernel.isa).count("v_cndmask_b32") == OTHER_SELECTS[format] + 10 * spec.row_tiles + hidden
    blocks = spec.blocks_per_cu
    assert kernel.occupancy["blocks_per_cu"] >= blocks and kernel.occupancy["waves_per_simd"] >= blocks


CHANGES = (
    {"page_size": 1, "table_kind": "csr"},
    {"page_size": 48, "table_kind": "csr", "ragged_q": True, "max_q_len": 3},
    {"page_size": 1, "table_kind": "contiguous", "num_kv_splits": 1},
    {"page_size": 128, "split_size": 1000},
    {"num_kv_splits": 3, "logit_cap": 30.0, "causal": False},
)
VARIANTS = [
    pytest.param(*kernel, changes, id="-".join((*kernel, *(f"{k}={v}" for k, v in changes.items()))))
    for i, kernel in enumerate(KERNELS)
    for j, changes in enumerate(CHANGES)
    if EVERYTHING or i == j
]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "precision", "changes"), VARIANTS)
def test_isa_of_variants(format, precision, changes):
    p = problem(format, 16, 1, **changes)
    kernel = build(p, precision=precision)
    mode = {None: "balanced", 1: "one"}.get(p.num_kv_splits, "count") if p.split_size is None else "size"
    # A few scalars may wait in lanes of a vector register (that is what an SGPR spill without scratch is).
    check_decode(kernel, DecodeSpec.for_problem(p, mode, precision), sgpr_spills=4)


def test_a8_takes_fewer_matrix_instructions():
    """A tile of scores: 5 where a query value is one e4m3, 10 where it is two, 18 in bf16."""
    p = problem("fp8", 16, 1)
    a8, exact = build(p, precision="a8"), build(p)
    assert (a8.resources["mfma"], exact.resources["mfma"]) == (5 + 16, 18 + 16)
    assert build(problem("mxfp4", 16, 1)).resources["mfma"] == 10 + 16
    assert a8.name != exact.name and a8.precision == "a8"


def test_packing():
    kernel = build(problem("mxfp4", 16, 1))
    assert kernel.hsaco[:4] == b"\x7fELF" and kernel.name.encode() in kernel.hsaco
    assert kernel.block == (256, 1, 1) and kernel.grid[1:] == (1, 1)
    assert str(kernel) and "hsaco=" not in repr(kernel)  # printable

    values = {a.name: 16 * i for i, a in enumerate(kernel.arguments) if a.name not in kernel.constants}
    segment = kernel.pack(values)
    assert len(segment) == kernel.kernarg_bytes
    q = next(a for a in kernel.arguments if a.name == "zeros")
    assert int.from_bytes(segment[q.offset : q.offset + 8], "little") == values["zeros"]
    del values["kv"]
    with pytest.raises(InvalidArgument, match="needs 'kv'"):
        kernel.pack(values)

    other = build(problem("mxfp4", 16, 1, batch=8, total_q=8, total_kv=8 * 8192))  # same code, another grid
    assert other.file == kernel.file and other.grid != kernel.grid


def test_refusals():
    with pytest.raises(InvalidArgument, match="target"):
        build(problem("bf16", 16, 1), "gfx1100")
    with pytest.raises(BackendUnavailable, match="fp16"):
        build(problem("fp8", 16, 1, q_dtype="fp16"))
    with pytest.raises(InvalidArgument, match="precision"):
        build(problem("fp8", 16, 1), precision="fp8")
    with pytest.raises(InvalidArgument, match="fp8 caches"):
        build(problem("mxfp4", 16, 1), precision="a8")


def test_a_build_without_a_linker_says_what_to_install(monkeypatch):
    from leanmla.kernels.flydsl import build as build_module
    from leanmla.kernels.flydsl import toolchain

    monkeypatch.setattr(toolchain, "_rocm_root", lambda: None)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.device, "triton_missing", lambda: "needs Triton")
    build_module._compile.cache_clear()
    with pytest.raises(BackendUnavailable, match=r"ld\.lld.*triton"):
        build(problem("bf16", 16, 1))
