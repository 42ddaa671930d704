"""The Triton kernels on a CPU: decode, append and planning under the interpreter, against their definitions."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton (pip install triton)")

FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")


@functools.cache
def _results(*arguments: str) -> dict[str, dict]:
    """What interpreted.py found, by case. A process of its own: interpretation is chosen when Triton is imported."""
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"{arguments}: after {len(lines)} cases\n{done.stderr[-2000:]}"
    return {line["case"]: line for line in lines}


def _check(results: dict[str, dict], at_least: int) -> None:
    wrong = {case: line["message"] for case, line in results.items() if not line["ok"]}
    assert not wrong, "\n".join(f"{case}: {message}" for case, message in wrong.items())
    assert len(results) >= at_least


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_matches_the_definition(fmt):
    """Cases of every kind, keys on either side of the product, NaN wherever nothing may be read."""
    _check({c: r for c, r in _results("decode", fmt).items() if not c.startswith("nan-")}, at_least=14)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_reaches_the_rows_that_see_it_and_no_others(fmt):
    _check({c: r for c, r in _results("decode", fmt).items() if c.startswith("nan-")}, at_least=2)


def test_append_writes_the_bytes_of_the_host_codecs():
    _check(_results("append"), at_least=28)


def test_device_planner_equals_split_plan():
    _check(_results("plan"), at_least=50)
