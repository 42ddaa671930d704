"""Bad calls: refused by name, with what was expected, what came and what to do, and without touching ``out``."""

import math

import pytest
import torch
from _helpers import i32

from leanmla import (
    CapacityExceeded,
    InvalidArgument,
    InvalidDtype,
    InvalidTable,
    LatentCache,
    MissingScale,
    PageTable,
    mla_decode,
)


class Call:
    """A right call; tests spoil one thing at a time."""

    def __init__(self):
        self.q = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
        self.cache = LatentCache.allocate(4, 64, format="bf16")
        self.table = PageTable.from_block_table(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), i32(70, 3), page_size=64)
        self.out = torch.full((2, 16, 512), 7.0, dtype=torch.bfloat16)
        self.options = {"sm_scale": 0.04}

    def __call__(self, **changes):
        changes = {**self.options, **changes}
        q, cache, table = changes.pop("q", self.q), changes.pop("cache", self.cache), changes.pop("table", self.table)
        return mla_decode(q, cache, table, out=changes.pop("out", self.out), **changes)


@pytest.fixture
def call():
    c = Call()
    c()
    c.out.fill_(7.0)
    return c


BF16 = torch.bfloat16
CASES = [
    ({"q": torch.zeros(2, 576, dtype=BF16)}, InvalidArgument, r"q: expected 3 dims \[total_q, num_heads, 576\], got shape \[2, 576\]"),
    ({"q": torch.zeros(2, 16, 512, dtype=BF16)}, InvalidArgument, "q: last dim must be .* = 576, got 512. If rope is apart, join"),
    ({"q": torch.zeros(2, 16, 576)}, InvalidDtype, "q: expected bfloat16 or float16, got float32"),
    ({"q": torch.zeros(2, 0, 576, dtype=BF16)}, InvalidArgument, "q: expected at least one head"),
    ({"q": torch.zeros(3, 16, 576, dtype=BF16)}, InvalidArgument, "q: 3 rows do not divide over 2 sequences. Pass qo_indptr"),
    ({"q": torch.zeros(2, 16, 1152, dtype=BF16)[..., ::2]}, InvalidArgument, "q: the last dim must be contiguous"),
    ({"q": torch.zeros(2, 16, 576, dtype=BF16, device="meta")}, InvalidArgument, "q, cache and table must be on one device, got q on meta"),
    ({"q": "no"}, InvalidArgument, "q: expected a tensor"),
    ({"cache": torch.zeros(4, 64, 576)}, InvalidArgument, "cache: expected a LatentCache.*from_tensors"),
    ({"table": i32(0, 1)}, InvalidArgument, "table: expected a PageTable"),
    ({"cache": LatentCache.allocate(8, 32, format="bf16")}, InvalidArgument, "table: page_size 64 does not match the cache's page_size 32"),
    ({"cache": LatentCache.allocate(4, 64, format="fp8")}, MissingScale, "no scale yet"),
    ({"cache": LatentCache.allocate(3, 64, format="bf16")}, None, None),  # the pages that hold keys are 0, 1 and 2
    ({"cache": LatentCache.allocate(2, 64, format="bf16")}, InvalidTable, "page ids: expected 0..1 where a page holds keys, got 2"),
    ({"sm_scale": math.nan}, InvalidArgument, "sm_scale: expected a finite number, got nan"),
    ({"sm_scale": math.inf}, InvalidArgument, "sm_scale"),
    ({"sm_scale": None}, InvalidArgument, "sm_scale: expected a finite number, got None. There is no default"),
    ({"sm_scale": torch.tensor(0.1)}, InvalidArgument, "sm_scale: expected a finite number"),
    ({"logit_cap": -1.0}, InvalidArgument, "logit_cap: expected a finite number >= 0"),
    ({"num_kv_splits": -1}, InvalidArgument, "num_kv_splits: expected None or a positive integer, got -1"),
    ({"num_kv_splits": 0}, InvalidArgument, "num_kv_splits"),
    ({"num_kv_splits": 2.0}, InvalidArgument, "num_kv_splits"),
    ({"split_size": 0}, InvalidArgument, "split_size"),
    ({"split_size": 64, "num_kv_splits": 2}, InvalidArgument, "exclude each other"),
    ({"out": torch.zeros(2, 16, 576, dtype=BF16)}, InvalidArgument, r"out: expected .* = \[2, 16, 512\], got \[2, 16, 576\]"),
    ({"out": torch.zeros(2, 16, 512)}, InvalidDtype, "out: expected q's dtype torch.bfloat16, got torch.float32"),
    ({"out": torch.zeros(2, 16, 1024, dtype=BF16)[..., ::2]}, InvalidArgument, "out: the last dim must be contiguous"),
    ({"out": torch.zeros(2, 16, 512, dtype=BF16, device="meta")}, InvalidArgument, "out: expected on q's device cpu, got meta"),
    ({"qo_indptr": torch.tensor([0, 1, 2])}, InvalidDtype, "qo_indptr: expected an int32 tensor"),
    ({"qo_indptr": i32(0, 2)}, InvalidArgument, r"qo_indptr: expected \[batch\+1\] = \[3\] for a table of 2 sequences, got \[2\]"),
    ({"qo_indptr": i32(0, 1, 1)}, InvalidTable, r"qo_indptr\[-1\]: expected 2, the rows of q, got 1"),
    ({"qo_indptr": i32(1, 1, 2)}, InvalidTable, r"qo_indptr\[0\]: expected 0, got 1"),
    ({"qo_indptr": i32(0, 3, 2)}, InvalidTable, "qo_indptr: expected rising offsets, got 3 then 2"),
    ({"qo_indptr": i32(0, 2, 2), "max_q_len": 1}, CapacityExceeded, "max_q_len: sequence 0 has 2 query rows, expected at most 1"),
    ({"qo_indptr": torch.zeros(6, dtype=torch.int32)[::2]}, InvalidArgument, "qo_indptr: must be contiguous"),
    ({"max_q_len": 0}, InvalidArgument, "max_q_len: expected at least 1"),
    ({"backend": "cuda"}, InvalidArgument, "backend: expected 'auto' or one of hopper_cuda, hopper, flydsl, triton, cpu, reference, got 'cuda'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "text"), CASES, ids=lambda v: ",".join(v) if isinstance(v, dict) else None)
def test_refusals(call, changes, kind, text):
    if kind is None:
        call(**changes)
        return
    with pytest.raises(kind, match=text):
        call(**changes)
    assert (call.out == 7.0).all(), "a refused call must not write"


def test_sm_scale_is_required(call):
    with pytest.raises(TypeError, match="sm_scale"):
        mla_decode(call.q, call.cache, call.table)


def test_contents_are_checked_on_the_cpu_unless_told_otherwise(call):
    call.table.cache_seqlens[0] = 129
    with pytest.raises(InvalidTable, match=r"cache_seqlens\[0\]: expected 0..128.*got 129"):
        call()
    call.table.cache_seqlens[0] = 70
    call.table.page_ids[0, 1] = -5
    with pytest.raises(InvalidTable, match="page ids"):
        call()


def test_every_refusal_is_a_leanmla_error():
    import leanmla

    for name in ("InvalidArgument", "InvalidDtype", "InvalidTable", "MissingScale", "CapacityExceeded", "PlanMismatch"):
        assert issubclass(getattr(leanmla, name), leanmla.LeanMLAError) and issubclass(getattr(leanmla, name), ValueError)
    assert issubclass(leanmla.InvalidDtype, TypeError)
