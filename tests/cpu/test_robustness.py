"""What careless or hostile callers do: it is refused by name, or it is right; the process survives and nothing is lost."""

import math
import threading

import numpy as np
import pytest
import torch
from _helpers import cpu_plan, i32

from leanmla import (
    BackendUnavailable,
    CapacityExceeded,
    InvalidArgument,
    InvalidDtype,
    InvalidTable,
    LatentCache,
    MissingScale,
    PageTable,
    PlanMismatch,
    formats,
    merge_states,
    mla_decode,
)
from leanmla.testing import DecodeCase, compare, make_inputs

BACKENDS = ("reference", "cpu")


def plan(**changes):
    return cpu_plan(**{"max_kv_len": 2048, **changes})


# -- captured steps and plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_checks_what_changed_since(backend):
    inputs = make_inputs(DecodeCase((100, 200), q_lens=(1, 1)))
    step = plan(backend=backend).capture(inputs.q, inputs.cache, inputs.table, **inputs.options)
    step()
    good_lens, good_ids = inputs.table.cache_seqlens.clone(), inputs.table.page_ids.clone()
    inputs.table.cache_seqlens.copy_(i32(5_000_000, 3))
    with pytest.raises(InvalidTable, match=r"cache_seqlens\[0\]"):
        step()
    inputs.table.cache_seqlens.copy_(good_lens)
    inputs.table.page_ids[0, 0] = 1 << 30
    with pytest.raises(InvalidTable, match="page ids"):
        step()
    inputs.table.page_ids.copy_(good_ids)
    inputs.qo_indptr.copy_(i32(0, 1_000_000, 1_000_001))
    with pytest.raises(InvalidTable, match="qo_indptr"):
        step()
    inputs.qo_indptr.copy_(i32(0, 1, 2))
    assert compare(inputs, step()).ok


def test_a_plan_used_from_several_threads_is_right():
    p = plan()
    inputs = [make_inputs(DecodeCase((900 + 250 * k, 300)), seed=k) for k in range(4)]
    want = [mla_decode(i.q, i.cache, i.table, backend="cpu", **i.options) for i in inputs]
    wrong = []

    def work(k):
        out = torch.empty_like(want[k])
        for _ in range(60):
            p.run(inputs[k].q, inputs[k].cache, inputs[k].table, out=out.fill_(math.nan), **inputs[k].options)
            if not torch.allclose(out.float(), want[k].float(), atol=2e-2):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_plans_key_capacities_are_kept():
    inputs = make_inputs(DecodeCase((700, 900)))
    for changes, text in [({"max_kv_len": 800}, "max_kv_len: this plan holds 800 keys, the call has 900"),
                          ({"max_total_kv": 1000}, "max_total_kv: this plan holds 1000 keys, the call has 1600")]:  # fmt: skip
        with pytest.raises(CapacityExceeded, match=text):
            plan(**changes).run(inputs.q, inputs.cache, inputs.table, **inputs.options)
    with pytest.raises(CapacityExceeded, match="max_total_q: this plan holds 1, the call needs 2"):
        plan(max_total_q=1).run(inputs.q, inputs.cache, inputs.table, **inputs.options)


def test_plans_without_a_gpu():
    with pytest.raises(BackendUnavailable, match="torch sees no GPU here|cannot run"):
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        plan(device="cuda")
    with pytest.raises(BackendUnavailable, match="meta"):
        plan(device="meta")


def test_a_plan_inside_compiled_code_breaks_the_graph_and_is_right():
    inputs, p = make_inputs(DecodeCase((70, 33))), plan()
    torch.compiler.reset()
    step = torch.compile(lambda q: p.run(q * 1, inputs.cache, inputs.table, **inputs.options) + 0, backend="eager")
    assert torch.equal(step(inputs.q), mla_decode(inputs.q, inputs.cache, inputs.table, **inputs.options))


# -- fp8 scale from the first append --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        (torch.randn(3, 576), torch.full((3,), -1)),  # a padded batch: all skipped
        (torch.zeros(3, 576), torch.arange(3)),  # a warm-up batch of zeros
        (torch.full((3, 576), math.nan), torch.arange(3)),
    ],
    ids=["skipped", "zeros", "nan"],
)
def test_a_first_append_without_magnitude_does_not_fix_the_scale(first):
    cache = LatentCache.allocate(4, 4, format="fp8")
    cache.append(*first)
    assert not cache.scale_is_set
    with pytest.raises(MissingScale):
        cache.dequantize()
    x = torch.randn(4, 576)
    cache.append(x, torch.arange(4))
    assert cache.scale_is_set and cache.saturation_count == 0
    assert torch.allclose(cache.gather(torch.arange(4)), x, atol=0.2)


def test_views_share_the_scale_and_the_counter():
    cache = LatentCache.allocate(4, 4, format="fp8")
    cache.as_tokens().append(torch.ones(2, 576), torch.arange(2))
    scale = cache.scale.clone()
    assert cache.scale_is_set
    cache.append(100 * torch.ones(2, 576), torch.arange(2, 4))
    assert torch.equal(cache.scale, scale) and cache.saturation_count == 1152 == cache.as_tokens().saturation_count


def test_one_infinity_does_not_void_its_neighbours():
    x = torch.randn(1, 576)
    for name in ("fp8", "fp8_tile128"):
        fmt = formats.get(name)
        clean = fmt.quantize(x)
        y = x.clone()
        y[0, 5] = math.inf
        rows = fmt.quantize(y)
        values, want = fmt.dequantize(rows.data, rows.scale)[0], fmt.dequantize(clean.data, clean.scale)[0]
        others = torch.arange(576) != 5
        assert torch.isfinite(values).all() and torch.allclose(values[others], want[others], atol=0.3)
        assert int(rows.saturated) == 1 and int(clean.saturated) == 0


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_out_that_shares_memory_is_refused():
    inputs = make_inputs(DecodeCase((30, 40)))
    expanded = torch.empty(1, 16, 512, dtype=torch.bfloat16).expand(2, 16, 512)
    with pytest.raises(InvalidArgument, match="out: rows share memory"):
        mla_decode(inputs.q, inputs.cache, inputs.table, out=expanded, **inputs.options)
    inside = inputs.cache.data.flatten()[: 2 * 16 * 512].view(2, 16, 512)
    with pytest.raises(InvalidArgument, match="out: lies in the cache's memory"):
        mla_decode(inputs.q, inputs.cache, inputs.table, out=inside, **inputs.options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_caches_carry_no_gradient(backend):
    inputs = make_inputs(DecodeCase((30, 40)))
    q = inputs.q.requires_grad_()
    assert not mla_decode(q, inputs.cache, inputs.table, backend=backend, **inputs.options).requires_grad
    p = plan(backend=backend)
    assert not p.run(q, inputs.cache, inputs.table, **inputs.options).requires_grad
    inputs.cache.append(torch.randn(1, 576, requires_grad=True), inputs.key_slots[:1])
    assert not inputs.cache.data.requires_grad
    parameter = torch.nn.Parameter(inputs.q.detach())
    assert not mla_decode(parameter, inputs.cache, inputs.table, backend=backend, **inputs.options).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_in_any_order(backend):
    inputs = make_inputs(DecodeCase((30, 40)))
    with torch.inference_mode():
        p = plan(backend=backend)
        first = p.run(inputs.q, inputs.cache, inputs.table, **inputs.options).clone()
    out = torch.empty_like(inputs.out)
    assert torch.equal(p.run(inputs.q, inputs.cache, inputs.table, out=out, **inputs.options), first)


def test_a_default_device_does_not_leak_in():
    inputs = make_inputs(DecodeCase((30, 40)))
    want = mla_decode(inputs.q, inputs.cache, inputs.table, backend="cpu", **inputs.options)
    with torch.device("meta"):
        got = mla_decode(inputs.q, inputs.cache, inputs.table, backend="cpu", **inputs.options)
    assert torch.equal(got, want)


# -- tables -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_csr_row_may_keep_one_page_with_id_minus_one(backend):
    cache = LatentCache.allocate(2, 64, format="bf16")
    cache.append(torch.randn(70, 576), torch.arange(70))
    table = PageTable.from_csr(i32(0, 2, 3), i32(0, 1, -1), i32(6, 0), page_size=64)
    assert table.kv_lens().tolist() == [70, 0]
    q = torch.randn(2, 16, 576).to(torch.bfloat16)
    out, lse = mla_decode(q, cache, table, sm_scale=0.04, return_lse=True, backend=backend)
    assert not out[1].any() and (lse[1] == -math.inf).all() and torch.isfinite(out[0]).all()


def test_a_last_dim_of_one_has_no_stride():
    wide = torch.arange(8, dtype=torch.int32).view(2, 4)
    table = PageTable.from_block_table(wide[:, ::4], i32(3, 2), page_size=4)
    assert table.slots(1).tolist() == [16, 17]


# -- values and types that are not what they should be ---------------------------------------------------------------------------

ARGUMENTS = [
    ({"sm_scale": np.array([0.1, 0.2])}, InvalidArgument, "sm_scale: expected a finite number"),
    ({"sm_scale": 10**400}, InvalidArgument, "sm_scale"),
    ({"sm_scale": np.complex64(1)}, InvalidArgument, "sm_scale"),
    ({"sm_scale": 1e300}, InvalidArgument, "sm_scale"),
    ({"sm_scale": True}, InvalidArgument, "sm_scale"),
    ({"sm_scale": "0.1"}, InvalidArgument, "sm_scale"),
    ({"logit_cap": 1e300}, InvalidArgument, "logit_cap"),
    ({"logit_cap": math.nan}, InvalidArgument, "logit_cap"),
    ({"causal": "no"}, InvalidArgument, "causal: expected True or False, got 'no'"),
    ({"backend": []}, InvalidArgument, "backend: expected"),
    ({"num_kv_splits": 20000}, InvalidArgument, "num_kv_splits: expected at most 4096, got 20000"),
    ({"num_kv_splits": 2**70}, InvalidArgument, "num_kv_splits"),
    ({"split_size": 2**70}, InvalidArgument, "split_size"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), ARGUMENTS, ids=lambda v: str(v) if isinstance(v, dict) else None)
def test_odd_arguments(changes, kind, text):
    inputs = make_inputs(DecodeCase((30, 40)))
    with pytest.raises(kind, match=text):
        mla_decode(inputs.q, inputs.cache, inputs.table, **{**inputs.options, **changes})


def test_numpy_scalars_are_numbers():
    inputs = make_inputs(DecodeCase((30, 40)))
    options = {**inputs.options, "sm_scale": np.float64(inputs.options["sm_scale"])}
    assert mla_decode(inputs.q, inputs.cache, inputs.table, **options).isfinite().all()


def test_more_splits_than_keys_cost_nothing_and_change_nothing():
    inputs = make_inputs(DecodeCase((40, 3), num_kv_splits=4096))
    out, lse = mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options, **inputs.splits)
    assert compare(inputs, out, lse).ok


def test_a_lazily_negated_query_is_refused():
    inputs = make_inputs(DecodeCase((30, 40)))
    with pytest.raises(InvalidArgument, match="q: is a lazily negated view"):
        mla_decode(torch._neg_view(inputs.q), inputs.cache, inputs.table, **inputs.options)


def test_odd_cache_arguments():
    data, mx = torch.zeros(4, 576, dtype=torch.uint8), torch.zeros(4, 288, dtype=torch.uint8)
    for scale in (
        torch.tensor([math.nan]),
        torch.zeros(1),
        torch.tensor([-1.0]),
        torch.tensor([math.inf]),
        math.inf,
        "x",
        [1.0, 2],
    ):
        with pytest.raises(InvalidArgument, match="scale: expected a positive finite"):
            LatentCache.from_tensors(data, scale, format="fp8", page_size=1)
    with pytest.raises(InvalidArgument, match="scale: expected"):
        LatentCache.from_tensors(mx, torch.tensor(1, dtype=torch.uint8), format="mxfp4", page_size=1)
    with pytest.raises(InvalidArgument, match="scale: expected on the cache's device cpu, got meta"):
        LatentCache.from_tensors(mx, torch.zeros(4, 18, dtype=torch.uint8, device="meta"), format="mxfp4", page_size=1)
    with pytest.raises(InvalidArgument, match="format: expected one of"):
        formats.get([])
    cache = LatentCache.allocate(2, 4, format="bf16")
    for latent in ([[0.0] * 576], np.zeros((1, 576), np.float32), None):
        with pytest.raises(InvalidArgument, match="latent: expected a tensor"):
            cache.append(latent, torch.tensor([0]))
    for slots in ([0], None):
        with pytest.raises(InvalidDtype, match="slots: expected int32 or int64"):
            cache.append(torch.zeros(1, 576), slots)
    for slot in (-1, 8):
        with pytest.raises(InvalidArgument, match=r"slots: expected 0\.\.7"):
            cache.gather(torch.tensor([slot]))


def test_merge_states_names_what_is_wrong():
    a, b = torch.zeros(3, 4), torch.zeros(3)
    for outs, lses, text in [
        ([a, torch.zeros(2, 4)], [b, b], r"outs: expected states of one shape"),
        ([a], [1.0], "lses: expected tensors, got float"),
        (torch.tensor(1.0), torch.tensor(1.0), "outs: expected .* got a scalar"),
        ([a], [b.to("meta")], "lses: expected on the device of outs"),
        ([a], [b.int()], "floating point"),
        ([a, a], [b], "same number of states"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            merge_states(outs, lses)
    out, _ = merge_states(iter([a, a]), iter([b, b]))
    assert torch.equal(out, a)
    half, lse = merge_states([a.half(), a.half()], [b.half(), b.half()])
    assert half.dtype == torch.float16 and lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value"), [("LEANMLA_BACKEND", "nope"), ("LEANMLA_CPU_THREADS", "²"), ("LEANMLA_CPU_THREADS", "0")]
)
def test_environment_variables_are_named_in_refusals(monkeypatch, name, value):
    inputs = make_inputs(DecodeCase((30, 40)))
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=name):
        mla_decode(inputs.q, inputs.cache, inputs.table, **inputs.options)


def test_devices_are_compared():
    inputs = make_inputs(DecodeCase((30, 40), q_lens=(1, 1)))
    with pytest.raises(InvalidArgument, match="qo_indptr: expected on q's device cpu, got meta"):
        mla_decode(inputs.q, inputs.cache, inputs.table, sm_scale=0.1, qo_indptr=inputs.qo_indptr.to("meta"))
    meta = LatentCache.from_tensors(torch.empty(4, 64, 576, dtype=torch.bfloat16, device="meta"), format="bf16", page_size=64)
    table = PageTable.from_block_table(i32(0, 1)[None].to("meta"), i32(3).to("meta"), page_size=64)
    with pytest.raises((PlanMismatch, InvalidArgument), match="device"):
        plan().run(torch.empty(1, 16, 576, dtype=torch.bfloat16, device="meta"), meta, table, sm_scale=0.1)
    with pytest.raises(BackendUnavailable, match="meta"):
        mla_decode(
            torch.empty(1, 16, 576, dtype=torch.bfloat16, device="meta"), meta, table, sm_scale=0.1, check_contents=False
        )


@pytest.mark.parametrize("cap", [1e3, 1e5, 1e8])
@pytest.mark.parametrize("fmt", ["bf16", "mxfp4"])
def test_a_large_logit_cap_is_no_cap(cap, fmt):
    inputs = make_inputs(DecodeCase((150, 64), format=fmt, logit_cap=cap, q_std=4.0))
    out, lse = mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="cpu", **inputs.options)
    report = compare(inputs, out, lse)
    assert report.ok, report.message
