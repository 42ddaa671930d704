"""The Triton backend's decisions that need no GPU: who can run, block sizes, room for every smaller call."""

import itertools

import pytest
import torch

from leanmla import device
from leanmla.kernels.launch_configs import decode_config
from leanmla.kernels.triton.backend import BACKEND, EVEN_KEYS, decode_constants, even_splits, max_items, with_splits
from leanmla.kernels.triton.build import TARGETS
from leanmla.problem import DecodeProblem
from leanmla.split_plan import plan_splits

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
            call = with_splits(call, config, info)
            items = max_items(call, config.block_kv, config.num_workers(info))
            assert call.num_kv_splits == 1 or items * config.row_tiles * config.rows <= workspace.partial_lse.numel()
            assert 2 * items <= workspace.items.numel()
            assert workspace.partial_out.numel() == 512 * workspace.partial_lse.numel()


def chosen(batch: int, max_kv_len: int, total_kv: int | None = None, **changes) -> tuple[int | None, str]:
    """(splits of every sequence that shapes alone lead to, how the lengths are planned for)"""
    total_kv = batch * max_kv_len if total_kv is None else total_kv
    call = problem(batch=batch, total_q=batch, ragged_q=False, max_kv_len=max_kv_len, total_kv=total_kv, **changes)
    config = decode_config(call, H200)
    launched = with_splits(call, config, H200)
    return even_splits(call, config, H200), decode_constants(launched, config, H200)["PLAN"]


def test_light_batches_are_not_planned():
    """One block a multiprocessor below 512 keys on each, otherwise as many as fit; the longest item decides."""
    assert chosen(4, 1024) == (32, "fixed") and chosen(4, 8192) == (32, "fixed")
    assert chosen(32, 1024) == (4, "fixed") and chosen(64, 1024) == (2, "fixed")
    assert chosen(32, 8192) == (8, "fixed") and chosen(256, 1024) == (1, "fixed")
    assert chosen(67, 1024) == (3, "fixed")  # 67 of 132 multiprocessors would be busy with one
    assert chosen(64, 8192) == (None, "table") and chosen(256, 8192) == (None, "table")
    assert chosen(4, 8192, num_kv_splits=3) == (None, "fixed")
    assert chosen(4, 8192, split_size=64)[0] is chosen(4, 8192, split_size=4096)[0] is None
    assert chosen(3, 0) == (1, "fixed")


def test_lengths_that_may_be_skewed_are_balanced():
    """Wherever splits are even, no lengths that the tables allow make an item longer than EVEN_KEYS."""
    assert chosen(32, 131072, 131072 + 31 * 1024) == (None, "table")
    assert chosen(32, 32 * 1024, 32 * 1024, table_kind="csr") == (None, "table")  # one sequence may have all keys
    assert chosen(20, 4096, 4096, table_kind="csr") == (4, "fixed")
    found = 0
    for fmt, batch, longest in itertools.product(FORMATS, (1, 3, 32, 33, 100, 150, 264, 600), (1, 100, 1024, 8192, 131072)):
        for total in (longest, longest + (batch - 1) * 64, batch * longest):
            splits, _ = chosen(batch, longest, total, format=fmt)
            if splits is None:
                continue
            found += 1
            lens = [longest] + [max(0, min(longest, (total - longest) // max(1, batch - 1)))] * (batch - 1)
            granularity = decode_config(problem(format=fmt), H200).block_kv
            plan = plan_splits(lens, num_workers=1, granularity=granularity, num_kv_splits=splits)
            assert max(i.num_keys for i in plan.items) <= EVEN_KEYS
    assert found > 100


def test_explained_items_are_those_that_run():
    call = problem(batch=64, total_q=64, max_kv_len=1024, total_kv=65536)
    assert set(BACKEND.host_plan(call, H200, [1024] * 64).splits_per_seq) == {2}
    long = problem(batch=32, total_q=32, max_kv_len=131072, total_kv=32 * 131072)
    splits = BACKEND.host_plan(long, H200, [131072] + [1024] * 31).splits_per_seq
    assert splits[0] > 100 and set(splits[1:]) <= {1, 2}
    assert dict(BACKEND.launch_config(long, H200).extra)["planning"] == "table"
