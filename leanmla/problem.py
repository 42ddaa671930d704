"""What is asked, as frozen values: print them, compare them, build them by hand in a test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .cache import LatentCache
    from .page_table import PageTable

__all__ = ["DIMS", "DecodeArgs", "DecodeProblem", "LaunchConfig", "MLADims"]


@dataclass(frozen=True, slots=True)
class MLADims:
    """Head sizes of absorbed MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    @property
    def qk_head_dim(self) -> int:
        """Length of a key: the latent part, then the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def v_head_dim(self) -> int:
        """Length of a value: the latent part of the same vector."""
        return self.kv_lora_rank


#: The one shape that DeepSeek-V2, V3 and R1 use; kernels are written for it.
DIMS = MLADims()


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """One decode step without its tensors; also the capacity of a :class:`~leanmla.DecodePlan`.

    Everything here is known from shapes and options, never from the contents of a tensor.
    """

    format: str  #: cache format name
    num_heads: int
    batch: int
    total_q: int  #: query rows over all sequences
    max_q_len: int  #: bound on one sequence's query rows
    ragged_q: bool  #: rows per sequence come from qo_indptr
    page_size: int
    table_kind: str  #: "csr" | "block_table" | "contiguous"
    max_kv_len: int  #: bound on one sequence's keys
    total_kv: int  #: bound on all sequences' keys together
    q_dtype: str = "bf16"  #: "bf16" | "fp16"
    causal: bool = True
    logit_cap: float = 0.0
    return_lse: bool = False
    num_kv_splits: int | None = None
    split_size: int | None = None

    def replace(self, **changes) -> DecodeProblem:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        q = f"q<={self.max_q_len}" if self.ragged_q else f"q{self.max_q_len}"
        return (
            f"b{self.batch}-h{self.num_heads}-{q}-kv<={self.max_kv_len}-page{self.page_size}"
            f"-{self.format}-{self.q_dtype}-{self.table_kind}"
        )


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a backend would run a problem; what ``leanmla explain`` prints."""

    backend: str
    kernel: str  #: path of the kernel file inside the package
    block_rows: int  #: query rows (heads x tokens) a tile
    block_kv: int  #: keys a tile
    num_workers: int  #: items that run at the same time
    reason: str  #: why these values
    extra: tuple[tuple[str, str], ...] = ()  #: further values worth printing, as (name, value)


@dataclass(frozen=True, slots=True)
class DecodeArgs:
    """A checked call, handed to a backend."""

    problem: DecodeProblem
    q: torch.Tensor  #: [total_q, num_heads, 576] bf16 | fp16, last stride 1
    cache: LatentCache
    table: PageTable
    qo_indptr: torch.Tensor | None  #: int32 [batch+1], or None for total_q // batch rows each
    sm_scale: float
    out: torch.Tensor  #: [total_q, num_heads, 512], dtype of q, last stride 1
    lse: torch.Tensor | None  #: fp32 [total_q, num_heads], natural log, or None
