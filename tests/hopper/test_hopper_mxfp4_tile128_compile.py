"""Compile the Hopper mxfp4 and fp8_tile128 kernels for sm_90 without a GPU: tensor-core instructions, spills, shared memory, descriptors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))

import machine_code  # noqa: E402
from test_hopper_offline_compile import _BASE, _POINTERS, SHARED_LIMIT, count, tile_loop  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from leanmla.kernels.hopper.decode_fp8_tile128_sm90 import decode_fp8_tile128  # noqa: E402
from leanmla.kernels.hopper.decode_mxfp4_sm90 import decode_mxfp4  # noqa: E402
from leanmla.kernels.hopper.gluon_names import NVMMASharedLayout  # noqa: E402

_KERNELS = {"mxfp4": decode_mxfp4, "fp8_tile128": decode_fp8_tile128}
_OWN_POINTERS = {
    "mxfp4": {"cache_ptr": "i32", "scale_ptr": "u8"},
    "fp8_tile128": {"cache_ptr": "fp8e4nv", "rope_ptr": "bf16", "scale_ptr": "fp32"},
}
_ROW_STRIDES = ("q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")


def _box(element: str, box: int, width: int, swizzle: int, bits: int) -> str:
    return f"tensordesc<{element}[1,{box},{width}],{NVMMASharedLayout(swizzle, bits, 3)!r}>"


def build(fmt: str, warps: int, **constants) -> tuple[list[str], list[str], int]:
    """(machine code, its tile loop, shared memory) of one variant."""
    kernel = _KERNELS[fmt]
    values = {**_BASE, **constants, "num_warps": warps}
    box = values["BOX"]
    descriptors = (
        {"desc": _box("i32", box, 32, 128, 32), "desc_rope": _box("i32", box, 8, 32, 32)}
        if fmt == "mxfp4"
        else {"desc": _box("fp8e4nv", box, 128, 128, 8), "desc_scale": _box("fp32", box, 4, 0, 32)}
    )
    pointers = {**_POINTERS, **_OWN_POINTERS[fmt]}
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = "*" + pointers[name]
        elif name in descriptors:
            signature[name] = descriptors[name]
        elif name in ("sm_scale", "logit_cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if "stride" in name else "i32"
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, name in enumerate(kernel.arg_names)
        if name in _ROW_STRIDES or (signature[name].startswith("*") and signature[name] != "*u8")
    }
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in values.items()}, attributes)
    options = {"num_warps": warps, **({"maxnreg": 128} if values["ROWS"] == 16 else {})}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    lines = machine_code.sass(compiled.asm["cubin"])
    # the form that tile_loop reads
    body = tile_loop("\n".join(re.sub(r"^(/\*[0-9a-f]+\*/)", r"        \1  ", line) for line in lines))
    return lines, body, compiled.metadata.shared


VARIANTS = [
    ("mxfp4", 4, {}),
    ("mxfp4", 8, {"ROWS": 32, "HEADS": 32}),
    ("mxfp4", 8, {"ROWS": 64, "HEADS": 64}),
    ("mxfp4", 4, {"GATHER": True, "PAGE_SIZE": 1}),
    ("mxfp4", 4, {"BOX": 16, "PAGE_SIZE": 16, "KIND": 1}),
    ("mxfp4", 4, {"MODE": 2, "KIND": 2, "PAGE_SIZE": 1}),
    ("fp8_tile128", 4, {}),
    ("fp8_tile128", 4, {"ROWS": 32, "HEADS": 32, "STAGES": 3}),
    ("fp8_tile128", 4, {"GATHER": True, "PAGE_SIZE": 1}),
    ("fp8_tile128", 4, {"BOX": 16, "PAGE_SIZE": 16, "KIND": 1}),
]


@pytest.mark.parametrize(("fmt", "warps", "constants"), VARIANTS, ids=lambda v: str(v))
def test_machine_code(fmt, warps, constants):
    lines, body, shared = build(fmt, warps, **constants)
    rows = constants.get("ROWS", 16)
    assert shared <= (SHARED_LIMIT // 2 - 1024 if rows == 16 else SHARED_LIMIT)
    assert machine_code.broken_descriptors(lines) == []
    # 512 values x 64 keys by m64 k16 over the warpgroups; fp8_tile128 has a bf16 rope product, mxfp4 an fp8 one
    assert count(body, "HGMMA") == 32 // (warps // 4) + (4 if fmt == "fp8_tile128" else 0)
    assert count(body, "QGMMA") == (18 if fmt == "mxfp4" else 16)
    assert count(body, "HMMA") == 0
    text = "\n".join(lines)
    assert ("UTMALDG" in text) != bool(constants.get("GATHER"))
    if fmt == "mxfp4" and constants.get("GATHER"):
        assert "LDG.E.128" in text
    if fmt == "fp8_tile128" and constants.get("GATHER"):
        assert "LDGSTS.E.BYPASS.128" in text
    # the variants with the fullest registers keep a few values in local memory
    spills = count(body, "LDL") + count(body, "STL")
    full = rows > 32 or (fmt == "fp8_tile128" and rows > 16)
    assert spills <= (160 if full else 48 if constants.get("GATHER") and fmt == "fp8_tile128" else 16)
