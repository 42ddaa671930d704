"""The few machine operations the kernels are written in: addressed loads and stores, conversions, MFMA, barriers.

Everything here emits IR while a kernel is traced. Values are FlyDSL numerics (``fx.Int32``, ``fx.Float32``) and vectors.
Addresses in global memory are 64-bit integers, addresses in LDS are byte offsets into the kernel's one allocation.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl._mlir.dialects import rocdl as rocdl_ops

__all__ = [
    "Lds",
    "align_bytes",
    "barrier",
    "bf16_from_fp4",
    "bf16_from_fp8",
    "exp2",
    "global_load",
    "global_store",
    "lds_load",
    "lds_store",
    "log2",
    "maximum",
    "maximum_int",
    "mfma_bf16",
    "mfma_scaled",
    "minimum",
    "own_copy",
    "pack_bf16",
    "pack_fp8",
    "reciprocal",
    "select",
    "shuffle_from",
    "udiv",
    "umod",
    "uniform",
    "unpack_fp8",
    "widen",
    "xor_lanes",
]

V = fx.Vector

# The GEP builder wants its flags spelled out; offsets here never wrap, but promising so gains nothing.
_NO_FLAGS = 0


def _ir(value):
    return value.ir_value() if hasattr(value, "ir_value") else value


def _gep(pointer, space: int, index, constant: int):
    byte = ir.IntegerType.get_signless(8)
    kind = ir.Type.parse(f"!llvm.ptr<{space}>")
    if index is not None:
        dynamic = -(2**31)  # the marker for "take the next dynamic index"
        pointer = llvm.getelementptr(kind, pointer, [_ir(index)], [dynamic], byte, _NO_FLAGS)
    if constant:
        pointer = llvm.getelementptr(kind, pointer, [], [constant], byte, _NO_FLAGS)
    return pointer


def _result_type(dtype, count: int):
    return dtype.ir_type if count == 1 else V.make_type(count, dtype)


def _wrap(value, dtype, count: int):
    return dtype(value) if count == 1 else V(value, (count,), dtype)


# -- global memory ------------------------------------------------------------------------------------------------------


def _global_pointer(address, constant: int):
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), _ir(address))
    return _gep(pointer, 1, None, constant)


def global_load(address, dtype, count: int = 1, *, offset: int = 0, align: int = 4, constant: bool = False):
    """``count`` elements at ``address + offset`` bytes. ``constant``: nothing writes there while the kernel runs."""
    pointer = _global_pointer(address, offset)
    value = llvm.load(_result_type(dtype, count), pointer, alignment=align, invariant=constant or None)
    return _wrap(value, dtype, count)


def global_store(address, value, *, offset: int = 0, align: int = 4) -> None:
    """Store a scalar or a vector at ``address + offset`` bytes."""
    llvm.store(_ir(value), _global_pointer(address, offset), alignment=align)


# -- LDS ----------------------------------------------------------------------------------------------------------------


class Lds:
    """One block of LDS. Offsets are ``dynamic + constant`` bytes; the constant part becomes the instruction's offset."""

    def __init__(self, num_bytes: int) -> None:
        storage = fx.SharedAllocator().allocate(num_bytes)
        self.base = _ir(storage._ptr.llvm_ptr)

    def load(self, dynamic, dtype, count: int = 1, *, offset: int = 0, align: int = 16):
        pointer = _gep(self.base, 3, dynamic, offset)
        return _wrap(llvm.load(_result_type(dtype, count), pointer, alignment=align), dtype, count)

    def store(self, dynamic, value, *, offset: int = 0, align: int = 16) -> None:
        llvm.store(_ir(value), _gep(self.base, 3, dynamic, offset), alignment=align)

    def load_transposed(self, dynamic, *, offset: int = 0):
        """``ds_read_b64_tr_b16``: 4 bf16 down a column; see lanes.transposed_read."""
        pointer = _gep(self.base, 3, dynamic, offset)
        return V(rocdl_ops.ds_read_tr16_b64_(V.make_type(4, fx.BFloat16), pointer), (4,), fx.BFloat16)


# Inside traced loops a method call on a local object would make the object part of the loop's state; these are plain functions.


def lds_load(lds: Lds, dynamic, *, offset: int = 0):
    """One int32."""
    return lds.load(dynamic, fx.Int32, offset=offset, align=4)


def lds_store(lds: Lds, dynamic, value, *, offset: int = 0) -> None:
    """One 4-byte value."""
    lds.store(dynamic, value, offset=offset, align=4)


def own_copy(vector):
    """The int32s of ``vector`` in registers of their own, whatever the compiler thinks of it.

    Where a value is still needed after its successor has begun to load, the compiler lets both live and copies the successor at the end
    of the loop: a wait for memory in the middle of the computation. A copy made before frees the registers the load goes to.
    """
    kind = fx.Int32.ir_type
    words = [
        llvm.inline_asm(kind, [_ir(vector[i])], "v_mov_b32 $0, $1", "=v,v", has_side_effects=True) for i in range(vector.numel)
    ]
    return V.from_elements([fx.Int32(w) for w in words], fx.Int32)


def barrier() -> None:
    """Wait for the block's other waves; LDS writes before it are visible after it."""
    fx.gpu.barrier()


# -- arithmetic ---------------------------------------------------------------------------------------------------------


def udiv(a, b):
    """Unsigned 32-bit division (no sign fix-ups, which signed ``//`` would bring)."""
    return fx.Int32(arith.divui(_ir(fx.Int32(a)), _ir(fx.Int32(b))))


def umod(a, b):
    """Unsigned 32-bit remainder."""
    return fx.Int32(arith.remui(_ir(fx.Int32(a)), _ir(fx.Int32(b))))


def widen(a):
    """int32 -> int64, sign kept: a page id is multiplied by its stride in 64 bits."""
    return fx.Int64(arith.extsi(fx.Int64.ir_type, _ir(a)))


def select(condition, a, b):
    """``condition ? a : b`` for two values of one type."""
    kind = type(a) if not isinstance(a, V) else None
    value = arith.select(_ir(condition), _ir(a), _ir(b))
    return V(value, a.shape, a.dtype) if kind is None else kind(value)


def minimum(a, b):
    """The smaller of two signed integers."""
    b = type(a)(b)
    return select(a < b, a, b)


def maximum_int(a, b):
    """The larger of two signed integers."""
    b = type(a)(b)
    return select(a > b, a, b)


def align_bytes(high, low, count):
    """Bytes ``count`` .. ``count + 3`` (count 0..3) of the 8 bytes ``high:low`` (v_alignbyte_b32)."""
    shift = fx.Int32(count) << 3
    return fx.Int32(llvm.call_intrinsic(fx.Int32.ir_type, "llvm.fshr.i32", [_ir(high), _ir(low), _ir(shift)], [], []))


def maximum(a, b):
    """The larger fp32; a NaN operand loses (it comes back through exp2 of the score, which stays NaN)."""
    return fx.Float32(arith.maxnumf(_ir(a), _ir(b)))


def exp2(x):
    """v_exp_f32: 2**x, results below the normal range flush to 0."""
    return fx.Float32(rocdl_ops.exp2(fx.Float32.ir_type, _ir(x)))


def log2(x):
    """v_log_f32."""
    return fx.Float32(rocdl_ops.log(fx.Float32.ir_type, _ir(x)))


def reciprocal(x):
    """v_rcp_f32: within 1 ulp."""
    return fx.Float32(rocdl_ops.rcp(fx.Float32.ir_type, _ir(x)))


def uniform(x):
    """Tell the compiler that every lane of the wave holds the same value (v_readfirstlane)."""
    return type(x)(rocdl_ops.readfirstlane(_ir(x).type, _ir(x)))


def xor_lanes(x, distance: int):
    """The value of lane ``l ^ distance``."""
    return type(x)(fx.gpu.shuffle_xor(x, distance, 64))


def shuffle_from(x, lane):
    """The value of lane ``lane`` (a traced index)."""
    return type(x)(fx.gpu.shuffle_idx(x, lane, 64))


def pack_bf16(values):
    """Round a list of fp32 to a bf16 vector (nearest even; v_cvt_pk_bf16_f32)."""
    vector = V.from_elements(values, fx.Float32)
    kind = V.make_type(len(values), fx.BFloat16)
    return V(arith.truncf(kind, _ir(vector)), (len(values),), fx.BFloat16)


def bf16_from_fp8(word, scale, half: int):
    """Two e4m3 bytes (``half`` 0: low, 1: high) of an int32, times 2**exponent(scale), as bf16 pair."""
    kind = V.make_type(2, fx.BFloat16)
    return V(rocdl_ops.cvt_scalef32_pk_bf16_fp8(kind, _ir(word), _ir(scale), bool(half)), (2,), fx.BFloat16)


def bf16_from_fp4(word, scale, byte: int):
    """Two E2M1 codes (``byte`` 0..3) of an int32, times 2**exponent(scale), as bf16 pair; the low nibble first."""
    kind = V.make_type(2, fx.BFloat16)
    return V(rocdl_ops.cvt_scalef32_pk_bf16_fp4(kind, _ir(word), _ir(scale), byte), (2,), fx.BFloat16)


def mfma_bf16(a, b, c):
    """``v_mfma_f32_16x16x32_bf16``: c + a @ b.T over 32 elements; a, b 8 bf16 a lane, c 4 fp32 (see lanes.py)."""
    kind = V.make_type(4, fx.Float32)
    return V(fx.rocdl.mfma_f32_16x16x32_bf16(kind, [_ir(a), _ir(b), _ir(c), 0, 0, 0]), (4,), fx.Float32)


def mfma_scaled(a, a_scale, b, b_scale, c, *, b_byte: int):
    """``v_mfma_scale_f32_16x16x128_f8f6f4``: c + (a * 2^(a_scale - 127)) @ (b * 2^(b_scale - 127)).T over 128 elements.

    a: 32 values a lane, E2M1 (int32 x 4) or e4m3 (int32 x 8); b: 32 e4m3 a lane (int32 x 8); scales: E8M0, one for 32 elements, in
    byte 0 and in byte ``b_byte``. See scaled.py.
    """
    kind = V.make_type(4, fx.Float32)
    e2m1, e4m3 = 4, 0
    a_type = e4m3
    if a.numel == 4:
        a_type = e2m1
        a = a.shuffle(V.filled(4, 0, fx.Int32), list(range(8)))  # the builder takes 8 registers; the instruction reads 4
    operands = [_ir(a), _ir(b), _ir(c), a_type, e4m3, 0, _ir(a_scale), b_byte, _ir(b_scale)]
    return V(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(kind, operands), (4,), fx.Float32)


def pack_fp8(values):
    """Four fp32, at most 448 in magnitude, to e4m3 (nearest even) in an int32."""
    word = _ir(fx.Int32(0))
    for half in range(2):
        a, b = _ir(values[2 * half]), _ir(values[2 * half + 1])
        word = rocdl_ops.cvt_pk_fp8_f32(fx.Int32.ir_type, a, b, word, bool(half))
    return fx.Int32(word)


def unpack_fp8(word):
    """The four e4m3 of an int32 as fp32."""
    kind, one = V.make_type(2, fx.Float32), _ir(fx.Float32(1.0))
    halves = [V(rocdl_ops.cvt_scalef32_pk_f32_fp8(kind, _ir(word), one, bool(h)), (2,), fx.Float32) for h in range(2)]
    return [halves[i // 2][i % 2] for i in range(4)]

