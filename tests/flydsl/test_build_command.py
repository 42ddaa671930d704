"""``leanmla build`` without a compiler: what it asks to be built, prints and writes."""

from __future__ import annotations

import json

import pytest
from pretend import pretend_build

from leanmla.cli import main


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Problems that were asked for."""
    asked = []

    def build(problem, target="gfx950", precision="16bit"):
        asked.append(problem)
        return pretend_build(problem, target, precision)

    monkeypatch.setattr("leanmla.kernels.flydsl.build.build", build)
    monkeypatch.setattr("leanmla.kernels.flydsl.toolchain.flydsl_missing", lambda: None)
    monkeypatch.setattr("leanmla.kernels.flydsl.toolchain.linker_missing", lambda: None)
    return asked


def test_one_problem(built, tmp_path, capsys):
    folder = tmp_path / "out"
    code = main(["build", "--target", "gfx950", "--heads", "16", "--format", "mxfp4", "--out", str(folder)])
    text = capsys.readouterr().out
    assert code == 0 and "mxfp4 h16 q1" in text and "3 code objects" in " ".join(text.split()) and "combine" in text
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines() if str(folder) not in line)
    document = json.loads((folder / "manifest.json").read_text())
    (entry,) = document["problems"]
    assert entry["problem"]["format"] == "mxfp4" and entry["problem"]["batch"] == 64 and entry["precision"] == "16bit"
    for launch in entry["launches"]:
        assert (folder / launch["file"]).is_file()


def test_all(built, tmp_path, capsys):
    result = tmp_path / "r.json"
    argv = ["build", "--heads", "all", "--format", "all", "--q-len", "all", "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*argv, "--json", str(result)]) == 0
    assert capsys.readouterr().out == ""
    assert {(p.format, p.num_heads, p.max_q_len) for p in built} == {
        (f, h, q) for f in ("bf16", "fp8", "mxfp4", "fp8_tile128") for h in (16, 32, 64, 128) for q in (1, 4)
    }
    document = json.loads(result.read_text())
    assert document["schema"] == "leanmla-build/1" and len(document["problems"]) == 32 and document["folder"]


def test_options_arrive(built, tmp_path):
    argv = ["build", "--format", "fp8", "--precision", "a8", "--heads", "20,24", "--q-len", "3", "--batch", "5", "--kv", "100", "--quiet"]
    argv += ["--page-size", "16", "--table", "csr", "--ragged-q", "--logit-cap", "30", "--no-causal", "--split-size", "256"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    first, second = built
    assert (first.num_heads, second.num_heads, first.total_q, first.max_kv_len) == (20, 24, 15, 112)
    assert (first.page_size, first.table_kind, first.ragged_q, first.causal) == (16, "csr", True, False)
    assert (first.logit_cap, first.split_size, first.return_lse) == (30.0, 256, True)


def test_an_interrupt_leaves_nothing(built, tmp_path, capsys, monkeypatch):
    def build(problem, target, precision):
        if built:
            raise KeyboardInterrupt
        built.append(problem)
        return pretend_build(problem)

    monkeypatch.setattr("leanmla.kernels.flydsl.build.build", build)
    assert main(["build", "--heads", "16,32", "--out", str(tmp_path / "out")]) == 130
    assert not list(tmp_path.iterdir())


def test_all_leaves_out_what_has_no_kernel_and_a_named_format_is_not_left_out(built, tmp_path, capsys):
    assert main(["build", "--format", "all", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert "mxfp4_row320" not in {p.format for p in built}
    assert main(["build", "--format", "bf16,mxfp4_row320", "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "mxfp4_row320" in error and "--compiler" in error and not (tmp_path / "other").exists()
