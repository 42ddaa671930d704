"""Goals: what a file may say, and what a run says to them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from leanmla.bench.cases import cases_named, contest_cases
from leanmla.bench.goals import judge, read_goals
from leanmla.bench.measure import Measurement
from leanmla.cli import main
from leanmla.errors import InvalidArgument

H200 = Path(__file__).resolve().parents[2] / "benchmarks" / "goals" / "h200.json"


def measured(case, fmt, time_us, backend="triton", **changes):
    values = {"status": "ok", "peer": False, **changes}
    return Measurement(
        case=case, batch=1, kv_lens=1, num_heads=16, q_len=1, page_size=64, format=fmt, contender=f"{backend} {fmt}",
        backend=backend, time_us=time_us, **values,
    )  # fmt: skip


def goals_file(tmp_path, **parts):
    path = tmp_path / "goals.json"
    path.write_text(json.dumps({"schema": "leanmla-goals/1", "device": "H200", **parts}))
    return path


def verdicts(path, results, read_tb_s=4.66):
    return judge(read_goals(path), results, cases_named("all,small"), read_tb_s)


def test_a_table_takes_the_fastest_of_ours_that_was_timed(tmp_path):
    table = {
        "title": "t",
        "columns": {"a": ["fp8"], "b": ["bf16", "fp8"]},
        "rows": {"4 x 1024": [10, 10], "32 x 1024": [1, None]},
    }
    results = [
        measured("4 x 1024", "fp8", 11.0),
        measured("4 x 1024", "fp8", 10.5, backend="hopper"),
        measured("4 x 1024", "bf16", 10.0),
        measured("4 x 1024", "fp8", 1.0, peer=True),
        measured("4 x 1024", "fp8", 1.0, status="wrong"),
    ]
    a, b, c = verdicts(goals_file(tmp_path, tables=[table]), results)
    assert (a.time_us, a.limit_us, a.met) == (10.5, 10.0, False)
    assert (b.time_us, b.met) == (10.0, True)  # at most: equal is met
    assert (c.time_us, c.met) == (None, None)
    table["backend"] = "triton"
    assert verdicts(goals_file(tmp_path, tables=[table]), results)[0].time_us == 11.0


def test_limits_against_another_result_the_floor_and_the_grid(tmp_path):
    limits = [
        {"name": "gather", "case": "256 x 8192 page1", "formats": ["fp8"], "times": 1.08, "of": {"case": "256 x 8192", "formats": ["fp8"]}},
        {"name": "floor", "case": "131072 + 31 x 1024", "formats": ["bf16"], "floor_times": 1.3, "plus_us": 10},
        {"name": "mean", "formats": ["bf16"], "geomean_us": 62},
    ]  # fmt: skip
    path = goals_file(tmp_path, limits=limits)
    results = [measured("256 x 8192 page1", "fp8", 107.0), measured("131072 + 31 x 1024", "bf16", 60.0)]
    gather, floor, mean = verdicts(path, results)
    assert gather.met is None and mean.met is None
    assert floor.limit_us == pytest.approx(1.3 * (131072 + 31 * 1024) * 1152 / 4.66e6 + 10) and floor.met
    results.append(measured("256 x 8192", "fp8", 100.0))
    results += [measured(c.label, "bf16", 61.0) for c in contest_cases()]
    gather, _, mean = verdicts(path, results)
    assert gather.limit_us == pytest.approx(108.0) and gather.met
    assert mean.time_us == pytest.approx(61.0) and mean.met


def test_equal_lengths_have_as_many_keys():
    ragged, evened = (c for c in cases_named("ragged") if c.name.startswith("256"))
    assert evened.uniform and math.isclose(evened.tokens, ragged.tokens, rel_tol=1e-3) and evened.batch == ragged.batch


def test_the_committed_goals_name_cases_of_the_benchmark():
    goals = read_goals(H200).goals
    labels = {c.label for c in cases_named("all")}
    for goal in goals:
        for which in filter(None, (goal.which, goal.of)):
            assert not which.case or which.case in labels, which
    assert sum(g.table.startswith("Tuned") for g in goals) == 24


@pytest.mark.parametrize(
    "parts, text",
    [
        ({"schema": "x"}, "leanmla-goals/1"),
        ({"tables": [{"title": "t", "columns": {"a": ["fp8"]}, "rows": {"x": [1, 2]}}]}, "expected 1 limits, got 2"),
        ({"tables": [{"title": "t", "columns": {"a": ["fp9"]}, "rows": {"x": [1]}}]}, "fp9"),
        ({"tables": [{"title": "t", "columns": {"a": ["fp8"]}, "rows": {"x": [0]}}]}, "positive"),
        ({"limits": [{"name": "n", "case": "x", "formats": ["fp8"]}]}, "expected one of us"),
        ({"limits": [{"name": "n", "formats": ["fp8"], "us": 3}]}, "with one"),
        ({"limits": [{"name": "n", "case": "x", "formats": ["fp8"], "times": 2}]}, "of"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, parts, text):
    with pytest.raises(InvalidArgument, match=text) as error:
        read_goals(goals_file(tmp_path, **parts))
    assert "--goals" in str(error.value)


def test_a_missing_file_is_refused_before_any_work(tmp_path, capsys):
    assert main(["bench", "--cases", "small", "--goals", str(tmp_path / "none.json")]) == 2
    assert "--goals" in capsys.readouterr().err


def test_verdicts_are_printed_and_kept(tmp_path, capsys):
    table = {"title": "loose", "columns": {"bf16": ["bf16"]}, "rows": {"1 x 65": [1e9]}}
    tight = {"name": "tight", "case": "1 x 65", "formats": ["bf16"], "us": 1e-6}
    path = goals_file(tmp_path, tables=[table], limits=[tight])
    out = tmp_path / "r.json"
    arguments = ["--cases", "1x65", "--formats", "bf16", "--peers", "none", "--seconds", "0.02", "--device", "cpu"]
    assert main(["bench", *arguments, "--goals", str(path), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "pass" in text and "MISS" in text and "1 met, 1 missed" in text and "meant for H200" in text
    assert [g["met"] for g in json.loads(out.read_text())["goals"]] == [True, False]
