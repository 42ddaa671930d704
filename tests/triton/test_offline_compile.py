"""The Triton kernels compiled without a GPU, and what the machine code must look like."""

import os
import re

import pytest

pytest.importorskip("triton", reason="needs Triton (pip install triton)")

import machine_code

from leanmla.kernels.launch_configs import candidates, decode_config
from leanmla.kernels.triton.build import TARGETS, build_combine, build_decode
from leanmla.problem import DecodeProblem

FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")
#: With LEANMLA_TEST_EVERYTHING=1 every kind of table is compiled for every format, otherwise each for two.
EVERYTHING = os.environ.get("LEANMLA_TEST_EVERYTHING") == "1"
OLD_TRITON = tuple(map(int, machine_code.triton.__version__.split(".")[:2])) < (3, 7)


def problem(fmt: str, **changes) -> DecodeProblem:
    """64 sequences of up to 8192 keys, 16 heads."""
    base = DecodeProblem(
        format=fmt, num_heads=16, batch=64, total_q=64, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
        max_kv_len=8192, total_kv=64 * 8192, return_lse=True,
    )  # fmt: skip
    return base.replace(**changes)


#: Bytes of stack a thread, that is of spilled registers, that Triton 3.6's ptxas may use, where it is not zero. fp8_tile128 holds
#: its queries in 144 registers; with several query tokens the pass that repairs NaN takes most of it (docs/measured.md).
SM_90_STACK = {("fp8_tile128", 1): 24, ("fp8_tile128", 32): 96, ("fp8_tile128", 64): 96, ("mxfp4", 32): 216, ("mxfp4", 64): 816}


@pytest.mark.parametrize("fmt", FORMATS)
def test_sm_90(fmt):
    """Matrix instructions, wide loads, shared memory for the promised number of blocks, and sound matrix descriptors."""
    kernel = build_decode(problem(fmt), TARGETS["sm_90"])
    cubin = kernel.compiled.asm["cubin"]
    lines = machine_code.sass(cubin)
    assert not machine_code.broken_descriptors(lines)
    used = machine_code.opcodes(lines)
    if kernel.config.swapped:
        assert sum(n for op, n in used.items() if op.startswith("HGMMA")) >= 68
        assert used["LDG.E.128"] >= 18
    else:
        # Keys are copied asynchronously 16 bytes a lane and come back as matrix fragments, 16 bits an element also with fp8,
        # which the conversion instruction widens.
        assert sum(n for op, n in used.items() if op.startswith("HMMA.16816")) >= 68
        assert used["LDGSTS.E.BYPASS.128"] >= 18 and used["LDSM.16.MT88.4"] >= 8
        assert fmt == "bf16" or used["F2FP.F16.E4M3.UNPACK_B"] >= 128
    assert not [op for op in used if op.startswith("LDG") and "U16" in op]
    # mxfp4's scales are single bytes: rows of 18 of them allow no wider load.
    assert not [op for op in used if op.startswith("LDG") and "U8" in op] or fmt == "mxfp4"
    reserved = 1024  # bytes a block that the system takes
    assert (kernel.shared_memory + reserved) * kernel.config.blocks_per_sm <= 233472
    if OLD_TRITON:
        registers, stack = machine_code.registers_and_stack(cubin)
        assert registers * 32 * kernel.config.num_warps * kernel.config.blocks_per_sm <= 65536
        assert stack <= SM_90_STACK.get((fmt, 1), 0)


@pytest.mark.parametrize("rows", (32, 64))
@pytest.mark.parametrize("fmt", FORMATS)
def test_sm_90_with_several_query_tokens(fmt, rows):
    """The wider row tiles, with the pass that repairs NaN in them."""
    q_len, total_q = rows // 16, 4 * rows
    kernel = build_decode(problem(fmt, total_q=total_q, max_q_len=q_len, ragged_q=True, table_kind="csr"), TARGETS["sm_90"])
    assert not machine_code.broken_descriptors(machine_code.sass(kernel.compiled.asm["cubin"]))
    assert kernel.shared_memory <= TARGETS["sm_90"].shared_memory
    if OLD_TRITON:
        assert machine_code.registers_and_stack(kernel.compiled.asm["cubin"])[1] <= SM_90_STACK.get((fmt, rows), 0)


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [(f, k) for i, f in enumerate(FORMATS) for j, k in enumerate(("csr", "contiguous")) if EVERYTHING or i % 2 == j],
)
def test_shared_memory_suffices_whatever_the_table(fmt, kind):
    """fp16 queries, which take twice the room with bf16 keys, two tokens, pages of one token or none at all."""
    p = problem(fmt, q_dtype="fp16", batch=4, total_q=8, max_q_len=2, ragged_q=True, table_kind=kind, page_size=1)
    for target in ("sm_80", "sm_90"):
        kernel = build_decode(p, TARGETS[target])
        assert kernel.shared_memory <= TARGETS[target].shared_memory, target
    one = build_decode(p.replace(total_q=4, max_q_len=1), TARGETS["sm_90"])
    assert (one.shared_memory + 1024) * one.config.blocks_per_sm <= 233472


@pytest.mark.parametrize("fmt", FORMATS)
def test_sm_80(fmt):
    """mma.sync and no instruction that only newer GPUs have; fp8 without conversion instructions, which sm_80 lacks."""
    kernel = build_decode(problem(fmt), TARGETS["sm_80"])
    assert len(re.findall(r"mma\.sync", kernel.compiled.asm["ptx"])) >= 68
    assert "e4m3" not in kernel.compiled.asm["ptx"]
    assert kernel.shared_memory * kernel.config.blocks_per_sm <= TARGETS["sm_80"].shared_memory
    if OLD_TRITON:
        _, stack = machine_code.registers_and_stack(kernel.compiled.asm["cubin"])
        assert stack <= (64 if fmt == "fp8_tile128" else 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gfx950(fmt):
    """MFMA, no spills, no scratch, loads of at least a word but for mxfp4's scale bytes."""
    kernel = build_decode(problem(fmt), TARGETS["gfx950"])
    assembly = kernel.compiled.asm["amdgcn"]
    assert len(re.findall(r"v_mfma_f32_16x16x32", assembly)) >= 36
    used = machine_code.amd_resources(assembly)
    assert used["vgpr_spill_count"] == 0 and used["private_segment_fixed_size"] == 0, used
    assert kernel.shared_memory <= TARGETS["gfx950"].shared_memory
    narrow = re.findall(r"(?:buffer|global)_load_(?:short|ushort|ubyte|sbyte)\w*", assembly)
    assert not narrow or (fmt == "mxfp4" and not [n for n in narrow if "short" in n])


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "gfx950"))
def test_combine(arch):
    kernel = build_combine(problem("fp8"), TARGETS[arch])
    if arch.startswith("sm"):
        registers, stack = machine_code.registers_and_stack(kernel.compiled.asm["cubin"])
        assert stack == 0 and registers <= 64
        assert machine_code.opcodes(machine_code.sass(kernel.compiled.asm["cubin"]))["LDG.E.128"] >= 4
    else:
        assert machine_code.amd_resources(kernel.compiled.asm["amdgcn"])["vgpr_spill_count"] == 0


def test_every_configuration_is_printable_and_starts_with_the_default():
    for fmt in FORMATS:
        for device in TARGETS.values():
            for heads in (1, 16, 20, 128):
                p = problem(fmt, num_heads=heads)
                configs = candidates(p, device)
                assert configs[0] == decode_config(p, device)
                assert all(c.rows * c.row_tiles >= heads and c.reason for c in configs)
