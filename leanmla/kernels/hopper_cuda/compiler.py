"""From CUDA C++ to a loaded kernel: NVRTC through cuda-core, with the machine code kept on disk.

The sources are the ``.cu`` and ``.cuh`` files beside this one. In front of them go the constants of the cache format, written from its
Python definition, and the macros of the variant. Nothing here is imported before it is needed: cuda-core is optional.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from ... import settings
from ...device import assumed, missing
from ...errors import BackendUnavailable
from ...files import write_whole
from ...formats import mxfp4_row320
from ...formats.mxfp4 import NUM_BLOCKS
from ...problem import DIMS
from .launch_configs import Arrangement

__all__ = ["ENTRY", "FORMATS", "SCALE_ROOM", "SOURCE", "Variant", "compile_cubin", "cubin", "kernel", "source_text", "unavailable"]

FOLDER = Path(__file__).parent
SOURCE = "decode_mxfp4_sm90.cu"
ENTRY = "decode_mxfp4"
FORMATS = ("mxfp4_row320", "mxfp4")
SCALE_ROOM = 48  #: bytes of shared memory for the scales of a row of ``mxfp4``: pieces of 16 that hold 18 bytes wherever they begin
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled; everything else is an argument."""

    format: str  #: of FORMATS
    q_is_fp16: bool
    has_cap: bool
    arrangement: Arrangement


def source_text(variant: Variant) -> str:
    """The translation unit; it includes the files beside this one."""
    ocp = variant.format == "mxfp4"
    constants = {
        "ROW_BYTES": mxfp4_row320.CODE_BYTES if ocp else mxfp4_row320.ROW_BYTES,
        "SCALES": NUM_BLOCKS,
        "SCALE_ROOM": SCALE_ROOM,
        "DEFICITS_AT": mxfp4_row320.DEFICITS_AT,
        "EXPONENT_AT": mxfp4_row320.EXPONENT_AT,
        "DEFICIT_UNIT": mxfp4_row320.DEFICIT_UNIT,
        "MAX_DEFICIT": mxfp4_row320.MAX_DEFICIT,
        "LATENT": DIMS.kv_lora_rank,
        "ROPE": DIMS.qk_rope_head_dim,
        **variant.arrangement.constants(),
    }
    macros = {"ROWS_ARE_OCP": ocp, "Q_IS_FP16": variant.q_is_fp16, "HAS_CAP": variant.has_cap}
    return "".join(
        [
            *(f"#define {name} {int(value)}\n" for name, value in macros.items()),
            *(f"constexpr int {name} = {value};\n" for name, value in constants.items()),
            f'#include "{SOURCE}"\n',
        ]
    )


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    return None if assumed("cuda") else _unavailable()


@functools.cache
def _unavailable() -> str | None:
    for module in ("cuda.core", "cuda.bindings"):
        if missing(module) is not None:
            return f"needs NVIDIA's {module.replace('.', '-')}, which is not installed (pip install 'leanmla[cuda]')"
    try:
        _nvrtc_version()
    except Exception as error:  # the loader of cuda-bindings has exceptions of its own
        return f"needs NVRTC, which cannot be loaded (pip install 'leanmla[cuda]'): {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    if int(result) != 0:
        raise RuntimeError(f"nvrtcVersion returned {int(result)}")
    return f"{major}.{minor}"


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.suffix in (".cu", ".cuh"))


def compile_cubin(variant: Variant) -> bytes:
    """Machine code for sm_90a, compiled now. Needs no GPU."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name=f"{ENTRY}_variant.cu", arch="sm_90a", std="c++17", include_path=str(FOLDER))
    return bytes(Program(source_text(variant), "c++", options).compile("cubin").code)


def cubin(variant: Variant) -> bytes:
    """Machine code for sm_90a, from the disk if these sources were compiled before."""
    text = "\0".join((source_text(variant), *_files(), *OPTIONS, _nvrtc_version()))
    path = settings.cache_directory() / "cubin" / f"{ENTRY}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        code = path.read_bytes()
        if code[:4] == b"\x7fELF":
            return code
    code = compile_cubin(variant)
    # A folder that cannot be written to costs a compilation a process; a file appears whole or not at all.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, code)
    return code


_lock = threading.Lock()


def kernel(variant: Variant, device_index: int):
    """The loaded kernel (a ``cuda.bindings.driver.CUfunction``), allowed its shared memory on a device.

    Raises:
        BackendUnavailable: the driver refuses the code.
    """
    with _lock:
        return _kernel(variant, device_index)


@functools.cache
def _kernel(variant: Variant, device_index: int):
    from cuda.bindings import driver

    loaded = _loaded(variant)
    handle = loaded.handle if hasattr(loaded, "handle") else loaded._handle
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(attribute, variant.arrangement.shared_bytes, handle, _device(device_index)), "cuKernelSetAttribute")
    return driver.CUfunction(int(handle))


@functools.cache
def _loaded(variant: Variant):
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin(variant)).get_kernel(ENTRY)


def _device(index: int):
    from cuda.bindings import driver

    return check(driver.cuDeviceGet(index), "cuDeviceGet")


def check(answer: tuple, what: str):
    """The value of a driver call's answer, or an error that names it."""
    from cuda.bindings import driver

    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailable(f"backend='hopper_cuda': {what} failed with {answer[0].name}.")
    return answer[1] if len(answer) > 1 else None
