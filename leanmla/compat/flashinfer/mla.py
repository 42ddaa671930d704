"""``flashinfer.mla``: ``BatchMLAPagedAttentionWrapper``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from ...cache import LatentCache
from ...checks import check_options
from ...decode import DecodePlan, mla_decode
from ...errors import CapacityExceeded, InvalidArgument, InvalidDtype, PlanMismatch
from ...page_table import PageTable
from ...problem import DIMS
from .._arguments import check_tensor, csr_page_table, joined_view, latent_cache, pages_as_bf16, refuse, reword
from .._fp16 import decode_fp16

__all__ = ["BatchMLAPagedAttentionWrapper"]

_THEIR_NAMES = {"data": "ckv_cache", "cache": "ckv_cache", "table": "kv_indices", "q": "q_nope", "page": "kv_indices"}
_BACKENDS = ("auto", "fa2", "fa3")


@dataclass(frozen=True)
class _Plan:
    """What :meth:`BatchMLAPagedAttentionWrapper.plan` fixed; tensors are read again by every run."""

    batch: int
    total_q: int
    max_q_len: int
    max_pages: int  #: most pages of a sequence
    num_heads: int
    page_size: int
    causal: bool
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class BatchMLAPagedAttentionWrapper:
    """MLA decode and incremental prefill over a paged cache whose latent and rope parts are passed apart.

    Args:
        float_workspace_buffer: tells the device; not used otherwise.
        use_cuda_graph: keep the page table at fixed addresses, so that a captured ``run`` sees later plans.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: with use_cuda_graph, the buffers that plan() copies into: int32
            [batch+1], [batch+1], [most pages], [batch].
        backend: "auto", "fa2" or "fa3", without influence; others are refused.

    Differs from the original: the split is planned on the device by every ``run``; ``plan`` reads the lengths on the host
    once, to check them. Any number of heads and any page size. The fp8 cache is e4m3fn with scale 1. Scratch is the wrapper's
    own, made by the first ``run`` that needs it and shared by its runs, which take turns. (A ``run`` that is captured without
    one before it has scratch of its own, in the graph's memory.)

    Example:
        >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, dtype=torch.int8))
        >>> offsets = torch.arange(3, dtype=torch.int32)
        >>> wrapper.plan(offsets, offsets, torch.arange(2, dtype=torch.int32), torch.tensor([16, 5], dtype=torch.int32),
        ...              16, 512, 64, 16, False, 192**-0.5, torch.bfloat16, torch.bfloat16)
        >>> cache = torch.randn(2, 16, 576, dtype=torch.bfloat16)
        >>> wrapper.run(torch.randn(2, 16, 512).bfloat16(), torch.randn(2, 16, 64).bfloat16(),
        ...             cache[..., :512], cache[..., 512:]).shape
        torch.Size([2, 16, 512])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise InvalidArgument(f"float_workspace_buffer: expected a tensor, got {type(float_workspace_buffer).__name__}.")
        if backend not in _BACKENDS:
            raise refuse("backend", backend, f"Offered: {', '.join(_BACKENDS)}; all run the same kernels here.")
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._plan: _Plan | None = None
        self._one: torch.Tensor | None = None
        self._kept: dict[tuple, list[DecodePlan]] = {}
        self._buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        if use_cuda_graph:
            for name, t in self._buffers.items():
                _check_index(name, t, self.device)
            assert qo_indptr is not None and kv_indptr is not None and kv_len_arr is not None and kv_indices is not None
            batch = kv_len_arr.numel()
            for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
                if t.numel() != batch + 1:
                    raise InvalidArgument(f"{name}: expected [{batch + 1}], one more than kv_len_arr, got {list(t.shape)}.")
            # The table that kernels read: plan() drops pages beyond kv_len_arr, so it needs buffers of its own.
            self._qo = torch.zeros(batch + 1, dtype=torch.int32, device=self.device)
            self._indptr = torch.zeros(batch + 1, dtype=torch.int32, device=self.device)
            self._indices = torch.zeros(kv_indices.numel(), dtype=torch.int32, device=self.device)
            self._last = torch.zeros(batch, dtype=torch.int32, device=self.device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Take over a batch's lengths and pages.

        Args:
            qo_indptr: int32 [batch+1], query row offsets. kv_indptr: int32 [batch+1], **page** offsets.
            kv_indices: int32 [>= kv_indptr[-1]], page ids.
            kv_len_arr: int32 [batch], keys of each sequence in **tokens**; pages beyond them are not read.
            num_heads, head_dim_ckv (512), head_dim_kpe (64), page_size, causal, sm_scale: the problem.
            q_data_type: bf16 or fp16. kv_data_type: bf16, fp16 or float8_e4m3fn.
            use_profiler: must be False.

        Differs from the original: tensors may lie on the CPU or on the device; a kv_len_arr beyond the sequence's pages is
        refused. With use_cuda_graph the longest query of a sequence may not exceed that of the first plan.
        """
        if use_profiler:
            raise refuse("use_profiler", use_profiler, "There is no in-kernel profiler here.")
        for name, value, want in (
            ("head_dim_ckv", head_dim_ckv, DIMS.kv_lora_rank),
            ("head_dim_kpe", head_dim_kpe, DIMS.qk_rope_head_dim),
        ):
            if value != want:
                raise InvalidArgument(f"{name}: expected {want}, got {value!r}.")
        for name, value in (("num_heads", num_heads), ("page_size", page_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name}: expected a positive integer, got {value!r}.")
        if q_data_type not in (torch.bfloat16, torch.float16):
            raise InvalidDtype(f"q_data_type: expected bfloat16 or float16, got {q_data_type}.")
        if kv_data_type not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            raise InvalidDtype(f"kv_data_type: expected bfloat16, float16 or float8_e4m3fn, got {kv_data_type}.")
        for name, t in (
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_len_arr", kv_len_arr),
        ):
            _check_index(name, t, None)
            if t.device.type != "cpu" and t.device != self.device:
                raise InvalidArgument(f"{name}: expected on the CPU or the workspace's device {self.device}, got {t.device}.")
        sm_scale = check_options(sm_scale=sm_scale, logit_cap=0.0, num_kv_splits=None, split_size=None)[0]
        batch = kv_len_arr.numel()
        for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            if t.numel() != batch + 1:
                raise InvalidArgument(f"{name}: expected [{batch + 1}], one more than kv_len_arr, got {list(t.shape)}.")
        qo_host, kv_host, len_host = qo_indptr.cpu().long(), kv_indptr.cpu().long(), kv_len_arr.cpu().long()
        for name, host in (("qo_indptr", qo_host), ("kv_indptr", kv_host)):
            if int(host[0]) != 0 or bool((torch.diff(host) < 0).any()):
                raise InvalidArgument(f"{name}: expected offsets rising from 0, got {host[:8].tolist()}...")
        pages = torch.diff(kv_host)
        wrong = (len_host < 0) | (len_host > pages * page_size)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise InvalidArgument(
                f"kv_len_arr[{b}]: expected 0..{int(pages[b]) * page_size} ({int(pages[b])} pages of {page_size}), got {int(len_host[b])}."
            )
        if int(kv_host[-1]) > kv_indices.numel():
            raise InvalidArgument(
                f"kv_indices: expected at least kv_indptr[-1] = {int(kv_host[-1])} page ids, got {kv_indices.numel()}."
            )
        max_q_len = int(torch.diff(qo_host).max()) if batch else 0
        max_pages = int((-(-len_host // page_size)).max()) if batch else 0
        plan = _Plan(
            batch, int(qo_host[-1]), max_q_len, max_pages, num_heads, page_size, bool(causal), sm_scale, q_data_type,
            kv_data_type,
        )  # fmt: skip

        # The table in our form: exactly the pages that hold keys.
        used = -(-len_host // page_size)
        indptr = torch.nn.functional.pad(torch.cumsum(used, 0), (1, 0)).int()
        last = torch.where(used > 0, len_host - (used - 1) * page_size, 0).int()
        ids = kv_indices.to(self.device, non_blocking=True)
        if not torch.equal(used, pages):
            seq = torch.repeat_interleave(torch.arange(batch), used)
            source = kv_host[:-1][seq] + torch.arange(seq.numel()) - indptr[:-1].long()[seq]
            ids = ids[source.to(self.device)]
        if self._use_cuda_graph:
            plan = self._replan(plan, qo_indptr, kv_indptr, kv_indices, kv_len_arr, indptr, ids, last)
        else:
            self._qo = qo_indptr.to(self.device, non_blocking=True)
            self._indptr, self._last, self._indices = indptr.to(self.device), last.to(self.device), ids
        self._plan = plan

    def _replan(self, plan, qo_indptr, kv_indptr, kv_indices, kv_len_arr, indptr, ids, last) -> _Plan:
        before = self._plan
        buffers = self._buffers
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        for name, t in given.items():
            buffer = buffers[name]
            assert buffer is not None
            if t.numel() > buffer.numel() or (name != "kv_indices" and t.numel() != buffer.numel()):
                raise CapacityExceeded(
                    f"{name}: the buffer given to the wrapper holds {buffer.numel()}, this plan has {t.numel()}. "
                    "With use_cuda_graph the batch size is fixed."
                )
        if before is not None and plan.max_q_len > before.max_q_len:
            raise CapacityExceeded(
                f"qo_indptr: a sequence has {plan.max_q_len} query rows, but graphs may have been captured for at most {before.max_q_len}. "
                "Make another wrapper."
            )
        for name, t in given.items():
            buffers[name][: t.numel()].copy_(t, non_blocking=True)  # type: ignore[index]
        self._qo.copy_(qo_indptr, non_blocking=True)
        self._indptr.copy_(indptr)
        self._last.copy_(last)
        self._indices[: ids.numel()].copy_(ids)
        return plan if before is None else dataclasses.replace(plan, max_q_len=before.max_q_len)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            q_nope: [total_q, H, 512]; q_pe: [total_q, H, 64]. Slices of one [total_q, H, 576] tensor are used as they are,
                otherwise joined by a copy.
            ckv_cache: [pages, page_size, 512]; kpe_cache: [pages, page_size, 64] (or [pages, 1, ...] for page_size 1). Slices
                of one 576-wide buffer are read in place; separate buffers cost a copy of the batch's pages in every run.
            out: [total_q, H, 512] to write to. lse: fp32 [total_q, H] to write to, with return_lse.
            return_lse: also return lse.
            profiler_buffer, kv_len, page_table: refused; they belong to backends that are not offered.
            return_lse_base_on_e: natural log instead of log 2.

        Returns:
            out, or (out, lse): lse is the **base-2** logarithm unless return_lse_base_on_e, -inf for rows without keys.

        Differs from the original: rows without keys are defined (out 0, lse -inf). An fp16 cache is not a format of our
        kernels: it is served by plain fp32 PyTorch, exact and slow; with use_cuda_graph, where the sizes of later plans are
        not known, its pages are copied to bf16 instead and lose three bits.
        """
        if torch.compiler.is_compiling():
            return _untraced(
                self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, profiler_buffer, kv_len, page_table,
                return_lse_base_on_e,
            )  # fmt: skip
        for name, value in (("profiler_buffer", profiler_buffer), ("kv_len", kv_len), ("page_table", page_table)):
            if value is not None:
                raise refuse(name, value, "It belongs to a backend that is not offered; lengths and pages come from plan().")
        plan = self._plan
        if plan is None:
            raise PlanMismatch("run: no plan. Call plan() first.")
        self._check_run(plan, q_nope, q_pe, ckv_cache, kpe_cache)
        q = joined_view(q_nope, q_pe)
        if q is None:
            q = torch.cat((q_nope, q_pe), dim=-1)
        if ckv_cache.ndim == 4:
            ckv_cache, kpe_cache = ckv_cache.squeeze(2), kpe_cache.squeeze(2)
        if ckv_cache.dtype == torch.float16 and not self._use_cuda_graph:
            values, natural = self._run_fp16(plan, q, ckv_cache, kpe_cache, out)
            return self._returned(values, natural, lse, return_lse, return_lse_base_on_e)
        try:
            cache, indices = self._cache(plan, ckv_cache, kpe_cache)
            table = csr_page_table(self._indptr, indices, self._last, plan.page_size)
            options = {"sm_scale": plan.sm_scale, "qo_indptr": self._qo, "causal": plan.causal, "return_lse": return_lse}
            scratch = self._scratch(plan, cache)
            if scratch is None:
                result = mla_decode(q, cache, table, out=out, max_q_len=plan.max_q_len, **options)  # type: ignore[arg-type]
            else:
                if out is None:
                    out = q.new_empty(plan.total_q, plan.num_heads, DIMS.v_head_dim)
                result = scratch.run(q, cache, table, out=out, **options)  # type: ignore[arg-type]
        except InvalidArgument as error:
            reword(error, _THEIR_NAMES)
            raise
        if not return_lse:
            return result  # type: ignore[return-value]
        values, natural = result
        return self._returned(values, natural, lse, return_lse, return_lse_base_on_e)

    forward = run

    @staticmethod
    def _returned(values, natural, lse, return_lse, natural_log):
        if not return_lse:
            return values
        scaled = natural * (1.0 if natural_log else math.log2(math.e))  # a copy: the scratch that holds it is used again
        if lse is None:
            return values, scaled
        check_tensor("lse", lse, torch.float32, natural.shape, natural.device)
        lse.copy_(scaled)
        return values, lse

    def _scratch(self, plan: _Plan, cache: LatentCache) -> DecodePlan | None:
        """Scratch for this plan: what an earlier run left, if it is large enough. None: let the call allocate its own.

        With use_cuda_graph it is sized by the wrapper's buffers, so that it is made once, and none is ever dropped: captured
        graphs keep its address.
        """
        if min(plan.batch, plan.total_q, plan.max_pages) == 0:
            return None
        fixed, cuda = self._use_cuda_graph, self.device.type == "cuda"
        # Memory goes back to the stream it was allocated on, so each stream has scratch of its own unless it is kept for good.
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda and not fixed else 0
        key = (cache.format.name, plan.num_heads, plan.page_size, plan.q_dtype, stream)
        slots = self._indices.numel() * plan.page_size
        for kept in self._kept.get(key, ()):
            has = kept.capacity
            if (
                plan.batch <= has.batch and plan.total_q <= has.total_q and plan.max_q_len <= has.max_q_len
                and plan.max_pages * plan.page_size <= has.max_kv_len and slots <= has.total_kv
            ):  # fmt: skip
                return kept
        if cuda and torch.cuda.is_current_stream_capturing():
            return None  # made here it would belong to this graph's memory
        if not fixed:
            self._kept.clear()
        kept = DecodePlan(
            num_heads=plan.num_heads, format=cache.format.name, page_size=plan.page_size, max_batch=plan.batch,
            max_kv_len=slots if fixed else plan.max_pages * plan.page_size, max_q_len=plan.max_q_len,
            max_total_q=plan.batch * plan.max_q_len if fixed else plan.total_q, max_total_kv=slots, q_dtype=plan.q_dtype,
            device=self.device,
        )  # fmt: skip
        self._kept.setdefault(key, []).append(kept)
        return kept

    def _run_fp16(self, plan: _Plan, q, ckv, kpe, out) -> tuple[torch.Tensor, torch.Tensor]:
        if out is not None:
            check_tensor("out", out, q.dtype, (plan.total_q, plan.num_heads, DIMS.v_head_dim), q.device)
        table = PageTable.from_csr(self._indptr, self._indices, self._last, page_size=plan.page_size)
        if not ckv.is_cuda:
            try:
                table.check_contents(ckv.shape[0])
            except InvalidArgument as error:
                reword(error, _THEIR_NAMES)
                raise
        column = torch.arange(plan.max_pages, device=self.device)
        at = (self._indptr[:-1, None].long() + column).clamp(max=max(self._indices.numel() - 1, 0))
        ids = self._indices[at] if self._indices.numel() else torch.zeros_like(at, dtype=torch.int32)
        values, lse = decode_fp16(
            q, (ckv, kpe), ids, table.kv_lens(), sm_scale=plan.sm_scale, causal=plan.causal, qo_indptr=self._qo,
            max_q_len=plan.max_q_len,
        )  # fmt: skip
        return (values if out is None else out.copy_(values)), lse

    def _cache(self, plan: _Plan, ckv: torch.Tensor, kpe: torch.Tensor) -> tuple[LatentCache, torch.Tensor]:
        """The cache to read and the page ids into it."""
        pages, indices = joined_view(ckv, kpe), self._indices
        if pages is None or pages.dtype == torch.float16:
            used = torch.arange(indices.numel(), device=indices.device) < self._indptr[-1]
            if not ckv.is_cuda:
                PageTable.from_csr(self._indptr, indices, self._last, page_size=plan.page_size).check_contents(ckv.shape[0])
            pages = pages_as_bf16((ckv, kpe), indices, used)
            indices = torch.arange(indices.numel(), dtype=torch.int32, device=indices.device)
        if pages.dtype == torch.bfloat16:
            return latent_cache(pages, format="bf16", page_size=plan.page_size), indices
        if self._one is None:
            self._one = torch.ones(1, device=self.device)
        return latent_cache(pages, self._one, format="fp8", page_size=plan.page_size), indices

    def _check_run(self, plan: _Plan, q_nope, q_pe, ckv_cache, kpe_cache) -> None:
        for name, t, width in (("q_nope", q_nope, DIMS.kv_lora_rank), ("q_pe", q_pe, DIMS.qk_rope_head_dim)):
            if not isinstance(t, torch.Tensor) or list(t.shape) != [plan.total_q, plan.num_heads, width]:
                got = list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise PlanMismatch(
                    f"{name}: expected [{plan.total_q}, {plan.num_heads}, {width}] as planned, got {got}. Plan again."
                )
            if t.dtype != plan.q_dtype:
                raise PlanMismatch(f"{name}: planned for {plan.q_dtype}, got {t.dtype}. Plan again with this q_data_type.")
        for name, t, width in (("ckv_cache", ckv_cache, DIMS.kv_lora_rank), ("kpe_cache", kpe_cache, DIMS.qk_rope_head_dim)):
            if not isinstance(t, torch.Tensor) or t.ndim not in (3, 4) or t.shape[1] != plan.page_size or t.shape[-1] != width:
                got = list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise InvalidArgument(f"{name}: expected [pages, {plan.page_size}, {width}], got {got}.")
            if t.ndim == 4 and t.shape[2] != 1:
                raise InvalidArgument(f"{name}: expected one KV head, got {list(t.shape)}.")
            if t.dtype != plan.kv_dtype:
                raise PlanMismatch(f"{name}: planned for {plan.kv_dtype}, got {t.dtype}. Plan again with this kv_data_type.")
        for name, t in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
            if t.device != self.device:
                raise InvalidArgument(f"{name}: expected on the workspace's device {self.device}, got {t.device}.")
        if ckv_cache.ndim != kpe_cache.ndim or ckv_cache.shape[0] != kpe_cache.shape[0]:
            raise InvalidArgument(
                f"kpe_cache: expected the pages of ckv_cache {list(ckv_cache.shape)}, got {list(kpe_cache.shape)}."
            )


@torch.compiler.disable
def _untraced(wrapper: BatchMLAPagedAttentionWrapper, *args):
    """``run`` outside of a traced graph: what can be read in place depends on addresses."""
    return wrapper.run(*args)


def _check_index(name: str, t: torch.Tensor | None, dev: torch.device | None) -> None:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.int32 or t.ndim != 1:
        got = f"{t.dtype} {list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise InvalidDtype(f"{name}: expected an int32 vector, got {got}.")
    if dev is not None and t.device != dev:
        raise InvalidArgument(f"{name}: expected on the workspace's device {dev}, got {t.device}.")
