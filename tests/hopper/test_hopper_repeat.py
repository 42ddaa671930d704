"""What repeated calls of the Hopper backends pass to their kernels, without a GPU: the first call's arguments, with the new addresses."""

from __future__ import annotations

import importlib
import sys
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "triton"))

from pretend_launcher import Kernel, addresses

import leanmla.decode
from leanmla import DecodePlan, LatentCache, PageTable, device, mla_decode
from leanmla.device import DeviceInfo
from leanmla.errors import InvalidArgument
from leanmla.kernels.hopper_cuda import backend as cuda_backend
from leanmla.kernels.hopper_cuda import launch_configs
from leanmla.kernels.hopper_cuda.compiler import FORMATS

H200 = DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 150 << 30)
GLUON = ("bf16", "fp8", "mxfp4", "fp8_tile128")
OPTIONS = {"sm_scale": 0.1, "check_contents": False}


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    """CPU tensors, taken to be an H200's."""
    monkeypatch.setattr(leanmla.decode, "_KNOWN", {})
    with device.override(H200, assume_installed=("cuda",)):
        yield


@pytest.fixture
def log(monkeypatch):
    """Launches of the Gluon kernels."""
    calls: list = []
    for fmt in GLUON:
        module = importlib.import_module(f"leanmla.kernels.hopper.decode_{fmt}_sm90")
        monkeypatch.setattr(module, f"decode_{fmt}", Kernel(getattr(module, f"decode_{fmt}"), calls))
    return calls


@pytest.fixture
def filled(monkeypatch):
    """Launches of the CUDA kernel, as (variant, grid, {argument: value})."""
    calls: list = []

    def launch(device, variant, grid, arguments):
        values = {name: getattr(arguments, name) for name, _ in arguments._fields_}
        calls.append((variant, grid, {k: (v.magic, v.shift) if hasattr(v, "magic") else v for k, v in values.items()}))

    monkeypatch.setattr(cuda_backend, "_launch", launch)
    return calls


def call(fmt: str, page_size: int = 64, kind: str = "block_table", shift: int = 0):
    """(q, cache, table) of three sequences; q begins ``shift`` elements into its memory."""
    cache = LatentCache.allocate(384 // page_size, page_size, format=fmt, **({"scale": 0.5} if fmt == "fp8" else {}))
    pages, lens = torch.arange(384 // page_size, dtype=torch.int32), torch.full((3,), 100, dtype=torch.int32)
    if kind == "contiguous":
        table = PageTable.contiguous(torch.tensor([0, 128, 256, 384], dtype=torch.int32))
    elif kind == "csr":
        table = PageTable.from_csr(
            torch.tensor([0, 1, 2, 3], dtype=torch.int32) * (128 // page_size),
            pages,
            torch.ones_like(lens),
            page_size=page_size,
        )
    else:
        table = PageTable.from_block_table(pages.view(3, -1), lens, page_size=page_size)
    return torch.zeros(3 * 16 * 576 + shift, dtype=torch.bfloat16)[shift:].view(3, 16, 576), cache, table


def plan_for(fmt: str, page_size: int = 64, name: str | None = None) -> DecodePlan:
    name = name or ("hopper" if fmt in GLUON else "hopper_cuda")
    return DecodePlan(num_heads=16, format=fmt, page_size=page_size, max_batch=3, max_kv_len=128, device="cpu", backend=name)


LAYOUTS = (("block_table", 64), ("csr", 1), ("csr", 16), ("contiguous", 64))


@pytest.mark.parametrize("kind, page_size", LAYOUTS)
@pytest.mark.parametrize("fmt", GLUON)
def test_a_repeated_call_passes_what_a_first_one_would(log, fmt, kind, page_size):
    plan, options = plan_for(fmt, page_size), {**OPTIONS, "return_lse": page_size == 64}
    plan.run(*call(fmt, page_size, kind), **options)
    others = call(fmt, page_size, kind)
    plan.run(*others, **options)
    plan._steps.clear()
    plan.run(*others, **options)
    first, again, afresh = log
    assert [how for _, how, *_ in log] == ["found", "repeated", "found"]
    assert addresses(again[2]) == addresses(afresh[2]) != addresses(first[2])
    assert again[3] == first[3] == afresh[3]
    names = importlib.import_module(f"leanmla.kernels.hopper.decode_{fmt}_sm90").__dict__[f"decode_{fmt}"].arg_names
    passed = dict(zip(names, addresses(again[2]), strict=True))
    assert passed["q_ptr"] == others[0].data_ptr() and passed["cache_ptr"] == others[1].data.data_ptr()
    assert isinstance(passed["desc"], int if page_size == 1 else dict)
    assert not any(isinstance(a, torch.Tensor) for a in again[2])


def test_other_tensors_of_the_table_and_out_arrive(log):
    plan = plan_for("fp8")
    q, cache, table = call("fp8")
    rows = torch.arange(4, dtype=torch.int32)
    passed = []
    for _ in range(2):
        out = torch.empty(3, 16, 512, dtype=torch.bfloat16)
        rows, (_, _, table) = rows.clone(), call("fp8")
        plan.run(q, cache, table, qo_indptr=rows, out=out, **OPTIONS)
        names = sys.modules["leanmla.kernels.hopper.decode_fp8_sm90"].decode_fp8.arg_names
        passed.append(dict(zip(names, addresses(log[-1][2]), strict=True)))
        assert passed[-1]["out_ptr"] == out.data_ptr() and passed[-1]["qo_ptr"] == rows.data_ptr()
        assert passed[-1]["lens_ptr"] == table.cache_seqlens.data_ptr()
        assert passed[-1]["ids_ptr"] == table.page_ids.data_ptr()
    assert [how for _, how, *_ in log] == ["found", "repeated"]
    assert passed[0]["kv_scale_ptr"] == passed[1]["kv_scale_ptr"] == cache.scale.data_ptr()
    # Scratch of its own: mla_decode makes a workspace a call.
    for _ in range(2):
        mla_decode(q, cache, table, backend="hopper", **OPTIONS)
    assert log[-1][1] == "repeated"


@pytest.mark.parametrize("fmt", (*GLUON, "mxfp4_row320"))
def test_nothing_keeps_a_cache_alive(log, filled, fmt):
    plan = plan_for(fmt)
    tensors = call(fmt)
    for _ in range(2):
        plan.run(*tensors, **OPTIONS)
        mla_decode(*tensors, backend=plan.backend.name, **OPTIONS)
    log.clear()
    filled.clear()
    gone = [weakref.ref(tensors[0]), weakref.ref(tensors[1].data)]
    del tensors
    assert [g() for g in gone] == [None, None]


def test_calls_that_need_another_launch_are_worked_out_anew(log):
    plan, base = plan_for("fp8"), call("fp8")
    plan.run(*base, **OPTIONS)
    for changed in (
        lambda: plan.run(*base, **OPTIONS, causal=False),
        lambda: plan.run(*base, **OPTIONS, logit_cap=2.0),
        lambda: plan.run(*base, **OPTIONS, return_lse=True),
        lambda: plan.run(*base, **{**OPTIONS, "sm_scale": 0.2}),
        lambda: plan.run(*call("fp8", shift=1), **OPTIONS),
        lambda: plan.run(torch.zeros(3, 16, 600, dtype=torch.bfloat16)[..., :576], *base[1:], **OPTIONS),
    ):
        log.clear()
        changed()
        assert [how for _, how, *_ in log] == ["found"]
    q, cache, table = base
    bytes_ = torch.zeros(cache.data.numel() + 4, dtype=cache.data.dtype)[4:].view(cache.data.shape)
    with pytest.raises(InvalidArgument, match="multiples of 16 bytes"):
        plan.run(q, LatentCache.from_tensors(bytes_, cache.scale, format="fp8", page_size=64), table, **OPTIONS)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind, page_size", LAYOUTS)
def test_the_cuda_kernel_gets_what_a_first_call_would(filled, kind, page_size, fmt):
    plan = plan_for(fmt, page_size, "hopper_cuda")
    plan.run(*call(fmt, page_size, kind), **OPTIONS)
    others = call(fmt, page_size, kind)
    plan.run(*others, **OPTIONS)
    plan._steps.clear()
    plan.run(*others, **OPTIONS)
    first, again, afresh = filled
    assert again == afresh != first
    assert again[2]["cache"] == others[1].data.data_ptr() and again[2]["q"] == others[0].data_ptr()
    assert again[2]["scales"] == (others[1].scale.data_ptr() if fmt == "mxfp4" else None)
    assert again[2]["whole_scales"] == (fmt == "mxfp4" and kind != "contiguous" and page_size % 16 == 0)


def test_queries_at_odd_addresses_are_not_read_in_pairs(filled):
    plan = plan_for("mxfp4_row320")
    for shift in (0, 2, 1, 2):
        plan.run(*call("mxfp4_row320", shift=shift), **OPTIONS)
    assert [values["pairs"] for _, _, values in filled] == [1, 1, 0, 1]


def test_a_plan_keeps_its_arrangement(filled):
    """And calls without one take the arrangement that is asked for, remembered or not."""
    tensors = call("mxfp4_row320")
    with launch_configs.using("three_groups"):
        plan = plan_for("mxfp4_row320")
        plan.run(*tensors, **OPTIONS)
    for name in ("three_groups", "two_groups", "three_groups"):
        with launch_configs.using(name):
            for _ in range(2):
                filled.clear()
                mla_decode(*tensors, backend="hopper_cuda", **OPTIONS)
                plan.run(*tensors, **OPTIONS)
                assert [variant.arrangement.name for variant, *_ in filled] == [name, "three_groups"]
