"""``leanmla build`` says by name what is wrong, before it builds anything and without leaving a folder."""

from __future__ import annotations

import pytest

from leanmla.cli import main


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    def build(*_, **__):
        raise AssertionError("a refused command built something")

    monkeypatch.setattr("leanmla.kernels.flydsl.build.build", build)
    monkeypatch.setattr("leanmla.kernels.flydsl.build_triton.build_triton", build)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--target", "gfx942"], ("--target", "gfx950", "'gfx942'")),
        (["--compiler", "hipcc"], ("--compiler", "flydsl or triton", "'hipcc'")),
        (["--format", "int4"], ("--format", "mxfp4", "'int4'")),
        (["--format", "bf16,"], ("--format", "''")),
        (["--heads", "sixteen"], ("--heads", "integers", "'sixteen'")),
        (["--heads", "0"], ("--heads", "at least 1", "got 0")),
        (["--q-len", "0"], ("--q-len", "at least 1")),
        (["--batch", "0"], ("--batch", "positive")),
        (["--kv", "-3"], ("--kv", "positive")),
        (["--page-size", "0"], ("--page-size", "positive")),
        (["--kv", "200000000"], ("--compiler flydsl", "sequences below")),
        (["--num-kv-splits", "0"], ("num_kv_splits",)),
        (["--logit-cap", "-1"], ("logit_cap",)),
        (["--precision", "fp4"], ("--precision", "a8", "'fp4'")),
        (["--precision", "a8", "--format", "bf16"], ("--precision", "fp8")),
        (["--precision", "a8", "--format", "fp8", "--compiler", "triton"], ("--precision", "--compiler flydsl")),
        (["--small-cache"], ("--small-cache", "--compiler triton")),
        (["--q-dtype", "fp16"], ("--compiler flydsl", "fp16", "--compiler triton")),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else None,
)
def test_refusals(argv, words, tmp_path, capsys):
    assert main(["build", *argv, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("leanmla build: ") and all(w in error for w in words), error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_out_is_required(capsys):
    assert main(["build"]) == 2
    assert "--out" in capsys.readouterr().err


def test_folders_that_hold_something_else_are_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["build", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err and (tmp_path / "thesis.txt").read_text() == "mine"
    assert main(["build", "--out", str(tmp_path / "thesis.txt")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["build", "--out", str(tmp_path / "no" / "such")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("flydsl_missing", ("needs flydsl", "leanmla[amd]", "--compiler triton")),
        ("linker_missing", ("ld.lld", "leanmla[amd]", "triton")),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(missing, words, tmp_path, capsys, monkeypatch):
    from leanmla.kernels.flydsl import toolchain

    if missing == "flydsl_missing":
        monkeypatch.setattr(toolchain, missing, lambda: "needs flydsl, which is not installed (pip install flydsl)")
    else:
        monkeypatch.setattr(toolchain, "flydsl_missing", lambda: None)
        monkeypatch.setattr(toolchain, "_rocm_root", lambda: None)
        monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
        monkeypatch.setattr(
            toolchain.device, "triton_missing", lambda: "needs Triton, which is not installed (pip install triton)"
        )
    assert main(["build", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert all(w in error for w in words) and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())
