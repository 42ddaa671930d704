"""Plans, torch.compile, captured steps, merging and the registry."""

import math
import subprocess
import sys

import pytest
import torch
from _helpers import cpu_plan as plan

from leanmla import (
    BackendUnavailable,
    CapacityExceeded,
    InvalidArgument,
    LatentCache,
    PageTable,
    PlanMismatch,
    backends,
    device,
    merge_states,
    mla_decode,
)
from leanmla.testing import DecodeCase, compare, make_inputs

# -- DecodePlan ---------------------------------------------------------------------------------------------------------


def test_a_plan_keeps_its_results_in_its_own_buffer():
    p, inputs = plan(), make_inputs(DecodeCase((100, 0, 300)))
    out, lse = p.run(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
    assert compare(inputs, out, lse).ok
    again = p.run(inputs.q, inputs.cache, inputs.table, **inputs.options)
    assert again.data_ptr() == out.data_ptr()


def test_replanning_with_the_same_total_but_other_lengths_is_right():
    p = plan()
    for lens in [(300, 100), (100, 300), (399, 1), (0, 400), (200, 200)]:
        inputs = make_inputs(DecodeCase(lens))
        out, lse = p.run(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
        assert compare(inputs, out, lse).ok


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (DecodeCase((9, 9), num_heads=8), PlanMismatch, "num_heads: this plan was built for 16, the call has 8"),
        (DecodeCase((9, 9), format="fp8"), PlanMismatch, "format: this plan was built for bf16, the call has fp8"),
        (DecodeCase((9, 9), page_size=16), PlanMismatch, "page_size: this plan was built for 64, the call has 16"),
        (DecodeCase((9, 9), q_dtype="fp16"), PlanMismatch, "q_dtype: this plan was built for bf16, the call has fp16"),
        (DecodeCase((9,) * 5), CapacityExceeded, "max_batch: this plan holds 4, the call needs 5"),
        (DecodeCase((9,), q_lens=3), CapacityExceeded, "max_q_len: this plan holds 2, the call needs 3"),
        (DecodeCase((9, 9), q_lens=(1, 3)), CapacityExceeded, "max_q_len"),
    ],
)
def test_a_plan_refuses_what_it_was_not_built_for_and_keeps_working(case, kind, text):
    p, good, bad = plan(), make_inputs(DecodeCase((50, 60))), make_inputs(case)
    with pytest.raises(kind, match=text):
        p.run(bad.q, bad.cache, bad.table, **bad.options)
    out, lse = p.run(good.q, good.cache, good.table, return_lse=True, **good.options)
    assert compare(good, out, lse).ok


def test_a_remembered_call_sees_new_contents_and_new_tensors():
    p = plan()
    for lens in ((100, 0, 300), (300, 100, 0), (100, 0, 300)):  # as many pages each time
        i = make_inputs(DecodeCase(lens))
        for decode in (p.run, mla_decode):
            out, lse = decode(i.q, i.cache, i.table, return_lse=True, check_contents=False, **i.options)
            assert compare(i, out, lse).ok
        i.q.mul_(0.5)
        out, lse = p.run(i.q, i.cache, i.table, return_lse=True, check_contents=False, **i.options)
        assert compare(i, out, lse).ok
    assert len(p._steps) == 1
    # What a caller does to the shape of a result stays with the caller.
    p.run(i.q, i.cache, i.table, check_contents=False, **i.options).transpose_(0, 1)
    assert p.run(i.q, i.cache, i.table, check_contents=False, **i.options).shape == (3, 16, 512)


def test_a_remembered_call_is_refused_once_anything_about_it_is_wrong():
    p, i = plan(), make_inputs(DecodeCase((100, 64, 300)))
    good = {"q": i.q, "cache": i.cache, "table": i.table, "sm_scale": 1.0, "check_contents": False}
    wide = torch.zeros(3, 16, 1152, dtype=torch.bfloat16)
    scale_less = LatentCache.allocate(i.cache.num_pages, 64, format="fp8")
    own = i.cache.data.view(-1)[: 3 * 16 * 512].view(3, 16, 512)
    bad = [
        ({"q": wide[..., ::2]}, "last dim must be contiguous"),
        ({"q": i.q[..., :512]}, "last dim must be"),
        ({"q": i.q.repeat(2, 1, 1)[:5]}, "do not divide"),
        ({"cache": scale_less}, "scale"),
        ({"cache": i.cache.data}, "expected a LatentCache"),
        ({"table": i.table.page_ids}, "expected a PageTable"),
        ({"sm_scale": True}, "sm_scale"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"causal": "yes"}, "causal"),
        ({"logit_cap": -1.0}, "logit_cap"),
        ({"qo_indptr": torch.tensor([0, 1, 2, 3])}, "int32"),
        ({"out": own}, "lies in the cache's memory"),
        ({"out": torch.empty(3, 16, 512)}, "out: expected q's dtype"),
    ]
    out = torch.empty(3, 16, 512, dtype=torch.bfloat16)
    for decode in (p.run, mla_decode):
        for _ in range(2):
            decode(**good)
            decode(**good, out=out)
        for change, text in bad:
            with pytest.raises(InvalidArgument, match=text):
                decode(**{**good, **change})
        with pytest.raises(InvalidArgument, match="cache_seqlens"):
            i.table.cache_seqlens[0] += 10**6
            decode(**{**good, "check_contents": True})
        i.table.cache_seqlens[0] -= 10**6
        # Tensors that change shape in place are seen too.
        wrong = i.q.clone()
        decode(**{**good, "q": wrong})
        wrong.resize_(5, 16, 576)
        with pytest.raises(InvalidArgument, match="do not divide"):
            decode(**{**good, "q": wrong})
    with pytest.raises(PlanMismatch, match="q_dtype"):
        p.run(**{**good, "q": i.q.half()})
    mla_decode(**good, num_kv_splits=1)
    with pytest.raises(InvalidArgument, match="num_kv_splits"):
        mla_decode(**good, num_kv_splits=True)


def test_plan_construction_is_checked():
    with pytest.raises(InvalidArgument, match="max_batch: expected a positive integer, got 0"):
        plan(max_batch=0)
    with pytest.raises(InvalidArgument, match="q_dtype: expected bfloat16 or float16"):
        plan(q_dtype=torch.float32)
    with pytest.raises(BackendUnavailable, match="backend='hopper' cannot run this"):
        plan(backend="hopper")


def test_capture_on_a_cpu_reruns_the_step():
    p, inputs = plan(), make_inputs(DecodeCase((100, 200)))
    step = p.capture(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
    out, lse = step()
    assert compare(inputs, out, lse).ok
    inputs.table.cache_seqlens.copy_(torch.tensor([40, 0]))
    inputs.q.normal_()
    out, lse = step()
    report = compare(inputs, out, lse)
    assert report.ok, report.message
    other = p.capture(inputs.q, inputs.cache, inputs.table, **inputs.options)
    assert other.out.data_ptr() != step.out.data_ptr()


# -- torch.compile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp4", "fp8_tile128"])
@pytest.mark.parametrize("table", ["csr", "block_table", "contiguous"])
def test_fullgraph_compile(fmt, table):
    inputs = make_inputs(DecodeCase((70, 0, 33), q_lens=2, format=fmt, table=table))

    def step(q):
        out, lse = mla_decode(q * 1, inputs.cache, inputs.table, return_lse=True, **inputs.options)
        return out * 2, lse

    torch.compiler.reset()
    out, lse = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs.q)
    eager = step(inputs.q)
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])


def test_compile_with_out_and_ragged_rows():
    inputs = make_inputs(DecodeCase((70, 5, 33), q_lens=(2, 0, 3)))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q):
        return mla_decode(q, inputs.cache, inputs.table, out=inputs.out, **inputs.options) + 0

    out = step(inputs.q)
    assert compare(inputs, inputs.out).ok and torch.equal(out, inputs.out)


def test_the_operator_is_registered_and_well_formed():
    inputs = make_inputs(DecodeCase((70, 5)))
    c, t = inputs.cache, inputs.table
    args = (inputs.q, c.data, None, "bf16", True, t.kind, 64, t.page_ids, None, None, t.cache_seqlens, None, 0.04, True, 0.0,
            None, "auto", None, None, None)  # fmt: skip
    torch.library.opcheck(torch.ops.leanmla.mla_decode.default, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        torch.ops.leanmla.mla_decode_out.default, (inputs.out, *args), test_utils=("test_schema", "test_faketensor")
    )


# -- merge_states -------------------------------------------------------------------------------------------------------


def test_merge_closed_form():
    out, lse = merge_states([torch.zeros(2), torch.ones(2)], [torch.tensor(2.0).log(), torch.tensor(8.0).log()])
    assert torch.allclose(out, torch.tensor(0.8)) and lse.item() == pytest.approx(math.log(10))


def test_merge_of_shards_is_the_whole():
    inputs = make_inputs(DecodeCase((200,), page_size=1, q_lens=1))
    whole, whole_lse = mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
    parts = []
    for ids in inputs.table.page_ids[0, :200].split([64, 1, 135]):
        table = PageTable.from_block_table(ids[None].contiguous(), torch.tensor([len(ids)], dtype=torch.int32), page_size=1)
        parts.append(mla_decode(inputs.q, inputs.cache, table, return_lse=True, **inputs.options))
    out, lse = merge_states([p[0] for p in parts], [p[1] for p in parts])
    assert torch.allclose(out.float(), whole.float(), atol=2e-2) and torch.allclose(lse, whole_lse, atol=1e-5)


def test_merge_skips_states_that_saw_no_key():
    nan = torch.full((3, 512), math.nan)
    out, lse = merge_states([nan, torch.ones(3, 512)], [torch.full((3,), -math.inf), torch.zeros(3)])
    assert (out == 1).all() and (lse == 0).all()
    out, lse = merge_states(torch.stack([nan, nan]), torch.full((2, 3), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_merge_does_not_overflow_and_keeps_nan():
    out, lse = merge_states([torch.zeros(1), torch.ones(1)], [torch.tensor(1e4), torch.tensor(1e4)])
    assert out.item() == 0.5 and lse.item() == pytest.approx(1e4 + math.log(2))
    out, lse = merge_states([torch.zeros(1), torch.ones(1)], [torch.tensor(math.nan), torch.tensor(0.0)])
    assert math.isnan(out.item()) and math.isnan(lse.item())


def test_merge_refusals():
    with pytest.raises(InvalidArgument, match="same number of states, at least one, got 0 and 0"):
        merge_states([], [])
    with pytest.raises(InvalidArgument, match=r"lses: expected \[1, 3\]"):
        merge_states([torch.zeros(3, 4)], [torch.zeros(2)])


# -- registry -----------------------------------------------------------------------------------------------------------

H200 = device.DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 150 << 30)


def test_auto_prefers_the_first_that_can():
    inputs = make_inputs(DecodeCase((9,)))
    p = plan()
    assert p.backend.name == "cpu"
    reasons = backends.reasons(p.capacity, device.describe("cpu"))
    assert list(reasons) == list(backends.NAMES) and reasons["cpu"] is None
    assert all(isinstance(r, str) and r for n, r in reasons.items() if n in ("hopper", "triton"))
    assert mla_decode(inputs.q, inputs.cache, inputs.table, **inputs.options).isfinite().all()


def test_an_explicit_choice_that_cannot_run_says_why():
    inputs = make_inputs(DecodeCase((9,)))
    with pytest.raises(BackendUnavailable, match=r"backend='triton' cannot run this: .+\. Can run it: cpu, reference"):
        mla_decode(inputs.q, inputs.cache, inputs.table, backend="triton", **inputs.options)


def test_the_environment_can_name_the_default(monkeypatch):
    monkeypatch.setenv("LEANMLA_BACKEND", "reference")
    assert plan().backend.name == "reference"
    monkeypatch.setenv("LEANMLA_BACKEND", "nonsense")
    with pytest.raises(InvalidArgument, match="nonsense"):
        plan()


def test_the_cpu_backend_refuses_a_gpu():
    assert "cpu" in backends.why_not("cpu", plan().capacity, H200).lower()


def test_device_answers_can_be_replaced():
    with device.override(H200):
        assert device.describe("cpu").arch == "sm_90" and device.describe("cpu").sm == 90
    assert device.describe("cpu").arch == "cpu"


def test_importing_touches_no_gpu_and_needs_no_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "def boom(*a, **k): raise SystemExit('a GPU was touched')\n"
        "torch.cuda.is_available = torch.cuda.init = torch.cuda._lazy_init = boom\n"
        "import leanmla\n"
        "assert not any(m.startswith('numba') for m in sys.modules) and 'matplotlib' not in sys.modules\n"
        "print(leanmla.__version__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_an_fp8_cache_scale_multiplies_keys_and_values_once():
    for scale in (0.37, 4.0):
        inputs = make_inputs(DecodeCase((33,), format="fp8", cache_scale=scale))
        double = LatentCache.from_tensors(inputs.cache.data, 2 * inputs.cache.scale, format="fp8", page_size=64)
        out = mla_decode(inputs.q, inputs.cache, inputs.table, **inputs.options)
        halved = {**inputs.options, "sm_scale": inputs.options["sm_scale"] / 2}
        assert torch.allclose(mla_decode(inputs.q, double, inputs.table, **halved).float(), 2 * out.float(), rtol=1e-2)
