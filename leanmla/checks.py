"""Refusals: turns a call into a checked :class:`~leanmla.problem.DecodeArgs` or says what is wrong with it.

Shapes, strides, dtypes and devices are always checked. The *contents* of tables are checked when the tensors are on the
CPU, where reading them is free, and on a GPU only on request, because that waits for the device.
"""

from __future__ import annotations

import math

import torch

from .cache import LatentCache
from .errors import CapacityExceeded, InvalidArgument, InvalidDtype, InvalidTable
from .page_table import PageTable
from .problem import DIMS, DecodeArgs, DecodeProblem

__all__ = ["MAX_KV_SPLITS", "check_call", "check_options", "check_types", "q_dtype_name", "reads_contents"]

#: More splits of one sequence than any machine has workers for.
MAX_KV_SPLITS = 4096
_FP32_MAX = torch.finfo(torch.float32).max

_Q_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def q_dtype_name(dtype: torch.dtype, argument: str = "q") -> str:
    """ "bf16" or "fp16"; refuses everything else."""
    if dtype not in _Q_DTYPES:
        raise InvalidDtype(
            f"{argument}: expected bfloat16 or float16, got {str(dtype).removeprefix('torch.')}. Cast the query; the cache may be in "
            "any of the formats."
        )
    return _Q_DTYPES[dtype]


def check_options(
    *, sm_scale: float, logit_cap: float, num_kv_splits: int | None, split_size: int | None
) -> tuple[float, float]:
    """Refuse options that are not numbers of the right kind; returns sm_scale and logit_cap as floats."""
    scale, cap = _to_float(sm_scale), _to_float(logit_cap)
    if not abs(scale) <= _FP32_MAX:
        raise InvalidArgument(
            f"sm_scale: expected a finite number, got {sm_scale!r}. There is no default: 1/sqrt(192) * mscale**2 for DeepSeek "
            "checkpoints, 1/sqrt(576) in the mixed-mla contest."
        )
    if not 0 <= cap <= _FP32_MAX:
        raise InvalidArgument(f"logit_cap: expected a finite number >= 0 (0 means none), got {logit_cap!r}.")
    for name, value in (("num_kv_splits", num_kv_splits), ("split_size", split_size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31):
            raise InvalidArgument(f"{name}: expected None or a positive integer, got {value!r}.")
    if num_kv_splits is not None and num_kv_splits > MAX_KV_SPLITS:
        raise InvalidArgument(
            f"num_kv_splits: expected at most {MAX_KV_SPLITS}, got {num_kv_splits}. Each split has scratch of its own; more than the "
            "machine's multiprocessors gain nothing."
        )
    if num_kv_splits is not None and split_size is not None:
        raise InvalidArgument(
            f"num_kv_splits and split_size exclude each other, got {num_kv_splits} and {split_size}. Give one of them."
        )
    return scale, cap


def reads_contents(check_contents: bool | None, device: torch.device) -> bool:
    """Whether a call checks what its tables hold: as asked, otherwise where reading them is free."""
    return device.type == "cpu" if check_contents is None else check_contents


def check_types(cache: object, table: object) -> None:
    """Refuse what is not a LatentCache and a PageTable."""
    if not isinstance(cache, LatentCache):
        raise InvalidArgument(
            f"cache: expected a LatentCache, got {type(cache).__name__}. Wrap it with LatentCache.from_tensors."
        )
    if not isinstance(table, PageTable):
        raise InvalidArgument(f"table: expected a PageTable, got {type(table).__name__}. Build one with PageTable.from_csr.")


def check_call(
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
    split_size: int | None,
    max_q_len: int | None,
    check_contents: bool | None,
) -> DecodeArgs:
    """Check a whole call. ``lse``, and ``out`` if None, are left for the caller to fill in.

    Raises:
        InvalidArgument and its kinds, naming the argument.
    """
    check_types(cache, table)
    if not isinstance(causal, bool) and causal not in (0, 1):
        raise InvalidArgument(f"causal: expected True or False, got {causal!r}.")
    sm_scale, logit_cap = check_options(
        sm_scale=sm_scale, logit_cap=logit_cap, num_kv_splits=num_kv_splits, split_size=split_size
    )
    total_q, num_heads = _check_q(q)
    cache.require_scale()
    _check_devices(q, cache, table)
    if table.kind == "contiguous":
        cache = cache.as_tokens()
    elif table.page_size != cache.page_size:
        raise InvalidArgument(
            f"table: page_size {table.page_size} does not match the cache's page_size {cache.page_size}. Build both with the same."
        )
    bound = _check_qo_indptr(q, table, qo_indptr, max_q_len)
    if out is not None:
        _check_out(out, q, cache)
    if reads_contents(check_contents, q.device):
        table.check_contents(cache.num_pages)
        if qo_indptr is not None:
            _check_qo_contents(qo_indptr, total_q, bound)

    if table.kind == "block_table":
        assert table.max_pages is not None
        max_kv_len = table.max_pages * table.page_size
        total_kv = max_kv_len * table.batch
    elif table.kind == "csr":
        assert table.max_pages is not None
        max_kv_len = total_kv = table.max_pages * table.page_size
    else:
        max_kv_len = total_kv = cache.num_tokens
    problem = DecodeProblem(
        format=cache.format.name,
        num_heads=num_heads,
        batch=table.batch,
        total_q=total_q,
        max_q_len=bound,
        ragged_q=qo_indptr is not None,
        page_size=table.page_size,
        table_kind=table.kind,
        max_kv_len=max_kv_len,
        total_kv=total_kv,
        q_dtype=_Q_DTYPES[q.dtype],
        causal=bool(causal),
        logit_cap=logit_cap,
        return_lse=bool(return_lse),
        num_kv_splits=num_kv_splits,
        split_size=split_size,
    )
    return DecodeArgs(problem, q, cache, table, qo_indptr, sm_scale, out, None)  # type: ignore[arg-type]


def _to_float(x: object) -> float:
    """A real scalar as a float; NaN if it is none, or too large for one."""
    if isinstance(x, torch.Tensor | bool | str | complex) or getattr(getattr(x, "dtype", None), "kind", "f") not in "fiu":
        return math.nan
    try:
        return float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _check_q(q: torch.Tensor) -> tuple[int, int]:
    if not isinstance(q, torch.Tensor):
        raise InvalidArgument(f"q: expected a tensor [total_q, num_heads, {DIMS.qk_head_dim}], got {type(q).__name__}.")
    if q.ndim != 3:
        raise InvalidArgument(
            f"q: expected 3 dims [total_q, num_heads, {DIMS.qk_head_dim}], got shape {list(q.shape)}. Flatten batch and q_len into one dim."
        )
    if q.shape[2] != DIMS.qk_head_dim:
        hint = (
            "If rope is apart, join the two first."
            if q.shape[2] == DIMS.kv_lora_rank
            else "This operator takes absorbed queries."
        )
        raise InvalidArgument(
            f"q: last dim must be kv_lora_rank + qk_rope_head_dim = {DIMS.qk_head_dim}, got {q.shape[2]}. {hint}"
        )
    if q.shape[1] < 1:
        raise InvalidArgument(f"q: expected at least one head, got shape {list(q.shape)}.")
    q_dtype_name(q.dtype)
    if q.is_neg():
        raise InvalidArgument("q: is a lazily negated view, whose memory holds other values. Call q.resolve_neg().")
    if q.numel() and q.stride(-1) != 1:
        raise InvalidArgument(f"q: the last dim must be contiguous, got strides {q.stride()}. Call .contiguous().")
    return q.shape[0], q.shape[1]


def _check_devices(q: torch.Tensor, cache: LatentCache, table: PageTable) -> None:
    devices = {"q": q.device, "cache": cache.device, "table": table.device}
    if cache.scale is not None:
        devices["cache.scale"] = cache.scale.device
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {d}" for name, d in devices.items())
        raise InvalidArgument(f"q, cache and table must be on one device, got {listing}. Move them together.")


def _check_qo_indptr(q: torch.Tensor, table: PageTable, qo_indptr: torch.Tensor | None, max_q_len: int | None) -> int:
    """Bound on one sequence's query rows."""
    total_q, batch = q.shape[0], table.batch
    if max_q_len is not None and (not isinstance(max_q_len, int) or isinstance(max_q_len, bool) or max_q_len < 0):
        raise InvalidArgument(f"max_q_len: expected None or an integer >= 0, got {max_q_len!r}.")
    if qo_indptr is None:
        if batch == 0 and total_q:
            raise InvalidArgument(f"q: the table has no sequence, expected 0 query rows, got {total_q}.")
        if batch and total_q % batch:
            raise InvalidArgument(
                f"q: {total_q} rows do not divide over {batch} sequences. Pass qo_indptr when sequences have different numbers of rows."
            )
        q_len = total_q // batch if batch else 0
        if max_q_len is not None and max_q_len < q_len:
            raise InvalidArgument(f"max_q_len: expected at least {q_len} (rows a sequence), got {max_q_len}. Raise it.")
        return q_len
    if not isinstance(qo_indptr, torch.Tensor) or qo_indptr.dtype != torch.int32:
        got = qo_indptr.dtype if isinstance(qo_indptr, torch.Tensor) else type(qo_indptr).__name__
        raise InvalidDtype(f"qo_indptr: expected an int32 tensor [{batch + 1}], got {got}. Convert with .to(torch.int32).")
    if qo_indptr.ndim != 1 or qo_indptr.numel() != batch + 1:
        raise InvalidArgument(
            f"qo_indptr: expected [batch+1] = [{batch + 1}] for a table of {batch} sequences, got {list(qo_indptr.shape)}."
        )
    if qo_indptr.stride(0) != 1:
        raise InvalidArgument(f"qo_indptr: must be contiguous, got stride {qo_indptr.stride(0)}. Call .contiguous().")
    if qo_indptr.device != q.device:
        raise InvalidArgument(f"qo_indptr: expected on q's device {q.device}, got {qo_indptr.device}. Move it there.")
    return total_q if max_q_len is None else min(max_q_len, total_q)


def _check_qo_contents(qo_indptr: torch.Tensor, total_q: int, max_q_len: int) -> None:
    offsets = qo_indptr.cpu().long()
    if int(offsets[0]) != 0:
        raise InvalidTable(f"qo_indptr[0]: expected 0, got {int(offsets[0])}.")
    if int(offsets[-1]) != total_q:
        raise InvalidTable(
            f"qo_indptr[-1]: expected {total_q}, the rows of q, got {int(offsets[-1])}. The offsets must cover q."
        )
    lens = offsets[1:] - offsets[:-1]
    if lens.numel() and int(lens.min()) < 0:
        b = int(lens.argmin())
        raise InvalidTable(
            f"qo_indptr: expected rising offsets, got {int(offsets[b])} then {int(offsets[b + 1])} at sequence {b}."
        )
    if lens.numel() and int(lens.max()) > max_q_len:
        b = int(lens.argmax())
        raise CapacityExceeded(
            f"max_q_len: sequence {b} has {int(lens[b])} query rows, expected at most {max_q_len}. Raise max_q_len."
        )


def _check_out(out: torch.Tensor, q: torch.Tensor, cache: LatentCache) -> None:
    want = [q.shape[0], q.shape[1], DIMS.v_head_dim]
    if not isinstance(out, torch.Tensor) or list(out.shape) != want:
        got = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InvalidArgument(
            f"out: expected [total_q, num_heads, {DIMS.v_head_dim}] = {want}, got {got}. Allocate it for this q."
        )
    if out.dtype != q.dtype:
        raise InvalidDtype(f"out: expected q's dtype {q.dtype}, got {out.dtype}.")
    if out.device != q.device:
        raise InvalidArgument(f"out: expected on q's device {q.device}, got {out.device}.")
    if out.numel() and out.stride(-1) != 1:
        raise InvalidArgument(f"out: the last dim must be contiguous, got strides {out.stride()}.")
    if out.numel() and any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise InvalidArgument(f"out: rows share memory, got strides {out.stride()}. Pass a tensor that was not expanded.")
    if out.numel() and out.untyped_storage().data_ptr() == cache.data.untyped_storage().data_ptr():
        raise InvalidArgument("out: lies in the cache's memory. Pass a tensor of its own: writing it would change keys.")
