"""``mxfp4_row320``: the values of ``mxfp4`` in one 320-byte row a token, arranged for the registers of a GPU kernel.

    byte        what
    0..287      magnitudes and signs of the 576 values, nibble d as in ``mxfp4`` but with the signs moved (below)
    288..303    4 * deficit of latent block b at 288 + 4 * (b % 4) + b // 4
    304, 305    4 * deficit of the rope blocks 16 and 17
    306         the reference exponent E, an E8M0 byte 14..254; 255: a block of this token is NaN
    307         E where byte 306 is 255, otherwise 0
    308..319    0

Block b has the scale 2**(E - deficit - 127), with deficit 0..26: a kernel can fold the deficit into the exponents of an
8-bit float and apply E to the logit. E is the largest scale byte of the token, but at least 14, and 127 where all values
are zero. A deficit of 27 marks a NaN block (in which case byte 306 is 255): its codes still decode to something finite, so
that only the logits of rows that see the key need turn into NaN.

Signs. A 32-bit word holds values 8j .. 8j+7, the magnitude of value 8j+i in bits 4i .. 4i+2. Byte m of the word has the
sign of value 8j+m in bit 7 and that of value 8j+4+m in bit 3. So ``w & 0x80808080`` are the signs of the four values whose
magnitudes are the low half of ``w & 0x77777777``, each at the top of a byte, and ``(w << 4) & 0x80808080`` those of the rest.

What is exact. :func:`from_ocp` and :func:`to_ocp` convert from and to the tensors of ``mxfp4``. A token is in range if
every block that has a nonzero value has a scale at most 2**26 below the largest such. In range, codes and scales come back
byte for byte, but for blocks of zeros: a block of zeros has no exponent, counts nowhere, and comes back with scale byte
0, which is also what quantising writes. Values, the sign of zeros included, are always the same in range. Out of range,
quantising rounds small blocks with the scale 2**(E - 26 - 127); converting refuses them, or on request does the same,
which moves values by at most 2**-28 of the token's largest scale.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument, InvalidDtype
from ..problem import DIMS
from .base import CacheFormat, Quantized
from .elements import E8M0_NAN, MX_BLOCK, e2m1_decode
from .mxfp4 import MXFP4, NUM_BLOCKS, block_codes, block_scales, pack_codes, unpack_codes

__all__ = [
    "DEFICITS_AT",
    "DEFICIT_AT",
    "DEFICIT_UNIT",
    "EXPONENT_AT",
    "FINITE_EXPONENT_AT",
    "MAX_DEFICIT",
    "MIN_EXPONENT",
    "MXFP4Row320",
    "NAN_DEFICIT",
    "ROW_BYTES",
    "SIGN_OF",
    "ZERO_EXPONENT",
    "from_ocp",
    "to_ocp",
]

ROW_BYTES = 320  #: ten 32-byte sectors; 16 rows are one bulk copy of 5120 bytes
CODE_BYTES = DIMS.qk_head_dim // 2  #: 288 bytes of nibbles come first
DEFICITS_AT = CODE_BYTES
EXPONENT_AT = DEFICITS_AT + NUM_BLOCKS  #: 306
FINITE_EXPONENT_AT = EXPONENT_AT + 1  #: 307
#: Byte of each block's deficit. A thread that reads blocks q, q + 4, q + 8, q + 12 finds theirs in one 32-bit word.
DEFICIT_AT: tuple[int, ...] = (*(DEFICITS_AT + 4 * (b % 4) + b // 4 for b in range(16)), DEFICITS_AT + 16, DEFICITS_AT + 17)

DEFICIT_UNIT = 4  #: bytes hold deficit * 4, the place of the exponent in an e5m2 number
MAX_DEFICIT = 26  #: E2M1 spans 4 exponents, e5m2's normal numbers 30: 26 are left for the difference between blocks
NAN_DEFICIT = 27  #: of a NaN block. One more than the largest, so e5m2 exponents end at 0 and do not wrap.
MIN_EXPONENT = 14  #: from here on 2**(E - 127 - 13), with 13 from e5m2's bias, is a normal fp32 number
ZERO_EXPONENT = 127  #: of a token of zeros: scale 1, near those of other tokens

#: Nibble n of a word carries in its bit 3 the sign of value SIGN_OF[n] of the word.
SIGN_OF: tuple[int, ...] = (4, 0, 5, 1, 6, 2, 7, 3)
_NIBBLE_OF_SIGN: tuple[int, ...] = tuple(SIGN_OF.index(i) for i in range(8))


def _move_signs(packed: torch.Tensor, source: tuple[int, ...]) -> torch.Tensor:
    """Nibble n of each 4 bytes takes its bit 3 from nibble ``source[n]``: uint8 [..., 288] -> [..., 288]."""
    codes = unpack_codes(packed).unflatten(-1, (-1, 8))
    return pack_codes(((codes & 7) | (codes & 8)[..., list(source)]).flatten(-2))


def _has_values(packed: torch.Tensor) -> torch.Tensor:
    """Which blocks have a nonzero magnitude, wherever the signs are: uint8 [..., 288] -> bool [..., 18]."""
    return ((packed & 0x77) != 0).unflatten(-1, (NUM_BLOCKS, MX_BLOCK // 2)).any(-1)


def _reference_exponent(byte: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """E of each token from the scales of the blocks that count: int32 [..., 18], bool [..., 18] -> int32 [..., 1]."""
    largest = torch.where(counts, byte, -1).amax(-1, keepdim=True)
    return torch.where(largest < 0, ZERO_EXPONENT, largest.clamp(min=MIN_EXPONENT))


def _rows(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows from ``mxfp4`` bytes whose deficits are in range."""
    byte, nan = scale.int(), scale == E8M0_NAN
    counts = _has_values(data) & ~nan
    exponent = _reference_exponent(byte, counts)
    deficit = torch.where(nan, NAN_DEFICIT, torch.where(counts, exponent - byte, 0))
    has_nan = nan.any(-1, keepdim=True)
    rows = data.new_zeros(*data.shape[:-1], ROW_BYTES)
    rows[..., :CODE_BYTES] = _move_signs(data, SIGN_OF)
    rows[..., list(DEFICIT_AT)] = (deficit * DEFICIT_UNIT).to(torch.uint8)
    rows[..., EXPONENT_AT, None] = torch.where(has_nan, E8M0_NAN, exponent).to(torch.uint8)
    rows[..., FINITE_EXPONENT_AT, None] = torch.where(has_nan, exponent, 0).to(torch.uint8)
    return rows


def _split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``mxfp4`` codes and scales of rows, whatever bytes they hold; exponents are held at 0 from below."""
    deficit = rows[..., list(DEFICIT_AT)].int() // DEFICIT_UNIT
    marked = (rows[..., EXPONENT_AT] == E8M0_NAN)[..., None]
    exponent = torch.where(marked, rows[..., FINITE_EXPONENT_AT, None], rows[..., EXPONENT_AT, None]).int()
    byte = torch.where(_has_values(rows[..., :CODE_BYTES]), (exponent - deficit).clamp(min=0), 0)
    byte = torch.where(marked & (deficit >= NAN_DEFICIT), E8M0_NAN, byte)
    return _move_signs(rows[..., :CODE_BYTES], _NIBBLE_OF_SIGN), byte.to(torch.uint8)


#: What holds bytes as they are. Another one-byte dtype (an fp8 cache, say) holds values, and viewing those as codes would go unnoticed.
_BYTES, _CODES, _SCALES = (
    tuple(dtype for name in ("uint8", *names) if (dtype := getattr(torch, name, None)) is not None)
    for names in ((), ("float4_e2m1fn_x2",), ("float8_e8m0fnu",))
)


def _bytes(name: str, t: torch.Tensor, dtypes: tuple, width: int, at_least: bool = False) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(f"{name}: expected a tensor, got {type(t).__name__}.")
    if t.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidDtype(f"{name}: expected bytes ({expected}), got {t.dtype}. Pass the stored bytes, not values.")
    if t.ndim < 1 or not (t.shape[-1] == width or (at_least and t.shape[-1] > width)):
        raise InvalidArgument(f"{name}: expected [..., {'>= ' if at_least else ''}{width}], got {list(t.shape)}.")
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _first(mask: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """(index of the token as text, full index) of the first True of [..., blocks]."""
    index = tuple(int(i) for i in mask.nonzero()[0])
    return str(index[0] if len(index) == 2 else index[:-1]), index


@torch.no_grad()
def from_ocp(data: torch.Tensor, scale: torch.Tensor, *, beyond: str = "refuse") -> torch.Tensor:
    """Rows from the two tensors of an ``mxfp4`` cache.

    Args:
        data: uint8 or float4_e2m1fn_x2 [..., 288], low nibble first.
        scale: uint8 or float8_e8m0fnu [..., >= 18], same leading dims; 255 is NaN. Padding is not read.
        beyond: what becomes of a block that has nonzero values and a scale more than 2**26 below the token's largest:
            "refuse" raises; "round" rounds its values with the scale that is 2**26 below.

    Returns:
        uint8 [..., 320]. With "refuse" this waits for the device.

    Raises:
        InvalidArgument: shapes, devices, or a block beyond the range; the message names the first one.
        InvalidDtype: not bytes.

    Example:
        >>> import torch
        >>> from leanmla import formats
        >>> ocp = formats.get("mxfp4").quantize(torch.randn(5, 576))
        >>> rows = from_ocp(ocp.data, ocp.scale)
        >>> [torch.equal(a, b) for a, b in zip(to_ocp(rows), ocp[:2])]
        [True, True]
    """
    if beyond not in ("refuse", "round"):
        raise InvalidArgument(f"beyond: expected 'refuse' or 'round', got {beyond!r}.")
    data = _bytes("data", data, _CODES, CODE_BYTES)
    scale = _bytes("scale", scale, _SCALES, NUM_BLOCKS, at_least=True)[..., :NUM_BLOCKS]
    if data.shape[:-1] != scale.shape[:-1] or data.device != scale.device:
        raise InvalidArgument(
            f"scale: expected leading dims {list(data.shape[:-1])} on {data.device} like data, got {list(scale.shape[:-1])} on "
            f"{scale.device}."
        )
    counts = _has_values(data) & (scale != E8M0_NAN)
    lowest = _reference_exponent(scale.int(), counts) - MAX_DEFICIT
    too_small = counts & (scale.int() < lowest)
    if beyond == "refuse":
        if bool(too_small.any()):
            token, index = _first(too_small)
            byte = int(scale[index])
            largest = int(lowest[index[:-1]]) + MAX_DEFICIT
            raise InvalidArgument(
                f"scale: block {index[-1]} of token {token} has scale byte {byte}, {largest - byte} below the token's largest, {largest}; "
                f"format 'mxfp4_row320' holds at most {MAX_DEFICIT}. Keep these tokens in 'mxfp4', or pass beyond='round'."
            )
        return _rows(data, scale)
    raised = torch.where(too_small, lowest, scale.int())
    # Codes times a power of two below 1 are exact in fp32 as far as rounding to E2M1 can tell (2**-60 is zero like less).
    factor = torch.exp2((scale.int() - raised).clamp(min=-60).float())
    values = e2m1_decode(data).unflatten(-1, (NUM_BLOCKS, MX_BLOCK)) * factor[..., None]
    codes, _ = block_codes(values, torch.full_like(scale, 127))
    return _rows(pack_codes(codes.flatten(-2)), raised.to(torch.uint8))


@torch.no_grad()
def to_ocp(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors of an ``mxfp4`` cache from rows; exact for every row that this format can hold.

    Args:
        rows: uint8 [..., 320].

    Returns:
        data uint8 [..., 288], low nibble first, and E8M0 scales uint8 [..., 18]. Waits for the device.

    Raises:
        InvalidArgument: a row holds bytes that the format does not define; the message names the first one.
    """
    rows = _bytes("rows", rows, _BYTES, ROW_BYTES)
    stored = rows[..., list(DEFICIT_AT)].int()
    marked = (rows[..., EXPONENT_AT] == E8M0_NAN)[..., None]
    exponent = torch.where(marked, rows[..., FINITE_EXPONENT_AT, None], rows[..., EXPONENT_AT, None]).int()
    nan = stored == NAN_DEFICIT * DEFICIT_UNIT
    bad = torch.where(nan, ~marked, (stored % DEFICIT_UNIT != 0) | (stored > MAX_DEFICIT * DEFICIT_UNIT))
    # Below MIN_EXPONENT kernels would flush the scale to zero; slots that were never written are zeros throughout.
    bad |= ~nan & _has_values(rows[..., :CODE_BYTES]) & (exponent < stored.floor_divide(DEFICIT_UNIT).clamp(min=MIN_EXPONENT))
    bad |= marked & ((exponent == E8M0_NAN) | ~nan.any(-1, keepdim=True))
    if bool(bad.any()):
        token, index = _first(bad)
        head = [int(rows[(*index[:-1], at)]) for at in (DEFICIT_AT[index[-1]], EXPONENT_AT, FINITE_EXPONENT_AT)]
        raise InvalidArgument(
            f"rows: token {token} is no row of format 'mxfp4_row320': block {index[-1]} has the deficit byte {head[0]} (byte "
            f"{DEFICIT_AT[index[-1]]}) under the exponents {head[1]} and {head[2]} (bytes {EXPONENT_AT}, {FINITE_EXPONENT_AT}). "
            "Convert only slots that were written."
        )
    return _split(rows)


class MXFP4Row320(CacheFormat):
    """The values of ``mxfp4`` with everything about a token in one row, 5 % larger."""

    name = "mxfp4_row320"
    data_width = ROW_BYTES
    storage_dtype = torch.uint8
    accepted_dtypes = (torch.uint8,)
    scale_kind = "none"
    has_mx_rule = True
    bytes_per_token = ROW_BYTES
    layout = "288 bytes of E2M1 pairs with moved signs, 18 block exponents below a common one, in one row of 320 bytes"

    def quantize(self, latent, *, scale=None, mx_scale_rule="even") -> Quantized:
        """As ``mxfp4``, but no block's scale is taken more than 2**26 below the token's largest."""
        self._check_latent(latent)
        blocks, byte = block_scales(latent, mx_scale_rule)
        finite = byte != E8M0_NAN
        lowest = torch.where(finite, byte.int(), 0).amax(-1, keepdim=True) - MAX_DEFICIT
        byte = torch.where(finite, torch.maximum(byte.int(), lowest), E8M0_NAN).to(torch.uint8)
        codes, saturated = block_codes(blocks, byte)
        return Quantized(_rows(pack_codes(codes.flatten(1)), byte), None, saturated)

    def dequantize(self, data, scale, dtype=torch.float32) -> torch.Tensor:
        """E2M1 value * 2**(E - deficit - 127); exact in fp64, and in fp32 for what it holds: 4 * 2**126 and more are infinite."""
        return MXFP4().dequantize(*_split(data), dtype)
