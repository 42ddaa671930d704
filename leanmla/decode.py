"""What users call: :func:`mla_decode`, :class:`DecodePlan` and :func:`merge_states`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import backends, checks, device, formats, settings
from .cache import LatentCache
from .errors import BackendUnavailable, CapacityExceeded, InvalidArgument, InvalidDtype, PlanMismatch
from .page_table import PageTable
from .problem import DIMS, DecodeArgs, DecodeProblem

__all__ = ["CapturedDecode", "DecodePlan", "merge_states", "mla_decode"]


def mla_decode(
    q: torch.Tensor,
    cache: LatentCache,
    table: PageTable,
    *,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    backend: str = "auto",
    split_size: int | None = None,
    max_q_len: int | None = None,
    check_contents: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode attention over a latent cache: ``softmax(sm_scale * q k^T) v`` with ``v = k[:512]``.

    The absorbed form of DeepSeek-V2 (arXiv:2405.04434, section 2.1.2); :mod:`leanmla.reference` is the definition.

    Args:
        q: [total_q, num_heads, 576] bf16 or fp16, absorbed query: 512 latent values, then 64 rope values. Any number of
            heads; the last dim contiguous.
        cache: the keys, in any cache format.
        table: where each sequence's keys lie in the cache.
        sm_scale: factor on the logits; required, since no default could know it.
        qo_indptr: int32 [batch+1], query row offsets of each sequence. None: total_q / batch rows each.
        causal: row i of a sequence's q_len rows sees keys j <= kv_len - q_len + i (bottom-right aligned).
        logit_cap: above 0, logits become cap * tanh(logits / cap).
        out: [total_q, num_heads, 512] in q's dtype to write to; None allocates.
        return_lse: also return lse.
        num_kv_splits: partitions of each sequence's keys; None lets the planner balance them.
        backend: "auto" or a backend's name; see ``leanmla info``.
        split_size: keys a partition (reproducible mode): a row alone equals the same row in any batch, bit for bit.
        max_q_len: bound on one sequence's query rows when qo_indptr is given; None takes total_q. A tight bound helps.
        check_contents: read and check the tables' contents. None: on the CPU yes, on a GPU no (it would wait for the device).
            With False, lengths and page ids that do not fit the tensors are read as they are: out of bounds.

    The result carries no gradient: decoding is inference.

    Returns:
        ``out``, or ``(out, lse)`` with lse fp32 [total_q, num_heads], natural log. A row that sees no key gets out 0 and
        lse -inf.

    Raises:
        InvalidArgument (and its kinds InvalidDtype, InvalidTable, MissingScale, CapacityExceeded): names the argument.
        BackendUnavailable: the backend asked for cannot run this; says why.

    Example:
        >>> import torch
        >>> from leanmla import LatentCache, PageTable, mla_decode
        >>> cache = LatentCache.allocate(4, 64, format="fp8")
        >>> cache.append(torch.randn(100, 576), torch.arange(100))
        >>> table = PageTable.from_block_table(
        ...     torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32), page_size=64)
        >>> q = torch.randn(1, 16, 576, dtype=torch.bfloat16)
        >>> mla_decode(q, cache, table, sm_scale=576**-0.5).shape
        torch.Size([1, 16, 512])
    """
    plain = not isinstance(q, torch.Tensor) or type(q) in (torch.Tensor, torch.nn.Parameter)
    if plain and not torch.compiler.is_compiling():
        return _decode(
            q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap, out=out,
            return_lse=return_lse, num_kv_splits=num_kv_splits, backend=backend, split_size=split_size,
            max_q_len=max_q_len, check_contents=check_contents,
        )  # fmt: skip
    checks.check_types(cache, table)
    # Traced (or a tensor subclass, such as a fake tensor): everything below the operator's boundary, checks included, happens when the graph runs.
    shared = (
        q, cache.data, cache.scale, cache.format.name, cache.scale_is_set, table.kind, table.page_size, table.page_ids,
        table.kv_indptr, table.kv_last_page_len, table.cache_seqlens, qo_indptr, sm_scale, causal, logit_cap, num_kv_splits,
        backend, split_size, max_q_len, check_contents,
    )  # fmt: skip
    if out is None:
        result, lse = _mla_decode_op(*shared)
    else:
        lse = _mla_decode_out_op(out, *shared)
        result = out
    return (result, lse) if return_lse else result


def _decode(
    q: torch.Tensor,
    cache: LatentCache,
    table: PageTable,
    *,
    sm_scale: float,
    qo_indptr: torch.Tensor | None,
    causal: bool,
    logit_cap: float,
    out: torch.Tensor | None,
    return_lse: bool,
    num_kv_splits: int | None,
    backend: str,
    split_size: int | None,
    max_q_len: int | None,
    check_contents: bool | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    key = None
    if all(type(n) is int or n is None for n in (num_kv_splits, split_size, max_q_len)) and type(backend) is str:
        key = _likeness(
            q, cache, table, qo_indptr, out, sm_scale, causal, logit_cap, return_lse, check_contents,
            num_kv_splits, split_size, max_q_len, settings.default_backend() if backend == "auto" else backend,
        )  # fmt: skip
    info = None
    if key is not None:
        info = device.describe(q.device)
        key = (*key, info)
    known = _KNOWN.get(key) if key is not None else None
    if known is None or (out is not None and _overlap(out, cache)):
        args = checks.check_call(
            q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap, out=out,
            return_lse=return_lse, num_kv_splits=num_kv_splits, split_size=split_size, max_q_len=max_q_len,
            check_contents=check_contents,
        )  # fmt: skip
        known = _Known(
            args.problem, args.sm_scale, backends.choose(args.problem, info or device.describe(q.device), backend), None
        )
    problem, scale, chosen, launch = known
    with torch.no_grad():
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], DIMS.v_head_dim)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        if problem.total_q:
            workspace = chosen.make_workspace(problem, q.device)
            whole = cache.as_tokens() if table.kind == "contiguous" else cache
            args = DecodeArgs(problem, q, whole, table, qo_indptr, scale, out, lse)
            if launch is None:
                launch = backends.prepare(chosen, args, workspace)
            _launch(q.device, launch, args, workspace)
            if key is not None:
                if len(_KNOWN) >= _REMEMBERED:
                    _KNOWN.clear()
                _KNOWN[key] = _Known(problem, scale, chosen, launch)
    return out if lse is None else (out, lse)


class _Known(NamedTuple):
    """A call of :func:`mla_decode` that passed every check and ran."""

    problem: DecodeProblem
    sm_scale: float
    backend: backends.Backend
    launch: Callable[[DecodeArgs, object], None] | None


#: By the key of :func:`_likeness` and what else such a call depends on.
_KNOWN: dict[tuple, _Known] = {}


# -- the operator as torch.library sees it -------------------------------------------------------------------------------
#
# torch.library takes tensors and plain values, so the cache and the table travel in parts. lse is always returned: an
# operator's outputs must not depend on an option, and it is small (4 bytes against 1024 of a row's out).


@torch.library.custom_op("leanmla::mla_decode", mutates_args=())
def _mla_decode_op(
    q: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: str, scale_is_set: bool, table_kind: str,
    page_size: int, page_ids: torch.Tensor | None, kv_indptr: torch.Tensor | None, kv_last_page_len: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None, qo_indptr: torch.Tensor | None, sm_scale: float, causal: bool, logit_cap: float,
    num_kv_splits: int | None, backend: str, split_size: int | None, max_q_len: int | None, check_contents: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    result = _run_op(
        None, q, data, scale, format, scale_is_set, table_kind, page_size, page_ids, kv_indptr, kv_last_page_len, cache_seqlens,
        qo_indptr, sm_scale, causal, logit_cap, num_kv_splits, backend, split_size, max_q_len, check_contents,
    )  # fmt: skip
    return result


@torch.library.custom_op("leanmla::mla_decode_out", mutates_args=("out",))
def _mla_decode_out_op(
    out: torch.Tensor, q: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: str, scale_is_set: bool,
    table_kind: str, page_size: int, page_ids: torch.Tensor | None, kv_indptr: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None, cache_seqlens: torch.Tensor | None, qo_indptr: torch.Tensor | None, sm_scale: float,
    causal: bool, logit_cap: float, num_kv_splits: int | None, backend: str, split_size: int | None, max_q_len: int | None,
    check_contents: bool | None,
) -> torch.Tensor:  # fmt: skip
    _, lse = _run_op(
        out, q, data, scale, format, scale_is_set, table_kind, page_size, page_ids, kv_indptr, kv_last_page_len, cache_seqlens,
        qo_indptr, sm_scale, causal, logit_cap, num_kv_splits, backend, split_size, max_q_len, check_contents,
    )  # fmt: skip
    return lse


def _run_op(
    out, q, data, scale, format, scale_is_set, table_kind, page_size, page_ids, kv_indptr, kv_last_page_len, cache_seqlens,
    qo_indptr, sm_scale, causal, logit_cap, num_kv_splits, backend, split_size, max_q_len, check_contents,
):  # fmt: skip
    cache = LatentCache(data, scale, format=formats.get(format), mx_scale_rule="even", scale_is_set=scale_is_set)
    batch = cache_seqlens.numel() if cache_seqlens is not None else kv_indptr.numel() - 1
    table = PageTable(table_kind, page_size, batch, page_ids, kv_indptr, kv_last_page_len, cache_seqlens)
    return _decode(
        q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap, out=out, return_lse=True,
        num_kv_splits=num_kv_splits, backend=backend, split_size=split_size, max_q_len=max_q_len, check_contents=check_contents,
    )  # fmt: skip


@_mla_decode_op.register_fake
def _(q, *args):
    return q.new_empty(q.shape[0], q.shape[1], DIMS.v_head_dim), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


@_mla_decode_out_op.register_fake
def _(out, q, *args):
    return q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


# -- calls that were checked before ------------------------------------------------------------------------------------

#: Kinds of calls that are remembered; beyond it all are forgotten.
_REMEMBERED = 256


class _Step(NamedTuple):
    """A call that passed every check and ran."""

    problem: DecodeProblem
    sm_scale: float
    launch: Callable[[DecodeArgs, object], None]
    out: torch.Tensor | None  #: the plan's buffer, if the caller gave none
    lse: torch.Tensor | None


def _likeness(
    q, cache, table, qo_indptr, out, sm_scale, causal, logit_cap, return_lse, check_contents, *others
) -> tuple | None:
    """Everything about a call that its checks and its launch depend on, as a key; None if the call must be checked in full.

    Values inside tensors are not part of it, so calls that check them have none; neither have arguments of unusual types, whose
    value might change behind the key.
    """
    if (
        type(q) not in _PLAIN
        or type(cache) is not LatentCache
        or type(table) is not PageTable
        or type(sm_scale) not in (float, int)
        or type(logit_cap) not in (float, int)
        or type(causal) is not bool
        or type(return_lse) is not bool
        or not (check_contents is False or (check_contents is None and q.device.type != "cpu"))
    ):
        return None
    key = [
        sm_scale, causal, logit_cap, return_lse, q.is_neg(), cache.format.name, cache.scale_is_set, table.kind, table.page_size,
        table.batch, *others,
    ]  # fmt: skip
    for t in (
        q, out, qo_indptr, cache.data, cache.scale, table.page_ids, table.kv_indptr, table.kv_last_page_len, table.cache_seqlens,
    ):  # fmt: skip
        if t is None:
            key.append(None)
        elif type(t) in _PLAIN:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
            if _HIP:  # Triton compiles other loads for buffers above 2 GiB
                key.append(t.untyped_storage().nbytes() < 1 << 31)
        else:
            return None
    return tuple(key)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HIP = torch.version.hip is not None


def _overlap(out: torch.Tensor, cache: LatentCache) -> bool:
    """Whether ``out`` may lie in the cache's memory, which the check of a whole call refuses."""
    return out.untyped_storage().data_ptr() == cache.data.untyped_storage().data_ptr()


def _launch(where: torch.device, launch: Callable[[DecodeArgs, object], None], args: DecodeArgs, workspace: object) -> None:
    """Run a step with its own device as the current one, which launches go to."""
    if where.type != "cuda" or where.index == torch.cuda.current_device():
        launch(args, workspace)
    else:
        with torch.cuda.device(where):
            launch(args, workspace)


# -- plans -------------------------------------------------------------------------------------------------------------


class CapturedDecode:
    """A decode step recorded by :meth:`DecodePlan.capture`. Call it to run the step again on the same tensors.

    It reads whatever q, the cache, the table's tensors and qo_indptr hold when it is called, and writes the same ``out``
    (and ``lse``) each time.
    """

    def __init__(self, replay: Callable[[], None], out: torch.Tensor, lse: torch.Tensor | None, graph: object) -> None:
        self._replay = replay
        self.out = out
        self.lse = lse
        self.graph = graph  #: the torch.cuda.CUDAGraph, or None on a CPU

    def __call__(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self._replay()
        return self.out if self.lse is None else (self.out, self.lse)


class DecodePlan:
    """A decode step prepared for a capacity: owns all scratch, so :meth:`run` allocates nothing and never synchronises.

    A plan runs one call at a time: its scratch is shared, so calls from several threads take turns and calls on several
    streams must be ordered by the caller. Splits are chosen from the lengths that the tables hold at each call, on the
    device; nothing about them is fixed by the plan. One plan serves any batch up to its capacity, and one captured graph
    stays right while keys are added, sequences end and padded rows (kv_len 0, page id -1) appear.

    Args:
        num_heads, format, page_size, q_dtype: fixed; :meth:`run` refuses others.
        max_batch: most sequences.
        max_kv_len: most keys of one sequence, tokens.
        max_q_len: most query rows of one sequence.
        max_total_q: most query rows of a batch; None: max_batch * max_q_len.
        max_total_kv: most keys of a batch, tokens; None: max_batch * max_kv_len.
        num_kv_splits, split_size: as in :func:`mla_decode`.
        device, backend: where and with what.

    Raises:
        InvalidArgument: a capacity is not a positive integer. BackendUnavailable: nothing can run it.

    Example:
        >>> plan = DecodePlan(num_heads=16, format="bf16", page_size=64, max_batch=8, max_kv_len=4096, device="cpu")
        >>> plan.backend.name
        'cpu'
    """

    def __init__(
        self,
        *,
        num_heads: int,
        format: str,
        page_size: int,
        max_batch: int,
        max_kv_len: int,
        max_q_len: int = 1,
        max_total_q: int | None = None,
        max_total_kv: int | None = None,
        q_dtype: torch.dtype = torch.bfloat16,
        num_kv_splits: int | None = None,
        split_size: int | None = None,
        device: torch.device | str = "cuda",
        backend: str = "auto",
    ) -> None:
        for name, value in (
            ("num_heads", num_heads),
            ("page_size", page_size),
            ("max_batch", max_batch),
            ("max_kv_len", max_kv_len),
            ("max_q_len", max_q_len),
            ("max_total_q", max_total_q),
            ("max_total_kv", max_total_kv),
        ):
            optional = name.startswith("max_total")
            if not (optional and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidArgument(f"{name}: expected a positive integer, got {value!r}.")
        checks.check_options(sm_scale=1.0, logit_cap=0.0, num_kv_splits=num_kv_splits, split_size=split_size)
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailable(
                "device: torch sees no GPU here, got device='cuda'. Pass device='cpu' to plan for the CPU."
            )
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        total_q = max_batch * max_q_len if max_total_q is None else max_total_q
        #: the largest problem this plan runs
        self.capacity = DecodeProblem(
            format=formats.get(format).name,
            num_heads=num_heads,
            batch=max_batch,
            total_q=total_q,
            max_q_len=max_q_len,
            ragged_q=True,
            page_size=page_size,
            table_kind="block_table",
            max_kv_len=max_kv_len,
            total_kv=max_batch * max_kv_len if max_total_kv is None else max_total_kv,
            q_dtype=checks.q_dtype_name(q_dtype, "q_dtype"),
            return_lse=True,
            num_kv_splits=num_kv_splits,
            split_size=split_size,
        )
        self._info = _device_info(self.device)
        self.backend = backends.choose(self.capacity, self._info, backend)
        self._workspace = self.backend.make_workspace(self.capacity, self.device)
        self._out = torch.empty(total_q * num_heads, DIMS.v_head_dim, dtype=q_dtype, device=self.device)
        self._lse = torch.empty(total_q * num_heads, dtype=torch.float32, device=self.device)
        self._able: set[tuple[str, bool, float, bool]] = set()
        self._steps: dict[tuple, _Step] = {}
        # The scratch serves one call at a time; on a GPU the lock covers the launches, and stream order does the rest.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"DecodePlan({self.capacity}, backend={self.backend.name!r}, device={str(self.device)!r})"

    def run(
        self,
        q: torch.Tensor,
        cache: LatentCache,
        table: PageTable,
        *,
        sm_scale: float,
        qo_indptr: torch.Tensor | None = None,
        causal: bool = True,
        logit_cap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        check_contents: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """:func:`mla_decode` within this plan's capacity.

        Without ``out`` the result lies in a buffer of the plan, which the next call overwrites.

        Raises:
            PlanMismatch: heads, format, page size, dtype or device are not the plan's. CapacityExceeded: the call is larger
                than the plan. Otherwise as :func:`mla_decode`.
        """
        key = _likeness(q, cache, table, qo_indptr, out, sm_scale, causal, logit_cap, return_lse, check_contents)
        step = self._steps.get(key) if key is not None else None
        if step is None or (out is not None and _overlap(out, cache)):
            return self._checked_run(key, q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal,
                                     logit_cap=logit_cap, out=out, return_lse=return_lse, check_contents=check_contents)  # fmt: skip
        # detach() makes a view of its own, so that what the caller does to its shape stays with the caller.
        if out is None:
            assert step.out is not None
            out = step.out.detach()
        lse = None if step.lse is None else step.lse.detach()
        if table.kind == "contiguous":
            cache = cache.as_tokens()
        with self._lock:
            _launch(
                self.device,
                step.launch,
                DecodeArgs(step.problem, q, cache, table, qo_indptr, step.sm_scale, out, lse),
                self._workspace,
            )
        return out if lse is None else (out, lse)

    @torch.no_grad()
    def _checked_run(self, key, q, cache, table, **options) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A call checked in full and, once it has run, remembered under ``key``."""
        args = self._args(q, cache, table, **options)
        if args.problem.total_q:
            with self._lock:
                launch = backends.prepare(self.backend, args, self._workspace)
                _launch(self.device, launch, args, self._workspace)
                if key is not None:
                    if len(self._steps) >= _REMEMBERED:
                        self._steps.clear()
                    own = None if options["out"] is not None else args.out.detach()
                    lse = None if args.lse is None else args.lse.detach()
                    self._steps[key] = _Step(args.problem, args.sm_scale, launch, own, lse)
        return args.out if args.lse is None else (args.out, args.lse)

    @torch.no_grad()
    def capture(
        self,
        q: torch.Tensor,
        cache: LatentCache,
        table: PageTable,
        *,
        sm_scale: float,
        qo_indptr: torch.Tensor | None = None,
        causal: bool = True,
        logit_cap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        pool: Any = None,
    ) -> CapturedDecode:
        """Record one step as a CUDA graph and return a callable that replays it.

        The graph keeps the *addresses* of q, the cache, the table's tensors, qo_indptr and out: change their contents in
        place between replays. Without ``out`` a buffer of its own is allocated, so several captures of one plan do not
        overwrite each other's results; they do share its scratch and must not run at the same time. On a CPU the callable
        just runs the step.

        Args:
            pool: a CUDA graph memory pool to share (``torch.cuda.graph_pool_handle()``). Otherwise as in :meth:`run`.
        """
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], DIMS.v_head_dim)
        args = self._args(q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap,
                          out=out, return_lse=return_lse, check_contents=None)  # fmt: skip
        if args.lse is not None:
            args = dataclasses.replace(args, lse=torch.empty_like(args.lse))

        def step() -> None:
            if args.problem.total_q:
                _launch(self.device, self.backend.run, args, self._workspace)

        if self.device.type != "cuda":

            def checked_step() -> None:
                # What the tables hold may have changed since: on a CPU a wrong length or page id would crash the process.
                self._args(q, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap,
                           out=out, return_lse=return_lse, check_contents=None)  # fmt: skip
                with torch.no_grad(), self._lock:
                    step()

            return CapturedDecode(checked_step, out, args.lse, None)
        # Warm up on a side stream: compiles kernels and loads modules, neither of which may happen inside a capture.
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return CapturedDecode(graph.replay, out, args.lse, graph)

    def _args(self, q, cache, table, *, out, return_lse, **options) -> DecodeArgs:
        cap = self.capacity
        args = checks.check_call(
            q, cache, table, out=out, return_lse=return_lse, num_kv_splits=cap.num_kv_splits, split_size=cap.split_size,
            max_q_len=cap.max_q_len if options["qo_indptr"] is not None else None, **options,
        )  # fmt: skip
        p = args.problem
        if q.device != self.device:
            raise PlanMismatch(
                f"q: this plan was built for device {self.device}, got {q.device}. Build a plan for that device."
            )
        for name in ("num_heads", "format", "q_dtype", "page_size"):
            if name == "page_size" and p.table_kind == "contiguous":
                continue
            if getattr(p, name) != getattr(cap, name):
                raise PlanMismatch(
                    f"{name}: this plan was built for {getattr(cap, name)}, the call has {getattr(p, name)}. Build another plan for it."
                )
        for name, what in (("batch", "max_batch"), ("total_q", "max_total_q"), ("max_q_len", "max_q_len")):
            if getattr(p, name) > getattr(cap, name):
                raise CapacityExceeded(
                    f"{what}: this plan holds {getattr(cap, name)}, the call needs {getattr(p, name)}. Build a larger plan."
                )
        if checks.reads_contents(options["check_contents"], q.device):
            lens = table.kv_lens()
            for what, needed, held in (
                ("max_kv_len", int(lens.max()) if len(lens) else 0, cap.max_kv_len),
                ("max_total_kv", int(lens.sum()), cap.total_kv),
            ):
                if needed > held:
                    raise CapacityExceeded(f"{what}: this plan holds {held} keys, the call has {needed}. Build a larger plan.")
        key = (p.table_kind, p.causal, p.logit_cap, p.ragged_q)
        if key not in self._able:
            reason = self.backend.why_not(p, self._info)
            if reason is not None:
                backends.choose(p, self._info, self.backend.name)  # raises, with the sentence and the alternatives
            self._able.add(key)
        rows = p.total_q * p.num_heads
        if out is None:
            out = self._out[:rows].view(p.total_q, p.num_heads, DIMS.v_head_dim)
        lse = self._lse[:rows].view(p.total_q, p.num_heads) if return_lse else None
        return dataclasses.replace(args, out=out, lse=lse)


# torch.compile breaks its graph around these two instead of tracing them. The attribute is what torch.compiler.disable sets;
# that function would import torch._dynamo, 1.5 s of every `import leanmla`.
for _method in (DecodePlan.run, DecodePlan.capture):
    _method._torchdynamo_disable = True  # type: ignore[union-attr]


def _device_info(dev: torch.device) -> device.DeviceInfo:
    return device.describe(dev)


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint sets of keys: ``out = sum(exp(lse_i - lse) out_i)``, ``lse = log(sum(exp(lse_i)))``.

    A state with lse -inf saw no key and is left out, whatever its ``out`` holds; if all are, the result is 0 and -inf. (Some
    libraries mark such states with +inf; translate that first.)

    Args:
        outs: n tensors [..., v_head_dim] (or one [n, ..., v_head_dim]), any float dtype.
        lses: n tensors [...] (or one [n, ...]), natural log.

    Returns:
        (out in the dtype of ``outs``, lse fp32).

    Raises:
        InvalidArgument: nothing to merge, or shapes that do not agree.

    Example:
        >>> out, lse = merge_states([torch.zeros(1), torch.ones(1)], [torch.tensor(2.0).log(), torch.tensor(8.0).log()])
        >>> round(out.item(), 4)
        0.8
    """
    out, lse = _stacked("outs", outs), _stacked("lses", lses)
    if len(out) == 0 or len(out) != len(lse):
        raise InvalidArgument(f"outs, lses: expected the same number of states, at least one, got {len(out)} and {len(lse)}.")
    if out.shape[:-1] != lse.shape:
        raise InvalidArgument(
            f"lses: expected {list(out.shape[:-1])}, the shape of outs without its last dim, got {list(lse.shape)}."
        )
    if not out.is_floating_point() or not lse.is_floating_point():
        raise InvalidDtype(f"outs, lses: expected floating point, got {out.dtype} and {lse.dtype}.")
    if out.device != lse.device:
        raise InvalidArgument(f"lses: expected on the device of outs, {out.device}, got {lse.device}. Move them together.")
    lse = lse.float()
    top = lse.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    # Selected, not multiplied: a state without keys may hold anything, and 0 * NaN is NaN.
    parts = torch.where((lse == -torch.inf)[..., None], 0.0, weight[..., None] * out.float())
    merged = parts.sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged.to(out.dtype), top + torch.log(total)


def _stacked(name: str, states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor [n, ...] of a sequence of equal tensors."""
    if isinstance(states, torch.Tensor):
        if states.ndim == 0:
            raise InvalidArgument(f"{name}: expected [n, ...] or a sequence of tensors, got a scalar.")
        return states
    states = list(states)
    odd = next((s for s in states if not isinstance(s, torch.Tensor)), None)
    if odd is not None:
        raise InvalidArgument(f"{name}: expected tensors, got {type(odd).__name__}. Use torch.as_tensor.")
    if not states:
        return torch.empty(0)
    different = next((s for s in states if s.shape != states[0].shape or s.device != states[0].device), None)
    if different is not None:
        raise InvalidArgument(
            f"{name}: expected states of one shape and device, {list(states[0].shape)} on {states[0].device}, got "
            f"{list(different.shape)} on {different.device}."
        )
    return torch.stack(states)
