"""Examples run and print something worth reading; docstring examples and links in the docs are right."""

import doctest
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stderr.strip(), done.stderr
    errors = [float(e) for e in re.findall(r"error[^0-9\n]*(\d\.\de[-+]\d\d)", done.stdout)]
    assert all(e < 5e-3 for e in errors), done.stdout
    if ("gpu" in path.stem or "graph" in path.stem) and not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use; without one the example says so")


@pytest.mark.parametrize("module", ["leanmla.decode", "leanmla.cache", "leanmla.page_table"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0 and (result.attempted or module == "leanmla.page_table")


def test_every_public_name_has_a_docstring():
    import leanmla

    for name in leanmla.__all__:
        thing = getattr(leanmla, name)
        if callable(thing):
            assert thing.__doc__ and len(thing.__doc__) > 20, name
            for member, value in vars(thing).items() if isinstance(thing, type) else ():
                if (not member.startswith("_") and callable(value)) or isinstance(value, property | classmethod):
                    assert getattr(thing, member).__doc__ or getattr(value, "__doc__", None), f"{name}.{member}"


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "leanmla/kernels/README.md"]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.exists()], ids=lambda d: d.name)
def test_relative_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.exists()], ids=lambda d: d.name)
def test_named_files_exist(document):
    for name in re.findall(r"`((?:leanmla|docs|examples|tests|benchmarks)/[\w/.-]+\.\w+)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.exists()], ids=lambda d: d.name)
def test_python_snippets_run(document):
    """Every ```python block of a document, in order, in one namespace. Blocks that name cuda need a GPU."""
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        if "cuda" in block and not torch.cuda.is_available():
            compile(block, str(document), "exec")
            continue
        exec(compile(block, str(document), "exec"), namespace)
