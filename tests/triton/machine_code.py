"""Reads what the compilers made: resources, instructions, and one miscompilation to look out for."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([_BIN / tool, option, f.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def sass(cubin: bytes) -> list[str]:
    """Instructions and labels of a cubin, one a line."""
    lines = (re.sub(r"/\* ?0x[0-9a-f]+ ?\*/", "", line).strip() for line in _run("nvdisasm", "-c", cubin).splitlines())
    return [line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/|\.L_x", line)]


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread); stack is spilled registers here."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "-res-usage", cubin))
    assert found
    return int(found[1]), int(found[2])


def opcodes(lines: list[str]) -> Counter:
    """How often each opcode, modifiers included, occurs."""
    found = (re.match(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", line) for line in lines)
    return Counter(m[1] for m in found if m)


def broken_descriptors(lines: list[str]) -> list[str]:
    """Matrix descriptors whose upper half comes from an undefined register.

    ptxas 12.8 and 12.9 add the constant upper half of a wgmma descriptor to a register that should hold zero but, under
    register pressure, holds something else. The product then reads shared memory at random; results are wrong without
    any error. Such an addition is one of a descriptor's upper constant whose register was not set to zero last.
    """
    broken = []
    for i, line in enumerate(lines):
        add = re.search(r"IADD3\.X R\d+, (R\d+)(?:\.reuse)?, -?0x[0-9a-f]{8}, RZ, P\d", line)
        if not add:
            continue
        register = add[1]
        for before in reversed(lines[:i]):
            pair = re.search(r"CS2R R(\d+), SRZ", before)
            if pair and register in (f"R{pair[1]}", f"R{int(pair[1]) + 1}"):
                break
            definition = re.search(rf"\*/\s+(?:@!?U?P\w+\s+)?[A-Z0-9_.]+\s+(?:P\w+, )?{register}, (.*)", before)
            if definition:
                if not re.match(r"(RZ, RZ, RZ|RZ)\s*;", definition[1]):
                    broken.append(f"{line}  <-  {before}")
                break
    return broken


def amd_resources(assembly: str) -> dict[str, int]:
    """Registers, spills and scratch of an AMD kernel, from its assembly."""
    names = ("vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = {n: re.search(rf"\.{n}:\s+(\d+)", assembly) for n in names}
    return {n: int(m[1]) if m else 0 for n, m in found.items()}
