"""Cases files, seeds, statistics."""

import pytest
import torch

from leanmla.contest import RANKED, TESTS, Case, combine_seeds, parse_cases, timing
from leanmla.contest.timing import geometric_mean, settled, summarize
from leanmla.errors import InvalidArgument


def test_lines_become_cases_and_keep_their_text():
    text = (
        "batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220\nqseqlen:2;batchsize:1;kvseqlen:  7 ;seed: -3; num_heads: 128\n"
    )
    first, second = parse_cases(text)
    assert first.arguments == {"batchsize": 4, "qseqlen": 1, "kvseqlen": 1024, "seed": 4220}
    assert second.arguments == {"batchsize": 1, "qseqlen": 2, "kvseqlen": 7, "seed": -3, "num_heads": 128}
    assert [c.spec for c in (first, second)] == text.splitlines()
    assert Case(4, 1, 1024, 4220).spec == text.splitlines()[0]
    assert parse_cases(Case(4, 1, 8, 1, 20).spec)[0].num_heads == 20


def test_the_secret_seed_is_combined_in_integers():
    assert combine_seeds(3, 4) == 3 + 7 * 8 // 2
    big = 10**15 + 7
    assert combine_seeds(4220, big) == 4220 + (4220 + big) * (4221 + big) // 2  # exact, beyond what a float holds
    case = parse_cases("batchsize: 1; qseqlen: 1; kvseqlen: 1; seed: 4220", secret=11)[0]
    assert case.seed == combine_seeds(4220, 11) and "4220" in case.spec
    assert parse_cases("batchsize: 1; qseqlen: 1; kvseqlen: 1; seed: 4220", secret=0)[0].seed == 4220 + 4220 * 4221 // 2


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "no case"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 1024", "seed is missing"),
        ("batchsize: four; qseqlen: 1; kvseqlen: 8; seed: 1", "expected 'name: integer'"),
        ("batchsize 4; qseqlen: 1; kvseqlen: 8; seed: 1", "expected 'name: integer'"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1; tp: 8", "names among"),
        ("batchsize: 0; qseqlen: 1; kvseqlen: 8; seed: 1", "must be positive"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1\n\n", "line 2"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1;", "expected 'name: integer'"),
    ],
)
def test_bad_lines_are_named(text, why):
    with pytest.raises(InvalidArgument, match=why):
        parse_cases(text)


def test_the_contests_own_cases():
    assert [(c.batchsize, c.qseqlen, c.kvseqlen, c.seed) for c in TESTS] == [
        (4, 1, 1024, 4220), (32, 1, 1024, 5412), (64, 1, 8192, 1360), (256, 1, 8192, 9826),
    ]  # fmt: skip
    assert {(c.batchsize, c.kvseqlen) for c in RANKED} == {(b, kv) for b in (4, 32, 64, 256) for kv in (1024, 8192)}
    assert TESTS[0].small().kvseqlen == 64 and Case(1, 1, 20, 1).small().kvseqlen == 16


def test_statistics():
    stats = summarize([1.0, 2.0, 3.0, 4.0])
    assert (stats.runs, stats.mean, stats.best, stats.worst) == (4, 2.5, 1.0, 4.0)
    assert stats.std == pytest.approx(1.2909944) and stats.err == pytest.approx(1.2909944 / 2)
    assert settled([1000.0, 1000.1, 1000.0]) and not settled([1000.0, 1000.0]) and not settled([1.0, 2.0, 3.0])
    assert geometric_mean([1.0, 100.0]) == pytest.approx(10.0)


def test_what_is_written_after_the_second_event_comes_too_late(monkeypatch):
    """On a GPU: a stand-in for work on another stream, which ends when the device is waited for."""
    late, right = torch.zeros(3), torch.ones(3)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 1.5

    waits = []
    monkeypatch.setattr(timing, "_Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: late.copy_(right) if waits else waits.append(1))
    monkeypatch.setattr(timing.utils, "clear_l2_cache", lambda: None)
    for _ in range(2):  # and what the first call left in the same tensor does not help the second
        waits.clear()
        result, ns = timing.time_call(lambda: late, torch.device("cuda"))
        assert result.tolist() == [0.0, 0.0, 0.0] and ns == 1.5e6
    result, _ = timing.time_call(lambda: late.copy_(right), torch.device("cuda"))
    assert result.tolist() == [1.0, 1.0, 1.0]
    assert timing.as_left(late, torch.device("cpu")) is late and timing.as_left("done", torch.device("cuda")) == "done"
