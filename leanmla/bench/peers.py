"""Others' decode paths on the same data: torch, FlashMLA, FlashInfer. A peer that is not installed is simply absent.

Each peer is prepared for one copy of a case and gives a call; what it returns is checked like ours before it is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import InvalidArgument
from ..problem import DIMS
from .cases import BenchCase
from .data import Copy

__all__ = ["PEERS", "Peer", "peers_named", "result_of"]

RANK, ROPE, DIM = DIMS.kv_lora_rank, DIMS.qk_rope_head_dim, DIMS.qk_head_dim


@dataclass(frozen=True)
class Peer:
    """A path to compare with."""

    name: str
    devices: tuple[str, ...]  #: "cpu", "cuda"
    format: str  #: the cache format it reads
    module: str | None  #: what must be importable; None: torch alone
    why_not: Callable[[BenchCase], str | None]  #: why it cannot run a case
    prepare: Callable[[list[Copy]], list[Callable[[], torch.Tensor]]]  #: one call a copy; each returns [total_q, H, 512]

    def refusal(self, case: BenchCase, device: torch.device) -> str | None:
        """Why this peer cannot run a case here, or None."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return self.why_not(case)


# -- torch ---------------------------------------------------------------------------------------------------------------


def _plain_torch(bytes_per_value: int) -> Callable[[BenchCase], str | None]:
    def why_not(case: BenchCase) -> str | None:
        if not case.uniform:
            return "takes equally long sequences only"
        if case.q_len > 1:
            return "has no bottom-right causal mask for more than one row"
        if case.tokens * DIM * bytes_per_value > 4 << 30:
            return "would copy more than 4 GiB of keys"
        return None

    return why_not


def _dense(copy: Copy, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [b, H, 576], keys [b, kv, 576]) without pages: what plain torch needs, and a head start for it."""
    case, page_ids = copy.case, copy.table.page_ids
    assert page_ids is not None
    offsets = torch.arange(case.page_size, device=page_ids.device)
    slots = (page_ids.long()[..., None] * case.page_size + offsets).flatten(1)[:, : case.kv_lens[0]]
    keys = copy.cache.gather(slots.flatten(), dtype).view(*slots.shape, DIM)
    return copy.q.to(dtype).view(case.batch, case.num_heads, DIM), keys


def _prepare_bmm(dtype: torch.dtype) -> Callable[[list[Copy]], list[Callable[[], torch.Tensor]]]:
    def prepare(copies: list[Copy]) -> list[Callable[[], torch.Tensor]]:
        def call_of(copy: Copy) -> Callable[[], torch.Tensor]:
            q, keys = _dense(copy, dtype)
            keys_t, values, scale = keys.transpose(1, 2), keys[..., :RANK], copy.case.sm_scale
            return lambda: torch.bmm(torch.softmax(torch.bmm(q, keys_t) * scale, dim=-1), values)

        return [call_of(copy) for copy in copies]

    return prepare


def _prepare_sdpa(copies: list[Copy]) -> list[Callable[[], torch.Tensor]]:
    def call_of(copy: Copy) -> Callable[[], torch.Tensor]:
        q, keys = _dense(copy, torch.bfloat16)
        # All heads read the same keys, so heads serve as query rows of one head.
        q, k, v, scale = q[:, None], keys[:, None], keys[:, None, :, :RANK], copy.case.sm_scale
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[:, 0]

    return [call_of(copy) for copy in copies]


# -- FlashMLA ------------------------------------------------------------------------------------------------------------


def _flash_mla_limits(case: BenchCase) -> str | None:
    return None if case.page_size == 64 else "takes pages of 64 only"


def _prepare_flash_mla(copies: list[Copy]) -> list[Callable[[], torch.Tensor]]:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    def call_of(copy: Copy) -> Callable[[], torch.Tensor]:
        case = copy.case
        lens = copy.table.cache_seqlens
        try:
            metadata, num_splits = get_mla_metadata(lens, case.q_len * case.num_heads, 1)
        except TypeError:  # newer versions plan inside the first call
            metadata, num_splits = get_mla_metadata()
        q = copy.q.view(case.batch, case.q_len, case.num_heads, DIM)
        keys = copy.cache.data.unsqueeze(2)

        def call() -> torch.Tensor:
            out, _ = flash_mla_with_kvcache(q, keys, copy.table.page_ids, lens, RANK, metadata, num_splits,
                                            softmax_scale=case.sm_scale, causal=True)  # fmt: skip
            return out.flatten(0, 1)

        return call

    return [call_of(copy) for copy in copies]


# -- FlashInfer ----------------------------------------------------------------------------------------------------------


def _prepare_flashinfer(backend: str, fp8: bool) -> Callable[[list[Copy]], list[Callable[[], torch.Tensor]]]:
    def prepare(copies: list[Copy]) -> list[Callable[[], torch.Tensor]]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        first = copies[0]
        case, device = first.case, first.q.device
        pages = [-(-n // case.page_size) for n in case.kv_lens]
        assert first.table.page_ids is not None
        ids = torch.cat([first.table.page_ids[b, :n] for b, n in enumerate(pages)])
        kv_indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32).to(device)
        q_indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len
        kv_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        # Its fp8 has no scale of the cache: the scale goes into the logits, and onto the output outside the timed call.
        scale = float(first.cache.scale) if fp8 and first.cache.scale is not None else 1.0
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), backend=backend)
        wrapper.plan(q_indptr, kv_indptr, ids, first.table.cache_seqlens, case.num_heads, RANK, ROPE, case.page_size, True,
                     case.sm_scale * scale, torch.bfloat16, kv_dtype)  # fmt: skip

        def call_of(copy: Copy) -> Callable[[], torch.Tensor]:
            keys = copy.cache.data.view(kv_dtype) if fp8 else copy.cache.data
            q_nope, q_pe, ckv, kpe = copy.q[..., :RANK], copy.q[..., RANK:], keys[..., :RANK], keys[..., RANK:]
            return _Scaled(lambda: wrapper.run(q_nope, q_pe, ckv, kpe), scale)

        return [call_of(copy) for copy in copies]

    return prepare


class _Scaled:
    """A call whose result is to be multiplied by a factor, which is left out when it is timed."""

    def __init__(self, call: Callable[[], torch.Tensor], factor: float) -> None:
        self.call, self.factor = call, factor

    def __call__(self) -> torch.Tensor:
        return self.call()


def result_of(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a peer's call computes, complete."""
    out = call()
    return out * call.factor if isinstance(call, _Scaled) and call.factor != 1.0 else out


def _anything(case: BenchCase) -> str | None:
    return None


PEERS: tuple[Peer, ...] = (
    Peer("torch sdpa bf16", ("cpu", "cuda"), "bf16", None, _plain_torch(2), _prepare_sdpa),
    Peer("torch bmm bf16", ("cpu", "cuda"), "bf16", None, _plain_torch(2), _prepare_bmm(torch.bfloat16)),
    Peer("torch bmm fp32", ("cpu",), "bf16", None, _plain_torch(4), _prepare_bmm(torch.float32)),
    Peer("flash_mla bf16", ("cuda",), "bf16", "flash_mla", _flash_mla_limits, _prepare_flash_mla),
    Peer("flashinfer fa3 bf16", ("cuda",), "bf16", "flashinfer", _anything, _prepare_flashinfer("fa3", False)),
    Peer("flashinfer fa2 fp8", ("cuda",), "fp8", "flashinfer", _anything, _prepare_flashinfer("fa2", True)),
    Peer("flashinfer fa3 fp8", ("cuda",), "fp8", "flashinfer", _anything, _prepare_flashinfer("fa3", True)),
)


def peers_named(names: str) -> list[Peer]:
    """The peers meant by ``--peers``: "auto" (all there are), "none", or words to look for in their names.

    Raises:
        InvalidArgument: a word is in no peer's name.
    """
    if names == "auto":
        return list(PEERS)
    if names == "none":
        return []
    found: list[Peer] = []
    for word in (w.strip() for w in names.split(",")):
        some = [p for p in PEERS if word and word in p.name]
        if not some:
            raise InvalidArgument(f"--peers: expected auto, none, or part of {', '.join(p.name for p in PEERS)}, got {word!r}.")
        found += [p for p in some if p not in found]
    return found
