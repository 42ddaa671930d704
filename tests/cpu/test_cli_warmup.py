"""``leanmla warmup``: what it runs, writes and refuses."""

from __future__ import annotations

import json

import pytest

from leanmla.cli import main
from leanmla.cli.warmup import cache_folders, usual_cases
from leanmla.formats import FORMATS


def test_cases_are_all_combinations():
    cases = usual_cases(("bf16", "fp8"), heads=(16, 64), q_lens=(1, 4), batches=(1, 33), tables=("block_table", "contiguous"))
    assert len(set(cases)) == len(cases) == 2 * 2 * 2 * 2 * 2
    assert {c.batch for c in cases} == {1, 33}
    assert all(c.page_size == (1 if c.table == "contiguous" else 64) for c in cases)
    assert {c.format for c in usual_cases(tuple(FORMATS))} == set(FORMATS)


def test_a_machine_without_a_gpu_compiles_the_cpu_kernels_and_says_so(capsys, tmp_path):
    pytest.importorskip("numba")
    path = tmp_path / "warm.json"
    assert main(["warmup", "--device", "cpu", "--format", "bf16,fp8", "--batch", "1,2", "--json", str(path)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "This compiles the CPU kernels only" in words and "Run leanmla warmup there" in words
    assert "4 cases in" in words
    document = json.loads(path.read_text())
    assert document["schema"] == "leanmla-warmup/1"
    assert [(c["backend"], c["format"], c["batch"]) for c in document["compiled"]] == [
        ("cpu", "bf16", 1), ("cpu", "bf16", 2), ("cpu", "fp8", 1), ("cpu", "fp8", 2),
    ]  # fmt: skip
    assert all(c["seconds"] > 0 for c in document["compiled"])


def test_quiet_and_json_on_stdout(capsys):
    pytest.importorskip("numba")
    assert main(["warmup", "--device", "cpu", "--format", "bf16", "--batch", "1", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""
    assert main(["warmup", "--device", "cpu", "--format", "bf16", "--batch", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--table", "tree"], "--table: expected some of block_table, csr, contiguous, got 'tree'"),
        (["--heads", "0"], "--heads: expected integers of at least 1, got 0"),
        (["--batch", "x"], "--batch: expected integers with commas between them"),
        (["--format", "int4"], "int4"),
        (["--backend", "hopper"], "backend='hopper' cannot run this"),
    ],
)
def test_refusals(capsys, words, said):
    assert main(["warmup", "--device", "cpu", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_caches_follow_their_variables(monkeypatch, tmp_path):
    import torch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cache_folders(torch.device("cuda")) == {"triton": str(tmp_path)}
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache_folders(torch.device("cpu")) == {"numba": str(tmp_path)}
