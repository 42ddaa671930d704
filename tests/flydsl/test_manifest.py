"""The manifest is enough to launch from: a launcher that knows nothing of this package packs the same bytes."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from pathlib import Path

import pytest
from pretend import pretend_build

from leanmla.errors import InvalidArgument
from leanmla.kernels.flydsl import manifest as manifest_module
from leanmla.kernels.flydsl.manifest import SCHEMA, buffers, manifest, parameters, write_manifest
from leanmla.problem import DecodeProblem

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07_launch_code_objects.py"
TABLES = ("block_table", "csr", "contiguous")


def problem(**changes) -> DecodeProblem:
    base = DecodeProblem(
        format="mxfp4", num_heads=16, batch=3, total_q=6, max_q_len=2, ragged_q=False, page_size=64, table_kind="block_table",
        max_kv_len=256, total_kv=3 * 256, return_lse=True,
    )  # fmt: skip
    return base.replace(**changes)


class RecordingHip:
    """Enough of HIP for the example: memory on the host, launches written down as (kernel name, grid, block, segment)."""

    def __init__(self):
        self.memory, self.code, self.functions, self.launches = [], [], [], []

    def hipMalloc(self, pointer, size):
        self.memory.append(ctypes.create_string_buffer(size.value))
        pointer._obj.value = ctypes.addressof(self.memory[-1])
        return 0

    def hipMemcpy(self, to, source, size, kind):
        ctypes.memmove(to, source, size.value)
        return 0

    def hipModuleLoadData(self, module, code):
        self.code.append(code)
        module._obj.value = len(self.code)
        return 0

    def hipModuleGetFunction(self, function, module, name):
        assert self.code[module.value - 1] == name  # what pretend_build puts there
        self.functions.append(name.decode())
        function._obj.value = len(self.functions)
        return 0

    def hipModuleLaunchKernel(self, function, *rest):
        sizes, extra = [n.value for n in rest[:7]], rest[9]
        segment = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        self.launches.append((self.functions[function.value - 1], tuple(sizes[:3]), tuple(sizes[3:6]), segment))
        return 0


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("launch_code_objects", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_imports_only_python_itself():
    imports = {line.split()[1].split(".")[0] for line in EXAMPLE.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert imports <= {"ctypes", "json", "math", "struct", "sys", "pathlib"}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "fp8_tile128"])
def test_a_stranger_packs_the_same_segments(example, tmp_path, format, table):
    p = problem(format=format, table_kind=table, page_size=1 if table == "contiguous" else 64, ragged_q=table == "csr")
    kernel = pretend_build(p)
    write_manifest([kernel], tmp_path / "out")
    hip = RecordingHip()
    launcher = example.Launcher(tmp_path / "out", hip)
    (entry,) = launcher.problems.values()
    scratch = launcher.make_scratch(entry)
    own = {b["name"]: 4096 * (i + 1) for i, b in enumerate(entry["buffers"]) if b["role"] != "scratch"}
    launcher.run(entry, scratch | own, {"sm_scale": 0.25, "q_row_stride": 99 * 16})

    values = {a.name: 0 for k in kernel.launches for a in k.arguments if a.name not in k.constants}
    values |= {p.name: p.default for p in parameters(kernel) if p.default is not None}
    values |= scratch | own | {"sm_scale": 0.25, "q_row_stride": 99 * 16}
    assert hip.launches == [(k.name, k.grid, k.block, k.pack(values)) for k in kernel.launches]
    assert {"items", "first_item", "split_counts", "num_items", "partial_out", "partial_lse", "zeros"} == set(scratch)


def test_an_optional_output_may_be_left_out(example, tmp_path):
    kernel = pretend_build(problem())
    write_manifest([kernel], tmp_path / "out")
    launcher = example.Launcher(tmp_path / "out", RecordingHip())
    (entry,) = launcher.problems.values()
    addresses = launcher.make_scratch(entry) | {b["name"]: 16 for b in entry["buffers"] if b["role"] != "scratch"}
    del addresses["lse"]
    launcher.run(entry, addresses, {"sm_scale": 1.0})
    del addresses["q"]
    with pytest.raises(KeyError, match="q"):
        launcher.run(entry, addresses, {"sm_scale": 1.0})


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_argument_has_one_source(table, ragged):
    kernel = pretend_build(problem(table_kind=table, page_size=1 if table == "contiguous" else 16, ragged_q=ragged))
    document = manifest([kernel])
    assert document["schema"] == SCHEMA and all(document[key] for key in ("packing", "order", "capacity"))
    (entry,) = document["problems"]
    assert json.loads(json.dumps(document)) == document
    names = {b["name"] for b in entry["buffers"]}
    numbers = {p["name"]: p for p in entry["parameters"]}
    assert numbers["sm_scale"]["default"] is None
    assert all(p["default"] is not None for name, p in numbers.items() if name != "sm_scale")
    used = set()
    for launch in entry["launches"]:
        assert launch["resources"]["waves_per_simd"] == 2 and launch["resources"]["blocks_per_cu"] >= 1
        end = 0
        for a in launch["arguments"]:
            assert sum(source in a for source in ("constant", "buffer", "parameter")) == 1, a
            assert a["offset"] % a["bytes"] == 0 and a["offset"] >= end
            end = a["offset"] + a["bytes"]
            assert a.get("buffer", next(iter(names))) in names and a.get("parameter", "sm_scale") in numbers
            used.add(a.get("buffer"))
        assert end <= launch["kernarg_bytes"]
    assert names <= used
    assert ("qo_indptr" in names) == ragged and ("page_ids" in names) == (table != "contiguous")


def test_sizes_are_the_problems():
    p = problem(format="bf16")
    sizes = {b.name: b for b in buffers(pretend_build(p))}
    assert sizes["q"].num_bytes == 6 * 16 * 576 * 2 and sizes["out"].num_bytes == 6 * 16 * 512 * 2
    assert sizes["kv"].shape == (None, 64, 576) and sizes["kv"].num_bytes is None
    assert sizes["page_ids"].shape == (3, 4) and "kv_scale" not in sizes
    assert sizes["zeros"].contents == "zeros"


def test_a_build_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    kernel = pretend_build(problem())

    def interrupted(kernels):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(manifest_module, "manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_manifest([kernel], folder)
    assert not list(tmp_path.iterdir())

    write_manifest([kernel], folder)
    first = {f.name: f.read_bytes() for f in folder.iterdir()}
    with monkeypatch.context() as m:
        m.setattr(manifest_module, "manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_manifest([pretend_build(problem(num_heads=32))], folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == first

    rename, calls = os.replace, []

    def second_is_interrupted(source, target):
        calls.append(source)
        if len(calls) == 2:  # the earlier build is out of the way, the new one not yet in its place
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as m:
        m.setattr(manifest_module.os, "replace", second_is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_manifest([pretend_build(problem(num_heads=32))], folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == first and list(tmp_path.iterdir()) == [folder]


def test_earlier_builds_are_replaced_and_nothing_else_is(tmp_path):
    kernel = pretend_build(problem())
    folder = tmp_path / "out"
    write_manifest([kernel], folder)
    write_manifest([pretend_build(problem(format="fp8"))], folder)
    assert json.loads((folder / "manifest.json").read_text())["problems"][0]["problem"]["format"] == "fp8"
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="files that are not of an earlier build"):
        write_manifest([kernel], folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file"):
        write_manifest([kernel], tmp_path / "file")
    with pytest.raises(InvalidArgument, match="does not exist"):
        write_manifest([kernel], tmp_path / "no" / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "out"]
