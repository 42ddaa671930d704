"""Submissions of every kind, good and bad, in the process that runs them."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from leanmla.contest import Case, Session, check_implementation, cli, generate_input
from leanmla.contest.runner import Limits

ROOT = Path(__file__).resolve().parents[2]
BEST = ROOT / "contest" / "submissions" / "leanmla_best.py"
#: Where to find submissions by others, to be run as they are.
PUBLIC = Path(os.environ.get("LEANMLA_SUBMISSIONS") or ROOT.parent / "shared" / "seeds")

QUICK = Limits(call_seconds=60.0, benchmark_runs=20, leaderboard_runs=5)

#: One submission that misbehaves in a way chosen by the kv length, so that one process serves for all ways.
CHAMELEON = """
import os, signal, sys, time
import torch
from task import input_t, output_t
from reference import ref_kernel, generate_input, check_implementation
from utils import make_match_reference

kept = {}

def custom_kernel(data: input_t) -> output_t:
    q, kv, qo, kvp, config = data
    way = config["kv_seq_len"]
    if way == 16: return ref_kernel(data)
    if way == 17: return ref_kernel(data)[:, :, :100]
    if way == 18: return ref_kernel(data).float()
    if way == 19: return ref_kernel(data) * float("nan")
    if way == 20: return "done"
    if way == 21: raise ValueError("no such\\nluck")
    if way == 22: return torch.zeros_like(ref_kernel(data))
    if way == 23:  # the output, by shape
        if way not in kept: kept[way] = ref_kernel(data)
        return kept[way]
    if way == 24:  # the output, by address
        key = way, q.data_ptr()
        if key not in kept: kept[key] = ref_kernel(data)
        return kept[key]
    if way == 25:  # the keys, by address
        key = way, kv["fp8"][0].data_ptr()
        if key not in kept: kept[key] = kv["fp8"][0].clone()
        return ref_kernel((q, {"fp8": (kept[key], kv["fp8"][1])}, qo, kvp, config))
    if way == 26:  # the query, by address
        key = way, q.data_ptr()
        if key not in kept: kept[key] = q.clone()
        return ref_kernel((kept[key], kv, qo, kvp, config))
    if way == 27:  # right at first only
        kept[way] = kept.get(way, 0) + 1
        return ref_kernel(data) * (1 if kept[way] < 6 else 5)
    if way == 28: os.kill(os.getpid(), signal.SIGSEGV)
    if way == 29: time.sleep(600)
    if way == 30: os._exit(3)
    if way == 31: return ref_kernel(data).to("meta")
    if way == 32:  # becomes its own judge
        import reference, utils
        reference.ref_kernel = lambda data: torch.zeros_like(ref_kernel(data))
        utils.compare = lambda *a, **k: (True, "")
        return reference.ref_kernel(data)
    if way == 33:  # stops the clock, and changes what it was lent
        right = ref_kernel(data)
        time.perf_counter_ns = time.perf_counter = lambda: 0
        config["sm_scale"] = 0.0
        kv.clear()
        return right
    if way == 34: sys.exit(0)
    if way == 35:  # a copy of the process stays behind
        child = os.fork()
        if not child: time.sleep(600)
        with open(__file__ + ".child", "w") as file: file.write(str(child))
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == 36:  # a copy of the process returns as well, from the last call of the check
        kept[way] = kept.get(way, 0) + 1
        right = ref_kernel(data)
        if kept[way] == 3 and not os.fork(): torch.set_num_threads(1)
        return right
    if way == 37: os.write(int(sys.argv[5]), b"hello\\n")
    if way == 38: os.write(int(sys.argv[5]), b'{"done": true, "ok": true}\\n')
    return ref_kernel(data)
"""


@pytest.fixture(scope="module")
def chameleon(tmp_path_factory):
    path = tmp_path_factory.mktemp("submissions") / "submission.py"
    path.write_text(CHAMELEON)
    with Session(path, "cpu", quiet=True, limits=QUICK) as session:
        yield session


def case(kv_len, batch=2):
    return Case(batch, 1, kv_len, 7)


def test_a_right_one_passes_and_is_timed(chameleon):
    outcome = chameleon.test(case(16))
    assert outcome.ok and outcome.message == outcome.note == "" and outcome.relative_error == 0.0
    outcome = chameleon.benchmark(case(16), max_runs=4)
    assert outcome.ok and 3 <= outcome.stats.runs <= 4
    assert 0 < outcome.stats.best <= outcome.stats.mean <= outcome.stats.worst
    assert chameleon.leaderboard(case(16)).stats.runs >= 3
    assert "aten::" in chameleon.profile(case(16)).report


@pytest.mark.parametrize(
    "kv_len, text",
    [
        (17, "shape [2, 16, 100], expected [2, 16, 512]"),
        (18, "dtype float32, expected bfloat16"),
        (19, "16384 NaN of 16384 elements"),
        (20, "not a tensor but a str"),
        (21, "custom_kernel raised ValueError: no such luck."),
        (22, "% of the elements lie outside"),
        (23, "The result is stale: kv_data changed in place"),
        (24, "The result is stale: kv_data changed in place"),
        (25, "The result is stale: kv_data changed in place"),
        (31, "is on meta, expected on cpu"),
    ],
)
def test_wrong_ones_are_told_in_one_sentence(chameleon, kv_len, text):
    for outcome in (chameleon.test(case(kv_len)), chameleon.benchmark(case(kv_len), max_runs=3)):
        assert not outcome.ok and outcome.stats is None
        assert text in outcome.message
        assert "\n" not in outcome.message and outcome.message.endswith(".")


def test_one_that_judges_itself_or_stops_the_clock(chameleon):
    result = chameleon.test(case(32))
    assert not result.ok and "% of the elements lie outside" in result.message
    result = chameleon.benchmark(case(33))
    assert result.ok and result.stats.best > 1000, result.message
    result = chameleon.test(case(34))
    assert not result.ok and "custom_kernel raised SystemExit: 0" in result.message
    assert chameleon.test(case(16)).ok  # nothing of it outlived its call


def test_stale_results_show_where_the_tolerance_is_blind(tmp_path):
    """With 2048 keys outputs are so small that an old one, or zeros, are within the contest's tolerance."""
    path = tmp_path / "stale.py"
    path.write_text(
        "from reference import ref_kernel\nkept = {}\n"
        "def custom_kernel(data):\n"
        "    key = data[4]['kv_seq_len'], data[0].data_ptr()\n"
        "    if key not in kept: kept[key] = ref_kernel(data)\n"
        "    return kept[key]\n"
    )
    with Session(path, "cpu", quiet=True) as session:
        outcome = session.test(case(4096, batch=1))
    assert not outcome.ok and outcome.message.startswith("The result is stale: kv_data changed in place")


def test_zeros_after_the_check_show_too(tmp_path):
    """Timed calls have to follow their inputs as the checked ones do."""
    path = tmp_path / "zeros.py"
    path.write_text(
        "from reference import ref_kernel\ncalls = {}\n"
        "def custom_kernel(data):\n"
        "    way = data[4]['kv_seq_len']\n"
        "    calls[way] = calls.get(way, 0) + 1\n"
        "    return ref_kernel(data) * (calls[way] <= 3)\n"
    )
    with Session(path, "cpu", quiet=True, limits=QUICK) as session:
        outcomes = session.benchmark(case(4096, batch=1)), session.leaderboard(case(4097, batch=1))
    for outcome, where in zip(outcomes, ("The output of the last timed call is wrong", "Wrong on fresh inputs, call 1")):
        assert not outcome.ok and outcome.message.startswith(where)
        assert "does not follow its inputs (cosine 0.00" in outcome.message


def test_a_query_kept_by_address_is_remarked_and_fails_if_strict(chameleon):
    outcome = chameleon.test(case(26))
    assert outcome.ok and "made from q is kept by its address" in outcome.note
    timed = chameleon.benchmark(case(26), max_runs=3)
    assert timed.ok and timed.stats.runs == 3
    chameleon.strict = True
    try:
        outcome = chameleon.test(case(26))
    finally:
        chameleon.strict = False
    assert not outcome.ok and "kept by its address" in outcome.message


def test_one_that_is_right_for_the_check_only(chameleon):
    outcome = chameleon.benchmark(case(27), max_runs=5)
    assert not outcome.ok and "The output of the last timed call is wrong" in outcome.message
    assert not chameleon.leaderboard(case(27)).ok


def test_crashes_and_hangs_end_the_case_not_the_run(chameleon):
    assert chameleon.test(case(28)).message == "The submission crashed: its process was killed by SIGSEGV."
    assert chameleon.test(case(30)).message == "The submission crashed: its process ended with exit code 3."
    chameleon.limits = Limits(call_seconds=2.0)
    assert chameleon.test(case(29)).message == "custom_kernel hangs: no answer within 2 s."
    chameleon.limits = QUICK
    assert chameleon.test(case(16)).ok


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _ends_within(seconds, pid):
    deadline = time.monotonic() + seconds
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _lives(pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_copy_left_behind_neither_holds_up_the_verdict_nor_lives_on(chameleon):
    begin = time.monotonic()
    assert chameleon.test(case(35)).message == "The submission crashed: its process was killed by SIGSEGV."
    assert time.monotonic() - begin < QUICK.call_seconds / 2, "taken for a hang"
    assert _ends_within(10.0, int(Path(f"{chameleon.submission}.child").read_text()))


def test_a_copy_that_returns_does_not_report(chameleon):
    assert chameleon.test(case(36, batch=1)).ok
    time.sleep(0.5)
    assert "shape" in chameleon.test(case(17)).message, "the answer of another process"


@pytest.mark.parametrize("kv_len", [37, 38])
def test_what_it_writes_to_the_runner_is_told(chameleon, kv_len):
    outcome = chameleon.test(case(kv_len))
    assert not outcome.ok and outcome.message.startswith(
        "The submission wrote to the pipe between its process and the runner: '"
    )
    assert chameleon.test(case(16)).ok


def test_it_does_not_outlive_its_runner(chameleon):
    assert chameleon.test(case(16)).ok
    os.write(chameleon._to, (json.dumps({"do": "test", "case": case(29).arguments}) + "\n").encode())
    while b'"call"' not in chameleon._line("call"):
        pass
    os.close(chameleon._to)  # as the system does when the runner ends
    chameleon._to = None
    try:
        assert chameleon._process.wait(timeout=30) == -signal.SIGKILL
    finally:
        chameleon.close()


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "import no_such_module\n",
            "The submission could not be imported: ModuleNotFoundError: No module named 'no_such_module'.",
        ),
        ("x = 1\n", "The submission has no function custom_kernel(data)."),
        ("import time\ntime.sleep(600)\n", "The import of the submission hangs: no answer within 2 s."),
        ("import os\nos._exit(4)\n", "The submission crashed: its process ended with exit code 4."),
        (None, "There is no file"),
    ],
)
def test_files_that_are_no_submission(tmp_path, text, message):
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text)
    with Session(path, "cpu", quiet=True, limits=Limits(call_seconds=2.0)) as session:
        outcome = session.test(case(16))
    assert not outcome.ok and outcome.message.startswith(message)


def test_cuda_means_the_cpu_inside(tmp_path):
    """What GPU submissions do around their kernels, on a CPU; aiter and the contest's modules are importable."""
    path = tmp_path / "redirected.py"
    path.write_text('''
import torch
from task import input_t, output_t
from utils import make_match_reference, set_seed
import aiter
from aiter.mla import mla_decode_fwd
from aiter import dtypes, get_mla_metadata_info_v1, get_mla_metadata_v1

assert torch.arange(3, device="cuda").device.type == "cpu"
assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
assert torch.ones(2).to("cuda:0").device.type == torch.ones(2).cuda().device.type == torch.ones(2).to(device="cuda").device.type == "cpu"
assert torch.ones(2).new_zeros(3, device="cuda").device.type == torch.zeros_like(torch.ones(1), device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device="cuda", pin_memory=True).pin_memory().device.type == "cpu"
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator)
x = torch.randn(3, device="cuda", generator=generator)
assert torch.equal(x, torch.randn(3, generator=torch.Generator().manual_seed(1)))
with torch.device("cuda"):
    assert torch.zeros(2).device.type == "cpu"
torch.set_default_device("cuda")
assert torch.zeros(2).device.type == "cpu"
torch.set_default_device(None)
assert torch.nn.Linear(2, 2, device="cuda").to("cuda").weight.device.type == "cpu"
assert not torch.cuda.is_available()
torch.cuda.synchronize()
torch.cuda.empty_cache()
stream = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    start.record()
    end.record(stream)
stream.synchronize()
stream.wait_stream(torch.cuda.current_stream())
assert start.elapsed_time(end) >= 0
assert torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count >= 1

graphs = {}

def run(data, out):
    q, kv, qo, kvp, config = data
    n = config["batch_size"] * config["kv_seq_len"]
    indices = torch.arange(n, dtype=torch.int32, device="cuda")
    last = torch.ones(config["batch_size"], dtype=torch.int32, device="cuda")
    mla_decode_fwd(q, kv["bf16"].view(-1, 1, 1, 576), out, qo, kvp, indices, last, 1, sm_scale=config["sm_scale"])
    out.add_(0.0)

def custom_kernel(data: input_t) -> output_t:
    """Captures a graph by address and replays it, which is legitimate: it reads what the addresses hold."""
    key = tuple(t.data_ptr() for t in (data[0], data[1]["bf16"]))
    if key not in graphs:
        out = torch.empty(data[0].shape[0], 16, 512, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(data, out)
        graphs[key] = graph, out
    graph, out = graphs[key]
    out.fill_(float("nan"))
    graph.replay()
    return out.clone()
''')
    with Session(path, "cpu", strict=True, quiet=True) as session:
        outcome = session.test(case(40))
    assert outcome.ok, outcome.message


def test_our_submission_follows_its_inputs(tmp_path):
    with Session(BEST, "cpu", strict=True, quiet=True, limits=QUICK) as session:
        for c in (Case(4, 1, 64, 4220), Case(4, 1, 64, 9), Case(2, 2, 33, 5, num_heads=20)):
            outcome = session.test(c)
            assert outcome.ok, outcome.message
        assert session.leaderboard(Case(4, 1, 64, 4220)).ok


def test_our_submission_records_addresses_not_values(monkeypatch):
    """What it does on a GPU, with the CPU's recordings: repeated addresses replay, new ones run, contents are always read anew."""
    spec = importlib.util.spec_from_file_location("leanmla_best", BEST)
    best = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(best)
    monkeypatch.setattr(best, "RECORDED_ON", ("cpu",))
    monkeypatch.setattr(best, "MOST_RECORDINGS", 3)
    plain = []
    run = best._run
    monkeypatch.setattr(best, "_run", lambda *a: plain.append(1) or run(*a))

    def right(data):
        return check_implementation(data, best.custom_kernel(data)) == (True, "")

    first, second = (generate_input(2, 1, 48, seed) for seed in (1, 2))
    assert right(first) and not plain, "a shape's first call records"
    for t, new in ((first[0], second[0]), (first[1]["bf16"], second[1]["bf16"])):
        t.copy_(new)
        first[1]["fp8"][0].view(torch.uint8).copy_(second[1]["fp8"][0].view(torch.uint8))
        first[1]["fp8"][1].copy_(second[1]["fp8"][1])
        out = best.custom_kernel(first)
    torch.testing.assert_close(out, best.custom_kernel(second))
    assert len(plain) == 1, "new addresses run plainly once"
    assert right(second) and right(second) and len(plain) == 1, "and are recorded when they come back"
    kept = [generate_input(2, 1, 48, seed) for seed in range(5)]
    assert all(right(data) for data in kept) and len(plain) == 6 and len(best._recorded) == 3
    other = (first[0], first[1], first[2], first[3], {**first[4], "sm_scale": 0.1})
    assert not torch.equal(best.custom_kernel(other), out), "another scale is another recording"


def _run(*arguments):
    command = [sys.executable, "-m", "leanmla.contest", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POPCORN")}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.parametrize("name", sorted(p.name for p in PUBLIC.glob("*.py")) or [None])
def test_public_submissions_run_unchanged(name, tmp_path):
    if name is None:
        pytest.skip("no public submissions here: set LEANMLA_SUBMISSIONS to a folder with some")
    cases = tmp_path / "cases.txt"
    cases.write_text(
        "batchsize: 4; qseqlen: 1; kvseqlen: 64; seed: 4220\nbatchsize: 8; qseqlen: 1; kvseqlen: 512; seed: 1360\n"
    )
    report = tmp_path / "report.json"
    done = _run("benchmark", PUBLIC / name, "--device", "cpu", "--cases", cases, "--seconds", "0.5", "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["passed"] and result["geometric_mean_ns"] > 0 and len(result["cases"]) == 2
    assert all(c["ok"] and c["stats"]["mean"] > 0 for c in result["cases"])
    assert "geometric mean" in done.stdout


def test_command_line_exit_codes(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("POPCORN_FD", raising=False)

    def run(*arguments):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        return cli.main(parser.parse_args([*map(str, arguments), "--device", "cpu"])), capfd.readouterr()

    submission = tmp_path / "zeros.py"
    submission.write_text(
        "import torch\ndef custom_kernel(d):\n    print('noise')\n    return torch.zeros(d[0].shape[0], 16, 512, dtype=torch.bfloat16)\n"
    )
    cases = tmp_path / "cases.txt"
    cases.write_text("batchsize: 2; qseqlen: 1; kvseqlen: 16; seed: 1\n")
    code, said = run("test", submission, "--cases", cases, "--quiet")
    assert code == 112 and said.out.count("\n") == 1 and "fail, 0 of 1 cases" in said.out and "outside" in said.out
    assert "noise" not in said.out + said.err
    code, said = run("test", submission, "--cases", cases)
    assert code == 112 and "FAIL" in said.out and "noise" in said.err
    cases.write_text("nonsense\n")
    code, said = run("test", submission, "--cases", cases)
    assert code == 113 and "cases line 1" in said.err
    assert run("test", submission, "--cases", tmp_path / "none.txt")[0] == 113
