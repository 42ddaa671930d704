"""The launch path without a card: what would be handed to HIP, field by field."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
from types import SimpleNamespace

import pytest
import torch
from pretend import pretend_build
from torch.utils._python_dispatch import TorchDispatchMode

from leanmla.checks import check_call
from leanmla.errors import CapacityExceeded, InvalidArgument
from leanmla.kernels.flydsl import backend as flydsl_backend
from leanmla.kernels.flydsl import hip
from leanmla.kernels.flydsl.build import lay_out
from leanmla.kernels.flydsl.spec import COMBINE_ARGS, DECODE_ARGS, PLAN_ARGS
from leanmla.kernels.flydsl.splits import work_shape
from leanmla.testing.cases import DecodeCase
from leanmla.testing.inputs import make_inputs

CODES = {"i64": "q", "i32": "i", "f32": "f"}


def checked_call(case: DecodeCase):
    inputs = make_inputs(case)
    lse = torch.empty(inputs.q.shape[:2])
    args = check_call(
        inputs.q, inputs.cache, inputs.table, sm_scale=0.5, qo_indptr=inputs.qo_indptr, causal=True, logit_cap=0.0, out=inputs.out,
        return_lse=True, num_kv_splits=None, split_size=None, max_q_len=None, check_contents=None,
    )  # fmt: skip
    return inputs, dataclasses.replace(args, lse=lse)


@pytest.fixture
def launches(monkeypatch):
    """Runs the backend on CPU tensors and records what it would launch: (name, grid, stream, values)."""
    recorded = []

    def launch(function, grid, block, dynamic_lds, stream, segment):
        table = {"plan": PLAN_ARGS, "decode": DECODE_ARGS, "combine": COMBINE_ARGS}[function]
        values = {a.name: struct.unpack_from("<" + CODES[a.kind], segment, a.offset)[0] for a in lay_out(table)[0]}
        recorded.append((function, grid, stream, values))

    monkeypatch.setattr(flydsl_backend, "_built", pretend_build)
    monkeypatch.setattr(hip, "load", lambda hsaco, name, device: name)
    monkeypatch.setattr(hip, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return recorded


@pytest.mark.parametrize("table", ["block_table", "csr", "contiguous"])
@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "fp8_tile128"])
def test_every_address_and_stride_arrives(launches, format, table):
    inputs, args = checked_call(DecodeCase((130, 0, 33), format=format, table=table, strided=table != "contiguous"))
    backend = flydsl_backend.FlyDslBackend()
    workspace = backend.make_workspace(args.problem, torch.device("cpu"))
    backend.run(args, workspace)
    assert [name for name, *_ in launches] == ["plan", "decode", "combine"]
    assert {stream for _, _, stream, _ in launches} == {77}
    values = launches[1][3]
    cache, pages = args.cache, args.table
    assert values["q"] == inputs.q.data_ptr() and values["out"] == inputs.out.data_ptr()
    assert values["lse"] == args.lse.data_ptr() and values["sm_scale"] == 0.5
    assert values["kv"] == cache.data.data_ptr()
    assert values["kv_page_stride"] == cache.data.stride(0) * cache.data.element_size()
    assert values["kv_token_stride"] == cache.data.stride(1) * cache.data.element_size()
    assert values["kv_scale"] == (0 if cache.scale is None else cache.scale.data_ptr())
    if format == "mxfp4":
        assert (values["scale_page_stride"], values["scale_token_stride"]) == cache.scale.stride()[:2]
    assert values["page_ids"] == (0 if pages.page_ids is None else pages.page_ids.data_ptr())
    assert values["kv_indptr"] == (0 if pages.kv_indptr is None else pages.kv_indptr.data_ptr())
    assert values["q_row_stride"] == 2 * inputs.q.stride(0) and values["out_head_stride"] == 2 * inputs.out.stride(1)
    assert values["table_stride"] == (pages.page_ids.stride(0) if table == "block_table" else 0)
    scratch = workspace.scratch
    assert not scratch.zeros.any() and values["zeros"] == scratch.zeros.data_ptr() and values["zeros"] % 16 == 0
    for name in ("items", "first_item", "split_counts", "num_items"):
        assert launches[0][3][name] == values[name] == getattr(scratch, name).data_ptr()
    assert launches[2][3]["partial_out"] == values["partial_out"] == scratch.partial_out.data_ptr()
    shape = work_shape(args.problem)
    assert scratch.partial_lse.numel() >= shape.partial_rows and scratch.items.numel() >= shape.max_items


def test_a_call_does_nothing_but_launch(launches):
    """No tensor operation, so nothing is allocated, copied or waited for: a graph may capture it."""

    class Refused(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} ran")

    _, args = checked_call(DecodeCase((130, 0), format="mxfp4"))
    backend = flydsl_backend.FlyDslBackend()
    workspace = backend.make_workspace(args.problem, torch.device("cpu"))
    with Refused():
        backend.run(args, workspace)
        with pytest.raises(AssertionError, match="empty"):
            torch.empty(1)
    assert len(launches) == 3


def test_smaller_calls_fit_a_plan_and_larger_do_not(launches):
    _, args = checked_call(DecodeCase((130, 64), q_lens=2))
    backend = flydsl_backend.FlyDslBackend()
    capacity = args.problem.replace(batch=8, total_q=8 * 16, max_q_len=16, ragged_q=True, max_kv_len=4096, total_kv=8 * 4096)
    backend.run(args, backend.make_workspace(capacity, torch.device("cpu")))
    small = backend.make_workspace(args.problem.replace(batch=1, total_q=2, total_kv=65, max_kv_len=65), torch.device("cpu"))
    with pytest.raises(CapacityExceeded, match="larger capacity"):
        backend.run(args, small)


def test_odd_scale_rows_are_refused(launches):
    _, args = checked_call(DecodeCase((10,), format="mxfp4"))
    odd = torch.zeros(args.cache.num_pages, args.cache.page_size, 19, dtype=torch.uint8)[:, :, :18]
    args.cache.scale = odd
    backend = flydsl_backend.FlyDslBackend()
    with pytest.raises(InvalidArgument, match="even"):
        backend.run(args, backend.make_workspace(args.problem, torch.device("cpu")))


def test_hip_receives_the_segment(monkeypatch):
    """hipModuleLaunchKernel's ``extra`` list: buffer pointer, buffer size, end; the bytes arrive unchanged."""
    seen = {}

    def launch_kernel(function, *rest):
        sizes, stream, parameters, extra = rest[:7], rest[7], rest[8], rest[9]
        assert parameters is None and (extra[0], extra[2], extra[4]) == (1, 2, 3)
        length = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[0]
        seen.update(sizes=[s.value for s in sizes], stream=stream.value, segment=ctypes.string_at(extra[1], length))
        return 0

    monkeypatch.setattr(hip, "_hip", lambda: SimpleNamespace(hipModuleLaunchKernel=launch_kernel))
    segment = bytes(range(40))
    hip.launch(ctypes.c_void_p(5), (7, 1, 1), (256, 1, 1), 0, 99, segment)
    assert seen == {"sizes": [7, 1, 1, 256, 1, 1, 0], "stream": 99, "segment": segment}


def test_hip_errors_are_raised(monkeypatch):
    library = SimpleNamespace(hipModuleLaunchKernel=lambda *a: 98, hipGetErrorString=lambda code: b"invalid device function")
    monkeypatch.setattr(hip, "_hip", lambda: library)
    with pytest.raises(RuntimeError, match=r"invalid device function \(HIP error 98\)"):
        hip.launch(ctypes.c_void_p(5), (1, 1, 1), (64, 1, 1), 0, 0, b"")
