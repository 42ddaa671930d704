"""NVIDIA's memory checker over small cases of the Triton kernels: append, plan, decode and combine in one process.

``compute-sanitizer --tool memcheck`` watches every load and store. By hand::

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/test_triton_memory.py fp8
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(fmt: str) -> None:
    """Ragged lengths that end inside pages, padded sequences, an append, splits that are merged."""
    from leanmla.testing import DecodeCase, compare, make_inputs

    sys.path.insert(0, str(Path(__file__).parent))
    from test_triton_decode import decode

    for case in (
        DecodeCase((333, 17, 0, 64), format=fmt, num_kv_splits=3),
        DecodeCase((70, 9), q_lens=(2, 1), num_heads=5, format=fmt, page_size=16, table="csr"),
    ):
        inputs = make_inputs(case, device="cuda")
        result = compare(inputs, *decode(inputs))
        assert result, result.message
    slots = torch.arange(5, device="cuda")
    inputs.cache.append(torch.randn(5, 576, device="cuda").bfloat16(), slots)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fmt", ("fp8",))
def test_memory_checker_finds_nothing(fmt):
    checker = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if checker is None:
        pytest.skip("needs compute-sanitizer (CUDA toolkit)")
    command = [checker, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, fmt]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    said = done.stdout + done.stderr
    if "ERROR SUMMARY" not in said and any(
        w in said for w in ("not supported", "Unable to", "permission", "Failed to initialize")
    ):
        pytest.skip(f"compute-sanitizer refuses this device: {said.strip().splitlines()[-1]}")
    assert "ERROR SUMMARY: 0 errors" in said and done.returncode == 0, said[-3000:]


if __name__ == "__main__":
    run(sys.argv[1])
