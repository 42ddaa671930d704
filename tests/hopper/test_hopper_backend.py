"""What the Hopper backend takes and refuses; needs no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from leanmla import backends
from leanmla.device import DeviceInfo
from leanmla.kernels.hopper.launch import choose_launch
from leanmla.problem import DecodeProblem

H200 = DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 150 << 30)
PROBLEM = DecodeProblem(
    format="fp8", num_heads=16, batch=256, total_q=256, max_q_len=1, ragged_q=False, page_size=1, table_kind="csr",
    max_kv_len=1024, total_kv=256 * 1024,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_splits": 8}, {"split_size": 128}, {"num_kv_splits": 8, "format": "fp8_tile128"}]
)
def test_fixed_splits_of_gathered_rows_stay_here(changes):
    """More blocks than run at once are right on a card: tests/gpu/test_hopper_decode.py."""
    assert backends.choose(PROBLEM.replace(**changes), H200).name == "hopper"


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, False),
        ({"batch": 4, "max_kv_len": 8192, "total_kv": 4 * 8192}, False),
        ({"batch": 1, "max_kv_len": 8192, "total_kv": 8192}, True),  # all workers on one sequence
        ({"batch": 32, "max_kv_len": 131072, "total_kv": 32 * 131072}, True),  # long ones may be few
        ({"batch": 1, "max_kv_len": 8192, "total_kv": 8192, "num_heads": 64}, False),  # 16 rows only
        ({"split_size": 64}, True),  # as many as a sequence has tiles
        ({"num_kv_splits": 8}, False),
        ({"num_kv_splits": 65}, True),
    ],
)
def test_code_for_very_many_splits_is_there_where_they_are_to_be_expected(changes, expected):
    assert choose_launch(PROBLEM.replace(**changes), H200).many_splits is expected


@pytest.mark.parametrize("fmt, heads, warps", [("bf16", 64, "8 + 4 + 4"), ("fp8", 64, "8 + 4 + 4"), ("fp8", 16, "4 + 4")])
def test_explain_names_the_roles(fmt, heads, warps):
    problem = PROBLEM.replace(format=fmt, num_heads=heads)
    assert dict(backends.get("hopper").launch_config(problem, H200).extra)["warps"] == warps
