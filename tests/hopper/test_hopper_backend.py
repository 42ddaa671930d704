"""What the Hopper backend takes and refuses; needs no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from leanmla import backends
from leanmla.device import DeviceInfo
from leanmla.problem import DecodeProblem

H200 = DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 150 << 30)
PROBLEM = DecodeProblem(
    format="fp8", num_heads=16, batch=256, total_q=256, max_q_len=1, ragged_q=False, page_size=1, table_kind="csr",
    max_kv_len=1024, total_kv=256 * 1024,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({"num_kv_splits": 8}, True),
        ({"split_size": 128}, True),
        ({"num_kv_splits": 8, "format": "mxfp4"}, True),
        ({}, False),  # planned: all blocks fit
        ({"num_kv_splits": 2}, False),
        ({"num_kv_splits": 8, "batch": 32, "total_q": 32}, False),
        ({"num_kv_splits": 8, "page_size": 64}, False),
        ({"num_kv_splits": 8, "format": "bf16"}, False),
    ],
)
def test_fixed_splits_that_gave_nan_go_to_another_backend(changes, refused):
    problem = PROBLEM.replace(**changes)
    reason = backends.why_not("hopper", problem, H200)
    assert (reason is not None) == refused
    chosen = backends.choose(problem, H200).name
    assert chosen == ("triton" if refused else "hopper")
    if refused:
        assert "num_kv_splits" in reason and "triton" in reason
