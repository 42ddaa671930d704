"""Which lane holds which element: the register layouts of gfx950 that the kernels rely on, in plain Python.

The kernels compute these indices with shifts on the lane number; tests compare the kernels' own index arithmetic (the
functions below take ints and traced values alike) with the definitions spelled out in tests/flydsl.

All are for waves of 64 lanes; ``row``/``col`` are of the 16x16 result, ``k`` runs along the contraction.
"""

from __future__ import annotations

__all__ = [
    "KEYS_PER_CHUNK",
    "mfma_group",
    "mfma_row",
    "operand_k",
    "probability_slot_key",
    "result_row",
    "scaled_key_k",
    "scaled_query_k",
    "transposed_read_source",
]

#: Keys one probability-times-value MFMA contracts.
KEYS_PER_CHUNK = 32


def mfma_row(lane):
    """Row of operand A (column of operand B, column of the result) that a lane holds."""
    return lane & 15


def mfma_group(lane):
    """Which quarter of the wave: the contraction slice of an operand, the row slice of the result."""
    return lane >> 4


def operand_k(lane, element):
    """``v_mfma_f32_16x16x32_bf16``: contraction index of ``element`` 0..7 of an operand register set."""
    return mfma_group(lane) * 8 + element


def scaled_key_k(lane, element):
    """``v_mfma_scale_f32_16x16x128_f8f6f4``, 4-bit operand: contraction index of ``element`` 0..31; one scale a lane covers them."""
    return mfma_group(lane) * 32 + element


def scaled_query_k(lane, element):
    """The same instruction, 8-bit operand (queries; keys of an fp8 cache): two runs of 16, half of the contraction apart.

    Scales do not follow: lane group ``g`` supplies the scale of contraction indices 32 g .. 32 g + 31, which other lanes hold.
    """
    return mfma_group(lane) * 16 + (element & 15) + 64 * (element >> 4)


def result_row(lane, element):
    """Row of the result that ``element`` 0..3 of a lane's accumulator belongs to; its column is ``mfma_row``."""
    return mfma_group(lane) * 4 + element


def probability_slot_key(lane, element):
    """Key (within a chunk of 32) that stands at contraction slot ``element`` 0..7 of a lane in the PV product.

    Scores come out of two 16-key MFMAs with 4 keys a lane group each. Contracting in that order, instead of 0..31,
    lets a lane store its 4 probabilities as they are; the value operand is read in the same order.
    """
    return mfma_group(lane) * 4 + (element & 3) + 16 * (element >> 2)


def transposed_read_source(lane):
    """``ds_read_b64_tr_b16``: (row, first column) of the 4 consecutive bf16 whose address a lane supplies.

    Sixteen lanes read a 4 x 16 block, four lanes a row; lane ``i`` of them receives column ``i``, rows 0..3.
    """
    return (lane & 15) >> 2, (lane & 3) * 4
