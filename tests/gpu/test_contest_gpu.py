"""Submissions on a GPU: ours, and public ones as they are, checked and timed by device events."""

import os
from pathlib import Path

import pytest
import torch

from leanmla.contest import RANKED, TESTS, Case, Session, check_implementation, generate_input, ref_kernel
from leanmla.contest.timing import time_call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).resolve().parents[2]
BEST = ROOT / "contest" / "submissions" / "leanmla_best.py"
PUBLIC = Path(os.environ.get("LEANMLA_SUBMISSIONS") or ROOT.parent / "shared" / "seeds")


def test_our_submission_passes_every_test_and_is_never_stale():
    with Session(BEST, "cuda", strict=True, quiet=True) as session:
        for case in (*TESTS, Case(8, 4, 500, 3), Case(5, 1, 777, 4, num_heads=128)):
            outcome = session.test(case)
            assert outcome.ok, f"{case.short}: {outcome.message}"
        for case in RANKED[:2]:
            outcome = session.leaderboard(case)
            assert outcome.ok and outcome.stats.runs >= 3, outcome.message


@pytest.mark.parametrize("name", sorted(p.name for p in PUBLIC.glob("*.py")) or [None])
def test_public_submissions_run_unchanged(name):
    if name is None:
        pytest.skip("no public submissions here: set LEANMLA_SUBMISSIONS to a folder with some")
    with Session(PUBLIC / name, "cuda", quiet=True) as session:
        for case in TESTS[:3]:
            outcome = session.test(case)
            assert outcome.ok, f"{case.short}: {outcome.message}"
        outcome = session.benchmark(RANKED[0], seconds=5.0)
        assert outcome.ok and outcome.stats.mean > 0, outcome.message


def test_a_wrong_device_is_told(tmp_path):
    path = tmp_path / "cpu.py"
    path.write_text("from reference import ref_kernel\ndef custom_kernel(data):\n    return ref_kernel(data).cpu()\n")
    with Session(path, "cuda", quiet=True) as session:
        outcome = session.test(Case(2, 1, 64, 1))
    assert not outcome.ok and "The output is on cpu, expected on cuda:0" in outcome.message


def test_inputs_fit_where_a_cast_of_the_whole_cache_would_not():
    """Quantisation works in pieces: the peak stays well below an fp32 copy of the cache."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    data = generate_input(256, 1, 8192, 9826, device="cuda")
    kept = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before < kept + 2 * 2**30
    assert check_implementation(data, ref_kernel(data)) == (True, "")


def test_times_are_cold_and_of_the_device():
    x = torch.zeros(1 << 20, device="cuda")
    _, short = time_call(lambda: x.add_(1), x.device)
    _, long = time_call(lambda: [x.add_(1) for _ in range(2000)], x.device)
    assert 1e3 < short < long


def test_work_left_on_another_stream_is_not_waited_for(tmp_path):
    """Late in every call, or only once it is timed, into the tensor that the last call filled."""
    path = tmp_path / "late.py"
    path.write_text(
        "import torch\nfrom reference import ref_kernel\n"
        "side, outs, calls = torch.cuda.Stream(), {}, {}\n"
        "def custom_kernel(data):\n"
        "    way = data[4]['kv_seq_len']\n"
        "    calls[way] = calls.get(way, 0) + 1\n"
        "    right = ref_kernel(data)\n"
        "    out = outs.setdefault(way, torch.zeros_like(right))\n"
        "    side.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(side):\n"
        "        torch.cuda._sleep(100_000_000)\n"
        "        out.copy_(right)\n"
        "    right.record_stream(side)\n"
        "    if way == 65 or (way == 66 and calls[way] <= 3):\n"
        "        torch.cuda.current_stream().wait_stream(side)\n"
        "    return out\n"
    )
    with Session(path, "cuda", quiet=True) as session:
        outcome = session.test(Case(2, 1, 64, 1))
        assert not outcome.ok and "outside" in outcome.message
        assert session.benchmark(Case(2, 1, 65, 1), max_runs=3).ok, "joined in time"
        outcome = session.benchmark(Case(2, 1, 66, 1), max_runs=3)
        assert not outcome.ok and outcome.message.startswith("The output of the last timed call is wrong")
