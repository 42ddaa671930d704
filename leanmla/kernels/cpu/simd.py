"""Sixteen-lane vectors inside numba kernels: loads, stores and the few operations that MLA decode needs.

A vector is one LLVM value of type <16 x float> or <16 x i32>. LLVM maps it to one AVX-512 register, two AVX2 registers
or four NEON registers, so one kernel source serves all of them. Memory is addressed by plain int64 byte addresses; no
load or store assumes an alignment. A *block* is a tuple of vectors, the accumulators of a matrix product.

Two operations have a fast form on some machines, chosen while compiling from the features of the host, and a general
form with the same meaning elsewhere: :data:`lookup16` (AVX-512, AVX2) and :data:`add_outer_bf16` (AVX512_BF16).
"""

from __future__ import annotations

import operator
import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen
from numba.core import config as numba_config
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_V16F, _V16I, _V16H = (ir.VectorType(t, LANES) for t in (_FLOAT, _I32, _HALF))
_V16U8, _V16U16 = (ir.VectorType(t, LANES) for t in (_I8, _I16))
_V32U8, _V32U16 = (ir.VectorType(t, 2 * LANES) for t in (_I8, _I16))


class _Vector(types.Type):
    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


v16f = _Vector("v16f", _V16F)
v16i = _Vector("v16i", _V16I)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, vector_type):
        super().__init__(data_model_manager, vector_type, vector_type.llvm_type)


def host_features() -> frozenset[str]:
    """The instruction sets that numba compiles for here; numba's own environment variables may narrow them."""
    features = numba_config.CPU_FEATURES  # type: ignore[attr-defined]  # read from the environment at import
    if features is None:
        features = codegen.get_host_cpu_features()
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


def why_not() -> str | None:
    """Why the kernels cannot be compiled for these features, or None."""
    if numba_config.DISABLE_JIT:  # type: ignore[attr-defined]
        return "numba is told not to compile; unset NUMBA_DISABLE_JIT"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    lacking = [name for feature, name in (("avx2", "AVX2"), ("f16c", "F16C")) if feature not in host_features()]
    if not lacking:
        return None
    if numba_config.CPU_FEATURES is not None or numba_config.CPU_NAME is not None:  # type: ignore[attr-defined]
        return f"numba is told to compile without {' and '.join(lacking)}; unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES"
    return f"needs a processor with {' and '.join(lacking)}"


_FEATURES = host_features()
HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= _FEATURES
HAS_AVX2 = "avx2" in _FEATURES
HAS_BF16_DOT = HAS_AVX512 and "avx512bf16" in _FEATURES

#: Accumulator rows of a block. AVX-512 has registers for 16 vectors and more; a vector takes two registers of 16 with AVX2
#: (16 rows there: 13.6 ms instead of 7 ms for batch 4, kv 8192, 16 heads on two cores) and four of 32 with NEON.
BLOCK_ROWS = 16 if HAS_AVX512 else 4


# -- emitting LLVM ----------------------------------------------------------------------------------------------------


def _splat(builder, scalar, lanes=LANES):
    vector_type = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), zeros)


def _load(builder, address, value_type, align):
    return builder.load(builder.inttoptr(address, value_type.as_pointer()), align=align)


def _store(builder, value, address, align):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _call(builder, name, result, *operands):
    kind = ir.FunctionType(result, [o.type for o in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _fma(builder, x, y, z):
    return _call(builder, "llvm.fma.v16f32", _V16F, x, y, z)


def _intrinsic(result, arguments, emit):
    """An intrinsic of fixed signature; ``emit(builder, *values)`` returns the LLVM value (None for void)."""

    def generate(context, builder, sig, args):
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    typed = signature(result, *arguments)
    # numba reads the arity off the function's own parameters, hence one function for each.
    typing = {
        1: lambda typingctx, a: (typed, generate),
        2: lambda typingctx, a, b: (typed, generate),
        3: lambda typingctx, a, b, c: (typed, generate),
        4: lambda typingctx, a, b, c, d: (typed, generate),
    }
    return intrinsic(typing[len(arguments)])


def _operator(python_operator, left, right, emit):
    """Give a Python operator its meaning on vectors."""

    class _Template(ConcreteTemplate):
        cases = (signature(left, left, right),)

    infer_global(python_operator)(_Template)
    lower_builtin(python_operator, left, right)(lambda context, builder, sig, args: emit(builder, *args))


def _shift(emit):
    return lambda b, x, n: emit(b, x, _splat(b, b.trunc(n, _I32)))


_operator(operator.add, v16f, v16f, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, v16f, v16f, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, v16f, v16f, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, v16f, v16f, lambda b, x, y: b.fdiv(x, y))
_operator(operator.add, v16i, v16i, lambda b, x, y: b.add(x, y))
_operator(operator.sub, v16i, v16i, lambda b, x, y: b.sub(x, y))
_operator(operator.and_, v16i, v16i, lambda b, x, y: b.and_(x, y))
_operator(operator.or_, v16i, v16i, lambda b, x, y: b.or_(x, y))
_operator(operator.lshift, v16i, types.int64, _shift(lambda b, x, n: b.shl(x, n)))
_operator(operator.rshift, v16i, types.int64, _shift(lambda b, x, n: b.lshr(x, n)))  # shifts zeros in


# -- constants, loads, stores -----------------------------------------------------------------------------------------


@intrinsic
def splat_f(typingctx, x):
    """All lanes = x as fp32."""

    def generate(context, builder, sig, args):
        return _splat(builder, context.cast(builder, args[0], sig.args[0], types.float32))

    return v16f(x), generate


@intrinsic
def splat_i(typingctx, x):
    """All lanes = the low 32 bits of x."""

    def generate(context, builder, sig, args):
        return _splat(builder, builder.trunc(context.cast(builder, args[0], sig.args[0], types.int64), _I32))

    return v16i(x), generate


def _loader(result, memory_type, align, widen=lambda b, x: x):
    return _intrinsic(result, (types.int64,), lambda b, address: widen(b, _load(b, address, memory_type, align)))


def _storer(value, align, narrow=lambda b, x: x):
    return _intrinsic(types.void, (types.int64, value), lambda b, address, x: _store(b, narrow(b, x), address, align))


load_f = _loader(v16f, _V16F, 4)  # 16 fp32
load_i = _loader(v16i, _V16I, 1)  # 64 bytes as 16 int32
load_u8 = _loader(v16i, _V16U8, 1, lambda b, x: b.zext(x, _V16I))  # 16 bytes, one a lane
load_u16 = _loader(v16i, _V16U16, 1, lambda b, x: b.zext(x, _V16I))  # 32 bytes, two a lane
# 32 bytes as 32 uint16, two a lane, the first in the low half
load_u8_pairs = _loader(v16i, _V32U8, 1, lambda b, x: b.bitcast(b.zext(x, _V32U16), _V16I))
broadcast_f = _loader(v16f, _FLOAT, 1, _splat)  # one fp32, to all lanes
scalar_f = _loader(types.float32, _FLOAT, 1)
scalar_i = _loader(types.int64, _I32, 1, lambda b, x: b.sext(x, _I64))
scalar_i64 = _loader(types.int64, _I64, 8)
scalar_u8 = _loader(types.int64, _I8, 1, lambda b, x: b.zext(x, _I64))

store_f = _storer(v16f, 4)
store_i = _storer(v16i, 1)
store_scalar_f = _storer(types.float32, 4)
store_scalar_i = _storer(types.int64, 4, lambda b, x: b.trunc(x, _I32))
store_scalar_i64 = _storer(types.int64, 8)
store_scalar_u8 = _storer(types.int64, 1, lambda b, x: b.trunc(x, _I8))


def _emit_prefetch(builder, address):
    read, into_l2, data = (ir.Constant(_I32, n) for n in (0, 2, 1))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.inttoptr(address, _I8.as_pointer()), read, into_l2, data)


#: Ask for a cache line in the second level. A hint: any address is safe.
prefetch = _intrinsic(types.void, (types.int64,), _emit_prefetch)

#: An address as the pointer that numba's carray takes.
as_pointer = _intrinsic(types.voidptr, (types.int64,), lambda b, address: b.inttoptr(address, _I8.as_pointer()))

#: Add to an int64 shared by threads; returns what it held before. What was written before it is seen after it.
fetch_add = _intrinsic(
    types.int64,
    (types.int64, types.int64),
    lambda b, address, n: b.atomic_rmw("add", b.inttoptr(address, _I64.as_pointer()), n, "acq_rel"),
)


# -- lane by lane -----------------------------------------------------------------------------------------------------

as_int = _intrinsic(v16i, (v16f,), lambda b, x: b.bitcast(x, _V16I))
as_float = _intrinsic(v16f, (v16i,), lambda b, x: b.bitcast(x, _V16F))
fma = _intrinsic(v16f, (v16f, v16f, v16f), _fma)  # x * y + z, rounded once
# A NaN in x never replaces y: a running maximum stays a number, and the NaN shows in exp(NaN - maximum) instead.
maximum = _intrinsic(v16f, (v16f, v16f), lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
# a < b ? x : y. False where a or b is NaN.
where_less = _intrinsic(v16f, (v16f,) * 4, lambda b, p, q, x, y: b.select(b.fcmp_ordered("<", p, q), x, y))
where_less_i = _intrinsic(v16f, (v16i, v16i, v16f, v16f), lambda b, p, q, x, y: b.select(b.icmp_signed("<", p, q), x, y))
where_equal_i = _intrinsic(v16i, (v16i,) * 4, lambda b, p, q, x, y: b.select(b.icmp_signed("==", p, q), x, y))
where_nan = _intrinsic(v16i, (v16f, v16i, v16i), lambda b, p, x, y: b.select(b.fcmp_unordered("uno", p, p), x, y))


def _emit_any_half_outside(builder, x, low, count):
    def splat(value):
        return _splat(builder, builder.trunc(value, _I16), 2 * LANES)

    beyond = builder.icmp_unsigned(">=", builder.sub(builder.bitcast(x, _V32U16), splat(low)), splat(count))
    return builder.icmp_unsigned("!=", builder.bitcast(beyond, _I32), ir.Constant(_I32, 0))


#: Is any 16-bit half of any lane outside low .. low + count - 1 (unsigned)?
any_half_outside = _intrinsic(types.boolean, (v16i, types.int64, types.int64), _emit_any_half_outside)
# fp16 in the low half of each lane, to and from fp32.
from_half = _intrinsic(v16f, (v16i,), lambda b, x: b.fpext(b.bitcast(b.trunc(x, _V16U16), _V16H), _V16F))
to_half = _intrinsic(v16i, (v16f,), lambda b, x: b.zext(b.bitcast(b.fptrunc(x, _V16H), _V16U16), _V16I))


_V8I = ir.VectorType(_I32, 8)


def _slice8(builder, vector, first):
    lanes = ir.Constant(_V8I, list(range(first, first + 8)))
    return builder.shuffle_vector(vector, ir.Constant(_V16I, ir.Undefined), lanes)


def _emit_lookup16(builder, table, index):
    if HAS_AVX512:
        return _call(builder, "llvm.x86.avx512.permvar.si.512", _V16I, table, index)
    if HAS_AVX2:
        # Eight entries a lookup: look both halves of the table up and choose by bit 3.
        halves = []
        for first in (0, 8):
            part = _slice8(builder, index, first)
            low, high = (_call(builder, "llvm.x86.avx2.permd", _V8I, _slice8(builder, table, entry), part) for entry in (0, 8))
            in_high = builder.trunc(builder.lshr(part, ir.Constant(_V8I, [3] * 8)), ir.VectorType(ir.IntType(1), 8))
            halves.append(builder.select(in_high, high, low))
        return builder.shuffle_vector(*halves, ir.Constant(_V16I, list(range(LANES))))
    result = ir.Constant(_V16I, ir.Undefined)
    for lane in range(LANES):
        at = ir.Constant(_I32, lane)
        entry = builder.and_(builder.extract_element(index, at), ir.Constant(_I32, LANES - 1))
        result = builder.insert_element(result, builder.extract_element(table, entry), at)
    return result


#: table[index & 15]; the table is a vector.
lookup16 = _intrinsic(v16i, (v16i, v16i), _emit_lookup16)


# -- blocks of accumulators -------------------------------------------------------------------------------------------


def make_zero_block(rows: int):
    """A function of no arguments that returns a block of ``rows`` zero vectors."""

    @intrinsic
    def zero_block(typingctx):
        def generate(context, builder, sig, args):
            return context.make_tuple(builder, sig.return_type, [ir.Constant(_V16F, [0.0] * LANES)] * rows)

        return types.UniTuple(v16f, rows)(), generate

    return zero_block


def _row(builder, base, stride, i):
    return builder.add(base, builder.mul(stride, ir.Constant(_I64, i)))


@intrinsic
def add_outer(typingctx, block, address, stride, b):
    """block[i] + a[i] * b for every i, where a[i] is the fp32 at ``address + i * stride``."""

    def generate(context, builder, sig, args):
        block, address, stride, b = args
        out = []
        for i in range(sig.args[0].count):
            a = _load(builder, _row(builder, address, stride, i), _FLOAT, 4)
            out.append(_fma(builder, _splat(builder, a), b, builder.extract_value(block, i)))
        return context.make_tuple(builder, sig.return_type, out)

    return block(block, types.int64, types.int64, v16f), generate


@intrinsic
def add_outer_bf16(typingctx, block, address, stride, b):
    """block[i] + a[i].lo * b.lo + a[i].hi * b.hi for every i: a[i] at ``address + i * stride`` and each lane of ``b``
    hold a pair of bf16. fp32 accumulation. AVX512_BF16 takes subnormal factors and results for zero."""

    def generate(context, builder, sig, args):
        block, address, stride, b = args
        out = []
        for i in range(sig.args[0].count):
            acc = builder.extract_value(block, i)
            a = _splat(builder, _load(builder, _row(builder, address, stride, i), _I32, 4))
            if HAS_BF16_DOT:
                # The memory operand goes last, where the instruction can broadcast it by itself.
                out.append(_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _V16F, acc, b, a))
            else:
                for half in (_low_bf16, _high_bf16):
                    acc = _fma(builder, half(builder, a), half(builder, b), acc)
                out.append(acc)
        return context.make_tuple(builder, sig.return_type, out)

    return block(block, types.int64, types.int64, v16i), generate


def _low_bf16(builder, pair):
    return builder.bitcast(builder.shl(pair, ir.Constant(_V16I, [16] * LANES)), _V16F)


def _high_bf16(builder, pair):
    return builder.bitcast(builder.and_(pair, ir.Constant(_V16I, [0xFFFF0000] * LANES)), _V16F)


@intrinsic
def store_block(typingctx, block, address, stride):
    """block[i] to ``address + i * stride``, for every i."""

    def generate(context, builder, sig, args):
        for i in range(sig.args[0].count):
            _store(builder, builder.extract_value(args[0], i), _row(builder, args[1], args[2], i), 4)
        return context.get_dummy_value()

    return types.void(block, types.int64, types.int64), generate


@intrinsic
def load_block_scaled(typingctx, block, address, stride, factors):
    """A block like ``block``: row i is the vector at ``address + i * stride`` times the fp32 at ``factors + 4 * i``."""

    def generate(context, builder, sig, args):
        out = []
        for i in range(sig.args[0].count):
            row = _load(builder, _row(builder, args[1], args[2], i), _V16F, 4)
            factor = _load(builder, _row(builder, args[3], ir.Constant(_I64, 4), i), _FLOAT, 4)
            out.append(builder.fmul(row, _splat(builder, factor)))
        return context.make_tuple(builder, sig.return_type, out)

    return block(block, types.int64, types.int64, types.int64), generate
