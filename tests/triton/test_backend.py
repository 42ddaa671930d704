"""The Triton backend's decisions that need no GPU: who can run, block sizes, room for every smaller call."""

import itertools

import pytest
import torch

from leanmla import device
from leanmla.kernels.launch_configs import decode_config
from leanmla.kernels.triton.backend import BACKEND, max_items
from leanmla.kernels.triton.build import TARGETS
from leanmla.problem import DecodeProblem

H200 = TARGETS["sm_90"]
FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")


def problem(**changes) -> DecodeProblem:
    base = DecodeProblem(
        format="bf16", num_heads=16, batch=4, total_q=4, max_q_len=1, ragged_q=True, page_size=64, table_kind="block_table",
        max_kv_len=8192, total_kv=4 * 8192, return_lse=True,
    )  # fmt: skip
    return base.replace(**changes)


def test_refusals_say_why():
    pytest.importorskip("triton", reason="needs Triton (pip install triton)")
    assert BACKEND.why_not(problem(), H200) is None
    assert "needs a GPU" in BACKEND.why_not(problem(), device.describe("cpu"))
    old = device.DeviceInfo("cuda", "V100", "sm_70", 80, 98304, 0)
    assert BACKEND.why_not(problem(), old) == "needs sm_80 or newer, this GPU is sm_70"
    assert "gfx942 or gfx950" in BACKEND.why_not(problem(), device.DeviceInfo("hip", "MI250", "gfx90a", 110, 65536, 0))
    assert "keys" in BACKEND.why_not(problem(max_kv_len=1 << 27), H200)
    assert "splits" in BACKEND.why_not(problem(num_kv_splits=1 << 15), H200)


def test_launch_config_is_printable():
    for fmt in FORMATS:
        for heads, q_len in itertools.product((1, 16, 20, 128), (1, 4)):
            config = BACKEND.launch_config(problem(format=fmt, num_heads=heads, max_q_len=q_len), H200)
            assert config.kernel.endswith("decode.py") and config.num_workers >= 1 and config.reason


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "gfx950"))
@pytest.mark.parametrize("heads", (1, 16, 20, 128))
def test_a_plan_has_room_for_every_smaller_call(fmt, target, heads):
    """Fewer query rows choose smaller row tiles and more workers; their partial results must fit all the same."""
    info = TARGETS[target]
    for batch, pages, q_len in itertools.product((1, 3, 300), (1, 128), (1, 2, 7, 16)):
        total_kv = batch * pages * 64
        capacity = problem(format=fmt, num_heads=heads, batch=batch, max_q_len=q_len, max_kv_len=pages * 64, total_kv=total_kv)
        with device.override(info):
            workspace = BACKEND.make_workspace(capacity, torch.device("meta"))
        for b, n in itertools.product({1, batch}, range(1, q_len + 1)):
            call = capacity.replace(batch=b, max_q_len=n, total_kv=b * pages * 64)
            config = decode_config(call, info)
            items = max_items(call, config.block_kv, config.num_workers(info))
            assert items * config.row_tiles * config.rows <= workspace.partial_lse.numel()
            assert 2 * items <= workspace.items.numel()
            assert workspace.partial_out.numel() == 512 * workspace.partial_lse.numel()
