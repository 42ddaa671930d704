"""Compile the CUDA C++ kernel without a GPU, by NVRTC or nvcc, and look at the machine code: tensor cores, copies, spills."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from leanmla.device import DeviceInfo, describe
from leanmla.errors import InvalidArgument
from leanmla.kernels.hopper_cuda import compiler, launch_configs, tune
from leanmla.kernels.hopper_cuda.arguments import Arguments, Divisor
from leanmla.kernels.hopper_cuda.backend import BACKEND
from leanmla.kernels.hopper_cuda.launch import arrangement_for, choose_launch
from leanmla.kernels.hopper_cuda.launch_configs import ARRANGEMENTS
from leanmla.problem import DecodeProblem

H200 = DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 141 << 30)
PROBLEM = DecodeProblem("mxfp4_row320", 16, 64, 64, 1, False, 64, "block_table", 8192, 64 * 8192)
VARIANTS = [
    compiler.Variant(fmt, fp16, cap, a)
    for fmt in compiler.FORMATS
    for a in ARRANGEMENTS.values()
    for fp16, cap in ((False, True), (True, False))
]


def compiler_here() -> str | None:
    if compiler.unavailable() is None:
        return "nvrtc"
    return "nvcc" if shutil.which("nvcc") else None


def tool(name: str) -> str | None:
    found = shutil.which(name)
    if found:
        return found
    triton = pytest.importorskip(
        "triton", reason="neither the CUDA toolkit nor Triton, which brings a disassembler, is installed"
    )
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


@functools.cache
def machine_code(variant: compiler.Variant, folder: Path) -> tuple[list[str], str]:
    """(SASS instructions, resource usage) of a variant."""
    cubin = folder / f"{variant.format}{variant.arrangement.name}{int(variant.q_is_fp16)}{int(variant.has_cap)}.cubin"
    if compiler_here() == "nvrtc":
        cubin.write_bytes(compiler.compile_cubin(variant))
    else:
        source = folder / "variant.cu"
        source.write_text(compiler.source_text(variant))
        command = ["nvcc", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", f"-I{compiler.FOLDER}"]
        subprocess.run([*command, "-o", str(cubin), str(source)], check=True, capture_output=True)
    disassembler, reader = tool("nvdisasm"), tool("cuobjdump")
    if disassembler is None or reader is None:
        pytest.skip("no nvdisasm and cuobjdump here")
    sass = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([reader, "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass), usage.stdout + usage.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cubin")


def count(instructions: list[str], name: str) -> int:
    return sum(bool(re.match(rf"(@!?U?P\w+ )?{name}\b", text.strip())) for text in instructions)


def product_loops(instructions: list[str]) -> list[list[str]]:
    """The instructions from the first to the last product of each kind: the bodies of the two loops over tiles."""
    found = []
    for name in ("QGMMA", "HGMMA", "HMMA"):
        at = [i for i, text in enumerate(instructions) if re.match(rf"(@!?U?P\w+ )?{name}\b", text.strip())]
        if at:
            found.append(instructions[at[0] : at[-1] + 1])
    return found


@pytest.mark.skipif(compiler_here() is None, reason="needs cuda-core with NVRTC (pip install 'leanmla[cuda]') or nvcc")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.format}-{v.arrangement.name}-{v.q_is_fp16}-{v.has_cap}")
def test_machine_code(variant, folder):
    instructions, usage = machine_code(variant, folder)
    # scores: 16 slices of 32 values and 2 of the rope part; values: 8 chunks of 4 x 16 keys
    assert count(instructions, "QGMMA") == 18
    assert count(instructions, "HGMMA") == 32
    assert count(instructions, "HMMA") == 12  # large scores again: a loop of 4, and the rope part's 8
    # products overlap: ptxas waits for each of them where it finds an accumulator read too early
    assert sum("DEPBAR.LE gsb0, 0x0" in text for text in instructions) <= 3
    assert "ACQBULK" in " ".join(instructions) and "PREEXIT" in " ".join(
        instructions
    )  # waits for the kernel before, lets the next begin
    assert "UBLKCP" in " ".join(instructions)  # bulk copies
    # what belongs to a segment, not to a tile, may be kept on the stack
    assert count(instructions, "LDL") + count(instructions, "STL") <= 112
    assert max(count(loop, "LDL") + count(loop, "STL") for loop in product_loops(instructions)) <= 16
    registers = re.search(r"REG:(\d+)", usage)
    shape = variant.arrangement
    assert registers is not None and int(registers[1]) == 65536 // shape.blocks_per_sm // shape.threads // 8 * 8


@pytest.mark.skipif(compiler.unavailable() is not None, reason="needs cuda-core with NVRTC (pip install 'leanmla[cuda]')")
def test_machine_code_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANMLA_CACHE_DIR", str(tmp_path / "cache"))
    first = compiler.cubin(VARIANTS[0])
    files = list((tmp_path / "cache" / "cubin").iterdir())
    assert len(files) == 1 and files[0].read_bytes() == first
    monkeypatch.setattr(compiler, "compile_cubin", lambda variant: pytest.fail("compiled again"))
    assert compiler.cubin(VARIANTS[0]) == first
    files[0].write_bytes(b"broken")
    monkeypatch.setattr(compiler, "compile_cubin", lambda variant: first)
    assert compiler.cubin(VARIANTS[0]) == first and files[0].read_bytes() == first


def test_a_folder_that_cannot_be_written_costs_a_compilation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEANMLA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compiler, "compile_cubin", lambda variant: b"\x7fELF code")
    monkeypatch.setattr(compiler, "_nvrtc_version", lambda: "13.0")
    assert compiler.cubin(VARIANTS[0]) == b"\x7fELF code"


def test_the_arguments_are_those_of_the_source():
    text = (compiler.FOLDER / "layout.cuh").read_text()
    body = re.search(r"struct Arguments \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    code = re.sub(r"//.*", "", body[1])
    names = [
        name.strip(" *\n")
        for _, declared in re.findall(r"(const \w+\*|\w+\*?)\s+([^;]+);", code)
        for name in declared.split(",")
    ]
    assert names == [name for name, _ in Arguments._fields_]
    assert ctypes.sizeof(Arguments) == 18 * 8 + 2 * 8 + 19 * 4 + 3 * 4


def test_numbers_shared_with_the_source():
    text = (compiler.FOLDER / "layout.cuh").read_text()
    assert "enum TableKind { CSR = 0, BLOCK_TABLE = 1, CONTIGUOUS = 2 };" in text
    assert "enum Mode { BALANCED = 0, FIXED_COUNT = 1, FIXED_SIZE = 2 };" in text
    assert "constexpr int KEYS = 64;" in text and "constexpr int ROWS = 16;" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": "fp8"}, "cache formats mxfp4_row320 and mxfp4 only, this is 'fp8'"),
        ({"num_heads": 129}, "1 to 128 heads"),
        ({"split_size": 96}, "multiple of 64"),
        ({"num_kv_splits": 40000}, "at most 32767 splits"),
    ],
)
def test_what_it_does_not_take(changes, text):
    reason = BACKEND.why_not(PROBLEM.replace(**changes), H200)
    assert reason is not None and text in reason


def test_what_is_missing_is_said(monkeypatch):
    compiler._unavailable.cache_clear()
    monkeypatch.setattr(compiler, "missing", lambda module: "no")
    try:
        reason = BACKEND.why_not(PROBLEM, H200)
        assert reason == "needs NVIDIA's cuda-core, which is not installed (pip install 'leanmla[cuda]')"
    finally:
        compiler._unavailable.cache_clear()


def test_launches():
    one = choose_launch(PROBLEM, H200)
    assert (one.tiles, one.workers, one.grid, one.may_wait) == (1, 132, 132, True)
    many = choose_launch(PROBLEM.replace(num_heads=128), H200)
    assert (many.tiles, many.workers, many.grid, many.may_wait) == (8, 16, 128, True)
    fixed = choose_launch(PROBLEM.replace(num_kv_splits=4), H200)
    assert (fixed.workers, fixed.grid, fixed.slots, fixed.may_wait) == (4, 256, 256, False)
    reason = BACKEND.launch_config(PROBLEM, H200)
    assert reason.kernel.endswith(compiler.SOURCE) and (compiler.FOLDER / compiler.SOURCE).exists()


def test_arrangements():
    """Two groups for few tiles a multiprocessor, three for many; row tiles count."""
    for changes, name in (
        ({}, "three_groups"),
        ({"total_kv": 64 * 1024}, "two_groups"),
        ({"total_kv": 64 * 1024, "num_heads": 128}, "three_groups"),
        ({"format": "mxfp4"}, "three_groups_even"),
        ({"format": "mxfp4", "total_kv": 64 * 1024}, "two_groups"),
    ):
        problem = PROBLEM.replace(**changes)
        assert dict(BACKEND.launch_config(problem, H200).extra)["arrangement"] == name
        assert arrangement_for(problem, H200) is ARRANGEMENTS[name]
        for other in ARRANGEMENTS:
            with launch_configs.using(other):
                assert arrangement_for(problem, H200).name == other
    # a row alone and in a batch: sums in the same order
    sizes = [PROBLEM.replace(split_size=256, total_kv=n) for n in (64, 64 * 1024, 64 * 8192)]
    assert len({arrangement_for(problem, H200).name for problem in sizes}) == 1
    for arrangement in ARRANGEMENTS.values():
        assert arrangement.threads * arrangement.blocks_per_sm <= 512  # at least 128 registers a thread
        assert arrangement.blocks_per_sm * (arrangement.shared_bytes + 1024) <= 228 * 1024
    with (
        pytest.raises(InvalidArgument, match="arrangement: expected one of three_groups, .*, got 'four'"),
        launch_configs.using("four"),
    ):
        pass


@pytest.mark.parametrize("x", [1, 2, 3, 5, 7, 16, 20, 48, 64, 96, 128, 2**30, 2**31 - 1])
def test_division_by_multiplication(x):
    by = Divisor.of(x)
    near = [k * x + d for k in (0, 1, 2, 1000, (2**31 - 1) // x) for d in (-1, 0, 1)]
    for n in [n for n in near + [2**31 - 1, 2**31 - 2, 123456789] if 0 <= n < 2**31]:
        assert n * by.magic >> by.shift == n // x


def test_tuning_says_why_it_cannot_run(capsys, tmp_path):
    if torch.cuda.is_available() and describe("cuda").arch == "sm_90":
        pytest.skip("it can")
    assert tune.main(["--json", str(tmp_path / "none" / "t.json")]) == 2
    assert "--json: the folder" in capsys.readouterr().out
    assert tune.main(["two_groups"]) == 2
    assert "backend='hopper_cuda' cannot run this: needs an NVIDIA Hopper GPU (sm_90)" in capsys.readouterr().out
    assert tune.main(["four"]) == 2
    assert "arrangement: expected one of" in capsys.readouterr().out


def test_tuning_prints_a_table():
    grid = tune.cases.contest_cases()[:2]
    found = [
        {"contender": name, "case": case.label, "status": "ok", "time_us": us}
        for name, times in (("a", (4.0, 9.0)), ("b", (1.0, 16.0)))
        for case, us in zip(grid, times, strict=True)
    ]
    lines = tune.table(["a", "b"], grid, found).splitlines()
    assert lines[1].split()[-2:] == ["4.0", "1.0*"] and lines[2].split()[-2:] == ["9.0*", "16.0"], lines
    assert lines[3].split()[-2:] == ["6.00", "4.00"]
