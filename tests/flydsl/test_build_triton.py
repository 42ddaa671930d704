"""The Triton kernels build for gfx950 from Python, with what a launcher needs to run them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("triton", reason="needs triton (pip install triton) to build for gfx950")

from gfx950_isa import instructions

from leanmla.kernels.flydsl.build_triton import build_triton
from leanmla.kernels.flydsl.manifest import buffers, write_manifest
from leanmla.kernels.flydsl.spec import LDS_LIMIT
from leanmla.problem import DecodeProblem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "q_dtype"), [("bf16", "bf16"), ("fp8", "bf16"), ("mxfp4", "bf16"), ("fp8_tile128", "bf16"), ("fp8", "fp16"), ("mxfp4", "fp16")]
)
def test_builds(format, q_dtype, tmp_path):
    """fp16 queries too: the FlyDSL kernels do not take them."""
    problem = DecodeProblem(
        format=format, num_heads=16, batch=4, total_q=4, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
        max_kv_len=8192, total_kv=4 * 8192, return_lse=True, q_dtype=q_dtype,
    )  # fmt: skip
    kernel = build_triton(problem)
    for k in kernel.launches:
        assert k.language == "triton" and k.hsaco[:4] == b"\x7fELF"
        assert k.resources["vgpr_spills"] == k.resources["scratch_bytes"] == 0
        assert k.lds_bytes == k.dynamic_lds_bytes <= LDS_LIMIT
        # The packed arguments end where the kernel descriptor says they do.
        last = k.arguments[-1]
        assert last.offset + 8 == k.kernarg_bytes
    counts = Counter(instructions(kernel.isa))
    assert sum(n for name, n in counts.items() if name.startswith("v_mfma")) > 0
    assert sum(n for name, n in counts.items() if re.match(r"(global|buffer)_load_dwordx[24]", name)) > 0
    assert "s_endpgm" in counts
    # The hints arrive: q in pieces of 16 bytes, and buffer instructions for what is known to be below 2 GiB.
    assert not [name for name in counts if re.match(r"(global|buffer)_load_[su]short", name)]
    assert counts["buffer_load_dwordx4"] > 0 and counts["buffer_store_dwordx4"] > 0
    assert write_manifest([kernel], tmp_path / "out").exists()


def test_a_small_cache_saves_registers():
    problem = DecodeProblem(
        format="bf16", num_heads=16, batch=4, total_q=4, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
        max_kv_len=8192, total_kv=4 * 8192,
    )  # fmt: skip
    any_size, small = build_triton(problem), build_triton(problem, small_cache=True)
    assert small.resources["vgprs"] < any_size.resources["vgprs"]
    assert {b.below for b in buffers(small) if b.name == "kv"} == {1 << 31} and {b.below for b in buffers(any_size)} == {None}
    assert "global_load_dwordx4" not in Counter(instructions(small.isa))
