"""The append kernel compiled without a GPU, in every format, for NVIDIA and AMD."""

import pytest

pytest.importorskip("triton", reason="needs Triton (pip install triton)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from leanmla.formats import FORMATS
from leanmla.kernels.triton.append import append_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("fmt", tuple(FORMATS))
def test_compiles(fmt, arch):
    constants = {"FORMAT": fmt, "PAGE_SIZE": 64, "EVEN": True}
    pointers = {
        "data_ptr": "*bf16" if fmt == "bf16" else "*u8", "scale_ptr": "*fp32" if fmt == "fp8" else "*u8", "saturated_ptr": "*i64",
        "latent_ptr": "*bf16", "rope_ptr": "*bf16", "slots_ptr": "*i64",
    }  # fmt: skip
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in append_kernel.arg_names}
    source = ASTSource(fn=append_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[arch], options={"num_warps": 4})
    assert compiled.asm["cubin" if arch.startswith("sm") else "hsaco"]
