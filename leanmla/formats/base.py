"""What a cache format is: a byte layout, a quantiser and its inverse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from ..errors import InvalidArgument, InvalidDtype
from ..problem import DIMS

__all__ = ["CacheFormat", "Quantized"]


class Quantized(NamedTuple):
    """Rows in a cache format."""

    data: torch.Tensor  #: [n, data_width] in the storage dtype
    scale: torch.Tensor | None  #: fp8: fp32 [1]; mxfp4: uint8 [n, 18]; otherwise None
    saturated: torch.Tensor  #: int64 [], values that were clipped to the format's largest


class CacheFormat(ABC):
    """One way to store a latent vector of 576 values. Formats are stateless; :func:`leanmla.formats.get` hands them out."""

    name: ClassVar[str]
    data_width: ClassVar[int]  #: storage elements a token in the data tensor
    storage_dtype: ClassVar[torch.dtype]  #: how kernels see the data tensor
    accepted_dtypes: ClassVar[tuple[torch.dtype, ...]]  #: dtypes a caller's data tensor may have
    scale_kind: ClassVar[str]  #: "none" | "per_tensor" | "block"
    has_mx_rule: ClassVar[bool] = False  #: quantising follows an ``mx_scale_rule``
    bytes_per_token: ClassVar[int]
    layout: ClassVar[str]  #: one sentence for people

    @abstractmethod
    def quantize(self, latent: torch.Tensor, *, scale: torch.Tensor | None = None, mx_scale_rule: str = "even") -> Quantized:
        """Quantise rows.

        Args:
            latent: [n, 576] bf16, fp16 or fp32.
            scale: fp8 only: fp32 [1] to use; None takes amax / 448 of these rows.
            mx_scale_rule: mxfp4 and mxfp4_row320 only: ``"even"`` or ``"floor"``.
        """

    @abstractmethod
    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values that stored rows stand for: [..., data_width] (storage dtype) -> [..., 576].

        fp64 is exact for every format; fp32 is exact except for fp8's one multiplication by the scale.
        """

    def as_storage(self, data: torch.Tensor, name: str = "data") -> torch.Tensor:
        """The same memory in the storage dtype; refuses dtypes that are not this format's."""
        if data.dtype not in self.accepted_dtypes:
            accepted = ", ".join(str(t).removeprefix("torch.") for t in self.accepted_dtypes)
            got = str(data.dtype).removeprefix("torch.")
            hint = (
                "This is another number format (NaN at 0x80, largest value 240): requantise the values, do not reinterpret the bytes."
                if got == "float8_e4m3fnuz"
                else f"Convert the cache, or name the format it really has (this one is '{self.name}')."
            )
            raise InvalidDtype(f"{name}: dtype for format '{self.name}' must be {accepted}, got {got}. {hint}")
        return data if data.dtype == self.storage_dtype else data.view(self.storage_dtype)

    def _check_latent(self, latent: torch.Tensor) -> None:
        if not isinstance(latent, torch.Tensor):
            raise InvalidArgument(
                f"latent: expected a tensor [n, {DIMS.qk_head_dim}], got {type(latent).__name__}. Use torch.as_tensor."
            )
        if latent.ndim != 2 or latent.shape[1] != DIMS.qk_head_dim:
            raise InvalidArgument(
                f"latent: expected [n, {DIMS.qk_head_dim}], got {list(latent.shape)}. "
                "Join the compressed latent (512) and the rope part (64) along the last dim."
            )
        if latent.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise InvalidDtype(f"latent: expected bfloat16, float16 or float32, got {latent.dtype}. Cast it first.")

    def __repr__(self) -> str:
        return f"<CacheFormat {self.name}: {self.bytes_per_token} bytes a token>"
