"""The benchmark's parts: cases, data, timers, results."""

from __future__ import annotations

import json
import os

import pytest
import torch

from leanmla.bench import results, timing
from leanmla.bench.cases import BenchCase, cases_named, contest_cases
from leanmla.bench.data import LatentPool, make_copies, pick_sequences, problem_of, sequences
from leanmla.bench.environment import environment
from leanmla.bench.measure import Contender, copies_needed, measure_case
from leanmla.bench.peers import PEERS, peers_named
from leanmla.bench.runner import contenders_for, earlier_times, formats_named
from leanmla.cli.known_devices import KNOWN
from leanmla.device import override
from leanmla.errors import BackendUnavailable, InvalidArgument
from leanmla.formats import FORMATS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> LatentPool:
    return LatentPool(CPU, tokens=256)


# -- cases ------------------------------------------------------------------------------------------------------------


def test_case_labels_are_unique():
    cases = cases_named("all,small")
    assert len({c.label for c in cases}) == len(cases)
    assert [c.label for c in contest_cases()][:3] == ["4 x 1024", "4 x 8192", "32 x 1024"]


def test_a_case_by_itself_and_no_case_twice():
    (case,) = cases_named("3x17")
    assert case == BenchCase((17,) * 3) and case.tokens == 51 and case.pages == 3
    assert len(cases_named("contest,contest,4x1024")) == 8
    with pytest.raises(InvalidArgument, match="got 'x'"):
        cases_named("x")


def test_all_formats_are_those_with_a_kernel():
    cases = contest_cases()
    assert formats_named(["all"], cases, CPU) == list(FORMATS)
    assert formats_named(["fp8", "fp8", "bf16"], cases, CPU) == ["fp8", "bf16"]
    known = KNOWN["a100"]
    with override(known.info, assume_installed=known.packages):
        assert formats_named(["mxfp4", "all"], cases, CPU) == ["mxfp4", "bf16", "fp8", "fp8_tile128"]
        assert formats_named(["mxfp4_row320"], cases, CPU) == ["mxfp4_row320"]
    with pytest.raises(InvalidArgument, match="format"):
        formats_named(["all", "fp9"], cases, CPU)


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_copies_have_the_same_keys_and_pages_of_their_own(pool, fmt):
    case = BenchCase((100, 1, 65), page_size=16, q_len=2)
    a, b = make_copies(case, fmt, pool, 2)
    assert a.cache.data.data_ptr() != b.cache.data.data_ptr()
    assert not torch.equal(a.q, b.q)
    assert a.table.kv_lens().tolist() == [100, 1, 65]
    slots = torch.cat([a.table.slots(i) for i in range(3)])
    assert len(set(slots.tolist())) == 166
    assert torch.equal(a.cache.gather(slots), b.cache.gather(slots))
    (other,) = make_copies(case, "bf16", pool, 1)
    assert torch.equal(other.q, a.q) and torch.equal(other.table.page_ids, a.table.page_ids)


def test_filled_cache_equals_quantising_every_row(pool):
    cache = pool.cache("mxfp4", 10, 64)
    rows = pool.latent.repeat(3, 1)[:640]
    whole = FORMATS["mxfp4"].quantize(rows)
    assert torch.equal(cache.data.flatten(0, 1), whole.data) and torch.equal(cache.scale.flatten(0, 1), whole.scale)


def test_picked_sequences():
    assert pick_sequences([5], 4) == [0]
    assert pick_sequences([9, 1, 30, 9, 9, 9, 9, 9], 4) == [0, 1, 2, 7]
    picks = pick_sequences([8] * 256, 6)
    assert len(picks) == 6 and picks[0] == 0 and picks[-1] == 255


def test_sequences_cut_a_call(pool):
    case = BenchCase((100, 7, 65), q_len=2)
    (copy,) = make_copies(case, "fp8", pool, 1)
    part = sequences(copy, "fp8", [0, 2])
    assert part.q.shape[0] == 4 and torch.equal(part.q[2:], copy.q[4:])
    assert torch.equal(part.table.slots(1), copy.table.slots(2))


def test_problem_is_what_a_call_would_have(pool):
    from leanmla import checks

    case = BenchCase((100, 7), num_heads=8, q_len=2)
    (copy,) = make_copies(case, "fp8", pool, 1)
    args = checks.check_call(copy.q, copy.cache, copy.table, sm_scale=1.0, qo_indptr=None, causal=True, logit_cap=0.0, out=None,
                             return_lse=False, num_kv_splits=None, split_size=None, max_q_len=None,
                             check_contents=True)  # fmt: skip
    assert args.problem == problem_of(case, "fp8")


# -- timers -------------------------------------------------------------------------------------------------------------


def test_median_and_spread():
    times = timing.Times((4.0, 1.0, 2.0, 3.0, 100.0))
    assert times.median_us == 3.0
    assert times.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert timing.Times((5.0,)).spread == 0.0


def test_contenders_take_turns():
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def sample(self) -> float:
            order.append(self.name)
            return 1.0

    times = timing.interleave({n: Fake(n) for n in "ab"}, seconds=0.0, min_rounds=3)
    assert order == ["a", "b"] * 3 and times["a"].samples_us == (1.0,) * 3


def test_clock_timer_goes_from_copy_to_copy():
    seen: list[int] = []
    timer = timing.make_timer(CPU, [lambda i=i: seen.append(i) for i in range(3)])
    seen.clear()
    for _ in range(4):
        assert timer.sample() >= 0
    assert seen == [0, 1, 2, 0]


def test_copies_exceed_the_cache():
    from leanmla.device import last_level_cache

    for case in cases_named("1x64,4x8192"):
        n = copies_needed(case, "mxfp4", CPU)
        assert n == 256 or n * case.tokens * 306 > 3 * last_level_cache(CPU)


# -- contenders and peers -----------------------------------------------------------------------------------------------


def test_peers_agree_with_the_definition(pool, monkeypatch):
    monkeypatch.setattr("leanmla.bench.measure.copies_needed", lambda case, fmt, device: 2)
    contenders = [Contender("bf16", peer=p) for p in PEERS if p.refusal(BenchCase((80,) * 2), CPU) is None]
    assert {c.name for c in contenders} == {"torch sdpa bf16", "torch bmm bf16", "torch bmm fp32"}
    for r in measure_case(BenchCase((80,) * 2), contenders, pool, seconds=0.0, min_rounds=2):
        assert r.status == "ok" and r.relative_error < 1e-2 and r.time_us > 0


def test_peers_say_why_they_cannot():
    by_name = {p.name: p for p in PEERS}
    assert "equally long" in by_name["torch bmm bf16"].refusal(BenchCase((1, 2)), CPU)
    assert "cuda only" in by_name["flash_mla bf16"].refusal(BenchCase((64,)), CPU)
    assert peers_named("none") == [] and len(peers_named("torch")) == 3


def test_contenders_are_filtered_and_explicit_ones_refused():
    cases = [BenchCase((64,))]
    assert [c.name for c in contenders_for(cases, ["fp8"], "reference", [], CPU)] == ["reference fp8"]
    assert "hopper fp8" not in {c.name for c in contenders_for(cases, ["fp8"], "all", PEERS, CPU)}
    with pytest.raises(BackendUnavailable, match="hopper"):
        contenders_for(cases, ["fp8"], "hopper", [], CPU)


def test_a_case_too_large_for_memory_is_skipped(pool, monkeypatch):
    monkeypatch.setattr("leanmla.bench.measure.free_memory", lambda device: 1000)
    (result,) = measure_case(BenchCase((80,) * 2), [Contender("bf16", "reference")], pool)
    assert result.status == "skipped" and "GiB" in result.message


# -- results ------------------------------------------------------------------------------------------------------------


def test_json_has_no_nan_and_short_lists():
    text = results.dump_json({"a": float("nan"), "b": [1.5, 2, 3], "c": (float("inf"), "x")})
    assert json.loads(text) == {"a": None, "b": [1.5, 2, 3], "c": [None, "x"]}
    assert "[1.5, 2, 3]" in text


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    results.write_json(file, {"schema": "leanmla-x/1"})
    assert results.read_json(file) == {"schema": "leanmla-x/1"}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write_json(file, {"schema": "leanmla-x/2"})
    assert results.read_json(file) == {"schema": "leanmla-x/1"}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "r.json"
    file.write_text("{}")
    with pytest.raises(InvalidArgument, match="not a result file"):
        results.read_json(file)
    with pytest.raises(InvalidArgument, match="expected a result of leanmla bench"):
        earlier_times({"schema": "leanmla-run/1"})


def test_geomean():
    assert results.geomean([1.0, 100.0]) == pytest.approx(10.0)


def test_environment_names_what_matters():
    facts = environment(CPU)
    assert facts["device"]["kind"] == "cpu" and facts["packages"]["torch"] and facts["python"]
    assert environment(CPU, "abc1234")["commit"] == "abc1234"  # a copy's own repository may be at another commit
    json.dumps(facts)
