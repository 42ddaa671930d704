"""What formats cost: the measurement against the definition, known levels, choosing by a budget, the command."""

from __future__ import annotations

import doctest
import importlib.util
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import leanmla.accuracy
from leanmla import LatentCache, PageTable
from leanmla.accuracy import (
    DISTRIBUTIONS,
    NUM_ROWS,
    AccuracyResult,
    Variant,
    _Attention,
    _chunks,
    measure_accuracy,
    recommend,
    same_values,
    variants_named,
)
from leanmla.cli import main
from leanmla.errors import InvalidArgument
from leanmla.reference import mla_decode_reference


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def result(label: str, error: float, distribution: str = "normal") -> AccuracyResult:
    name, _, rule = label.partition(" ")
    return AccuracyResult(distribution, 64, Variant(name, rule), error, error, 0, 0.0, 0.0, 0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("variant", ["fp8", "mxfp4 floor", "fp8_tile128", "mxfp4_row320 floor"])
def test_it_measures_what_the_definition_computes(distribution, variant):
    """The same draws through LatentCache and mla_decode_reference give the same errors."""
    kv_len, heads = 100, 4
    [found] = measure_accuracy([distribution], [kv_len], formats=[variant], num_heads=heads, seed=3)
    q, keys = _chunks(DISTRIBUTIONS[distribution], kv_len, heads, 3)
    latent = torch.cat(list(keys()))
    name, _, rule = variant.partition(" ")
    cache = LatentCache.allocate(kv_len, 1, format=name, **({"mx_scale_rule": rule} if rule else {}))
    cache.append(latent, torch.arange(kv_len))
    table = PageTable.contiguous(torch.tensor([0, kv_len], dtype=torch.int32))
    sm_scale = DISTRIBUTIONS[distribution].sm_scale
    # causal=False: all rows see all keys. The unrounded side in fp64 by hand.
    got, got_lse = mla_decode_reference(q, cache, table, sm_scale=sm_scale, causal=False)
    logits = sm_scale * (q @ latent.double().T)
    want, want_lse = torch.softmax(logits, -1) @ latent.double()[:, :512], torch.logsumexp(logits, -1)
    assert found.out_error == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-6)
    assert found.lse_error == pytest.approx(float((got_lse - want_lse).abs().max()), rel=1e-5, abs=1e-12)
    by_head = (got - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2))
    assert found.worst_head == int(by_head.argmax()) and found.worst_head_error == pytest.approx(float(by_head.max()), rel=1e-6)
    assert found.saturated == cache.saturation_count


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.floats(0.1, 100))
def test_attention_in_chunks_is_attention(sizes, spread):
    gen = torch.Generator().manual_seed(sum(sizes))
    q = torch.randn(3, 576, generator=gen, dtype=torch.float64) * spread / 24
    keys = torch.randn(sum(sizes), 576, generator=gen, dtype=torch.float64)
    attention = _Attention(q)
    for chunk in keys.split(sizes):
        attention.add(chunk)
    out, lse = attention.result()
    logits = q @ keys.T
    assert torch.allclose(out, torch.softmax(logits, -1) @ keys[:, :512], rtol=1e-9, atol=1e-12)
    assert torch.allclose(lse, torch.logsumexp(logits, -1), rtol=1e-12)


def test_levels_are_those_of_the_formats():
    found = {(r.distribution, r.variant.label): r for r in measure_accuracy(kv_lens=[512])}
    assert len(found) == 15
    for name in DISTRIBUTIONS:
        assert found[name, "bf16"].out_error < 4e-3
        assert 0.01 < found[name, "fp8"].out_error < 0.06
        assert 0.01 < found[name, "fp8_tile128"].out_error < 0.06
        assert found[name, "mxfp4 even"].out_error > 2 * found[name, "fp8"].out_error
        for label in ("bf16", "fp8", "mxfp4 even", "fp8_tile128"):
            assert found[name, label].saturated == 0
        assert found[name, "mxfp4 floor"].saturated > 0  # amax in (6, 8) * 2**e clips
    normal, heavy = (found[n, "mxfp4 even"].out_error for n in ("normal", "heavy-tailed"))
    assert heavy > 2 * normal  # an outlier flattens the 31 values beside it
    assert found["normal", "mxfp4 even"].out_error < found["normal", "mxfp4 floor"].out_error
    # peaked heads suffer more from the same rounding
    assert found["model-like", "mxfp4 even"].worst_head >= 8
    assert all(r.worst_head_error >= r.out_error for r in found.values())


def test_the_same_seed_gives_the_same_result_and_another_does_not():
    first, again, other = (measure_accuracy(["heavy-tailed"], [80], formats=["fp8"], seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_distributions_are_what_they_say():
    for name in DISTRIBUTIONS:
        q, keys = _chunks(DISTRIBUTIONS[name], 2000, 16, 0)
        x = torch.cat(list(keys()))
        assert x.shape == (2000, 576) and q.shape == (NUM_ROWS, 16, 576) and bool(x.isfinite().all())
        channel = x.std(0)
        if name == "normal":
            assert abs(float(x.std()) - 1) < 0.01
        elif name == "heavy-tailed":
            assert int((channel > 8 * channel.median()).sum()) >= 4
            z = x / channel
            assert float(z.pow(4).mean()) > 4  # a normal has 3
        else:
            latent, rope = x[:, :512], x[:, 512:]
            assert float(rope.square().mean().sqrt()) > 4 * float(latent.square().mean().sqrt())
            logits = (q.flatten(0, 1) @ x.double().T) * DISTRIBUTIONS[name].sm_scale
            spread = logits.std(-1).view(NUM_ROWS, 16).mean(0)
            assert 0.7 < float(spread[0]) < 1.4 and 2.8 < float(spread[-1]) < 5.5


def test_the_keys_of_a_long_sequence_begin_with_those_of_the_first_chunk(monkeypatch):
    monkeypatch.setattr(leanmla.accuracy, "CHUNK", 64)
    _, short = _chunks(DISTRIBUTIONS["model-like"], 64, 4, 0)
    _, long = _chunks(DISTRIBUTIONS["model-like"], 150, 4, 0)
    assert torch.equal(next(iter(short())), next(iter(long())))
    assert [c.shape[0] for c in long()] == [64, 64, 22]


def test_variants():
    assert [v.label for v in variants_named()] == ["bf16", "fp8", "mxfp4 even", "mxfp4 floor", "fp8_tile128"]
    assert [v.label for v in variants_named(["mxfp4_row320"])] == ["mxfp4_row320 even", "mxfp4_row320 floor"]
    assert [v.label for v in variants_named(["mxfp4 floor", "fp8", "fp8"])] == ["mxfp4 floor", "fp8"]
    for names, words in (
        (["int4"], "format: expected one of"),
        (["mxfp4 up"], "expected a scale rule"),
        (["fp8 even"], "it has none"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            variants_named(names)


def test_recommendation_is_the_smallest_within_the_budget_everywhere():
    found = [result("bf16", 0.002), result("fp8", 0.03), result("mxfp4 even", 0.04), result("mxfp4 floor", 0.045),
             result("mxfp4 even", 0.2, "heavy-tailed"), result("mxfp4 floor", 0.19, "heavy-tailed"), result("fp8", 0.02, "heavy-tailed"),
             result("bf16", 0.003, "heavy-tailed")]  # fmt: skip
    assert recommend(found, 0.05).variant.label == "fp8"
    assert recommend(found, 0.195).variant.label == "mxfp4 floor"
    assert recommend(found, 0.5).variant.label == "mxfp4 floor"  # of equal size, the smaller error
    assert recommend(found, 0.01).variant.label == "bf16"
    assert recommend(found, 0.001) is None
    assert [r.variant.label for r in recommend(found, 0.05).too_large] == ["mxfp4 floor", "mxfp4 even"]
    assert "fp8 (576 bytes a token) is the smallest within 0.05" in recommend(found, 0.05).sentence()
    assert recommend([result("fp8", 0.01), result("fp8", math.nan)], 1.0) is None  # NaN is never within
    assert recommend([result("fp8", math.nan), result("fp8", 0.01)], 1.0) is None
    for budget in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match="budget: expected a positive number"):
            recommend(found, budget)
    with pytest.raises(InvalidArgument, match="at least one"):
        recommend([], 0.1)


def test_refusals():
    for options, words in (
        ({"distributions": ["cauchy"]}, "distributions: expected some of"),
        ({"kv_lens": [0]}, "kv_lens: expected lengths from 1"),
        ({"kv_lens": [1 << 30]}, "kv_lens: expected lengths from 1"),
        ({"num_heads": 0}, "num_heads"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            measure_accuracy(**options)


def test_a_single_key_costs_only_its_own_rounding():
    found = measure_accuracy(["normal"], [1], formats=["bf16", "fp8"])
    assert found[0].out_error < 4e-3 and found[1].out_error < 0.06


def test_docstring_example():
    assert doctest.testmod(leanmla.accuracy).failed == 0


# -- the command ---------------------------------------------------------------------------------------------------------


def test_command(capsys, tmp_path):
    file = tmp_path / "a.json"
    argv = ["accuracy", "--kv", "64,128", "--distributions", "normal,model-like", "--formats", "fp8,mxfp4", "--heads", "4"]
    plot = ["--plot", str(tmp_path / "a.svg")] if importlib.util.find_spec("matplotlib") else []
    assert main([*argv, "--budget", "0.06", "--json", str(file), *plot]) == 0
    out = capsys.readouterr().out
    assert "model-like" in out and "Budget: fp8 (576 bytes a token)" in out.replace("\n", " ")
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())
    document = json.loads(file.read_text())
    assert document["schema"] == "leanmla-accuracy/1" and len(document["results"]) == 2 * 2 * 3
    assert document["recommendation"]["label"] == "fp8" and document["recommendation"]["worst_out_error"] <= 0.06
    assert document["environment"]["python"] and document["command"]
    if plot:
        assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_command_quiet_json_on_stdout_and_exit_codes(capsys, tmp_path):
    small = ["accuracy", "--kv", "32", "--distributions", "normal", "--heads", "2", "--formats", "mxfp4"]
    assert main([*small, "--quiet"]) == 0 and capsys.readouterr().out == ""
    assert main([*small, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_lens"] == [32]
    assert main([*small, "--budget", "0.0001"]) == 2
    assert "no format measured stays within" in capsys.readouterr().err
    for extra, words in (
        (["--budget", "0"], "--budget: expected a positive number"),
        (["--formats", "int4"], "format: expected one of"),
        (["--distributions", "x"], "distributions: expected some of"),
        (["--kv", "a"], "--kv: expected integers"),
        (["--plot", str(tmp_path / "a.gif")], "--plot: expected a file name"),
    ):
        assert main([*small, *extra]) == 2, extra
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1


def test_ctrl_c_leaves_no_file(capsys, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("leanmla.accuracy._measure_one", interrupted)
    assert main(["accuracy", "--kv", "32", "--json", str(tmp_path / "a.json")]) == 130
    assert not list(tmp_path.iterdir())


def test_a_layout_of_the_same_values_is_named_and_not_measured_twice(capsys):
    assert [(label, v.label) for label, v in same_values(["fp8", "mxfp4 floor"])] == [("mxfp4 floor", "mxfp4_row320 floor")]
    assert same_values(["mxfp4 even", "mxfp4_row320 even", "bf16"]) == []
    assert main(["accuracy", "--kv", "32", "--heads", "2", "--distributions", "normal"]) == 0
    assert capsys.readouterr().out.count("mxfp4_row320: 320 bytes a token, the values of mxfp4 and so its errors.") == 1
    pytest.importorskip("matplotlib")
    from leanmla.plots.accuracy_plot import accuracy_figure

    for formats, want in ((["mxfp4"], ["mxfp4_row320: as mxfp4, at 320"]), (["mxfp4", "mxfp4_row320"], [])):
        found = [r.document() for r in measure_accuracy(["normal"], [32], formats=formats, num_heads=2)]
        words = [t.get_text() for t in accuracy_figure(found).legends[0].get_texts()]
        assert [w for w in words if " as " in w] == want
