"""Repeated calls on a GPU, which go past checks and launchers: the bits of a first call, whatever moved in the meantime."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import leanmla.decode
from leanmla import DecodePlan, LatentCache, mla_decode
from leanmla.device import triton_missing
from leanmla.errors import BackendUnavailable, InvalidArgument, InvalidDtype, PlanMismatch
from leanmla.testing.cases import DecodeCase
from leanmla.testing.inputs import DecodeInputs, make_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: (backend, cache format)
KERNELS = (
    *(("hopper", fmt) for fmt in ("bf16", "fp8", "mxfp4", "fp8_tile128")),
    ("hopper_cuda", "mxfp4_row320"),
    ("hopper_cuda", "mxfp4"),
    ("triton", "bf16"),
    ("triton", "mxfp4"),
)
#: All tables, rows fetched through tensor maps and one by one, several splits, no split.
CASES = (
    DecodeCase((3000, 64, 1, 511)),
    DecodeCase((700, 0, 1500, 90), table="csr", page_size=1, num_heads=64),
    DecodeCase((130, 1200, 77), table="contiguous", q_lens=2, num_kv_splits=3),
    DecodeCase((400, 33, 900), q_lens=(3, 1, 2), page_size=16, table="csr", q_dtype="fp16", logit_cap=30.0),
    *(DecodeCase(tuple(1 + 37 * i for i in range(40)), num_kv_splits=n) for n in (None, 1)),
)
FIRST = CASES[0]


def turns(case: DecodeCase, fmt: str, backend: str, device: str = "cuda") -> tuple[DecodePlan, list[DecodeInputs]]:
    """A plan and three calls that are alike: other tensors, other contents, the lengths turned round."""
    lens = case.kv_lens
    inputs = [make_inputs(case.replace(format=fmt, kv_lens=lens[k:] + lens[:k]), seed=k, device=device) for k in range(3)]
    try:
        plan = DecodePlan(
            num_heads=case.num_heads, format=fmt, page_size=case.page_size, max_batch=case.batch, max_kv_len=8192,
            max_q_len=max(case.rows), max_total_q=sum(case.rows), q_dtype=inputs[0].q.dtype, num_kv_splits=case.num_kv_splits,
            device=device, backend=backend,
        )  # fmt: skip
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return plan, inputs


def run(plan: DecodePlan, inputs: DecodeInputs, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**inputs.options, "return_lse": True, "check_contents": False, **changes}
    out, lse = plan.run(inputs.q, inputs.cache, inputs.table, **options)
    return (out if "out" in changes else out.clone()), lse.clone()


def decode(plan: DecodePlan, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    most = {} if inputs.qo_indptr is None else {"max_q_len": plan.capacity.max_q_len}
    return mla_decode(
        inputs.q, inputs.cache, inputs.table, return_lse=True, backend=plan.backend.name, check_contents=False,
        num_kv_splits=inputs.case.num_kv_splits, **inputs.options, **most,
    )  # fmt: skip


def afresh(plan: DecodePlan, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend makes of a call when it has seen none like it."""
    leanmla.decode._KNOWN.clear()
    return decode(plan, inputs)


def parts(x: DecodeInputs) -> list[torch.Tensor]:
    """Every tensor that a call reads."""
    table = x.table
    found = (
        x.q, x.cache.data, x.cache.scale, table.page_ids, table.kv_indptr, table.kv_last_page_len, table.cache_seqlens, x.qo_indptr,
    )  # fmt: skip
    return [t for t in found if t is not None]


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    assert not bool(a[0].isnan().any())
    return torch.equal(a[0].view(torch.int16), b[0].view(torch.int16)) and torch.equal(
        a[1].view(torch.int32), b[1].view(torch.int32)
    )


def refuse(*args, **kwargs):
    raise AssertionError("a repeated call was launched as a first one is")


@contextlib.contextmanager
def repeated():
    """Inside, nothing may be worked out that a first call works out."""
    with pytest.MonkeyPatch.context() as patch:
        if not triton_missing():
            from triton.runtime.jit import JITFunction

            patch.setattr(JITFunction, "run", refuse)
        patch.setattr("leanmla.kernels.hopper_cuda.backend.fill", refuse)
        patch.setattr("leanmla.checks.check_call", refuse)
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
@pytest.mark.parametrize("backend, fmt", KERNELS)
def test_other_tensors_of_the_same_kind(backend, fmt, case):
    plan, inputs = turns(case, fmt, backend)
    # A plan and a call may cut sequences differently (one goes by its capacity, the other by the batch), hence two expectations.
    want = [afresh(plan, x) for x in inputs]
    want_of_plan = [run(turns(case, fmt, backend)[0], x) for x in inputs]
    run(plan, inputs[-1])
    run(plan, inputs[-1], out=torch.empty_like(want[-1][0]))
    with repeated():
        for _ in range(2):
            for x, of_call, of_plan in zip(inputs, want, want_of_plan, strict=True):
                assert same(run(plan, x), of_plan)
                out = torch.full_like(of_plan[0], torch.nan)
                got = run(plan, x, out=out)
                assert got[0] is out and same(got, of_plan)
                assert same(decode(plan, x), of_call)
    assert len(plan._steps) == 2


@pytest.mark.parametrize("backend, fmt", KERNELS)
def test_in_a_graph(backend, fmt):
    plan, inputs = turns(FIRST, fmt, backend)
    want = [afresh(plan, x) for x in inputs]
    here = inputs[0]
    out = torch.empty_like(want[0][0])
    run(plan, here, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with repeated(), torch.cuda.graph(graph):
        _, lse = plan.run(here.q, here.cache, here.table, out=out, return_lse=True, check_contents=False, **here.options)
    for x, expected in zip((inputs[1], inputs[2], inputs[1]), (want[1], want[2], want[1]), strict=True):
        run(plan, inputs[2])  # calls beside the graph do not move what it reads
        for ours, theirs in zip(parts(here), parts(x), strict=True):
            ours.copy_(theirs)
        out.fill_(torch.nan)
        graph.replay()
        assert same((out, lse), expected)


@pytest.mark.parametrize("backend, fmt", KERNELS)
def test_on_the_current_stream(backend, fmt):
    """The query arrives late on a stream of its own; whoever runs elsewhere reads NaN."""
    plan, (x, *_) = turns(FIRST, fmt, backend)
    want = afresh(plan, x)
    run(plan, x)
    q = x.q.clone()
    late = dataclasses.replace(x, q=torch.full_like(q, torch.nan))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with repeated(), torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.q.copy_(q)
        got = run(plan, late)
    stream.synchronize()
    assert same(got, want)


@pytest.mark.parametrize("backend, fmt", KERNELS)
def test_what_is_not_like_the_calls_before_is_refused_or_worked_out_anew(backend, fmt):
    plan, (x, *_) = turns(FIRST, fmt, backend)
    want = afresh(plan, x)
    for _ in range(2):
        assert same(run(plan, x), want)
    on_cpu = make_inputs(x.case)
    with pytest.raises(InvalidArgument, match="one device"):
        run(plan, dataclasses.replace(x, q=x.q.cpu()))
    with pytest.raises(InvalidArgument, match="one device"):
        run(plan, dataclasses.replace(x, cache=on_cpu.cache))
    with pytest.raises(PlanMismatch, match="device"):
        run(plan, on_cpu)
    with pytest.raises(PlanMismatch, match="q_dtype"):
        run(plan, dataclasses.replace(x, q=x.q.half()))
    with pytest.raises(InvalidDtype):
        run(plan, dataclasses.replace(x, q=x.q.float()))
    with pytest.raises(InvalidArgument, match="out"):
        run(plan, x, out=want[0].float())
    with pytest.raises(InvalidArgument, match="out"):
        run(plan, x, out=want[0].cpu())
    if backend != "triton":
        data = x.cache.data
        shift = 8 // data.element_size()
        data = torch.empty(data.numel() + shift, dtype=data.dtype, device="cuda")[shift:].view(data.shape).copy_(data)
        cache = LatentCache.from_tensors(data, x.cache.scale, format=fmt, page_size=x.case.page_size)
        with pytest.raises(InvalidArgument, match="multiples of 16 bytes"):
            run(plan, dataclasses.replace(x, cache=cache))
    # Queries and results at every address that their dtype allows, in turns.
    for shift in (1, 2, 4, 7, 1, 8, 0):
        q = torch.empty(x.q.numel() + shift, dtype=x.q.dtype, device="cuda")[shift:].view(x.q.shape).copy_(x.q)
        out = torch.full((want[0].numel() + shift,), torch.nan, dtype=x.q.dtype, device="cuda")[shift:].view(want[0].shape)
        moved = dataclasses.replace(x, q=q)
        assert same(run(plan, moved, out=out), afresh(plan, moved)), shift
    assert same(run(plan, x), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend, fmt", KERNELS)
def test_on_another_gpu_than_the_current_one(backend, fmt):
    plan, inputs = turns(FIRST, fmt, backend, "cuda:1")
    want = [afresh(plan, x) for x in inputs]
    run(plan, inputs[0])
    assert torch.cuda.current_device() == 0
    with repeated():
        for x, expected in zip(inputs, want, strict=True):
            assert same(run(plan, x), expected) and same(decode(plan, x), expected)
    assert torch.cuda.current_device() == 0
    with pytest.raises(PlanMismatch, match="device"):
        run(plan, make_inputs(inputs[0].case, device="cuda:0"))
