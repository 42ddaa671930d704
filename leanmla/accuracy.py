"""What a cache format costs in accuracy: exact attention over the stored values against exact attention over the unrounded ones.

Kernels do not enter: both sides are computed in fp64, so every backend inherits these errors and adds its own (about 2e-3,
the rounding of a 16-bit output; ``leanmla run`` measures it). Latents are synthetic. Three distributions bracket what models
write: plain normal values, heavy tails with outlier channels, and a model-like one with a rope part of another scale.

    from leanmla.accuracy import measure_accuracy, recommend
    results = measure_accuracy(["normal"], [1024])
    recommend(results, budget=0.05).variant.label

Memory is bounded whatever the lengths: latents are drawn in chunks, and softmax runs over them as flash decoding does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .errors import InvalidArgument
from .formats import CONVERTIBLE, FORMATS, get
from .formats.elements import MX_SCALE_RULES
from .problem import DIMS

__all__ = [
    "DISTRIBUTIONS",
    "AccuracyResult",
    "Distribution",
    "Recommendation",
    "Variant",
    "measure_accuracy",
    "recommend",
    "same_values",
    "variants_named",
]

#: Keys drawn, quantised and attended to at a time.
CHUNK = 4096
#: Longest sequence; a sanity bound, time grows with it.
MAX_KV_LEN = 1 << 20
#: Query rows that attend to the same keys.
NUM_ROWS = 4


@dataclass(frozen=True)
class Variant:
    """A format, and for ``mxfp4`` and ``mxfp4_row320`` the rule that its block scales follow."""

    format: str
    mx_scale_rule: str = ""

    @property
    def label(self) -> str:
        """For people: ``fp8``, ``mxfp4 even``."""
        return f"{self.format} {self.mx_scale_rule}".strip()

    @property
    def bytes_per_token(self) -> int:
        return FORMATS[self.format].bytes_per_token


def variants_named(names: Sequence[str] | None = None) -> list[Variant]:
    """Formats as variants: ``mxfp4`` stands for both scale rules, ``mxfp4 floor`` for one.

    None: all there are, one of those that hold the same values in two layouts.

    Raises:
        InvalidArgument: there is no such format or rule.
    """
    found: list[Variant] = []
    twins = [twin for _, twin in CONVERTIBLE]
    for name in [f for f in FORMATS if f not in twins] if names is None else names:
        name, _, rule = name.strip().partition(" ")
        fmt = get(name).name
        rules = MX_SCALE_RULES if FORMATS[fmt].has_mx_rule else ("",)
        if rule and rule not in rules:
            raise InvalidArgument(
                f"formats: expected a scale rule of {fmt} ({', '.join(r for r in rules if r) or 'it has none'}), got {rule!r}."
            )
        found += [Variant(fmt, r) for r in ([rule] if rule else rules)]
    return list(dict.fromkeys(found))


def same_values(labels: Iterable[str]) -> list[tuple[str, Variant]]:
    """Layouts that hold the values of a format among ``labels`` and are not there themselves: the label of the one, the other
    once for each rule. Their errors are those of the former, at another size."""
    found, there = [], list(labels)
    for label in there:
        name, _, rule = label.partition(" ")
        for original, twin in CONVERTIBLE:
            variant = Variant(twin, rule)
            if name == original and variant.label not in there:
                found.append((label, variant))
    return found


# -- distributions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """How latents and queries are drawn. Everything follows from a seed."""

    name: str
    words: str  #: one sentence for people
    sm_scale: float
    make: Callable[[torch.Generator, int], _Source]


class _Source:
    """One draw: fixed properties of the channels, then queries and any stretch of keys."""

    def queries(self, gen: torch.Generator, rows: int, heads: int) -> torch.Tensor:
        raise NotImplementedError

    def keys(self, gen: torch.Generator, first: int, count: int) -> torch.Tensor:
        raise NotImplementedError


def _normal(gen: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen)


class _Normal(_Source):
    def __init__(self, gen: torch.Generator, heads: int) -> None:
        pass

    def queries(self, gen, rows, heads):
        return _normal(gen, rows, heads, DIMS.qk_head_dim)

    def keys(self, gen, first, count):
        return _normal(gen, count, DIMS.qk_head_dim)


class _HeavyTailed(_Source):
    """Student's t with 5 degrees of freedom; channels differ in scale (log-normal, sigma 0.5) and 8 of 576 are 20 times as large."""

    OUTLIERS, FACTOR, DEGREES = 8, 20.0, 5

    def __init__(self, gen: torch.Generator, heads: int) -> None:
        self.scale = torch.exp(0.5 * _normal(gen, DIMS.qk_head_dim))
        self.scale[torch.randperm(DIMS.qk_head_dim, generator=gen)[: self.OUTLIERS]] *= self.FACTOR

    def queries(self, gen, rows, heads):
        # Weights of a projection meet large channels with small factors, so that these do not drown the logits.
        return _normal(gen, rows, heads, DIMS.qk_head_dim) / self.scale

    def keys(self, gen, first, count):
        x = _normal(gen, count, DIMS.qk_head_dim)
        chi = sum(_normal(gen, count, DIMS.qk_head_dim).square_() for _ in range(self.DEGREES))
        return x * torch.rsqrt(chi / self.DEGREES) * self.scale  # type: ignore[operator]


class _ModelLike(_Source):
    """Latents as DeepSeek-style layers write them, as far as that can be imitated without a model.

    The latent part is correlated (64 directions carry most of it), has a mean, is RMS-normalised and then scaled by a gain per
    channel. The rope part is 6 times as large and rotated by position (base 10000). Heads differ in how peaked they are: each
    looks for a direction of its own, and the standard deviation of its logits goes from 1 (diffuse) to 4 (peaked).
    """

    DIRECTIONS, ROPE_SCALE, LOGIT_STD = 64, 6.0, (1.0, 4.0)

    def __init__(self, gen: torch.Generator, heads: int) -> None:
        self.basis = _normal(gen, self.DIRECTIONS, DIMS.kv_lora_rank) * torch.linspace(1.5, 0.3, self.DIRECTIONS)[:, None] / 6
        self.mean = 0.4 * _normal(gen, DIMS.kv_lora_rank)
        self.gain = torch.exp(0.4 * _normal(gen, DIMS.kv_lora_rank))
        self.rope = self.ROPE_SCALE * torch.exp(0.6 * _normal(gen, DIMS.qk_rope_head_dim // 2))
        self.frequency = 10000.0 ** (-torch.arange(0, DIMS.qk_rope_head_dim, 2) / DIMS.qk_rope_head_dim)
        self.heads = heads

    def queries(self, gen, rows, heads):
        latent = (_normal(gen, rows, heads, self.DIRECTIONS) @ self.basis) / self.gain
        rope = _normal(gen, rows, heads, DIMS.qk_rope_head_dim) / self.rope.repeat_interleave(2) / 4
        q = torch.cat((latent, rope), dim=-1)
        # Logits of the stated spread, judged on keys of their own.
        sample = self.keys(torch.Generator().manual_seed(1), 0, 512)
        spread = (q.flatten(0, 1) @ sample.T).std(-1).view(rows, heads, 1) * _SCALE_192
        return q * (torch.linspace(*self.LOGIT_STD, heads)[:, None] / spread)

    def keys(self, gen, first, count):
        latent = self.mean + _normal(gen, count, self.DIRECTIONS) @ self.basis + 0.5 * _normal(gen, count, DIMS.kv_lora_rank)
        latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True)) * self.gain
        pairs = (_normal(gen, count, DIMS.qk_rope_head_dim // 2, 2) + 1.0) * self.rope[:, None]
        angle = torch.arange(first, first + count)[:, None] * self.frequency
        cos, sin = torch.cos(angle), torch.sin(angle)
        rope = torch.stack((pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos), dim=-1)
        return torch.cat((latent, rope.flatten(1)), dim=1)


_SCALE_192 = 192**-0.5
_SCALE_576 = 576**-0.5

DISTRIBUTIONS: dict[str, Distribution] = {
    d.name: d
    for d in (
        Distribution("normal", "standard normal latents and queries", _SCALE_576, _Normal),
        Distribution("heavy-tailed", "Student's t (5 degrees), uneven channels, 8 of 576 channels 20 times as large", _SCALE_576, _HeavyTailed),
        Distribution("model-like", "correlated, RMS-normalised latents; rope part 6 times as large, rotated; peaked and diffuse heads",
                     _SCALE_192, _ModelLike),
    )
}  # fmt: skip


# -- measuring -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccuracyResult:
    """What one variant costs on one distribution and length."""

    distribution: str
    kv_len: int
    variant: Variant
    out_error: float  #: relative L2 over all rows and heads
    worst_head_error: float  #: relative L2 of the worst head over all rows
    worst_head: int
    lse_error: float  #: largest |difference|
    lse_rms_error: float
    saturated: int  #: values that were clipped

    def document(self) -> dict:
        """As it goes into JSON."""
        fields = dataclasses.asdict(self)
        fields.pop("variant")
        return {"format": self.variant.format, "mx_scale_rule": self.variant.mx_scale_rule or None, "label": self.variant.label,
                "bytes_per_token": self.variant.bytes_per_token, **fields}  # fmt: skip


class _Attention:
    """Softmax attention over keys that come in chunks, in fp64, all rows seeing all keys."""

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q  #: fp64 [n, 576], the logit scale in it
        self.peak = torch.full((q.shape[0], 1), -math.inf, dtype=torch.float64)
        self.sum = torch.zeros(q.shape[0], 1, dtype=torch.float64)
        self.out = torch.zeros(q.shape[0], DIMS.v_head_dim, dtype=torch.float64)

    def add(self, keys: torch.Tensor) -> None:
        """More keys, fp64 [n, 576]."""
        logits = self.q @ keys.T
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        weights, faded = torch.exp(logits - peak), torch.exp(self.peak - peak)
        self.sum = self.sum * faded + weights.sum(-1, keepdim=True)
        self.out = self.out * faded + weights @ keys[:, : DIMS.v_head_dim]
        self.peak = peak

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [n, 512] and lse [n]."""
        return self.out / self.sum, (self.peak + torch.log(self.sum)).squeeze(1)


def _chunks(
    distribution: Distribution, kv_len: int, heads: int, seed: int
) -> tuple[torch.Tensor, Callable[[], Iterator[torch.Tensor]]]:
    """The queries, and the keys as often as wanted: each pass draws the same ones."""
    fixed = torch.Generator().manual_seed(seed)
    source = distribution.make(fixed, heads)
    q = source.queries(fixed, NUM_ROWS, heads).double()

    def keys() -> Iterator[torch.Tensor]:
        for first in range(0, kv_len, CHUNK):
            yield source.keys(torch.Generator().manual_seed(seed * 1_000_003 + first + 1), first, min(CHUNK, kv_len - first))

    return q, keys


def _measure_one(
    distribution: Distribution, kv_len: int, variants: Sequence[Variant], heads: int, seed: int
) -> list[AccuracyResult]:
    q, keys = _chunks(distribution, kv_len, heads, seed)
    q = (q * distribution.sm_scale).flatten(0, 1)
    scale = None
    if any(v.format == "fp8" for v in variants):
        amax = max(float(chunk.abs().max()) for chunk in keys())
        scale = torch.tensor([max(amax, 1e-12)]) / 448.0
    exact, stored = _Attention(q), {v: _Attention(q) for v in variants}
    saturated = dict.fromkeys(variants, 0)
    for chunk in keys():
        exact.add(chunk.double())
        for v in variants:
            fmt = FORMATS[v.format]
            rows = fmt.quantize(chunk, scale=scale if v.format == "fp8" else None, mx_scale_rule=v.mx_scale_rule or "even")
            saturated[v] += int(rows.saturated)
            stored[v].add(fmt.dequantize(rows.data, rows.scale, torch.float32).double())
    return [_compare(distribution.name, kv_len, v, exact, stored[v], heads, saturated[v]) for v in variants]


def _compare(
    name: str, kv_len: int, variant: Variant, exact: _Attention, stored: _Attention, heads: int, saturated: int
) -> AccuracyResult:
    (want, want_lse), (got, got_lse) = exact.result(), stored.result()
    difference = (got - want).view(NUM_ROWS, heads, -1)
    size = want.view(NUM_ROWS, heads, -1)
    by_head = difference.square().sum((0, 2)).sqrt() / size.square().sum((0, 2)).sqrt()
    lse = (got_lse - want_lse).abs()
    return AccuracyResult(
        distribution=name, kv_len=kv_len, variant=variant, out_error=float(difference.norm() / size.norm()),
        worst_head_error=float(by_head.max()), worst_head=int(by_head.argmax()), lse_error=float(lse.max()),
        lse_rms_error=float(lse.square().mean().sqrt()), saturated=saturated,
    )  # fmt: skip


def measure_accuracy(
    distributions: Sequence[str] | None = None,
    kv_lens: Sequence[int] = (1024, 8192),
    *,
    formats: Sequence[str] | None = None,
    num_heads: int = 16,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda label: None,
    on_done: Callable[[], None] = lambda: None,
) -> list[AccuracyResult]:
    """The error of every format on every distribution and length.

    Args:
        distributions: names of :data:`DISTRIBUTIONS`; None takes all.
        kv_lens: keys a sequence.
        formats: see :func:`variants_named`; None takes all.
        num_heads: query heads; four rows of them attend to the same keys.
        seed: of everything that is drawn.
        on_step, on_done: told what is being done, and when one distribution and length is done.

    Returns:
        One result for each distribution, length and variant, in this order.

    Raises:
        InvalidArgument: no such distribution or format, or a count out of range.

    Example:
        >>> [r] = measure_accuracy(["normal"], [256], formats=["fp8"])
        >>> 0.01 < r.out_error < 0.05
        True
    """
    names = list(DISTRIBUTIONS) if distributions is None else list(distributions)
    for name in names:
        if name not in DISTRIBUTIONS:
            raise InvalidArgument(f"distributions: expected some of {', '.join(DISTRIBUTIONS)}, got {name!r}.")
    for n in kv_lens:
        if not 1 <= n <= MAX_KV_LEN:
            raise InvalidArgument(f"kv_lens: expected lengths from 1 to {MAX_KV_LEN}, got {n}.")
    if not 1 <= num_heads <= 128:
        raise InvalidArgument(f"num_heads: expected 1 to 128, got {num_heads}.")
    variants = variants_named(formats)
    results: list[AccuracyResult] = []
    for name in names:
        for kv_len in kv_lens:
            on_step(f"{name}, {kv_len} keys")
            results += _measure_one(DISTRIBUTIONS[name], kv_len, variants, num_heads, seed)
            on_done()
    return results


# -- choosing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recommendation:
    """The smallest format whose error stays within a budget everywhere it was measured."""

    budget: float
    variant: Variant
    worst: AccuracyResult  #: where it comes closest to the budget
    too_large: tuple[AccuracyResult, ...]  #: of each smaller variant, the worst result

    def sentence(self) -> str:
        """In words."""
        v, w = self.variant, self.worst
        text = (
            f"{v.label} ({v.bytes_per_token} bytes a token) is the smallest within {self.budget:g}: "
            f"at worst {w.out_error:.2g} ({w.distribution}, {w.kv_len} keys)"
        )
        over = "; ".join(f"{r.variant.label} reaches {r.out_error:.2g} ({r.distribution})" for r in self.too_large)
        return f"{text}. {over}." if over else f"{text}."

    def document(self) -> dict:
        """As it goes into JSON."""
        return {"budget": self.budget, "label": self.variant.label, "format": self.variant.format,
                "mx_scale_rule": self.variant.mx_scale_rule or None, "bytes_per_token": self.variant.bytes_per_token,
                "worst_out_error": self.worst.out_error, "worst_distribution": self.worst.distribution,
                "worst_kv_len": self.worst.kv_len}  # fmt: skip


def recommend(results: Sequence[AccuracyResult], budget: float) -> Recommendation | None:
    """The variant of fewest bytes (then of smallest error) whose output error is within ``budget`` in every result; None if none is.

    Raises:
        InvalidArgument: the budget is not a positive number, or there are no results.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise InvalidArgument(f"budget: expected a positive number, such as 0.05, got {budget}.")
    if not results:
        raise InvalidArgument("results: expected at least one, got none.")
    worst: dict[Variant, AccuracyResult] = {}
    for r in results:
        before = worst.get(r.variant)
        # A NaN is worse than anything and stays.
        if before is None or math.isnan(r.out_error) or r.out_error > before.out_error:
            worst[r.variant] = r
    ordered = sorted(worst, key=lambda v: (v.bytes_per_token, worst[v].out_error))
    for i, variant in enumerate(ordered):
        if worst[variant].out_error <= budget:
            return Recommendation(budget, variant, worst[variant], tuple(worst[v] for v in ordered[:i]))
    return None
