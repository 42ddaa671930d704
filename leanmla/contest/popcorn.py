"""The contest's line protocol on file descriptor ``$POPCORN_FD``.

``python -m leanmla.contest.popcorn test|benchmark|leaderboard|profile CASES [SUBMISSION.py]`` takes the place of the contest's
own evaluation script. Exit codes: 0 passed, 112 a check failed, 113 bad cases file, 111 no ``$POPCORN_FD``, 2 bad usage.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import sys
from pathlib import Path
from typing import TextIO

from .. import settings
from ..errors import InvalidArgument
from .cases import Case, read_cases
from .runner import Limits, Outcome, Session

__all__ = ["BAD_CASES", "CHECK_FAILED", "MODES", "NO_FD", "PASSED", "USAGE", "run"]

PASSED, USAGE, NO_FD, CHECK_FAILED, BAD_CASES = 0, 2, 111, 112, 113
MODES = ("test", "benchmark", "leaderboard", "profile")

_WARM_UP = Limits(benchmark_runs=100, benchmark_busy_seconds=0.1)


class _Log:
    """``key: value`` lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, key: str, value: object) -> None:
        text = "\\n".join(str(value).splitlines())  # a value never ends its line
        print(f"{key}: {text}", file=self._file, flush=True)


def run(
    mode: str, cases_file: str | Path | None, submission: str | Path, *, device: str, cases: list[Case] | None = None
) -> int:
    """Run a submission, speaking the protocol.

    Args:
        mode: one of :data:`MODES`.
        cases_file: path of a cases file; None uses ``cases``.
        submission: path of the submission.
        device: "cpu" or "cuda".

    Returns:
        The exit code.
    """
    number = settings.popcorn_fd()
    if not number:
        return NO_FD
    try:
        file = os.fdopen(int(number), "w", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"POPCORN_FD: {error}", file=sys.stderr)
        return USAGE
    os.set_inheritable(file.fileno(), False)
    with file:
        if mode not in MODES:
            print(f"mode: expected one of {', '.join(MODES)}, got {mode!r}.", file=sys.stderr)
            return USAGE
        try:
            secret = settings.popcorn_seed()
        except InvalidArgument as error:
            print(error, file=sys.stderr)
            return USAGE
        if cases_file is not None:
            try:
                cases = read_cases(cases_file, secret)
            except InvalidArgument as error:
                print(error, file=sys.stderr)
                return BAD_CASES
        elif secret is not None:
            from .cases import combine_seeds

            cases = [dataclasses.replace(c, seed=combine_seeds(c.seed, secret), line=c.spec) for c in cases or []]
        with Session(submission, device, seed=42 if secret is None else secret) as session:
            passed = _MODES[mode](_Log(file), session, cases or [])
    return PASSED if passed else CHECK_FAILED


def _test(log: _Log, session: Session, cases: list[Case]) -> bool:
    passed = True
    log("test-count", len(cases))
    for i, case in enumerate(cases):
        log(f"test.{i}.spec", case.spec)
        outcome = session.test(case)
        passed &= outcome.ok
        log(f"test.{i}.status", "pass" if outcome.ok else "fail")
        if not outcome.ok:
            log(f"test.{i}.error", outcome.message)
        elif outcome.note:
            log(f"test.{i}.message", outcome.note)
    log("check", "pass" if passed else "fail")
    return passed


def _timed(log: _Log, i: int, outcome: Outcome) -> bool:
    if outcome.ok and outcome.stats is not None:
        for field in dataclasses.fields(outcome.stats):
            log(f"benchmark.{i}.{field.name}", getattr(outcome.stats, field.name))
        return True
    log(f"benchmark.{i}.status", "fail")
    log(f"benchmark.{i}.error", outcome.message)
    return False


def _warm_up(session: Session, cases: list[Case]) -> None:
    """Clocks and compilers, on a GPU. Its verdict does not count: the case itself follows."""
    if session.device == "cuda" and cases:
        session.benchmark(cases[0], max_runs=_WARM_UP.benchmark_runs, seconds=1.0)


def _benchmark(log: _Log, session: Session, cases: list[Case]) -> bool:
    _warm_up(session, cases)
    passed = True
    log("benchmark-count", len(cases))
    for i, case in enumerate(cases):
        log(f"benchmark.{i}.spec", case.spec)
        passed &= _timed(log, i, session.benchmark(case))
    log("check", "pass" if passed else "fail")
    return passed


def _leaderboard(log: _Log, session: Session, cases: list[Case]) -> bool:
    _warm_up(session, cases)
    passed = True
    log("benchmark-count", len(cases))
    for i, case in enumerate(cases):
        outcome = session.leaderboard(case)
        log(f"benchmark.{i}.spec", case.spec)
        if not _timed(log, i, outcome):
            passed = False
            break  # a rank needs every case
    log("check", "pass" if passed else "fail")
    return passed


def _profile(log: _Log, session: Session, cases: list[Case]) -> bool:
    passed = True
    log("benchmark-count", len(cases))
    for i, case in enumerate(cases):
        log(f"benchmark.{i}.spec", case.spec)
        outcome = session.profile(case)
        passed &= outcome.ok
        if outcome.ok:
            # '+' and '*' instead of '+' and '/', which is what readers of this protocol decode.
            log(f"benchmark.{i}.report", base64.b64encode(outcome.report.encode(), b"+*").decode())
        else:
            log(f"benchmark.{i}.status", "fail")
            log(f"benchmark.{i}.error", outcome.message)
    log("check", "pass" if passed else "fail")
    return passed


_MODES = {"test": _test, "benchmark": _benchmark, "leaderboard": _leaderboard, "profile": _profile}


def main(argv: list[str] | None = None) -> int:
    """Entry point with the arguments of the contest's own script."""
    argv = sys.argv[1:] if argv is None else argv
    if not settings.popcorn_fd():
        return NO_FD
    if len(argv) not in (2, 3):
        print("usage: python -m leanmla.contest.popcorn MODE CASES [SUBMISSION.py]", file=sys.stderr)
        return USAGE
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return run(argv[0], argv[1], argv[2] if len(argv) == 3 else "submission.py", device=device)


if __name__ == "__main__":
    sys.exit(main())
