"""Runs tests/gpu in several processes on one GPU and keeps a record.

    python tools/gpu_tests.py [--processes 14] [--seconds 300] [--json FILE] [PATH or test id ...]

Most of a GPU test is compiling on the CPU, so processes help although there is one GPU. Needs pytest alone. A process takes the next few
tests when it is done with the last; one whose GPU context is lost (every later test would fail with it) or that died is replaced. After
``--seconds`` no test is begun, and after a minute more none is waited for. Exit status: 0 if every test passed or was skipped, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 4  #: tests a process takes at once: neighbours share compiled kernels
GRACE = 60  #: seconds a test that has begun may go on after the deadline
LOST_CONTEXT = 3  #: exit status of a process that lost it
LOST = ("CUDA error", "HIP error", "illegal memory access", "unspecified launch failure")


class Worker:
    """pytest plugin: runs the tests that no other process has taken, and notes each outcome at once."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline
        self.log = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.reports: list = []

    def note(self, **facts) -> None:
        self.log.write(json.dumps(facts) + "\n")

    def take(self, count: int) -> list[int]:
        """The next tests that are free; none when there are none or time is over."""
        taken: list[int] = []
        for index in range(count):
            if len(taken) == CHUNK or time.time() > self.deadline:
                break
            try:
                with (self.folder / f"taken-{index}").open("x") as claim:
                    claim.write(str(os.getpid()))
                taken.append(index)
            except FileExistsError:
                continue
        return taken

    def pytest_runtestloop(self, session) -> bool:
        self.note(collected=len(session.items))
        todo = self.take(len(session.items))
        while todo and time.time() <= self.deadline:
            index, item = todo[0], session.items[todo.pop(0)]
            todo = todo or self.take(len(session.items))
            self.note(began=item.nodeid, index=index)
            self.reports = []
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=session.items[todo[0]] if todo else None)
            self.finish(item.nodeid)
        return True

    def finish(self, nodeid: str) -> None:
        text = "\n".join(str(r.longrepr) for r in self.reports if r.outcome == "failed")
        skipped = any(r.outcome == "skipped" for r in self.reports)
        if text:
            outcome = "failed"
        elif any(hasattr(r, "wasxfail") for r in self.reports):
            outcome = "xfailed" if skipped else "xpassed"
        else:
            outcome = "skipped" if skipped else "passed"
        self.note(test=nodeid, outcome=outcome, seconds=round(sum(r.duration for r in self.reports), 2), text=text)
        if any(sign in text for sign in LOST):
            self.log.close()
            os._exit(LOST_CONTEXT)  # an orderly end would use the lost context

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def pytest_collectreport(self, report) -> None:
        if report.outcome == "failed":
            self.note(test=report.nodeid, outcome="failed", seconds=0.0, text=str(report.longrepr))


def work(folder: str, deadline: str, *tests: str) -> int:
    """What one process does."""
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--no-header", "--no-summary", "--tb=short"]
    return int(pytest.main([*options, *tests], plugins=[Worker(Path(folder), float(deadline))]))


def run(tests: list[str], processes: int, seconds: float, show=print) -> dict:
    """All of it; returns the record."""
    begin = time.time()
    outcomes: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--worker", name, str(begin + seconds), *tests]

        def start():
            return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        running, restarts = [start() for _ in range(processes)], 2 * processes
        shown = begin
        while running and time.time() < begin + seconds + GRACE:
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                running.remove(process)
                free(folder, process.pid)
                if process.returncode not in (0, 1, 2, 4, 5) and restarts and time.time() < begin + seconds:
                    restarts -= 1
                    running.append(start())
            if time.time() > shown + 10:
                shown = time.time()
                done = Counter(facts["outcome"] for facts in read(folder)[0].values())
                show(f"{shown - begin:.0f} s: {', '.join(f'{n} {what}' for what, n in sorted(done.items())) or 'compiling'}")
        for process in running:
            process.kill()
            process.wait()
        outcomes, unbegun, hung = read(folder)
    counts = Counter(facts["outcome"] for facts in outcomes.values())
    counts["died or hung"] = len(hung)
    counts["not reached"] = unbegun
    return {
        "schema": "leanmla-gpu-tests-1",
        "seconds": round(time.time() - begin, 1),
        "processes": processes,
        "counts": {what: n for what, n in sorted(counts.items()) if n},
        "bad": {
            **{test: facts["text"] for test, facts in sorted(outcomes.items()) if facts["outcome"] == "failed"},
            **dict.fromkeys(sorted(hung), "the process died or hung in this test"),
        },
        "xfailed": sorted(test for test, facts in outcomes.items() if facts["outcome"] in ("xfailed", "xpassed")),
        "slowest": {
            test: facts["seconds"] for test, facts in sorted(outcomes.items(), key=lambda entry: -entry[1]["seconds"])[:10]
        },
    }


def free(folder: Path, pid: int) -> None:
    """Hand back what an ended process took and did not begin."""
    log = folder / f"{pid}.jsonl"
    began = {facts["index"] for facts in lines(log) if "index" in facts} if log.exists() else set()
    for claim in folder.glob("taken-*"):
        if claim.read_text() == str(pid) and int(claim.name.removeprefix("taken-")) not in began:
            claim.unlink()


def lines(log: Path) -> list[dict]:
    """What a process noted; the last line may be half written."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read(folder: Path) -> tuple[dict[str, dict], int, set[str]]:
    """Outcomes by test, how many tests never began, and those that began and never ended."""
    outcomes: dict[str, dict] = {}
    began: set[str] = set()
    collected = 0
    for log in folder.glob("*.jsonl"):
        for facts in lines(log):
            collected = max(collected, facts.get("collected", 0))
            if "began" in facts:
                began.add(facts["began"])
            elif "test" in facts:
                outcomes[facts.pop("test")] = facts
    return outcomes, collected - len(began), began - set(outcomes)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--worker"]:
        return work(*arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="paths or test ids (default: tests/gpu)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=300.0, help="no test begins after this many (default: 300)")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--commit", help="commit to record for a copy of the tree that is no repository of its own")
    chosen = parser.parse_args(arguments)
    record = run(chosen.tests, chosen.processes, chosen.seconds)
    for test, text in record["bad"].items():
        print(f"\n{test}\n{text[-2000:]}")
    print("slowest: " + ", ".join(f"{test.rsplit('/', 1)[-1]} {seconds} s" for test, seconds in record["slowest"].items()))
    print(f"{record['seconds']} s: " + (", ".join(f"{n} {what}" for what, n in record["counts"].items()) or "no test found"))
    if chosen.json:
        sys.path.insert(0, str(ROOT))
        from leanmla.bench.environment import environment
        from leanmla.bench.results import write_json

        where = "cuda" if torch_has_gpu() else "cpu"
        write_json(
            chosen.json,
            {**record, "command": f"python tools/gpu_tests.py {shlex.join(arguments)}", **environment(where, chosen.commit)},
        )
    return 0 if set(record["counts"]) <= {"passed", "skipped", "xfailed", "xpassed"} and record["counts"] else 1


def torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
