"""Cases files, seeds, statistics."""

import pytest

from leanmla.contest import RANKED, TESTS, Case, combine_seeds, parse_cases
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
