"""Compile the decode kernels without a GPU: the same sources, constants and options that the launcher would use.

Used by the offline tests, and to produce code objects for machines one does not have. ``leanmla.kernels.triton.backend``
is the launcher; what it passes at run time appears here as a signature.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...device import DeviceInfo
from ...problem import DecodeProblem
from ..launch_configs import TritonConfig, combine_config, decode_config
from .backend import combine_constants, compile_options, decode_constants

__all__ = ["TARGETS", "CompiledKernel", "build_combine", "build_decode"]

#: Devices to build for, by architecture.
TARGETS: dict[str, DeviceInfo] = {
    "sm_80": DeviceInfo("cuda", "A100", "sm_80", 108, 166912, 0),
    "sm_90": DeviceInfo("cuda", "H200", "sm_90", 132, 232448, 0),
    "gfx942": DeviceInfo("hip", "MI300X", "gfx942", 304, 65536, 0),
    "gfx950": DeviceInfo("hip", "MI355X", "gfx950", 256, 163840, 0),
}

_INT = "*i32"
_DECODE_SIGNATURE = {
    "out_ptr": None, "lse_ptr": "*fp32", "partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "splits_ptr": _INT,
    "first_ptr": _INT, "items_ptr": _INT, "num_items_ptr": _INT, "factors_ptr": _INT, "q_ptr": None, "data_ptr": None,
    "scale_ptr": None, "page_ids_ptr": _INT, "kv_indptr_ptr": _INT, "kv_last_ptr": _INT, "seqlens_ptr": _INT,
    "qo_indptr_ptr": _INT, "batch": "i32", "num_workers": "i32", "num_splits": "i32", "split_size": "i32", "q_len": "i32",
    "sm_scale": "fp32", "logit_cap": "fp32", "stride_q_token": "i32", "stride_q_head": "i32", "stride_out_token": "i32",
    "stride_out_head": "i32", "stride_lse_token": "i32", "stride_page": "i32", "stride_scale_page": "i32", "stride_table": "i32",
}  # fmt: skip
_COMBINE_SIGNATURE = {
    "out_ptr": None, "lse_ptr": "*fp32", "partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "splits_ptr": _INT,
    "first_ptr": _INT, "qo_indptr_ptr": _INT, "batch": "i32", "num_splits": "i32", "q_len": "i32", "stride_out_token": "i32",
    "stride_out_head": "i32", "stride_lse_token": "i32", "row_groups": "i32",
}  # fmt: skip
#: Arguments that are multiples of 16 in a contiguous call; the launcher finds that out by itself.
_MULTIPLES = ("stride_q_token", "stride_q_head", "stride_out_token", "stride_out_head")


@dataclass(frozen=True)
class CompiledKernel:
    """A code object and what is needed to launch it."""

    name: str
    target: DeviceInfo
    config: TritonConfig
    constants: dict
    signature: dict  #: argument -> type, in the kernel's order, constants left out
    compiled: object  #: triton's CompiledKernel: ``asm`` by stage, ``metadata``

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory (LDS) a program uses."""
        return self.compiled.metadata.shared  # type: ignore[attr-defined]


def _compile(kernel, signature: dict, constants: dict, config: TritonConfig, device: DeviceInfo, num_warps: int, name: str):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", device.sm, 32) if device.kind == "cuda" else GPUTarget("hip", device.arch, 64)
    types = {a: "constexpr" if a in constants else signature[a] for a in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if types[a].startswith("*") or (a in _MULTIPLES and a in signature)
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": 1, **compile_options(device)}
    compiled = triton.compile(source, target=target, options=options)
    return CompiledKernel(name, device, config, constants, signature, compiled)


def build_decode(problem: DecodeProblem, device: DeviceInfo, config: TritonConfig | None = None) -> CompiledKernel:
    """The decode kernel for a problem with contiguous tensors.

    Args:
        problem: shapes and options.
        device: for which device; one of :data:`TARGETS` or any other.
        config: block sizes; None takes those the launcher would.
    """
    from .decode import decode_kernel

    config = config or decode_config(problem, device)
    q = "*bf16" if problem.q_dtype == "bf16" else "*fp16"
    data = "*bf16" if problem.format == "bf16" else "*u8"
    scale = {"fp8": "*fp32", "mxfp4": "*u8"}.get(problem.format, _INT)
    signature = {**_DECODE_SIGNATURE, "out_ptr": q, "q_ptr": q, "data_ptr": data, "scale_ptr": scale}
    constants = decode_constants(problem, config, device)
    return _compile(decode_kernel, signature, constants, config, device, config.num_warps, "decode_kernel")


def build_combine(problem: DecodeProblem, device: DeviceInfo) -> CompiledKernel:
    """The combine kernel that belongs to :func:`build_decode`."""
    from .combine import combine_kernel

    config = decode_config(problem, device)
    signature = {**_COMBINE_SIGNATURE, "out_ptr": "*bf16" if problem.q_dtype == "bf16" else "*fp16"}
    merge = combine_config(problem, device)
    constants = combine_constants(problem, config, device)
    return _compile(combine_kernel, signature, constants, config, device, merge.num_warps, "combine_kernel")
