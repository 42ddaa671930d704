"""The kernels compile for gfx950 without a GPU, and their ISA is what was designed: counted, not guessed."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

pytest.importorskip("flydsl", reason="needs flydsl (pip install leanmla[amd]) to build for gfx950")

from gfx950_isa import by_kind, instructions, loop_text

from leanmla.errors import BackendUnavailable, InvalidArgument
from leanmla.kernels.flydsl.build import BuiltKernel, build, write_manifest
from leanmla.kernels.flydsl.spec import LDS_LIMIT, DecodeSpec
from leanmla.problem import DecodeProblem

FORMATS = ("bf16", "fp8", "mxfp4")
#: Loads of the next tile in the loop, a wave: (mnemonic, count).
TILE_LOADS = {
    "bf16": {"global_load_dwordx4": 18},
    "fp8": {"global_load_dwordx4": 9},
    # 9 pieces of 8 bytes; 18 scale bytes as 5 aligned words.
    "mxfp4": {"global_load_dwordx2": 9, "global_load_dwordx4": 1, "global_load_dword": 1},
    # 5 operands of 16 bytes; scales as above.
    "mxfp4 scaled": {"global_load_dwordx4": 6, "global_load_dword": 1},
}
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
    # Values: 8 blocks of 16 dims, 2 chunks of 32 keys. Scores: 18 steps of 32 dims for each 16-key subtile, or 5 of 128, twice.
    wanted = {BF16_MFMA: 16, SCALED_MFMA: 10} if spec.scaled_scores else {BF16_MFMA: spec.row_tiles * (18 + 16)}
    assert Counter(mfma) == wanted

    loop = loop_text(kernel.isa)
    counts = by_kind(instructions(loop))
    assert counts["mfma"] == len(mfma)
    assert counts["s_barrier"] == 4
    assert counts["ds_read_b64_tr_b16"] == 32
    # Keys for scores (from LDS unless scaled), the maxima, 2 chunks of probabilities a row tile; the branch that drops what is not
    # finite reads a thread's 18 pieces once more.
    keys_read = 0 if spec.scaled_scores else 18 * spec.row_tiles
    assert counts["ds_read_b128"] == keys_read + 1 + 2 * spec.row_tiles + (18 if spec.hides_keys else 0)
    loads = {n: c for n, c in counts.items() if n.startswith(("global_load", "buffer_load", "flat_load"))}
    pages = {} if spec.tile_in_page or spec.table_kind == "contiguous" else {"global_load_dword": 2 if spec.format == "bf16" else 1}
    data = TILE_LOADS["mxfp4 scaled" if spec.scaled_scores else spec.format]
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
@pytest.mark.parametrize("format", FORMATS)
def test_isa(format, heads, q_len):
    p = problem(format, heads, q_len)
    kernel = build(p)
    check_decode(kernel, DecodeSpec.for_problem(p, "balanced"))
    assert kernel.plan is not None and kernel.combine is not None
    assert kernel.launches == (kernel.plan, kernel, kernel.combine)
    check_resources(kernel.plan)
    check_resources(kernel.combine)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1, "table_kind": "csr"},
        {"page_size": 48, "table_kind": "csr", "ragged_q": True, "max_q_len": 3},
        {"page_size": 1, "table_kind": "contiguous", "num_kv_splits": 1},
        {"page_size": 128, "split_size": 1000},
        {"num_kv_splits": 3, "logit_cap": 30.0, "causal": False},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_isa_of_variants(format, changes):
    p = problem(format, 16, 1, **changes)
    kernel = build(p)
    mode = {None: "balanced", 1: "one"}.get(p.num_kv_splits, "count") if p.split_size is None else "size"
    # A few scalars may wait in lanes of a vector register (that is what an SGPR spill without scratch is).
    check_decode(kernel, DecodeSpec.for_problem(p, mode), sgpr_spills=4)


def test_manifest_and_packing(tmp_path):
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
    path = write_manifest([kernel, other], tmp_path)
    manifest = json.loads(path.read_text())
    first, second = manifest["problems"]
    assert first["problem"] == kernel.problem and first != second
    assert [e["name"] for e in first["launches"]] == [k.name for k in kernel.launches]
    for entry in first["launches"] + second["launches"]:
        assert (tmp_path / entry["file"]).read_bytes()[:4] == b"\x7fELF"
        assert entry["grid"] and entry["kernarg_bytes"] and entry["wavefront_size"] == 64
        assert {*entry["constants"]} < {a["name"] for a in entry["arguments"]}
    assert len(list(tmp_path.glob("*.hsaco"))) == 3


def test_refusals():
    with pytest.raises(InvalidArgument, match="target"):
        build(problem("bf16", 16, 1), "gfx1100")
    with pytest.raises(BackendUnavailable, match="fp8_tile128"):
        build(problem("fp8_tile128", 16, 1))
