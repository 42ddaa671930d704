"""The command line: what each command prints and writes, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from leanmla import __main__, backends
from leanmla.bench.ceilings import Ceilings
from leanmla.cli import COMMANDS, explain, main, support
from leanmla.cli import run as run_command
from leanmla.cli.known_devices import KNOWN
from leanmla.device import override
from leanmla.errors import BackendUnavailable
from leanmla.kernels.reference.backend import ReferenceBackend
from leanmla.split_plan import plan_splits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ceilings, cold copies and many latents take seconds; here the first are given and the others few."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations on a busy machine: waiting for a second thread costs more than it saves
    monkeypatch.setattr("leanmla.bench.data.POOL_TOKENS", 512)
    given = Ceilings(read_tb_s=0.02, read_by="given", matmul_tflop_s=0.1, launch_us=None)
    monkeypatch.setattr("leanmla.bench.runner.measure_ceilings", lambda device: given)
    monkeypatch.setattr("leanmla.bench.measure.copies_needed", lambda case, fmt, device: 2)
    yield
    torch.set_num_threads(threads)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    text = capsys.readouterr()
    return code, text.out, text.err


def run_json(capsys, tmp_path, *argv: str) -> tuple[int, dict, str]:
    file = tmp_path / "result.json"
    code, out, _ = run(capsys, *argv, "--json", str(file))
    return code, json.loads(file.read_text()), out


def assert_fits(text: str) -> None:
    """Readable at 100 columns."""
    wide = [line for line in text.splitlines() if len(line.rstrip()) > 100]
    assert not wide, wide


# -- each command -------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert run(capsys, "--version")[1].startswith("leanmla ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_json_and_quiet(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "--json" in out and "--quiet" in out


def test_info(capsys, tmp_path):
    code, document, out = run_json(capsys, tmp_path, "info")
    assert code == 0
    assert_fits(out)
    assert document["schema"] == "leanmla-info/1"
    assert document["environment"]["packages"]["torch"]
    assert set(document["reasons"]["bf16"]) == set(backends.NAMES)
    assert "LEANMLA_BACKEND" in out and "hopper" in out


def test_check(capsys, tmp_path):
    code, document, out = run_json(
        capsys, tmp_path, "check", "--backend", "reference", "--kind", "plain", "--format", "fp8,mxfp4"
    )
    assert code == 0
    assert_fits(out)
    assert document["ok"] and len(document["results"]) == 8
    assert {r["format"] for r in document["results"]} == {"fp8", "mxfp4"}
    assert all(r["worst_ratio"] <= 1 and not r["problems"] for r in document["results"])
    assert "All 8 results are right." in out


def test_run(capsys, tmp_path):
    code, document, out = run_json(capsys, tmp_path, "run", "--backend", "reference", "--cases", "3x100")
    assert code == 0
    assert_fits(out)
    assert document["schema"] == "leanmla-run/1" and document["ok"]
    by_format = {r["format"]: r for r in document["results"]}
    assert len(by_format) == 5
    assert by_format["mxfp4_row320"]["quantisation_error"] == pytest.approx(by_format["mxfp4"]["quantisation_error"], rel=1e-6)
    assert by_format["bf16"]["quantisation_error"] == 0
    assert 0.005 < by_format["fp8"]["quantisation_error"] < 0.06 < by_format["mxfp4"]["quantisation_error"] < 0.3
    assert all(r["relative_error"] < 3e-3 and r["time_us"] > 0 for r in document["results"])
    assert by_format["mxfp4"]["cache_bytes"] == 300 * 306


def test_bench_and_compare(capsys, tmp_path):
    argv = ("bench", "--backend", "reference", "--cases", "2x70", "--seconds", "0.01", "--formats", "bf16,fp8")
    code, document, out = run_json(capsys, tmp_path, *argv, "--peers", "bmm")
    assert code == 0
    assert_fits(out)
    assert document["complete"] and document["ok"] and document["schema"] == "leanmla-bench/1"
    for key in ("environment", "protocol", "ceilings", "command", "started", "seconds", "geomean_contest_us"):
        assert key in document
    ours = [r for r in document["results"] if not r["peer"]]
    peers = [r for r in document["results"] if r["peer"]]
    assert [r["contender"] for r in ours] == ["reference bf16", "reference fp8"]
    assert {r["contender"] for r in peers} == {"torch bmm bf16", "torch bmm fp32"}
    for r in ours:
        assert r["status"] == "ok" and r["relative_error"] < 3e-3 and r["samples_us"] and r["kernel"]
        assert r["tb_s"] == pytest.approx(r["cache_bytes"] / r["time_us"] / 1e6)
        assert r["read_share"] == pytest.approx(r["tb_s"] / 0.02)

    code, out, _ = run(capsys, *argv, "--peers", "none", "--compare", str(tmp_path / "result.json"))
    assert code == 0 and "vs before" in out and "new" not in out


def test_bench_leaves_out_what_the_time_limit_does_not_allow(capsys, tmp_path):
    code, document, out = run_json(capsys, tmp_path, "bench", "--backend", "reference", "--cases", "1x64", "--time-limit", "0")
    assert code == 0
    assert document["not_run"] == ["1 x 64"] and not document["complete"] and not document["results"]
    assert "Not run" in out


def test_explain(capsys, tmp_path):
    code, document, out = run_json(capsys, tmp_path, "explain", "--kv", "17,4096,1,0", "--format", "mxfp4", "--device", "cpu")
    assert code == 0
    assert_fits(out)
    lens = [0] * 4
    for seq, _, start, end in document["schedule"]["items"]:
        assert start <= end
        lens[seq] += end - start
    assert lens == [17, 4096, 1, 0]
    assert document["cost"]["cache_bytes"] == (17 + 4096 + 1) * 306
    assert document["reasons"][document["backend"]] is None


@pytest.mark.parametrize("device", KNOWN)
def test_explain_needs_no_such_device(capsys, tmp_path, device):
    code, document, out = run_json(capsys, tmp_path, "explain", "--device-like", device, "--format", "fp8", "--q-len", "2")
    assert code == 0
    assert_fits(out)
    assert document["device"]["arch"] == KNOWN[device].info.arch and not document["device_is_real"]
    assert "CHOSEN" in out and "balance" in out
    assert (ROOT / re.search(r"^kernel +(\S+)$", out, re.MULTILINE)[1]).exists()
    assert ("floor_us" in document["cost"]) and (document["cost"]["floor_us"] is None) == (KNOWN[device].tb_s is None)


def test_contest_hook_passes_arguments_on(capsys, monkeypatch):
    import types

    seen = {}
    cli = types.ModuleType("leanmla.contest.cli")
    cli.add_arguments = lambda parser: parser.add_argument("submission")
    cli.main = lambda args: seen.update(vars(args)) or 112
    package = types.ModuleType("leanmla.contest")
    package.cli = cli
    monkeypatch.setitem(sys.modules, "leanmla.contest", package)
    monkeypatch.setitem(sys.modules, "leanmla.contest.cli", cli)
    assert main(["contest", "file.py"]) == 112
    assert seen["submission"] == "file.py"


def test_quiet_prints_nothing(capsys):
    for argv in (
        ("info",),
        ("explain", "--device", "cpu"),
        ("check", "--backend", "reference", "--kind", "plain", "--format", "bf16"),
    ):
        assert run(capsys, *argv, "--quiet") == (0, "", "")


def test_json_to_stdout_is_all_there_is_on_stdout(capsys):
    code, out, err = run(capsys, "explain", "--device", "cpu", "--json", "-")
    assert code == 0
    assert json.loads(out)["schema"] == "leanmla-explain/1"
    assert "CHOSEN" in err


# -- what is wrong, and exit codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("info", "--json", "/no/such/folder/x.json"), "folder /no/such/folder does not exist"),
        (("info", "--json", "/proc/x.json"), "--json: /proc/x.json cannot be written"),
        (("info", "--json", "x" * 250), "cannot be written (File name too long)"),
        (("check", "--seed", "99999999999999999999999"), "--seed: expected an integer from 0 to 4294967295"),
        (("check", "--seed", "-1"), "--seed: expected an integer from 0 to 4294967295, got -1"),
        (("accuracy", "--seed", "99999999999999999999999"), "--seed: expected an integer from 0 to 4294967295"),
        (("run", "--time-limit", "0"), "--time-limit: expected a positive number of seconds, got 0"),
        (("run", "--time-limit", "nan"), "--time-limit: expected a positive number of seconds, got nan"),
        (("bench", "--time-limit", "nan"), "--time-limit: expected a positive number of seconds, got nan"),
        (("bench", "--seconds", "-1"), "--seconds: expected a positive number of seconds, got -1"),
        (("info", "--device", "tpu"), "--device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (("explain", "--format", "int3"), "format: expected one of bf16"),
        (("explain", "--kv", "1,x"), "--kv: expected integers"),
        (("explain", "--kv", "1,2", "--batch", "3"), "--kv: lists 2 sequences, --batch says 3"),
        (("explain", "--heads", "0"), "--heads: expected a positive integer"),
        (("explain", "--backend", "hopper", "--device", "cpu"), "backend='hopper' cannot run this"),
        (("check", "--kind", "nonsense"), "--kind: expected some of plain"),
        (("check", "--backend", "hopper", "--device", "cpu"), "backend='hopper' cannot run this"),
        (("run", "--backend", "nonsense", "--cases", "1x1"), "backend: expected 'auto' or one of"),
        (("run", "--backend", "hopper", "--device", "cpu", "--cases", "1x64"), "backend='hopper' cannot run this"),
        (("bench", "--backend", "hopper", "--device", "cpu", "--cases", "1x64"), "backend='hopper' cannot run this"),
        (("bench", "--cases", "fast"), "--cases: expected some of contest"),
        (("bench", "--peers", "nobody"), "--peers: expected auto, none"),
        (("bench", "--compare", "/no/file.json"), "cannot be read as a result file"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence_and_exit_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert words in err and err.startswith(f"leanmla {argv[0]}: ") and err.count("\n") == 1


@pytest.mark.parametrize(("variable", "value"), [("LEANMLA_BACKEND", "zzz"), ("LEANMLA_CPU_THREADS", "x")])
@pytest.mark.parametrize(
    "argv", [("run", "--cases", "2x100"), ("bench", "--cases", "2x100"), ("explain",), ("check", "--kind", "plain")]
)
def test_a_wrong_setting_is_refused_by_name_before_the_work(capsys, tmp_path, monkeypatch, variable, value, argv):
    if argv[0] == "check" and variable == "LEANMLA_BACKEND":
        pytest.skip("check names its backends")
    monkeypatch.setenv(variable, value)
    file = tmp_path / "z.json"
    code, out, err = run(capsys, *argv, "--device", "cpu", "--json", str(file))
    assert code == 2 and out == "" and not file.exists()
    assert err.startswith(f"leanmla {argv[0]}: {variable}: expected") and f"got '{value}'" in err and err.count("\n") == 1


def test_a_setting_that_can_run_none_of_it_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("LEANMLA_BACKEND", "hopper")
    code, out, err = run(capsys, "run", "--cases", "2x100", "--device", "cpu")
    assert code == 2 and out == "" and "backend='hopper' cannot run this" in err


def test_a_run_without_a_result_is_not_ok(capsys, tmp_path, monkeypatch):
    def refuses(self, args, workspace):
        raise BackendUnavailable("it does not like the weather.")

    monkeypatch.setattr(ReferenceBackend, "run", refuses)
    code, document, out = run_json(capsys, tmp_path, "run", "--backend", "reference", "--cases", "2x70", "--formats", "fp8")
    assert code == 2 and not document["ok"]
    assert "Left out, 1 case: reference fp8: it does not like the weather." in out and ".." not in out


def test_a_case_that_does_not_fit_is_said_to_need_what_it_needs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("leanmla.bench.measure.free_memory", lambda device: 1 << 30)
    case = ("--cases", "300x9999999", "--formats", "bf16")
    code, document, _ = run_json(capsys, tmp_path, "run", "--backend", "reference", *case)
    assert code == 2 and not document["ok"]
    gib = -(-9999999 // 64) * 64 * 1152 / 2**30
    words = f"300 x 9999999 needs {300 * gib:,.1f} GiB for the cache, one sequence of it {gib:.1f} GiB, more than there is"
    assert document["results"][0]["message"] == words and "3,218.7 GiB" in words


def test_unknown_command_and_option(capsys):
    assert run(capsys, "fly")[0] == 2
    assert run(capsys, "info", "--fast")[0] == 2


def _broken(change):
    right = ReferenceBackend.run

    def broken_run(self, args, workspace):
        right(self, args, workspace)
        change(args)

    return broken_run


def test_a_wrong_kernel_is_not_timed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "run", _broken(lambda args: args.out[0].mul_(1.05)))
    code, document, out = run_json(capsys, tmp_path, "bench", "--backend", "reference", "--cases", "2x70", "--formats", "fp8")
    result = document["results"][0]
    assert code == 1 and not document["ok"]
    assert result["status"] == "wrong" and result["time_us"] is None and result["samples_us"] == []
    assert "WRONG" in out and "expected" in result["message"]


def test_an_output_that_is_not_written_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "run", lambda self, args, workspace: args.out[1:].zero_())
    code, document, out = run_json(capsys, tmp_path, "run", "--backend", "reference", "--cases", "2x70", "--formats", "bf16")
    assert code == 1 and "WRONG" in out
    assert "was not written" in document["results"][0]["message"]


def test_a_kernel_that_goes_wrong_while_it_is_timed_is_caught(capsys, tmp_path, monkeypatch):
    calls = []

    def later(args):
        calls.append(1)
        if len(calls) > 8:
            args.out.zero_()

    monkeypatch.setattr(ReferenceBackend, "run", _broken(later))
    code, document, _ = run_json(capsys, tmp_path, "bench", "--backend", "reference", "--cases", "2x70", "--formats", "fp8")
    assert code == 1
    assert document["results"][0]["status"] == "wrong" and "in the timed calls" in document["results"][0]["message"]
    assert document["results"][0]["time_us"] is None


def test_a_kernel_that_raises_is_reported(capsys, tmp_path, monkeypatch):
    def fails(self, args, workspace):
        raise RuntimeError("no luck")

    monkeypatch.setattr(ReferenceBackend, "run", fails)
    code, document, out = run_json(capsys, tmp_path, "bench", "--backend", "reference", "--cases", "1x70", "--formats", "fp8")
    assert code == 1 and document["results"][0]["status"] == "failed" and "no luck" in out
    code, document, out = run_json(capsys, tmp_path, "check", "--backend", "reference", "--kind", "skewed", "--format", "fp8")
    assert code == 1 and "no luck" in out


def test_check_reports_what_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "run", _broken(lambda args: args.out.view(-1)[7].add_(0.5)))
    code, document, out = run_json(capsys, tmp_path, "check", "--backend", "reference", "--kind", "plain", "--format", "fp8")
    assert code == 1 and not document["ok"]
    assert "4 of 4 results are wrong" in out and "out[0, 0, 7]" in out


def test_check_sees_bits_that_change_and_storage_that_matters(capsys, tmp_path, monkeypatch):
    calls = []

    def drift(args):
        calls.append(1)
        args.lse.view(-1)[0] += 1e-6 * (len(calls) % 3)

    monkeypatch.setattr(ReferenceBackend, "run", _broken(drift))
    _, document, _ = run_json(capsys, tmp_path, "check", "--backend", "reference", "--kind", "plain", "--format", "fp8")
    problems = {p for r in document["results"] for p in r["problems"]}
    assert any("other bits" in p for p in problems) and any("what lies past the keys" in p for p in problems)


# -- files, interruption, pipes -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_130_and_no_file(capsys, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("leanmla.bench.measure.interleave", interrupted)
    file = tmp_path / "result.json"
    code, _, err = run(capsys, "bench", "--backend", "reference", "--cases", "1x64", "--json", str(file))
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_for_real(tmp_path):
    code = (
        "import sys, leanmla.cli, leanmla.cli.check; print('ready', flush=True); "
        "sys.exit(leanmla.cli.main(['check', '--backend', 'reference', '--json', sys.argv[1]]))"
    )
    file = tmp_path / "result.json"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("started_as", ["module", "script", "library"])
def test_ctrl_c_while_torch_is_imported(started_as, tmp_path):
    """The earliest moment that is ours: nothing but a package's import has happened yet."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise KeyboardInterrupt")
    script = tmp_path / "leanmla"
    script.write_text("import sys\nfrom leanmla.__main__ import main\nsys.exit(main())\n")
    argv = {"module": ["-m", "leanmla", "info"], "script": [str(script), "info"], "library": ["-c", "import leanmla"]}[
        started_as
    ]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, cwd=tmp_path / "torch",
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    if started_as == "library":
        assert "KeyboardInterrupt" in done.stderr and done.returncode != 0  # whoever imports it decides
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_before_the_command_line_is_there(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("leanmla.cli.main", interrupted)
    assert __main__.main() == 130


def test_json_into_a_pipe_or_device_leaves_it_in_place(capsys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert run(capsys, "explain", "--device", "cpu", "--quiet", "--json", str(pipe))[0] == 0
    assert json.loads(reader.communicate(timeout=60)[0])["schema"] == "leanmla-explain/1"
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.skipif(not pathlib.Path("/dev/full").is_char_device(), reason="needs /dev/full, a device that is always full")
def test_json_that_cannot_be_written_in_the_end(capsys):
    code, _, err = run(capsys, "explain", "--device", "cpu", "--quiet", "--json", "/dev/full")
    assert code == 2 and err.startswith("leanmla explain: --json: /dev/full cannot be written") and err.count("\n") == 1


def test_a_broken_pipe_is_silent():
    command = f"set -o pipefail; {sys.executable} -m leanmla info | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert done.stdout.startswith("leanmla") and done.stderr == ""
    assert done.returncode in (0, 141)  # 0 if everything fitted the pipe


# -- sizing the main job --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "code"), [(">&-", 0), (">/dev/full", 2)])
def test_output_that_goes_nowhere_leaves_no_traceback(where, code):
    if where == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    command = f"{sys.executable} -m leanmla explain --device-like h200 {where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert done.stderr == ("" if code == 0 else "leanmla: the output cannot be written (No space left on device).\n")


def test_a_narrow_terminal_folds_words_but_no_number(monkeypatch, capsys):
    monkeypatch.setattr("leanmla.cli.output.PLAIN_WIDTH", 60)
    assert main(["accuracy", "--kv", "64", "--heads", "2", "--distributions", "normal", "--formats", "fp8"]) == 0
    assert re.search(r" \d\.\de-\d\d  \d\.\de-\d\d \(#\d\)  \d\.\de-\d\d", capsys.readouterr().out)
    assert main(["explain", "--device-like", "h200", "--batch", "3", "--kv", "5,17,4000"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_run_makes_batches_smaller_for_memory_and_time():
    from leanmla.bench.cases import contest_cases

    cases, names = contest_cases(), ["bf16", "fp8"]
    large = cases[-1]
    assert run_command._fit(large, [large], names, 4 << 30, 1000.0, 1e-7) == (large, "")
    smaller, why = run_command._fit(large, [large], names, 1 << 30, 1000.0, 1e-7)
    assert why == "memory" and smaller.batch == 113 and smaller.label == "113 of 256 x 8192"
    smaller, why = run_command._fit(large, [large], names, 4 << 30, 11.5, 1e-6)
    assert why == "time" and 80 < smaller.batch < 140
    smaller, why = run_command._fit(large, [large], names, 4 << 30, -5.0, 1e-6)
    assert why == "time" and smaller.batch == 1
    small = cases[1]
    assert run_command._fit(small, cases[1:], names, 4 << 30, 60.0, 1e-5) == (small, "")


# -- pictures and tables ----------------------------------------------------------------------------------------------------


def test_the_picture_shows_sequences_borders_and_idle_workers():
    lines = explain.draw(plan_splits([1024, 512], num_workers=3, granularity=64, num_kv_splits=1))
    assert len(lines) == 4
    bars = [line[8:] for line in lines[1:]]
    assert bars[0] == "a" * 71 + "|"
    assert bars[1] == "b" * 35 + "|" + "." * 36
    assert bars[2] == "." * 72
    assert len(explain.draw(plan_splits([4096] * 99, num_workers=264))) == 1 + explain.PICTURE_ROWS
    assert explain.draw(plan_splits([0, 0], num_workers=2)) == ["(no keys at all)"]


def test_explain_shows_the_schedule_that_the_cpu_backend_runs(capsys, tmp_path):
    pytest.importorskip("numba")
    argv = ("explain", "--device", "cpu", "--backend", "cpu", "--batch", "1", "--kv", "8192")
    _, document, _ = run_json(capsys, tmp_path, *argv)
    assert [i[2:] for i in document["schedule"]["items"]] == [[n * 2048, (n + 1) * 2048] for n in range(4)]  # one thread


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_explain_needs_no_packages_of_such_a_device(capsys, monkeypatch, device):
    real = importlib.util.find_spec

    def find_spec(name, *args):
        if name in ("triton", "numba"):
            return None
        if name.startswith(("triton.", "numba.")):
            raise ModuleNotFoundError(name)
        return real(name, *args)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    code, out, err = run(capsys, "explain", "--device-like", device, "--backend", "hopper" if device == "h200" else "cpu")
    assert code == 0, err
    with override(KNOWN["h200"].info):
        code, out, err = run(capsys, "explain")
    assert code == 0 and "Triton" in out


def test_support_table_does_not_depend_on_this_machine():
    table = support.support_table()
    with override(KNOWN["mi355x"].info):
        assert support.support_table() == table
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 5 and all(row.count("|") == len(support.COLUMNS) + 2 for row in rows)


def test_support_table_is_put_between_its_markers(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{support.BEGIN}\nold\n{support.END}\nbelow\n")
    assert support.main(["--check", str(readme)]) == 1
    assert support.main(["--write", str(readme)]) == 0
    assert support.main(["--check", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text and support.support_table() in text
    readme.write_text("no markers")
    assert support.main(["--write", str(readme)]) == 2
    assert "expected one <!-- support:begin -->" in capsys.readouterr().err


def test_the_readme_has_the_current_support_table():
    assert support.main(["--check", str(ROOT / "README.md")]) == 0
