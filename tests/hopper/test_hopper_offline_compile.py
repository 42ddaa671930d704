"""Compile the Hopper kernels for sm_90 without a GPU and look at the machine code: tensor-core instructions, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "triton"))

import machine_code  # noqa: E402

from leanmla.kernels.hopper.decode_bf16_sm90 import decode_bf16  # noqa: E402
from leanmla.kernels.hopper.decode_fp8_sm90 import decode_fp8  # noqa: E402
from leanmla.kernels.hopper.gluon_names import NVMMASharedLayout  # noqa: E402

SHARED_LIMIT = 227 * 1024
_STRIDES = ("page_stride", "token_stride", "q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")
_POINTERS = {
    "q_ptr": "bf16", "out_ptr": "bf16", "lse_ptr": "fp32", "part_out_ptr": "fp32", "part_lse_ptr": "fp32", "counter_ptr": "i32",
    "lens_ptr": "i32", "last_ptr": "i32", "ids_ptr": "i32", "qo_ptr": "i32", "kv_scale_ptr": "fp32",
}  # fmt: skip
_BASE = {
    "KIND": 0, "PAGE_SIZE": 64, "RAGGED_Q": False, "LENS": 256, "ONE_PASS": True, "MODE": 0, "HEADS": 16, "ROWS": 16, "STAGES": 2,
    "BOX": 64, "GATHER": False, "CAUSAL": True, "HAS_CAP": False, "WRITE_LSE": True, "MANY_SPLITS": False,
}  # fmt: skip


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def build(fmt: str, warps: int, **constants) -> tuple[str, int]:
    """(SASS, shared memory) of one variant."""
    kernel = decode_bf16 if fmt == "bf16" else decode_fp8
    values = {**_BASE, **constants, "num_warps": warps}
    element = "bf16" if fmt == "bf16" else "fp8e4nv"
    panel, bits = (64, 16) if fmt == "bf16" else (128, 8)
    if fmt == "bf16":
        values.setdefault("SPLIT_Q", False)
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            signature[name] = "constexpr"
        elif name in _POINTERS:
            signature[name] = "*" + _POINTERS[name]
        elif name == "cache_ptr":
            signature[name] = "*" + element
        elif name == "desc":
            signature[name] = f"tensordesc<{element}[1,{values['BOX']},{panel}],{NVMMASharedLayout(128, bits, 3)!r}>"
        elif name == "desc_rope":
            signature[name] = f"tensordesc<{element}[1,{values['BOX']},64],{NVMMASharedLayout(64, bits, 3)!r}>"
        elif name in ("sm_scale", "logit_cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if "stride" in name else "i32"
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name in _STRIDES
    }
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in values.items()}, attributes)
    options = {"num_warps": warps}
    if fmt == "fp8" and values["ROWS"] == 16:
        options["maxnreg"] = 128
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return sass, compiled.metadata.shared


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and where each label points."""
    labels: dict[str, int] = {}
    found: list[str] = []
    for line in sass.splitlines():
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if label:
            labels[label[1]] = len(found)
            continue
        text = re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*;)", line)
        if text:
            found.append(text[1])
    return found, labels


def product_loops(sass: str) -> list[list[str]]:
    """The innermost loops with products in them, shortest first: one a role that has some."""
    found, labels = instructions(sass)
    spans = []
    for i, text in enumerate(found):
        branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if branch and labels.get(branch[1], i + 1) <= i and sum("GMMA" in t for t in found[labels[branch[1]] : i + 1]) > 10:
            spans.append((labels[branch[1]], i + 1))
    inner: list[tuple[int, int]] = []
    for a, b in sorted(spans, key=lambda span: span[1] - span[0]):
        # others are outer loops, or retries of barriers, which lie at the end of the code
        if all(b <= c or d <= a for c, d in inner):
            inner.append((a, b))
    return [found[a:b] for a, b in inner]


def tile_loop(sass: str) -> list[str]:
    """The smallest loop with the products in it."""
    return product_loops(sass)[0]


def broken_descriptors(sass: str) -> list[str]:
    lines = (re.sub(r"/\* ?0x[0-9a-f]+ ?\*/", "", line).strip() for line in sass.splitlines())
    return machine_code.broken_descriptors([line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/|\.L_x", line)])


def count(body: list[str], name: str) -> int:
    return sum(bool(re.match(rf"(@!?U?P\w+ )?{name}\b", t.strip())) for t in body)


BF16 = [
    (4, {}),
    (4, {"ROWS": 32, "HEADS": 32}),
    (4, {"GATHER": True, "PAGE_SIZE": 1}),
    (4, {"BOX": 16, "PAGE_SIZE": 16, "KIND": 1}),
    (4, {"MODE": 1}),
    (4, {"HAS_CAP": True, "CAUSAL": False}),
    (4, {"SPLIT_Q": True, "RAGGED_Q": True}),
]
#: 64 query rows, whatever the format.
WIDE = [
    {"HEADS": 64},
    {"HEADS": 128, "CAUSAL": False},
    {"HAS_CAP": True},
    {"GATHER": True, "PAGE_SIZE": 1},
    {"BOX": 16, "PAGE_SIZE": 16, "KIND": 1, "MODE": 1},
    {"RAGGED_Q": True, "MODE": 2, "KIND": 2},
]
FP8 = [
    (4, {}),
    (4, {"CAUSAL": False}),
    (8, {"ROWS": 32, "HEADS": 32, "STAGES": 3}),
    (4, {"GATHER": True, "PAGE_SIZE": 1}),
    (4, {"MODE": 2, "KIND": 2, "PAGE_SIZE": 1}),
]


@pytest.mark.parametrize(("warps", "constants"), BF16, ids=lambda v: str(v))
def test_bf16(warps, constants):
    sass, shared = build("bf16", warps, **constants)
    assert shared <= SHARED_LIMIT
    assert not broken_descriptors(sass)
    body = tile_loop(sass)
    # 36 products for the scores, and 512 values x 64 keys by m64 k16
    assert count(body, "HGMMA") == 36 * (2 if constants.get("SPLIT_Q") else 1) + 32
    assert count(body, "HMMA") == 0
    assert count(body, "LDL") == count(body, "STL") == 0
    assert ("UTMALDG" in sass) != bool(constants.get("GATHER"))
    assert ("LDGSTS" in sass) == bool(constants.get("GATHER"))


@pytest.mark.parametrize("constants", WIDE, ids=str)
def test_bf16_wide(constants):
    sass, shared = build("bf16", 8, ROWS=64, **constants)
    assert shared <= SHARED_LIMIT
    assert not broken_descriptors(sass)
    summer, scorer = sorted(product_loops(sass), key=lambda role: count(role, "HGMMA"))
    # a warpgroup of the summer has 256 of the 512 values
    assert [count(role, "HGMMA") for role in (summer, scorer)] == [16, 36]
    # more means that ptxas has put a wait behind each product
    assert all(count(role, "WARPGROUP") <= 8 for role in (summer, scorer))
    # at most the address of the factors, which are seldom read
    assert count(summer, "LDL") <= 1
    assert count(summer, "STL") == 0
    # what the scorer keeps in local memory is mostly read where a tile is not whole
    assert count(scorer, "LDL") + count(scorer, "STL") <= (60 if "GATHER" in constants else 32)


@pytest.mark.parametrize(("warps", "constants"), FP8, ids=lambda v: str(v))
def test_fp8(warps, constants):
    sass, shared = build("fp8", warps, **constants)
    two_blocks = constants.get("ROWS", 16) == 16
    assert shared <= (SHARED_LIMIT // 2 - 1024 if two_blocks else SHARED_LIMIT)
    assert not broken_descriptors(sass)
    body = tile_loop(sass)
    assert count(body, "QGMMA") == 18 + (32 if two_blocks else 0)
    assert count(body, "HGMMA") == (0 if two_blocks else 16)
    # the variants with the fullest registers keep a few values in local memory
    spills = count(body, "LDL") + count(body, "STL")
    assert spills <= (32 if constants.get("GATHER") else 4 if constants.get("CAUSAL", True) and two_blocks else 0)


@pytest.mark.parametrize("constants", WIDE, ids=str)
def test_fp8_wide(constants):
    sass, shared = build("fp8", 8, ROWS=64, STAGES=3, **constants)
    assert shared <= SHARED_LIMIT
    assert not broken_descriptors(sass)
    scorer, summer = sorted(product_loops(sass), key=lambda role: count(role, "HGMMA"))
    # both terms of 64 rows; a warpgroup of the summer has 256 of the 512 values
    assert (count(scorer, "QGMMA"), count(summer, "HGMMA")) == (36, 16)
    # one wait a product of the summer, from the fourth on: fewer registers, and ptxas puts one behind each
    assert count(scorer, "WARPGROUP") <= 8
    assert count(summer, "WARPGROUP") <= 29
    # at most an address
    assert count(summer, "LDL") <= 1
    assert count(summer, "STL") == 0
    # what the scorer keeps in local memory is mostly read where a tile is not whole
    assert count(scorer, "LDL") + count(scorer, "STL") <= 112
