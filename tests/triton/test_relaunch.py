"""What the launcher hands to Triton in a first call and to the kernels in later ones, without a GPU or a compiler."""

import pytest
import torch
from pretend_launcher import Kernel, addresses

pytest.importorskip("triton", reason="needs Triton (pip install triton)")

import leanmla.decode
from leanmla import DecodePlan, LatentCache, PageTable, device, mla_decode
from leanmla.errors import InvalidArgument
from leanmla.kernels.triton import backend, combine, decode, plan
from leanmla.kernels.triton.build import TARGETS


@pytest.fixture
def log(monkeypatch):
    """Launches on CPU tensors, taken to be an H200's."""
    calls: list = []
    monkeypatch.setattr(backend, "EVEN_KEYS", 0)  # lengths are planned for
    monkeypatch.setattr(leanmla.decode, "_KNOWN", {})
    for module, name in ((plan, "plan_kernel"), (decode, "decode_kernel"), (combine, "combine_kernel")):
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), calls))
    with device.override(TARGETS["sm_90"]):
        yield calls


def call(fmt: str, batch: int, shift: int = 0):
    cache = LatentCache.allocate(2 * batch, 64, format=fmt, **({"scale": 0.5} if fmt == "fp8" else {}))
    if shift:
        room = torch.zeros(cache.data.numel() + shift, dtype=cache.data.dtype)[shift:]
        cache = LatentCache.from_tensors(room.view(cache.data.shape), cache.scale, format=fmt, page_size=64)
    pages = torch.arange(2 * batch, dtype=torch.int32).view(batch, 2)
    table = PageTable.from_block_table(pages, torch.full((batch,), 100, dtype=torch.int32), page_size=64)
    return torch.zeros(batch, 16, 576, dtype=torch.bfloat16), cache, table


@pytest.mark.parametrize("batch", (3, 40))
@pytest.mark.parametrize("fmt", ("bf16", "mxfp4"))
def test_a_repeated_call_passes_what_the_first_one_passed(log, fmt, batch):
    p = DecodePlan(num_heads=16, format=fmt, page_size=64, max_batch=40, max_kv_len=128, device="cpu", backend="triton")
    kernels = ["plan_kernel"] * (batch == 40) + ["decode_kernel", "combine_kernel"]
    q, cache, table = call(fmt, batch)
    options = {"sm_scale": 0.1, "return_lse": True, "check_contents": False}
    for _ in range(2):
        p.run(q, cache, table, **options)
    first, again = log[: len(kernels)], log[len(kernels) :]
    assert [(name, how) for name, how, *_ in first] == [(name, "found") for name in kernels]
    assert [(name, how) for name, how, *_ in again] == [(name, "repeated") for name in kernels]
    for a, b in zip(first, again, strict=True):
        assert addresses(a[2]) == list(b[2]) and (*a[3], 1, 1)[:3] == b[3]
    # Other tensors of the same kind: their addresses arrive.
    others = call(fmt, batch)
    log.clear()
    out = p.run(*others, **options)[0]
    position = decode.decode_kernel.arg_names.index
    name, how, args, _ = log[-2]
    assert (name, how, len(args)) == ("decode_kernel", "repeated", len(decode.decode_kernel.arg_names))
    assert args[position("q_ptr")] == others[0].data_ptr() and args[position("out_ptr")] == out.data_ptr()
    assert args[position("data_ptr")] == others[1].data.data_ptr()
    assert args[position("page_ids_ptr")] == others[2].page_ids.data_ptr()
    assert args[position("seqlens_ptr")] == others[2].cache_seqlens.data_ptr()
    if fmt == "mxfp4":
        assert args[position("scale_ptr")] == others[1].scale.data_ptr()


def test_calls_that_need_another_kernel_go_through_tritons_launcher(log):
    p = DecodePlan(num_heads=16, format="bf16", page_size=64, max_batch=3, max_kv_len=128, device="cpu", backend="triton")
    options = {"sm_scale": 0.1, "check_contents": False}
    base = call("bf16", 3)
    p.run(*base, **options)
    for changed in (
        lambda: p.run(*call("bf16", 3, shift=1), **options),  # rows not aligned to 16 bytes
        lambda: p.run(*call("bf16", 2), **options),
        lambda: p.run(*base, **options, causal=False),
        lambda: p.run(*base, **options, logit_cap=2.0),
        lambda: p.run(*base, **options, return_lse=True),
        lambda: p.run(*base, **options, qo_indptr=torch.tensor([0, 1, 2, 3], dtype=torch.int32)),
        lambda: p.run(torch.zeros(3, 16, 600, dtype=torch.bfloat16)[..., :576], *base[1:], **options),
        lambda: p.run(torch.zeros(3 * 16 * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 16, 576), *base[1:], **options),
    ):
        log.clear()
        changed()
        assert [how for _, how, *_ in log] == ["found"] * len(log)
    log.clear()
    p.run(*base, **options)
    assert {how for _, how, *_ in log} == {"repeated"}


def test_a_cache_at_another_address_modulo_16_is_checked_again(log):
    p = DecodePlan(num_heads=16, format="fp8", page_size=64, max_batch=3, max_kv_len=128, device="cpu", backend="triton")
    options = {"sm_scale": 0.1, "check_contents": False}
    p.run(*call("fp8", 3, shift=4), **options)
    with pytest.raises(InvalidArgument, match="4-byte words"):
        p.run(*call("fp8", 3, shift=1), **options)


def test_calls_without_a_plan_are_remembered(log):
    base = call("bf16", 3)
    for _ in range(2):
        mla_decode(*base, sm_scale=0.125, check_contents=False, backend="triton")
    assert [how for _, how, *_ in log] == ["found", "found", "repeated", "repeated"]
    out, part = (decode.decode_kernel.arg_names.index(n) for n in ("out_ptr", "partial_out_ptr"))
    assert all(isinstance(log[2][2][n], int) for n in (out, part))
    log.clear()
    mla_decode(*base, sm_scale=0.25, check_contents=False, backend="triton")
    assert log[0][2][decode.decode_kernel.arg_names.index("sm_scale")] == 0.25


def test_counts_that_may_be_one_do_not_choose_another_kernel():
    """A batch of 1 as a constant would undo the decode kernel's loop of one trip, and its operands would spill."""
    for kernel in (decode.decode_kernel, plan.plan_kernel):
        free = {p.name for p in kernel.params if p.do_not_specialize}
        assert free >= {"batch", "num_workers", "split_size"}, kernel.arg_names
