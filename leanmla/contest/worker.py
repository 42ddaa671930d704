"""The process that a submission runs in: takes requests as JSON lines from one pipe, answers on another.

The first line it reads is a word that it puts into all of its own, which tells them from what a submission may write there.
Before each piece of the submission's code it writes a ``{"event": ...}`` line, so that whoever waits can tell a hang from a
long job. It is started by :mod:`leanmla.contest.runner`, which see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

_FOLLOWS = 0.8  # cosine to the reference below which an output does not follow its inputs; correct 4-bit caches have 0.98
_SAME = 0.99  # cosine between two outputs above which they are taken to be one
_OWN_PID, _getpid, _exit = os.getpid(), os.getpid, os._exit  # bound before a submission can replace them


class _Failure(Exception):
    """A submission is at fault; the text is one sentence for its author."""


class Worker:
    """One submission, loaded."""

    def __init__(self, submission: Path, device: str, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self._event("prepare")
        self._prepare(submission, device)
        self._event("import")
        self._kernel = self._load(submission)

    def _event(self, what: str) -> None:
        self._say({"event": what})

    def _prepare(self, submission: Path, device: str) -> None:
        import torch

        if device == "cpu":
            from . import cpu_as_cuda

            cpu_as_cuda.enable()
        from .. import compat
        from . import reference, task, timing, utils

        reference.DEVICE = device
        # What judges and times is bound before the submission is loaded, which gets copies of its own to do with as it likes.
        self._reference = SimpleNamespace(
            **{name: getattr(reference, name) for name in ("generate_input", "ref_kernel", "RTOL", "ATOL")}
        )
        self._compare = utils.compare
        self._timing = SimpleNamespace(
            **{name: getattr(timing, name) for name in ("as_left", "settled", "summarize", "time_call")}
        )
        for module in (task, utils, reference):
            sys.modules[module.__name__.rpartition(".")[2]] = _copy_of(module)
        sys.modules["reference"].DEVICE = device  # type: ignore[attr-defined]
        # On a CPU even an installed aiter is of no use: it needs its GPU.
        if device == "cpu" or importlib.util.find_spec("aiter") is None:
            compat.install("aiter", force=True)
        sys.path.insert(0, str(submission.parent))
        self._torch = torch
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")

    def _load(self, submission: Path) -> Callable[[Any], Any]:
        spec = importlib.util.spec_from_file_location("submission", submission)
        if spec is None or spec.loader is None:
            raise _Failure(f"The submission {submission.name} is not a Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules["submission"] = module
        try:
            _in_this_process(spec.loader.exec_module, module)
        except BaseException as error:
            traceback.print_exc()
            raise _Failure(f"The submission could not be imported: {_one_line(error)}.") from error
        kernel = getattr(module, "custom_kernel", None)
        if not callable(kernel):
            raise _Failure("The submission has no function custom_kernel(data).")
        return partial(_in_this_process, kernel)

    # -- requests -----------------------------------------------------------------------------------------------------

    def test(self, request: dict[str, Any]) -> dict[str, Any]:
        """One checked call, and the same again after the inputs changed in place."""
        data = self._reference.generate_input(**request["case"])
        return self._checked(data, request)[0]

    def benchmark(self, request: dict[str, Any]) -> dict[str, Any]:
        """A check, then timed calls on the same inputs."""
        settled, summarize, time_call = self._timing.settled, self._timing.summarize, self._timing.time_call
        data = self._reference.generate_input(**request["case"])
        answer, expected = self._checked(data, request)
        durations: list[float] = []
        begin = perf_counter()
        output = None
        while len(durations) < request["max_runs"]:
            self._event("call")
            output, ns = self._guard(partial(time_call, partial(self._kernel, _lent(data)), self._device))
            durations.append(ns)
            if settled(durations) or (len(durations) >= 3 and self._over(begin, durations, request)):
                break
        self._require(output, expected, "The output of the last timed call is wrong")
        return {**answer, "stats": dataclasses.asdict(summarize(durations))}

    def leaderboard(self, request: dict[str, Any]) -> dict[str, Any]:
        """A check, then timed calls, each on fresh inputs and checked."""
        settled, summarize, time_call = self._timing.settled, self._timing.summarize, self._timing.time_call
        case = dict(request["case"])
        data = self._reference.generate_input(**case)
        answer, _ = self._checked(data, request)
        durations: list[float] = []
        begin = perf_counter()
        while len(durations) < request["max_runs"]:
            case["seed"] += 13
            fresh = self._reference.generate_input(**case)  # while the previous inputs still hold their addresses
            expected = self._reference.ref_kernel(fresh)
            data = fresh
            self._event("call")
            output, ns = self._guard(partial(time_call, partial(self._kernel, _lent(data)), self._device))
            self._require(output, expected, f"Wrong on fresh inputs, call {len(durations) + 1}")
            durations.append(ns)
            if settled(durations) or (len(durations) >= 3 and self._over(begin, durations, request)):
                break
        return {**answer, "stats": dataclasses.asdict(summarize(durations))}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """torch.profiler's table of one call."""
        torch = self._torch
        from torch.profiler import ProfilerActivity, profile

        data = self._reference.generate_input(**request["case"])
        expected = self._reference.ref_kernel(data)
        self._call(data)  # compiles, so that the profiled call shows the steady state
        gpu = self._device.type == "cuda"
        self._event("call")
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
            output = self._guard(partial(self._kernel, _lent(data)))
        self._require(output, expected, "Wrong")
        key = "self_device_time_total" if gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=20)
        return {"ok": True, "report": table, **self._quality(output, expected, torch)}

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _checked(self, data: Any, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Check one call on ``data``; afterwards ``data`` holds other values, whose reference is returned too."""
        torch, reference = self._torch, self._reference
        expected = reference.ref_kernel(data)  # before the submission can touch the inputs
        output = self._call(data)
        self._require(output, expected, "Wrong")
        answer: dict[str, Any] = {"ok": True, **self._quality(output, expected, torch)}
        first = output.clone()

        # New keys in the same tensors: an output kept from before, or anything made from the old keys, shows.
        other = reference.generate_input(**{**request["case"], "seed": request["case"]["seed"] + 1})
        self._copy_into(data[1], other[1])
        changed = reference.ref_kernel(data)
        output = self._call(data)
        # Told apart before the tolerance has its say: with many keys it cannot tell old values from new ones, and with few it
        # would only say that values are off.
        if self._usable(output, changed) and self._cosine(output, changed) < _FOLLOWS and self._cosine(output, first) > _SAME:
            raise _Failure(
                "The result is stale: kv_data changed in place, at the same addresses, and the output is still the one of the old values."
            )
        self._require(output, changed, "Wrong after kv_data changed in place")
        # A new query in the same tensor. The contest never does that, so it is worth a remark, not a verdict.
        self._copy_into(data[0], other[0])
        expected = reference.ref_kernel(data)
        output = self._call(data)
        if self._reason(output, expected):
            note = "Something made from q is kept by its address: when q changes in place, the output is stale."
            if request.get("strict"):
                raise _Failure(note)
            answer["note"] = note
            expected = self._unmoved(data, request)
        return answer, expected

    def _unmoved(self, data: Any, request: dict[str, Any]) -> Any:
        """Put the first query back, for a submission that would not see another one in its place."""
        original = self._reference.generate_input(**request["case"])
        self._copy_into(data[0], original[0])
        return self._reference.ref_kernel(data)

    def _copy_into(self, to: Any, source: Any) -> None:
        if isinstance(to, dict):
            for key in to:
                self._copy_into(to[key], source[key])
        elif isinstance(to, tuple):
            for t, s in zip(to, source):
                self._copy_into(t, s)
        elif to.dtype.itemsize == 1:
            to.view(self._torch.uint8).copy_(source.view(self._torch.uint8))
        else:
            to.copy_(source)

    def _call(self, data: Any) -> Any:
        """One call: its output, as the stream that asked for it finds it."""
        self._event("call")
        return self._guard(lambda: self._timing.as_left(self._kernel(_lent(data)), self._device))

    def _reason(self, output: Any, expected: Any) -> str:
        """Why ``output`` cannot stand for ``expected``, or "" if it can.

        With many keys zeros are within the tolerance, so the output also has to point the way that the reference does.
        """
        good, reason = self._compare(output, expected, rtol=self._reference.RTOL, atol=self._reference.ATOL)
        if good and not (cosine := self._cosine(output, expected)) >= _FOLLOWS:
            return f"The output is within the tolerance but does not follow its inputs (cosine {cosine:.2f} to the reference)."
        return reason

    def _require(self, output: Any, expected: Any, what: str) -> None:
        reason = self._reason(output, expected)
        if reason:
            raise _Failure(reason if what == "Wrong" else f"{what}: {reason[0].lower()}{reason[1:]}")

    def _usable(self, output: Any, expected: Any) -> bool:
        """Whether the two can be compared at all."""
        return isinstance(output, self._torch.Tensor) and output.shape == expected.shape and output.device == expected.device

    def _cosine(self, a: Any, b: Any) -> float:
        """Over the finite values: single infinities are the tolerance's affair."""
        a, b = (t.double().flatten().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
        size = float(a.norm() * b.norm())
        return float(a @ b) / size if size > 0 else float(a.norm() == b.norm())

    def _quality(self, output: Any, expected: Any, torch: Any) -> dict[str, float]:
        difference = (output.double() - expected.double()).norm()
        return {
            "relative_error": float(difference / expected.double().norm().clamp(min=1e-30)),
            "max_error": float((output.double() - expected.double()).abs().max()) if output.numel() else 0.0,
        }

    def _guard(self, call: Callable[[], Any]) -> Any:
        """The submission's exceptions as failures, including those that only show when the device is waited for."""
        try:
            result = call()
            self._sync()
            return result
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() too
            traceback.print_exc()
            raise _Failure(f"custom_kernel raised {_one_line(error)}.") from error

    def _sync(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    @staticmethod
    def _over(begin: float, durations: list[float], request: dict[str, Any]) -> bool:
        return perf_counter() - begin > request["max_seconds"] or sum(durations) > request["max_busy_seconds"] * 1e9


def _end_if_forked() -> None:
    """End a copy of this process that the submission made and let return: there is one result, and it is the original's."""
    if _getpid() != _OWN_PID:
        _exit(0)


def _in_this_process(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    finally:
        _end_if_forked()


def _end_with(fd: int) -> None:
    """Wait until nobody can write to ``fd`` any more, then end this process and those it started: whoever asked is gone."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups only
    poll.poll()
    with contextlib.suppress(OSError):
        os.killpg(_OWN_PID, signal.SIGKILL)
    _exit(1)


def _lent(data: Any) -> Any:
    """The same tensors in containers of the submission's own, so that what it does to a dict stays its affair."""
    return tuple(dict(part) if isinstance(part, dict) else part for part in data)


def _copy_of(module: ModuleType) -> ModuleType:
    """A module loaded a second time, with globals of its own."""
    spec = importlib.util.spec_from_file_location(module.__name__, str(module.__file__))
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return (f"{name}: {text[:400]}" if text else name).rstrip(".")


def main(argv: list[str]) -> int:
    submission, device, seed, read_fd, write_fd = argv
    requests = os.fdopen(int(read_fd), "r", encoding="utf-8")
    answers = os.fdopen(int(write_fd), "w", encoding="utf-8")

    token = requests.readline().strip()
    threading.Thread(target=_end_with, args=(int(read_fd),), daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        _end_if_forked()
        answers.write(json.dumps({"token": token, **message}) + "\n")
        answers.flush()

    say({"event": "start"})
    try:
        worker = Worker(Path(submission).resolve(), device, say)
    except _Failure as failure:
        say({"done": True, "ok": False, "message": str(failure)})
        return 0
    except Exception as error:
        traceback.print_exc()
        say({"done": True, "ok": False, "message": f"The runner could not start here: {_one_line(error)}."})
        return 0
    from .utils import set_seed

    set_seed(int(seed))
    say({"done": True, "ok": True})
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request["do"])(request)
        except _Failure as failure:
            answer = {"ok": False, "message": str(failure)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "message": f"The runner failed on this case: {_one_line(error)}."}
        say({"done": True, **answer})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
