"""Runs a submission in a process of its own and says in one sentence what went wrong, whatever went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Case
from .timing import Stats

__all__ = ["Limits", "Outcome", "Session"]


@dataclass(frozen=True)
class Limits:
    """How long things may take, and how often they are repeated."""

    call_seconds: float = 300.0  #: one call of the submission (the first one compiles), or its import
    benchmark_runs: int = 1000
    benchmark_busy_seconds: float = 50.0  #: of summed call time
    leaderboard_runs: int = 100
    leaderboard_busy_seconds: float = 30.0
    case_seconds: float = 120.0  #: of wall clock for one case's timed calls


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: Case
    ok: bool
    message: str = ""  #: why not, one sentence
    note: str = ""  #: a remark on a case that passed
    stats: Stats | None = None
    relative_error: float | None = None  #: L2, against the reference
    max_error: float | None = None
    report: str = ""  #: the profiler's table


_LOOK_SECONDS = 0.1  # how often to see whether the process lives while it says nothing
_LONGEST_LINE = 1 << 24  # bytes of one answer; a profile has some thousands


class _Gone(Exception):
    """The process gave no answer; the text is the sentence."""


class Session:
    """A submission in a spawned process, which is started when needed and again after it died.

    Args:
        submission: path of the Python file.
        device: "cpu" or "cuda".
        seed: global seeds of the process.
        limits: see :class:`Limits`.
        quiet: drop what the submission prints; otherwise it goes to stderr.
        strict: make stale results after an in-place change of q a failure too.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        submission: str | Path,
        device: str = "cpu",
        *,
        seed: int = 42,
        limits: Limits | None = None,
        quiet: bool = False,
        strict: bool = False,
    ) -> None:
        self.submission = Path(submission)
        self.device = device
        self.seed = seed
        self.limits = limits or Limits()
        self.quiet = quiet
        self.strict = strict
        self._process: subprocess.Popen | None = None
        self._to: int | None = None
        self._from: int | None = None
        self._pending = b""
        self._token = secrets.token_hex(8)  #: in each line of the worker's, and in none of a submission's

    # -- what to do ---------------------------------------------------------------------------------------------------

    def test(self, case: Case) -> Outcome:
        """Check one case."""
        return self._ask("test", case)

    def benchmark(self, case: Case, *, max_runs: int | None = None, seconds: float | None = None) -> Outcome:
        """Check one case, then time it on one set of inputs until the error of the mean is below 0.1 % or time runs out."""
        limits = self.limits
        return self._ask(
            "benchmark", case, max_runs=max_runs or limits.benchmark_runs, max_busy_seconds=limits.benchmark_busy_seconds,
            max_seconds=seconds or limits.case_seconds,
        )  # fmt: skip

    def leaderboard(self, case: Case) -> Outcome:
        """Time one case, every call on fresh inputs and checked."""
        limits = self.limits
        return self._ask(
            "leaderboard", case, max_runs=limits.leaderboard_runs, max_busy_seconds=limits.leaderboard_busy_seconds,
            max_seconds=limits.case_seconds,
        )  # fmt: skip

    def profile(self, case: Case) -> Outcome:
        """Profile one call."""
        return self._ask("profile", case)

    # -- the process --------------------------------------------------------------------------------------------------

    def _ask(self, do: str, case: Case, **options: Any) -> Outcome:
        try:
            self._start()
            assert self._to is not None
            request = {"do": do, "case": case.arguments, "strict": self.strict, **options}
            os.write(self._to, (json.dumps(request) + "\n").encode())
            answer = self._answer()
        except BrokenPipeError:
            answer = {"ok": False, "message": self._epitaph()}
            self.close()
        except _Gone as gone:
            answer = {"ok": False, "message": str(gone)}
            self.close()
        stats = answer.get("stats")
        return Outcome(
            case, answer["ok"], answer.get("message", ""), answer.get("note", ""), Stats(**stats) if stats else None,
            answer.get("relative_error"), answer.get("max_error"), answer.get("report", ""),
        )  # fmt: skip

    def _start(self) -> None:
        if self._process is not None:
            return
        if not self.submission.is_file():
            raise _Gone(f"There is no file {self.submission}.")
        child_reads, self._to = os.pipe()
        self._from, child_writes = os.pipe()
        self._pending = b""
        environment = {k: v for k, v in os.environ.items() if k not in ("POPCORN_FD", "POPCORN_SEED")}
        package = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
        where = subprocess.DEVNULL if self.quiet else _stderr()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "leanmla.contest.worker", str(self.submission.resolve()), self.device, str(self.seed),
                    str(child_reads), str(child_writes),
                ],
                stdin=subprocess.DEVNULL, stdout=where, stderr=where, env=environment, pass_fds=(child_reads, child_writes),
                start_new_session=True,  # so that close() can end what the submission starts, too
            )  # fmt: skip
        finally:
            os.close(child_reads)
            os.close(child_writes)
        os.write(self._to, f"{self._token}\n".encode())
        answer = self._answer()
        if not answer["ok"]:
            raise _Gone(answer["message"])

    def _answer(self) -> dict[str, Any]:
        """The next answer, past the events before it; each event starts the clock anew."""
        doing = "start"
        while True:
            line = self._line(doing)
            try:
                message = json.loads(line)
                known = message["token"] == self._token
            except (ValueError, LookupError, TypeError, RecursionError):
                known = False
            if not known:
                raise _Gone(_foreign(line))
            if message.get("done"):
                return message
            doing = message["event"]

    def _line(self, doing: str) -> bytes:
        assert self._from is not None
        # Starting up and the runner's own work between calls are not the submission's fault, but must end some time too.
        deadline = time.monotonic() + self.limits.call_seconds + (120.0 if doing in ("start", "prepare") else 0.0)
        assert self._process is not None
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            # The end of the process, not of the pipe: a child that it left behind may hold that open. Asked before the pipe, so
            # that nothing said before the end is lost.
            ended = self._process.poll() is not None
            ready, _, _ = select.select([self._from], [], [], 0.0 if ended else min(left, _LOOK_SECONDS))
            if ready:
                chunk = os.read(self._from, 1 << 16)
                if not chunk:
                    raise _Gone(self._epitaph())
                self._pending += chunk
                if len(self._pending) > _LONGEST_LINE:
                    raise _Gone(_foreign(self._pending))
            elif ended:
                raise _Gone(self._epitaph())
            elif not left:
                what = {"import": "The import of the submission", "call": "custom_kernel"}.get(doing, "The process")
                raise _Gone(f"{what} hangs: no answer within {self.limits.call_seconds:g} s.")
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _epitaph(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "The submission's process closed its pipe."
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            return f"The submission crashed: its process was killed by {name}."
        return f"The submission crashed: its process ended with exit code {code}."

    def close(self) -> None:
        """End the process and those that it started."""
        for fd in (self._to, self._from):
            if fd is not None:
                os.close(fd)
        self._to = self._from = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _foreign(line: bytes) -> str:
    return f"The submission wrote to the pipe between its process and the runner: {line[:60].decode(errors='replace')!r}."


def _stderr() -> int:
    """Where the submission's prints go: our stderr, if that is a file at all."""
    try:
        return sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return subprocess.DEVNULL
