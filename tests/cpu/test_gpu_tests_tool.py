"""tools/gpu_tests.py: every test runs once whatever happens to the processes, and the record says what happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_tests.py"
if not TOOL.exists():
    pytest.skip("tools/ is not part of an installed package", allow_module_level=True)

TESTS = """
import os, time, pytest
from pathlib import Path

@pytest.mark.parametrize("i", range(9))
def test_passes(i):
    (Path(__file__).parent / f"ran-{i}").touch(exist_ok=False)

def test_fails():
    assert "three" == "four"

def test_skips():
    pytest.skip("no")

@pytest.mark.xfail(strict=True)
def test_known():
    raise AssertionError

def test_dies():
    os._exit(9)

def test_loses_the_context():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_last():
    (Path(__file__).parent / "ran-last").touch(exist_ok=False)
"""


def run(folder, *options):
    done = subprocess.run(
        [sys.executable, TOOL, folder, "--processes", "2", "--json", folder / "record.json", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, json.loads((folder / "record.json").read_text())


def test_each_test_runs_once_and_every_end_is_recorded(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    done, record = run(tmp_path)
    assert done.returncode == 1
    assert record["counts"] == {"died or hung": 1, "failed": 3, "passed": 10, "skipped": 1, "xfailed": 1}
    assert [name.split("::")[-1] for name in record["bad"]] == [
        "test_broken.py",
        "test_fails",
        "test_loses_the_context",
        "test_dies",
    ]
    assert "four" in record["bad"]["test_some.py::test_fails"]
    assert len(list(tmp_path.glob("ran-*"))) == 10
    assert "1 died or hung, 3 failed, 10 passed" in done.stdout
    assert record["commit"] and record["packages"]["torch"] and record["command"].startswith("python tools/gpu_tests.py")


def test_what_time_does_not_allow_is_counted(tmp_path):
    (tmp_path / "test_three.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    done, record = run(tmp_path, "--seconds", "0", "--processes", "1")
    assert record["counts"] == {"not reached": 3} and done.returncode == 1
