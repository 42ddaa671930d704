"""Compile a FlyDSL launcher for gfx950 on any machine: no GPU, no ROCm. Returns the code object and its ISA text."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from ... import device
from ...errors import BackendUnavailable

__all__ = ["FLYDSL_VERSION", "compile_launcher", "flydsl_missing", "flydsl_version", "linker_missing", "resources"]

#: The version the kernels are written for, built and emulated with.
FLYDSL_VERSION = "0.5.0"

_lock = threading.Lock()  # FlyDSL is steered through environment variables, which the process has one set of


def flydsl_missing() -> str | None:
    """Why FlyDSL cannot be used, or None. Does not import it."""
    reason = device.missing("flydsl")
    version = flydsl_version()
    if reason is None and version and version.split(".")[:2] != FLYDSL_VERSION.split(".")[:2]:
        return f"is written for flydsl {FLYDSL_VERSION}, this is {version} (pip install flydsl=={FLYDSL_VERSION})"
    return reason


@functools.cache
def flydsl_version() -> str:
    """The installed version, or "" if there is none."""
    try:
        return importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rocm_root() -> Path | None:
    """An installed ROCm that has llvm/bin/ld.lld."""
    roots = (Path(root) for root in (os.environ.get("ROCM_PATH"), "/opt/rocm") if root)
    return next((root for root in roots if (root / "llvm" / "bin" / "ld.lld").exists()), None)


def linker_missing() -> str | None:
    """Why there is nothing to link code objects with, or None."""
    if _rocm_root() or shutil.which("ld.lld") or device.triton_missing() is None:
        return None
    return "needs a linker, ld.lld: from ROCm, from LLVM's lld, or the one inside triton's wheel (pip install triton)"


def _rocm_with_linker(folder: Path) -> Path:
    """A ROCm root that has llvm/bin/ld.lld: the installed one, or a stand-in made in ``folder`` over triton's linker."""
    installed = _rocm_root()
    if installed:
        return installed
    if linker_missing():
        raise BackendUnavailable(f"building for gfx950 {linker_missing()}.")
    script = folder / "rocm" / "llvm" / "bin" / "ld.lld"
    script.parent.mkdir(parents=True)
    system = shutil.which("ld.lld")
    if system:
        script.symlink_to(system)
    else:
        link = Path(__file__).with_name("link_with_triton.py")
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(link))} "$@"\n')
        script.chmod(0o755)
    return folder / "rocm"


def compile_launcher(launcher, kernel: str, arguments: list, *, target: str, hints: dict) -> tuple[bytes, str]:
    """(hsaco bytes, ISA text) of the one kernel that ``launcher`` launches.

    Args:
        launcher: a ``@flyc.jit`` function.
        kernel: the kernel's name.
        arguments: placeholder arguments; their values do not matter.
        target: "gfx950".
        hints: FlyDSL compile hints, such as ``waves_per_eu``.
    """
    import flydsl.compiler as flyc

    with _lock, tempfile.TemporaryDirectory(prefix="leanmla-build-") as name:
        folder = Path(name)
        settings = {
            "ARCH": target,
            "FLYDSL_GPU_ARCH": target,
            "COMPILE_ONLY": "1",
            "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": str(folder),
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
            "ROCM_PATH": str(_rocm_with_linker(folder)),
        }
        log = io.StringIO()  # FlyDSL prints the name of every file it writes
        with _environment(**settings), contextlib.redirect_stdout(log):
            flyc.compile[hints](launcher, *arguments)
        (isa,) = (folder / kernel).glob("*_final_isa.s")
        (binary,) = (folder / kernel).glob("*_gpu_module_to_binary.mlir")
        return _code_object(binary.read_text()), isa.read_text()


def _code_object(module: str) -> bytes:
    """The ELF inside ``gpu.binary``: a string attribute with every unprintable byte as backslash and two hex digits."""
    text = re.search(r'\bbin = "((?:[^"\\]|\\.)*)"', module)
    assert text is not None, "no code object in the module"
    raw = text[1].encode("latin-1")

    def byte(m: re.Match[bytes]) -> bytes:
        return m[1] if m[1] in (b"\\", b'"') else bytes([int(m[1], 16)])

    code = re.sub(rb'\\([0-9A-Fa-f]{2}|\\|")', byte, raw)
    assert code[:4] == b"\x7fELF", "the module's binary is not an ELF file"
    return code


def resources(isa: str) -> dict[str, int]:
    """What a kernel takes, from the metadata in its ISA text."""
    keys = {
        "vgprs": "vgpr_count", "agprs": "agpr_count", "sgprs": "sgpr_count", "vgpr_spills": "vgpr_spill_count",
        "sgpr_spills": "sgpr_spill_count", "scratch_bytes": "private_segment_fixed_size",
        "lds_bytes": "group_segment_fixed_size", "kernarg_bytes": "kernarg_segment_size",
    }  # fmt: skip
    found = {}
    for ours, theirs in keys.items():
        value = re.search(rf"\.{theirs}:\s+(\d+)", isa)
        assert value is not None, f"no {theirs} in the ISA text"
        found[ours] = int(value[1])
    found["mfma"] = len(re.findall(r"^\s+v_mfma_", isa, re.MULTILINE))
    return found
