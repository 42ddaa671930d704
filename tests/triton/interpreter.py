"""Makes Triton's interpreter compute bf16 and fp8 as hardware does, so that kernels can be tested on a CPU.

As shipped (3.6 to 3.9) it keeps bf16 as 16-bit integers: ``tl.dot`` multiplies the bit patterns and narrowing casts
truncate or lose the carry. Here every such step goes through PyTorch's conversions instead. For tests only.
``TRITON_INTERPRET=1`` must be in the environment before Triton is first imported.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_WIDE = {tl.float32: torch.float32, tl.float64: torch.float64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _tensor(data: np.ndarray, dtype) -> torch.Tensor:
    """The interpreter's array for a Triton dtype, as the PyTorch tensor with the same bits."""
    data = np.ascontiguousarray(data)
    torch_dtype = _NARROW.get(dtype) or _WIDE[dtype]
    return torch.from_numpy(data.view(_SIGNED[data.dtype.itemsize])).view(torch_dtype)


def _float32(handle) -> np.ndarray:
    """Values of a handle, exactly."""
    scalar = handle.dtype.scalar
    if scalar in _NARROW:
        return _tensor(handle.data, scalar).float().numpy()
    return handle.data.astype(np.float32)


def _convert(data, source, target, rounding_mode, _original=interpreter._convert_float):
    source, target = source.scalar, target.scalar
    known = {**_NARROW, **_WIDE}
    if source in known and target in known:
        result = _tensor(data, source).to(known[target])
        size = result.element_size()
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return result.view(bits).numpy().view(_UNSIGNED[size])
    return _original(data, source, target, rounding_mode)


def _dot(self, a, b, accumulator, *_):
    if accumulator.dtype.scalar.is_floating():
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.matmul(_float32(a), _float32(b), dtype=np.float32)
            total = (product + accumulator.data).astype(accumulator.data.dtype)
        return interpreter.TensorHandle(total, accumulator.dtype.scalar)
    return interpreter.TensorHandle(
        np.matmul(a.data, b.data, dtype=accumulator.data.dtype) + accumulator.data, accumulator.dtype.scalar
    )


def mend() -> None:
    """Install the replacements; harmless when repeated."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
