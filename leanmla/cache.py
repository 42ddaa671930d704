"""``LatentCache``: the tensors of one layer's latent KV cache and the format they are in."""

from __future__ import annotations

import torch

from . import formats
from .errors import InvalidArgument, InvalidDtype, MissingScale
from .formats import CacheFormat
from .formats.elements import MX_SCALE_RULES
from .formats.fp8 import e4m3_scale, finite_amax
from .formats.mxfp4 import NUM_BLOCKS
from .formats.mxfp4_row320 import from_ocp, to_ocp
from .problem import DIMS

__all__ = ["LatentCache"]

_QUANTIZE_ROWS = 1 << 16  # rows quantised at a time on the host: bounds fp32 temporaries to ~150 MB


class _State:
    """What a cache and its views share beside tensors."""

    __slots__ = ("saturated", "scale_is_set")

    def __init__(self, scale_is_set: bool) -> None:
        self.scale_is_set = scale_is_set
        self.saturated: torch.Tensor | None = None


class LatentCache:
    """Pages of latent vectors in one cache format.

    Make one with :meth:`allocate` or wrap tensors you have with :meth:`from_tensors`; nothing is ever copied.

    Attributes:
        format: the :class:`~leanmla.formats.CacheFormat`.
        data: [num_pages, page_size, W] in the format's storage dtype (uint8, or bf16 for ``bf16``); any page and token
            stride, last stride 1.
        scale: None; fp32 [1] for ``fp8``; uint8 E8M0 [num_pages, page_size, 18] for ``mxfp4``.
    """

    def __init__(
        self, data: torch.Tensor, scale: torch.Tensor | None, *, format: CacheFormat, mx_scale_rule: str, scale_is_set: bool
    ) -> None:
        # Use allocate() or from_tensors(): they check and bring tensors into the internal form.
        self.format = format
        self.data = data
        self.scale = scale
        self.mx_scale_rule = mx_scale_rule
        self._state = _State(scale_is_set)

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        *,
        format: str | CacheFormat,
        device: torch.device | str = "cpu",
        scale: torch.Tensor | float | None = None,
        mx_scale_rule: str = "even",
    ) -> LatentCache:
        """An empty cache of ``num_pages`` pages.

        Args:
            num_pages, page_size: pages, and tokens a page; at least 1 each.
            format: "bf16", "fp8", "mxfp4", "fp8_tile128" or "mxfp4_row320".
            device: where.
            scale: ``fp8`` only: the tensor's scale. None takes amax / 448 of the first :meth:`append`, after which it
                stays fixed.
            mx_scale_rule: ``mxfp4`` and ``mxfp4_row320`` only: "even" or "floor".

        Raises:
            InvalidArgument: a count is not positive, or an option does not belong to the format.

        Example:
            >>> cache = LatentCache.allocate(4, 64, format="mxfp4")
            >>> cache.bytes_per_token
            306
        """
        fmt = formats.get(format)
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name}: expected a positive integer, got {value!r}.")
        data = torch.zeros(num_pages, page_size, fmt.data_width, dtype=fmt.storage_dtype, device=device)
        if fmt.scale_kind == "block":
            if scale is not None:
                raise InvalidArgument(
                    f"scale: format '{fmt.name}' finds its own scales, got {type(scale).__name__}. Leave it out."
                )
            scale_tensor: torch.Tensor | None = torch.zeros(num_pages, page_size, NUM_BLOCKS, dtype=torch.uint8, device=device)
        elif fmt.scale_kind == "per_tensor":
            scale_tensor = torch.full((1,), torch.nan, dtype=torch.float32, device=device)
            if scale is not None:
                scale_tensor.copy_(_per_tensor_scale(scale, data.device))
        else:
            _no_scale(scale, fmt)
            scale_tensor = None
        return cls(
            data, scale_tensor, format=fmt, mx_scale_rule=_mx_rule(mx_scale_rule),
            scale_is_set=fmt.scale_kind != "per_tensor" or scale is not None,
        )  # fmt: skip

    @classmethod
    def from_tensors(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor | float | None = None,
        *,
        format: str | CacheFormat,
        page_size: int,
        mx_scale_rule: str = "even",
    ) -> LatentCache:
        """Wrap existing tensors without a copy.

        Args:
            data: [num_pages, page_size, W], [num_pages, page_size, 1, W], [tokens, 1, W] or [tokens, W], where W is 576
                (``bf16``, ``fp8``), 288 (``mxfp4``), 656 (``fp8_tile128``) or 320 (``mxfp4_row320``). Strided views of larger
                buffers are fine as long as the last dim is contiguous. In the token forms tokens must be a multiple of page_size.
            scale: ``fp8``: fp32 [1]. ``mxfp4``: E8M0 bytes [>= tokens, >= 18], [num_pages, page_size, >= 18] or
                [tokens, 1, >= 18]; padding is never read. Otherwise None.
            format: the cache format's name.
            page_size: tokens a page.
            mx_scale_rule: the rule that :meth:`append` follows for ``mxfp4`` and ``mxfp4_row320``.

        Raises:
            InvalidArgument: shape, stride or device; InvalidDtype: dtype; MissingScale: no scale where one is needed.
        """
        fmt = formats.get(format)
        if not isinstance(data, torch.Tensor):
            raise InvalidArgument(f"data: expected a tensor, got {type(data).__name__}.")
        if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
            raise InvalidArgument(f"page_size: expected a positive integer, got {page_size!r}.")
        width = data.shape[-1] if data.ndim else 0
        if width != fmt.data_width:
            hint = (
                "If rope is stored apart, join the two first."
                if width == DIMS.kv_lora_rank
                else f"The layout is: {fmt.layout}."
            )
            raise InvalidArgument(f"data: last dim of format '{fmt.name}' must be {fmt.data_width}, got {width}. {hint}")
        if data.stride(-1) != 1:
            raise InvalidArgument(
                f"data: the last dim must be contiguous, got strides {data.stride()}. Copy it once with .contiguous(), or keep the "
                "cache in that form."
            )
        data = _paged(fmt.as_storage(data), page_size, "data")
        if fmt.scale_kind == "per_tensor":
            if scale is None:
                raise MissingScale(
                    f"scale: format '{fmt.name}' needs its fp32 [1] scale, got None. Pass the scale the values were divided by."
                )
            scale_tensor: torch.Tensor | None = _per_tensor_scale(scale, data.device)
        elif fmt.scale_kind == "block":
            scale_tensor = _block_scales(scale, data)
        else:
            _no_scale(scale, fmt)
            scale_tensor = None
        return cls(data, scale_tensor, format=fmt, mx_scale_rule=_mx_rule(mx_scale_rule), scale_is_set=True)

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.data.shape[1]

    @property
    def num_tokens(self) -> int:
        """Slots in the cache."""
        return self.data.shape[0] * self.data.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.data.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes a decode step reads for each key, block scales included."""
        return self.format.bytes_per_token

    @property
    def scale_is_set(self) -> bool:
        """False for an ``fp8`` cache whose scale still waits for the first append."""
        return self._state.scale_is_set

    @property
    def saturation_count(self) -> int:
        """Values that :meth:`append` clipped to the format's largest so far. Reads device memory (a sync on a GPU)."""
        return 0 if self._state.saturated is None else int(self._state.saturated)

    @property
    def saturation_counter(self) -> torch.Tensor:
        """The int64 scalar behind :attr:`saturation_count`, on the cache's device."""
        if self._state.saturated is None:
            self._state.saturated = torch.zeros((), dtype=torch.int64, device=self.device)
        return self._state.saturated

    def __repr__(self) -> str:
        mib = self.num_tokens * self.bytes_per_token / 2**20
        return (
            f"LatentCache({self.format.name}, {self.num_pages} pages x {self.page_size} tokens, {mib:.1f} MiB, {self.device})"
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise rows and scatter them to their slots.

        On a GPU with Triton this is one kernel without a host sync; elsewhere torch operations with the same bits. The one
        exception is an ``fp8`` cache that still has no scale: it takes it from the rows written, which waits for the device.
        Rows without a finite non-zero value (a warm-up batch of zeros, say) leave the scale unset.

        Args:
            latent: [n, 576] or [n, 1, 576], bf16, fp16 or fp32.
            slots: int32 or int64 [n], ``page * page_size + offset``; -1 skips a row. Two rows must not share a slot.

        Raises:
            InvalidArgument: shapes, dtypes or devices; on the CPU also a slot outside the cache. Nothing is written then.
        """
        if isinstance(latent, torch.Tensor) and latent.ndim == 3 and latent.shape[1] == 1:
            latent = latent.squeeze(1)
        self.format._check_latent(latent)
        self._check_slots(slots, latent.shape[0], latent.device)
        if latent.shape[0] == 0:
            return
        if not self._state.scale_is_set:
            self._take_scale(latent, slots)
        launcher = _gpu_append(self)
        if launcher is not None:
            launcher.append(self, latent, slots)
            return
        for lo in range(0, latent.shape[0], _QUANTIZE_ROWS):
            self._append_torch(latent[lo : lo + _QUANTIZE_ROWS], slots[lo : lo + _QUANTIZE_ROWS])

    @torch.no_grad()
    def append_split(self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor) -> None:
        """:meth:`append` with the compressed latent and the rope part apart, as models produce them.

        Args:
            kv_c: [n, 512]; k_pe: [n, 64] or [n, 1, 64]; same dtype. slots: as in :meth:`append`.
        """
        if isinstance(k_pe, torch.Tensor) and k_pe.ndim == 3 and k_pe.shape[1] == 1:
            k_pe = k_pe.squeeze(1)
        for name, t, width in (("kv_c", kv_c, DIMS.kv_lora_rank), ("k_pe", k_pe, DIMS.qk_rope_head_dim)):
            if not isinstance(t, torch.Tensor) or t.ndim != 2 or t.shape[1] != width:
                got = list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise InvalidArgument(f"{name}: expected a tensor [n, {width}], got {got}.")
        if kv_c.shape[0] != k_pe.shape[0] or kv_c.dtype != k_pe.dtype or kv_c.device != k_pe.device:
            raise InvalidArgument(
                f"k_pe: expected {kv_c.shape[0]} rows of {kv_c.dtype} on {kv_c.device} like kv_c, got {k_pe.shape[0]} rows of "
                f"{k_pe.dtype} on {k_pe.device}."
            )
        launcher = _gpu_append(self) if self._state.scale_is_set else None
        if launcher is None or kv_c.shape[0] == 0:
            self.append(torch.cat((kv_c, k_pe), dim=1), slots)
            return
        self.format._check_latent(kv_c.new_empty(0, DIMS.qk_head_dim))
        self._check_slots(slots, kv_c.shape[0], kv_c.device)
        launcher.append_split(self, kv_c, k_pe, slots)

    def _take_scale(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Fix an ``fp8`` cache's scale from the rows that are written, if they have a magnitude to take it from."""
        assert self.scale is not None
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MissingScale(
                "cache: an 'fp8' cache without a scale cannot take it inside a CUDA graph capture. Append once before, or pass scale= "
                "to LatentCache.allocate."
            )
        amax = torch.where(slots >= 0, finite_amax(latent.float()), 0.0).amax()
        if float(amax) > 0:
            self.scale.copy_(e4m3_scale(amax))
            self._state.scale_is_set = True
        else:
            # Zeros and NaN have the same bytes under every scale; 1 serves until there is something to scale.
            self.scale.fill_(1.0)

    def _append_torch(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        keep = slots >= 0
        rows = self.format.quantize(latent[keep], scale=self.scale if self.format.scale_kind == "per_tensor" else None,
                                    mx_scale_rule=self.mx_scale_rule)  # fmt: skip
        kept = slots[keep].long()
        page, offset = kept // self.page_size, kept % self.page_size
        self.data.index_put_((page, offset), rows.data)
        if self.format.scale_kind == "block":
            assert self.scale is not None and rows.scale is not None
            self.scale.index_put_((page, offset), rows.scale)
        self.saturation_counter.add_(rows.saturated)

    def _check_slots(self, slots: torch.Tensor, n: int, device: torch.device) -> None:
        if not isinstance(slots, torch.Tensor) or slots.dtype not in (torch.int32, torch.int64):
            got = slots.dtype if isinstance(slots, torch.Tensor) else type(slots).__name__
            raise InvalidDtype(f"slots: expected int32 or int64, got {got}. Convert with .to(torch.int64).")
        if slots.ndim != 1 or slots.numel() != n:
            raise InvalidArgument(f"slots: expected [{n}], one slot a row of latent, got {list(slots.shape)}.")
        if slots.device != self.device or device != self.device:
            raise InvalidArgument(
                f"append: latent on {device} and slots on {slots.device} must be on the cache's device {self.device}. Move them there."
            )
        if self.device.type == "cpu" and n and (int(slots.max()) >= self.num_tokens or int(slots.min()) < -1):
            bad = int(slots.max()) if int(slots.max()) >= self.num_tokens else int(slots.min())
            raise InvalidArgument(
                f"slots: expected -1 (skip) or 0..{self.num_tokens - 1}, got {bad}. A slot is page * page_size + offset."
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def gather(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values at some slots, dequantised: int64 [n] -> [n, 576].

        Raises:
            InvalidArgument: on the CPU, a slot outside the cache.
        """
        self.require_scale()
        if slots.device.type == "cpu" and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_tokens:
            raise InvalidArgument(f"slots: expected 0..{self.num_tokens - 1}, got {int(slots.min())}..{int(slots.max())}.")
        page, offset = slots // self.page_size, slots % self.page_size
        scale = self.scale[page, offset] if self.format.scale_kind == "block" and self.scale is not None else self.scale
        return self.format.dequantize(self.data[page, offset], scale, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole cache as values, [num_pages, page_size, 576]. For inspection and tests: it is a full copy."""
        self.require_scale()
        return self.format.dequantize(self.data, self.scale, dtype)

    def as_tokens(self) -> LatentCache:
        """The same storage seen as pages of one token, for tables without pages.

        Raises:
            InvalidArgument: pages do not follow each other in memory (a view with gaps between pages).
        """
        if self.page_size == 1:
            return self

        def flat(name: str, t: torch.Tensor) -> torch.Tensor:
            if self.num_pages > 1 and t.stride(0) != t.shape[1] * t.stride(1):
                raise InvalidArgument(
                    f"{name}: a contiguous table needs pages that follow each other, got page stride {t.stride(0)} for "
                    f"{t.shape[1]} tokens of stride {t.stride(1)}. Use a page table (from_csr or from_block_table)."
                )
            return t.as_strided((self.num_tokens, 1, t.shape[2]), (t.stride(1), t.stride(1), 1), t.storage_offset())

        scale = self.scale
        if self.format.scale_kind == "block":
            assert scale is not None
            scale = flat("scale", scale)
        view = LatentCache(
            flat("data", self.data),
            scale,
            format=self.format,
            mx_scale_rule=self.mx_scale_rule,
            scale_is_set=self._state.scale_is_set,
        )
        view._state = self._state  # one scale and one counter, whichever name is appended through
        return view

    @torch.no_grad()
    def convert(self, format: str | CacheFormat, *, beyond: str = "refuse") -> LatentCache:
        """A new cache with the same values in another layout: between ``mxfp4`` and ``mxfp4_row320``, exactly.

        Every slot is converted, so every slot has to hold what :meth:`allocate` or :meth:`append` left there. Waits for the
        device.

        Args:
            format: "mxfp4" or "mxfp4_row320". This cache's own format gives a copy.
            beyond: to ``mxfp4_row320`` only: "refuse" raises where a block's scale is more than 2**26 below the largest
                of its token; "round" rounds such blocks, as :meth:`append` does.

        Raises:
            InvalidArgument: another pair of formats, or a token that the new format cannot hold; the message names it.

        Example:
            >>> import torch
            >>> cache = LatentCache.allocate(2, 64, format="mxfp4")
            >>> cache.append(torch.randn(100, 576), torch.arange(100))
            >>> rows = cache.convert("mxfp4_row320")
            >>> rows.bytes_per_token, torch.equal(rows.dequantize(), cache.dequantize())
            (320, True)
        """
        fmt = formats.get(format)
        pair = (self.format.name, fmt.name)
        if pair[0] == pair[1]:
            data, scale = self.data.contiguous().clone(), None if self.scale is None else self.scale.contiguous().clone()
        elif pair == ("mxfp4", "mxfp4_row320"):
            assert self.scale is not None
            data, scale = from_ocp(self.data, self.scale, beyond=beyond), None
        elif pair == ("mxfp4_row320", "mxfp4"):
            data, scale = to_ocp(self.data)
        else:
            raise InvalidArgument(
                f"format: '{pair[0]}' cannot become '{pair[1]}' without rounding. Exact are {formats.CONVERTIBLE}, both ways; otherwise "
                "append the latents, or what gather() returns, to a cache of that format."
            )
        return LatentCache(data, scale, format=fmt, mx_scale_rule=self.mx_scale_rule, scale_is_set=self._state.scale_is_set)

    def require_scale(self) -> None:
        """Refuse an ``fp8`` cache that has no scale yet."""
        if not self._state.scale_is_set:
            raise MissingScale("cache: this 'fp8' cache has no scale yet. Append once, or pass scale= to LatentCache.allocate.")


def _paged(t: torch.Tensor, page_size: int, name: str) -> torch.Tensor:
    """[num_pages, page_size, W] view of any of the accepted shapes."""
    if t.ndim == 4 and t.shape[2] == 1 and t.shape[1] == page_size:
        return t.squeeze(2)
    if t.ndim == 3 and t.shape[1] == page_size:
        return t
    if t.ndim == 3 and t.shape[1] == 1:
        t = t.squeeze(1)
    if t.ndim == 2:
        if t.shape[0] % page_size:
            raise InvalidArgument(
                f"{name}: {t.shape[0]} tokens do not fill pages of {page_size}. Pass a multiple, or page_size=1 with a contiguous table."
            )
        return t.unflatten(0, (t.shape[0] // page_size, page_size))
    raise InvalidArgument(
        f"{name}: expected [num_pages, {page_size}, W], [num_pages, {page_size}, 1, W], [tokens, 1, W] or [tokens, W], got {list(t.shape)}. "
        "There is one KV head; page_size must agree with the shape."
    )


def _block_scales(scale: torch.Tensor | float | None, data: torch.Tensor) -> torch.Tensor:
    """uint8 [num_pages, page_size, 18] view of the E8M0 tensor of an mxfp4 cache."""
    num_pages, page_size = data.shape[:2]
    if scale is None:
        raise MissingScale(
            f"scale: format 'mxfp4' needs its E8M0 scales [>= {num_pages * page_size}, >= {NUM_BLOCKS}], got None. Pass the second tensor."
        )
    if not isinstance(scale, torch.Tensor):
        raise InvalidArgument(f"scale: format 'mxfp4' takes a tensor of E8M0 bytes, got {type(scale).__name__}.")
    e8m0 = getattr(torch, "float8_e8m0fnu", None)
    if scale.dtype not in (torch.uint8, e8m0):
        raise InvalidDtype(
            f"scale: format 'mxfp4' takes float8_e8m0fnu or uint8 bytes, got {scale.dtype}. Do not convert to float."
        )
    if scale.device != data.device:
        raise InvalidArgument(f"scale: expected on the cache's device {data.device}, got {scale.device}. Move it there.")
    if scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    if scale.ndim == 4 and scale.shape[2] == 1:
        scale = scale.squeeze(2)
    if scale.ndim == 3 and scale.shape[1] == 1 and page_size != 1:
        scale = scale.squeeze(1)
    tokens = num_pages * page_size
    fits = (
        scale.ndim in (2, 3)
        and scale.shape[-1] >= NUM_BLOCKS
        and (
            (scale.ndim == 2 and scale.shape[0] >= tokens)
            or (scale.ndim == 3 and scale.shape[0] >= num_pages and scale.shape[1] == page_size)
        )
    )
    if not fits:
        raise InvalidArgument(
            f"scale: expected [>= {tokens}, >= {NUM_BLOCKS}] or [{num_pages}, {page_size}, >= {NUM_BLOCKS}] (one row a token, one byte per "
            f"32 values), got {list(scale.shape)}."
        )
    if scale.stride(-1) != 1:
        raise InvalidArgument(f"scale: the last dim must be contiguous, got strides {scale.stride()}. Call .contiguous().")
    rows: torch.Tensor = scale[:tokens].unflatten(0, (num_pages, page_size)) if scale.ndim == 2 else scale[:num_pages]
    return rows[..., :NUM_BLOCKS]


def _per_tensor_scale(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        try:
            value = float(scale)
        except (TypeError, ValueError):
            value = float("nan")
        if not 0.0 < value < float("inf"):
            raise InvalidArgument(f"scale: expected a positive finite number, got {scale!r}.")
        return torch.full((1,), value, dtype=torch.float32, device=device)
    if scale.dtype != torch.float32:
        raise InvalidDtype(f"scale: expected float32, got {scale.dtype}. Convert with .float().")
    if scale.numel() != 1:
        raise InvalidArgument(f"scale: format 'fp8' has one scale for the whole tensor, expected [1], got {list(scale.shape)}.")
    if scale.device != device:
        raise InvalidArgument(f"scale: expected on the cache's device {device}, got {scale.device}. Move it there.")
    if scale.device.type == "cpu" and not 0.0 < float(scale) < float("inf"):
        raise InvalidArgument(f"scale: expected a positive finite value, got {float(scale)}. value = fp8 * scale.")
    return scale.reshape(1)


def _no_scale(scale: object, fmt: CacheFormat) -> None:
    if scale is not None:
        raise InvalidArgument(
            f"scale: format '{fmt.name}' has no scale tensor ({fmt.layout}), got {type(scale).__name__}. Leave it out."
        )


def _mx_rule(rule: str) -> str:
    if rule not in MX_SCALE_RULES:
        raise InvalidArgument(f"mx_scale_rule: expected one of {MX_SCALE_RULES}, got {rule!r}.")
    return rule


def _gpu_append(cache: LatentCache):
    """The module with the one-launch append kernels, or None where torch operations serve."""
    if cache.device.type != "cuda":
        return None
    from .device import triton_missing

    if triton_missing() is not None:
        return None
    from .kernels.triton import append

    return append
