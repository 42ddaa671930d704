"""The contest's line protocol, byte for byte, and its exit codes."""

import base64
import os
import re

import pytest

from leanmla.contest import combine_seeds, popcorn, runner
from leanmla.errors import InvalidArgument

GOOD = "from reference import ref_kernel\ndef custom_kernel(data):\n    return ref_kernel(data)\n"
#: Right for kv length 16, wrong for others; shows the generator's seed through a file.
MIXED = GOOD + (
    "def custom_kernel(data):\n    good = ref_kernel(data)\n    return good if data[4]['kv_seq_len'] == 16 else good.float()\n"
)
LIMITS = runner.Limits(leaderboard_runs=8, benchmark_runs=20)  # instead of 100 and 1000
LINES = ["batchsize: 2; qseqlen: 1; kvseqlen: 16; seed: 4220", "batchsize: 1; qseqlen: 1;  kvseqlen: 17; seed: 1"]


@pytest.fixture
def speak(tmp_path, monkeypatch):
    """Run a mode; returns the exit code and what came out of the file descriptor."""

    def run(mode, submission=GOOD, cases=LINES, secret=None, entry=None):
        (tmp_path / "submission.py").write_text(submission)
        (tmp_path / "cases.txt").write_text("\n".join(cases) + "\n")
        read, write = os.pipe()
        monkeypatch.setenv("POPCORN_FD", str(write))
        if secret is None:
            monkeypatch.delenv("POPCORN_SEED", raising=False)
        else:
            monkeypatch.setenv("POPCORN_SEED", str(secret))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(runner, "Limits", lambda: LIMITS)
        code = entry() if entry else popcorn.run(mode, tmp_path / "cases.txt", tmp_path / "submission.py", device="cpu")
        with os.fdopen(read, encoding="utf-8") as file:
            return code, file.read().splitlines()

    return run


def test_test_mode(speak):
    code, lines = speak("test")
    assert code == 0
    assert lines == [
        "test-count: 2",
        f"test.0.spec: {LINES[0]}",
        "test.0.status: pass",
        f"test.1.spec: {LINES[1]}",
        "test.1.status: pass",
        "check: pass",
    ]


def test_a_failed_test_and_the_secret_seed(speak):
    code, lines = speak("test", MIXED, secret=31)
    assert code == 112
    assert lines == [
        "test-count: 2",
        f"test.0.spec: {LINES[0]}",
        "test.0.status: pass",
        f"test.1.spec: {LINES[1]}",
        "test.1.status: fail",
        "test.1.error: The output has dtype float32, expected bfloat16.",
        "check: fail",
    ]


NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"


def test_leaderboard_mode_and_the_contests_own_command_line(speak):
    code, lines = speak("leaderboard", cases=LINES[:1], entry=lambda: popcorn.main(["leaderboard", "cases.txt"]))
    assert code == 0
    assert lines[0] == "benchmark-count: 1" and lines[1] == f"benchmark.0.spec: {LINES[0]}" and lines[-1] == "check: pass"
    assert [line.split(": ")[0].split(".")[2] for line in lines[2:-1]] == ["runs", "mean", "std", "err", "best", "worst"]
    assert all(re.fullmatch(rf"benchmark\.0\.\w+: {NUMBER}", line) for line in lines[2:-1])
    assert 3 <= int(lines[2].split(": ")[1]) <= 8
    assert 1e3 < float(lines[3].split(": ")[1]) < 1e10, "nanoseconds"


def test_a_failed_benchmark(speak):
    code, lines = speak("benchmark", MIXED.replace("== 16", "== 99"), cases=LINES[:1])
    assert code == 112
    assert lines == [
        "benchmark-count: 1",
        f"benchmark.0.spec: {LINES[0]}",
        "benchmark.0.status: fail",
        "benchmark.0.error: The output has dtype float32, expected bfloat16.",
        "check: fail",
    ]


def test_profile_mode(speak):
    code, lines = speak("profile", cases=LINES[:1])
    assert code == 0 and lines[0] == "benchmark-count: 1" and lines[-1] == "check: pass"
    key, value = lines[2].split(": ")
    assert key == "benchmark.0.report" and b"aten::" in base64.b64decode(value, b"+*")


def test_other_exit_codes(speak, monkeypatch):
    code, lines = speak("test", cases=["what: ever"])
    assert code == 113 and lines == []
    code, lines = speak("test", cases=["batchsize: 1; qseqlen: 1; kvseqlen: 16; seed: 1", ""])
    assert code == 113 and lines == []
    assert speak("script")[0] == 2
    assert speak("test", secret="much")[0] == 2
    monkeypatch.delenv("POPCORN_FD")
    assert popcorn.run("test", "cases.txt", "submission.py", device="cpu") == 111
    assert popcorn.main(["test", "cases.txt"]) == 111


def test_secret_seeds_reach_the_inputs_and_the_global_generators(tmp_path, monkeypatch):
    """Without running anything: what a session is asked."""
    asked = []

    class Session:
        def __init__(self, submission, device, seed):
            self.seed = seed

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def test(self, case):
            asked.append((case.seed, self.seed))
            return popcorn.Outcome(case, True)

    monkeypatch.setattr(popcorn, "Session", Session)
    (tmp_path / "cases.txt").write_text(LINES[0])
    for secret in ("", "5", "0"):
        read, write = os.pipe()
        monkeypatch.setenv("POPCORN_FD", str(write))
        monkeypatch.setenv("POPCORN_SEED", secret)
        assert popcorn.run("test", tmp_path / "cases.txt", "submission.py", device="cpu") == 0
        os.close(read)
    assert asked == [(4220, 42), (combine_seeds(4220, 5), 5), (combine_seeds(4220, 0), 0)]


def test_info_knows_the_variables(monkeypatch):
    from leanmla import settings

    assert {"POPCORN_FD", "POPCORN_SEED"} <= set(settings.VARIABLES)
    monkeypatch.setenv("POPCORN_SEED", " 7 ")
    assert settings.popcorn_seed() == 7
    monkeypatch.setenv("POPCORN_SEED", "much")
    with pytest.raises(InvalidArgument, match="^POPCORN_SEED: expected an integer, got 'much'"):
        settings.popcorn_seed()


def test_values_stay_on_their_line():
    import io

    file = io.StringIO()
    popcorn._Log(file)("key", "two\nlines")
    assert file.getvalue() == "key: two\\nlines\n"
