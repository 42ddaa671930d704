"""The benchmark on a GPU: graphs, ceilings, and a run end to end."""

from __future__ import annotations

import json

import pytest
import torch

from leanmla.bench.cases import BenchCase
from leanmla.bench.ceilings import measure_ceilings
from leanmla.bench.data import LatentPool
from leanmla.bench.measure import Contender, copies_needed, measure_case
from leanmla.bench.timing import make_timer
from leanmla.cli import main
from leanmla.formats import FORMATS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_graph_timer_replays_every_call(device):
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    timer = make_timer(device, [lambda i=i: counts[i].add_(1) for i in range(3)])
    before = counts.tolist()
    assert timer.sample() > 0
    timer.run_all()
    assert [n - m for n, m in zip(counts.tolist(), before)] == [2, 2, 2]


def test_ceilings_are_plausible(device):
    ceilings = measure_ceilings(device)
    assert 0.05 < ceilings.read_tb_s < 20 and ceilings.matmul_tflop_s > 1
    assert ceilings.launch_us is not None and 0.2 < ceilings.launch_us < 50


def test_copies_exceed_l2(device):
    case = BenchCase((1024,) * 4)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    assert copies_needed(case, "bf16", device) * case.tokens * 1152 > 3 * l2


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_case_is_checked_and_timed(device, fmt):
    (result,) = measure_case(BenchCase((700, 65, 1)), [Contender(fmt, "auto")], LatentPool(device), seconds=0.02)
    if fmt == "mxfp4_row320" and result.backend == "reference":
        pytest.skip("no kernel of this GPU reads mxfp4_row320")
    assert result.status == "ok", result.message
    assert result.backend != "reference" and result.time_us > 0 and result.relative_error < 3e-3


def test_bench_end_to_end(tmp_path):
    file = tmp_path / "result.json"
    assert main(["bench", "--cases", "4x1024", "--seconds", "0.02", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["ok"] and document["environment"]["device"]["kind"] in ("cuda", "hip")
    ours = [r for r in document["results"] if not r["peer"]]
    assert len(ours) >= 4 and {r["status"] for r in ours} == {"ok"}
    assert all(0 < r["read_share"] < 1.5 for r in ours)


def test_run_and_check_end_to_end():
    assert main(["run", "--cases", "4x1024", "--quiet"]) == 0
    assert main(["check", "--kind", "plain", "--format", "fp8", "--quiet"]) == 0
