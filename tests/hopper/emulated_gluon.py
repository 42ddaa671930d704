"""Runs the whole Gluon kernels of ``leanmla.kernels.hopper`` on a CPU: every block and both of its partitions, from the real launchers.

The package's sources are loaded a second time, as ``leanmla.kernels.hopper_emulated``, with this in the place of Gluon. Tensors are
numpy arrays (bf16 and fp8 as bytes, converted by torch), layouts mean nothing except how shared memory is cut into swizzled panels.

A partition is a thread, but only one runs at a time: control moves on at barrier waits and atomics alone, in an order that
:class:`Policy` fixes. Modelled beside the arithmetic:

* mbarriers with phases, arrivals and expected bytes; a deadlock is reported with everybody's barrier;
* copies land either at once or, as late as they may, at the wait on their barrier; in between the destination holds ones and any
  access to it is an error. So is a store to what a product in flight still reads, and the use of its result before the wait;
* stores to shared memory that a tensor core or a bulk copy meets without ``fence_async_shared``;
* bounds of global memory, of page ids of tensor maps, of shared memory.

Not modelled: threads inside a partition (``thread_barrier``, which lane holds what), register and memory order of the GPU, the few
bits that fp8 wgmma keeps of a sum, approximations of exp2, log2 and reciprocal, races between blocks other than at atomics.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import random
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import leanmla.kernels

PACKAGE = "leanmla.kernels.hopper_emulated"
FOLDER = Path(leanmla.kernels.__file__).parent / "hopper"
KERNELS = ("decode_bf16_sm90", "decode_fp8_sm90", "decode_fp8_tile128_sm90", "decode_mxfp4_sm90")
SHARED_LIMIT = 227 * 1024


class EmulationError(AssertionError):
    """What the hardware would not forgive."""


class _Stop(BaseException):
    """Unwinds the other partitions after an error."""


@dataclass(frozen=True)
class Policy:
    """order: "first", "last" or "turns" among those that can run, or a seed; late: copies and products finish as late as they may;
    resident: blocks at a time."""

    order: str | int = "turns"
    late: bool = True
    resident: int = 6


# ---- values


@dataclass(frozen=True)
class DType:
    name: str
    np: type  # bf16 and fp8: of the bytes
    torch: torch.dtype

    @property
    def size(self):
        return np.dtype(self.np).itemsize

    @property
    def coded(self):
        return self.name in ("bfloat16", "float8e4nv", "float8e5")

    @property
    def is_float(self):
        return "float" in self.name


BOOL = DType("int1", np.bool_, torch.bool)
INT8 = DType("int8", np.int8, torch.int8)
INT16 = DType("int16", np.int16, torch.int16)
INT32 = DType("int32", np.int32, torch.int32)
INT64 = DType("int64", np.int64, torch.int64)
FLOAT16 = DType("float16", np.float16, torch.float16)
FLOAT32 = DType("float32", np.float32, torch.float32)
BFLOAT16 = DType("bfloat16", np.int16, torch.bfloat16)
E4M3 = DType("float8e4nv", np.int8, torch.float8_e4m3fn)
E5M2 = DType("float8e5", np.int8, torch.float8_e5m2)
_OF_TORCH = {t.torch: t for t in (BOOL, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, BFLOAT16, E4M3, E5M2)}
_OF_TORCH[torch.uint8] = DType("uint8", np.uint8, torch.uint8)


def _float(data, dtype):
    """fp32 values of a coded array."""
    data = np.ascontiguousarray(data)
    return (
        torch.from_numpy(data).view(dtype.torch).float().numpy().reshape(data.shape) if dtype.coded else data.astype(np.float32)
    )


def _code(x, dtype):
    """fp32 values to bytes; e4m3 saturates, as the instruction does."""
    x = np.array(x, np.float32)
    if dtype is E4M3:
        x = np.clip(x, -448, 448)
    raw = torch.int16 if dtype is BFLOAT16 else torch.int8
    return torch.from_numpy(x.reshape(-1)).to(dtype.torch).view(raw).numpy().reshape(x.shape)


class Tensor:
    """A scalar or a tensor."""

    __slots__ = ("data", "dtype")
    __hash__ = None

    def __init__(self, data, dtype):
        self.data, self.dtype = np.asarray(data), dtype

    shape = property(lambda self: self.data.shape)
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype, bitcast=False):
        if bitcast:
            assert dtype.size == self.dtype.size
            return Tensor(np.ascontiguousarray(self.data).view(dtype.np).reshape(self.shape), dtype)
        if dtype is self.dtype:
            return self
        x = _float(self.data, self.dtype) if self.dtype.coded else self.data
        return Tensor(_code(x, dtype) if dtype.coded else x.astype(dtype.np), dtype)

    def __getitem__(self, index):
        return Tensor(self.data[index], self.dtype)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    def __repr__(self):
        return f"{self.data}:{self.dtype.name}"

    def __neg__(self):
        return Tensor(-self.data, self.dtype)

    def __invert__(self):
        return Tensor(~self.data, self.dtype)


def val(x):
    """What a variable holds after an assignment in a kernel: numbers become scalars."""
    if isinstance(x, bool | np.bool_):
        return Tensor(x, BOOL)
    if isinstance(x, int):
        return Tensor(np.int32(x), INT32) if -(2**31) <= x < 2**31 else Tensor(np.int64(x), INT64)
    return Tensor(np.float32(x), FLOAT32) if isinstance(x, float) else x


_RANK = {BOOL: 0, INT8: 1, _OF_TORCH[torch.uint8]: 1, INT16: 2, INT32: 3, INT64: 4, FLOAT32: 5}


def _common(a, b):
    """Two operands as arrays of one type."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a, b = val(a), val(b)
    number_a, number_b = not isinstance(a, Tensor), not isinstance(b, Tensor)
    x, y = (val(a) if number_a else a), (val(b) if number_b else b)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise EmulationError(f"no value yet: {a!r} with {b!r}")
    if x.dtype not in _RANK or y.dtype not in _RANK:
        raise EmulationError(f"arithmetic on {x.dtype.name} and {y.dtype.name}")
    if x.data.ndim and y.data.ndim and x.data.ndim != y.data.ndim:
        raise EmulationError(f"shapes {x.shape} and {y.shape}")
    dtype = max(x.dtype, y.dtype, key=_RANK.__getitem__)
    return x.data.astype(dtype.np, copy=False), y.data.astype(dtype.np, copy=False), dtype


def _divide(x, y):
    return (x - np.fmod(x, y)) // y  # towards zero, as in C


def _operator(name, function, result=None, other=None):
    def forward(self, x):
        if isinstance(x, Pointer):
            return NotImplemented
        a, b, dtype = _common(self, x)
        return Tensor(function(a, b), result or dtype)

    def backward(self, x):
        a, b, dtype = _common(x, self)
        return Tensor(function(a, b), result or dtype)

    setattr(Tensor, f"__{name}__", forward)
    if result is None:
        setattr(Tensor, f"__r{name}__", backward)


for _name, _function in (
    ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("truediv", np.divide), ("floordiv", _divide), ("mod", np.fmod),
    ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor), ("lshift", np.left_shift), ("rshift", np.right_shift),
):  # fmt: skip
    _operator(_name, _function)
for _name, _function in (
    ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal), ("eq", np.equal), ("ne", np.not_equal),
):  # fmt: skip
    _operator(_name, _function, BOOL)


class Pointer:
    """Addresses into the buffer of a torch tensor."""

    def __init__(self, tensor, at=None, array=None, dtype=None):
        if array is None:
            dtype = _OF_TORCH[tensor.dtype]
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).numpy()
            array = raw[: raw.size // dtype.size * dtype.size].view(dtype.np)
            at = tensor.storage_offset()
        self.array, self.at, self.element = array, np.asarray(at, np.int64), dtype
        self.dtype = types.SimpleNamespace(element_ty=dtype)

    def _with(self, at):
        return Pointer(None, at, self.array, self.element)

    def __add__(self, offset):
        return self._with(self.at + val(offset).data)

    __radd__ = __add__

    def __getitem__(self, index):
        return self._with(self.at[index])

    def to(self, dtype):
        return Tensor(self.at * self.element.size, INT64)

    def reach(self, mask):
        """(elements, mask), broadcast and checked."""
        at, mask = np.broadcast_arrays(self.at, val(mask).data)
        used = at[mask]
        if used.size and (used.min() < 0 or used.max() >= self.array.size):
            raise EmulationError(f"global memory: elements {used.min()}..{used.max()} of a buffer of {self.array.size}")
        return at, mask


def _load(pointer, mask=True, other=0, cache_modifier=None):
    at, mask = pointer.reach(mask)
    if pointer.element.coded:
        assert other == 0
    data = np.full(at.shape, other, pointer.element.np)
    data[mask] = pointer.array[at[mask]]
    return Tensor(data, pointer.element)


def _store(pointer, x, mask=True):
    at, mask = pointer.reach(mask)
    data = np.broadcast_to(val(x).to(pointer.element).data, at.shape)
    pointer.array[at[mask]] = data[mask]


# ---- shared memory


class Shared:
    """A view of one allocation: [..., rows, panels, columns of a panel], panels of ``width`` bytes (0: rows are whole)."""

    def __init__(self, array, dtype, width, base, turned=False):
        self.array, self.dtype, self.width, self.base, self.turned = array, dtype, width, base, turned

    @staticmethod
    def over(raw, dtype, shape, layout, base):
        width = layout if isinstance(layout, int) else 0
        flat = raw.view(dtype.np)
        assert flat.size == int(np.prod(shape)), (flat.size, shape)
        if layout is None or len(shape) < 2:  # no matrix
            return Shared(flat.reshape(*shape, 1, 1), dtype, width, base)
        *outer, rows, columns = shape
        per = min(width // dtype.size or columns, columns)
        assert columns % per == 0
        return Shared(flat.reshape(*outer, columns // per, rows, per).swapaxes(-3, -2), dtype, width, base)

    @property
    def shape(self):
        *outer, rows, panels, per = self.array.shape
        if (panels, per) == (1, 1):
            return (*outer, rows)
        return (*outer, panels * per, rows) if self.turned else (*outer, rows, panels * per)

    def _view(self, array, turned=None):
        return Shared(array, self.dtype, self.width, self.base, self.turned if turned is None else turned)

    def index(self, i):
        i = int(val(i).data)
        if not 0 <= i < self.array.shape[0]:
            raise EmulationError(f"shared memory: index {i} of {self.array.shape[0]}")
        return self._view(self.array[i])

    def slice(self, start, length, dim=0):
        per = self.array.shape[-1]
        extent = self.array.shape[-3] if dim == 0 else self.array.shape[-2] * per
        if not 0 <= start <= start + length <= extent:
            raise EmulationError(f"shared memory: slice {start}:{start + length} of {extent}")
        if dim == 0:
            return self._view(self.array[start : start + length])
        if start % per == 0 and length % per == 0:
            return self._view(self.array[:, start // per : (start + length) // per])
        assert start % per + length <= per
        return self._view(self.array[:, start // per : start // per + 1, start % per : start % per + length])

    def permute(self, order):
        assert order == (1, 0)
        return self._view(self.array, not self.turned)

    def _reinterpret(self, dtype, shape, layout):
        assert layout == self.width, "another swizzle"
        lo, hi = self.bounds
        return Shared.over(machine.current.block.memory[lo:hi], dtype, shape, layout, self.base)

    @property
    def bounds(self):
        lo, hi = np.lib.array_utils.byte_bounds(self.array)
        return int(lo - self.base), int(hi - self.base)

    def read(self):
        data = np.array(self.array).reshape(self.shape if not self.turned else (self.array.shape[0], -1))
        return data.T if self.turned else data

    def write(self, data):
        self.array[...] = np.asarray(data).reshape(self.array.shape)

    def load(self, layout=None):
        machine.current.block.touch(self)
        return Tensor(self.read(), self.dtype)

    def store(self, x):
        if not isinstance(x, Tensor) or tuple(x.shape) != tuple(self.shape) or x.dtype is not self.dtype:
            raise EmulationError(f"shared memory: store of {x!r} to {self.shape} {self.dtype.name}")
        block = machine.current.block
        block.touch(self, write=True)
        self.write(x.data)
        block.unfenced.append((self.bounds, machine.current))


def _allocate(dtype, shape, layout):
    block = machine.current.block
    alignment = 1024 if isinstance(layout, int) and layout else 16  # of swizzled panels; of scalars and vectors
    start = -(-block.allocated // alignment) * alignment
    size = int(np.prod(shape)) * dtype.size
    block.allocated = start + size
    if block.allocated > block.memory.size:
        raise EmulationError(f"shared memory: {block.allocated} bytes")
    return Shared.over(block.memory[start : start + size], dtype, shape, layout, block.memory.__array_interface__["data"][0])


def _overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]


# ---- barriers, copies, products


class Barrier:
    def __init__(self, name, count):
        self.name, self.count, self.phase, self.left, self.bytes, self.flying = name, count, 0, count, 0, []

    def arrive(self, count):
        self.left -= count
        if self.left < 0:
            raise EmulationError(f"{self}: more arrivals than expected")
        self._turn()

    def came(self, size):
        self.bytes -= size
        self._turn()

    def _turn(self):
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count

    def __repr__(self):
        return f"barrier {self.name}: phase {self.phase}, {self.left} of {self.count} arrivals and {self.bytes} bytes missing, {len(self.flying)} in flight"


def _barrier(view):
    try:
        return machine.current.block.barriers[view.bounds[0]]
    except KeyError:
        raise EmulationError("a barrier that was not set up") from None


def _init(view, count):
    machine.current.block.barriers[view.bounds[0]] = Barrier(f"at byte {view.bounds[0]}", count)


def _expect(view, size):
    barrier = _barrier(view)
    barrier.bytes += size
    barrier.arrive(1)


def _arrive(view, count=1):
    _barrier(view).arrive(count)


def _wait(view, parity):
    barrier, parity = _barrier(view), int(val(parity).data)
    task = machine.current
    machine.switch(lambda: barrier.phase % 2 != parity or barrier.flying, f"{barrier!r}, parity {parity}", barrier)
    while barrier.phase % 2 == parity:
        if barrier.flying:
            barrier.flying.pop(0)()
        else:
            machine.switch(lambda: barrier.phase % 2 != parity or barrier.flying, f"parity {parity}", barrier)
    assert machine.current is task


def _start(dest, data, done, waiting):
    """Begin a copy: ``data`` lands in ``dest`` at once, or when ``waiting`` is popped."""
    block = machine.current.block
    block.touch(dest, write=True)
    entry = dest.bounds

    def land():
        block.flying.remove(entry)
        dest.write(data)
        done()

    block.flying.append(entry)
    dest.array[...] = np.full(1, -1, np.int8).repeat(dest.dtype.size).view(dest.dtype.np)[0]
    if machine.policy.late:
        waiting.append(land)
    else:
        land()


@dataclass
class TensorDescriptor:
    base: torch.Tensor
    shape: list
    strides: list
    block_shape: list
    layout: object = None


def _bulk_copy(desc, coordinates, view, dest):
    at = [int(val(c).data) for c in coordinates]
    dtype = _OF_TORCH[desc.base.dtype]
    assert dest.dtype is dtype and list(dest.shape) == desc.block_shape, (dest.shape, desc.block_shape)
    _need_fence(dest)
    index = [np.arange(a, a + n) for a, n in zip(at, desc.block_shape)]
    ok = [(i >= 0) & (i < n) for i, n in zip(index, desc.shape)]
    if ok[2].any() and not ok[0].all():
        raise EmulationError(f"tensor map: page {at[0]} of {desc.shape[0]}")
    offset = sum(i.reshape([-1 if k == d else 1 for k in range(3)]) * s for d, (i, s) in enumerate(zip(index, desc.strides)))
    mask = ok[0][:, None, None] & ok[1][:, None] & ok[2]
    barrier = _barrier(view)
    data = _load(Pointer(desc.base) + Tensor(offset, INT64), Tensor(mask, BOOL)).data
    _start(dest, data, lambda: barrier.came(data.nbytes), barrier.flying)


def _gather(dest, pointer, mask=True):
    block, task = machine.current.block, machine.current
    data = _load(pointer, mask)
    assert data.shape == tuple(dest.shape) and data.dtype is dest.dtype
    _start(dest, data.data, lambda: block.unfenced.append((dest.bounds, None)), task.copies)


def _copies_arrive(view, increment_count):
    assert increment_count is False
    barrier, task = _barrier(view), machine.current
    threads = 32 * task.warps
    if machine.policy.late:
        barrier.flying += [*task.copies, lambda: barrier.arrive(threads)]
        task.copies = []
    else:
        barrier.arrive(threads)


def _fence():
    block = machine.current.block
    block.unfenced = [(bounds, task) for bounds, task in block.unfenced if task not in (None, machine.current)]


def _need_fence(view):
    bounds = view.bounds
    if any(_overlap(bounds, other) for other, _ in machine.current.block.unfenced):
        raise EmulationError("shared memory was stored to without fence_async_shared")


class Flight:
    """A product that has been started."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.result = a, b, acc, use_acc, None

    def resolve(self):
        a, b = (
            torch.from_numpy(_float(x.read() if isinstance(x, Shared) else x.data, x.dtype)).double() for x in (self.a, self.b)
        )
        x = (a @ b).float().numpy()
        if self.use_acc:
            x = x + (self.acc.result if isinstance(self.acc, Flight) else self.acc).data
        self.result = Tensor(x, FLOAT32)


def _mma(a, b, acc, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    task = machine.current
    m, n = acc.shape if isinstance(acc, Tensor) else acc.use_shape
    assert (a.shape[0], b.shape[1]) == (m, n) and a.shape[1] == b.shape[0], (a.shape, b.shape, (m, n))
    assert is_async
    for x in (a, b):
        if isinstance(x, Shared):
            task.block.touch(x)
            _need_fence(x)
    flight = Flight(a, b, acc, use_acc)
    flight.use_shape = (m, n)
    if not machine.policy.late:
        flight.resolve()
    task.products.append(flight)
    return flight


def _mma_wait(pending, deps):
    products = machine.current.products
    while len(products) > pending:
        flight = products.pop(0)
        if flight.result is None:
            flight.resolve()
        flight.done = True
    out = [x.result if isinstance(x, Flight) and getattr(x, "done", False) else x for x in deps]
    return out[0] if len(out) == 1 else tuple(out)


class Block:
    """What the partitions of one block share."""

    def __init__(self, number):
        self.number, self.allocated, self.barriers, self.flying, self.unfenced, self.tasks = number, 0, {}, [], [], []
        self.memory = np.full(SHARED_LIMIT // 1024 * 1024, 0xFF, np.uint8)

    def touch(self, view, write=False):
        bounds = view.bounds
        if any(_overlap(bounds, other) for other in self.flying):
            raise EmulationError("shared memory is used while a copy is still writing to it")
        if write:
            for task in self.tasks:
                for flight in task.products:
                    if any(isinstance(x, Shared) and _overlap(bounds, x.bounds) for x in (flight.a, flight.b)):
                        raise EmulationError("shared memory is written while a product in flight still reads it")


# ---- who runs


class Task:
    def __init__(self, block, role, warps, function):
        self.block, self.role, self.warps, self.function = block, role, warps, function
        self.go, self.ready, self.what, self.on, self.over = threading.Semaphore(0), None, "start", None, False
        self.copies, self.products = [], []
        block.tasks.append(self)

    def __repr__(self):
        return f"block {self.block.number} {self.role}"


class Machine:
    def __init__(self, policy):
        self.random = random.Random(policy.order)
        self.policy, self.tasks, self.current, self.error, self.home = policy, [], None, None, threading.Semaphore(0)

    def run(self, grid, function, warps):
        self.grid, self.waves = grid, 0
        numbers = iter(range(grid) if self.policy.order != "last" else range(grid - 1, -1, -1))
        self.next_block = lambda: next(numbers, None)
        self.make = lambda number: self.spawn(Task(Block(number), "mathematician", warps, function))
        for _ in range(self.policy.resident):
            number = self.next_block()
            if number is not None:
                self.make(number)
        self.pass_on(None)
        self.home.acquire()
        if self.error is not None:
            for task in self.tasks:
                task.go.release()
            raise self.error

    def spawn(self, task):
        self.tasks.append(task)
        threading.Thread(target=self.body, args=(task,), daemon=True).start()

    def body(self, task):
        task.go.acquire()
        try:
            if self.error is not None:
                return
            with np.errstate(all="ignore"):
                task.function()
            if task.products or task.copies:
                raise EmulationError(f"{task} ends with work in flight")
        except _Stop:
            return
        except BaseException as e:
            e.add_note(f"in {task}")
            self.error = e
            self.home.release()
            return
        task.over = True
        self.tasks.remove(task)
        if all(t.over for t in task.block.tasks):
            if task.block.flying:
                self.error = EmulationError(f"block {task.block.number} ends with copies in flight")
            number = self.next_block()
            if number is not None:
                self.make(number)
        self.pass_on(task)

    def choose(self, after):
        able = [t for t in self.tasks if t.ready is None or t.ready()]
        if not able:
            return None
        able.sort(key=lambda t: (t.block.number, t.role))
        if self.policy.order == "first":
            return able[0]
        if self.policy.order == "last":
            return able[-1]
        if isinstance(self.policy.order, int):
            return self.random.choice(able)
        key = (after.block.number, after.role) if after else (-1, "")
        return next((t for t in able if (t.block.number, t.role) > key), able[0])

    def pass_on(self, task):
        """Give control to the next that can run; returns it."""
        if self.error is not None or not self.tasks:
            self.home.release()
            return None
        following = self.choose(task)
        if following is None:
            waiting = "\n".join(f"  {t}: {t.what}; {t.on!r}" for t in self.tasks)
            self.error = EmulationError(f"deadlock, everybody waits:\n{waiting}")
            self.home.release()
            return None
        self.current = following
        if following is not task:
            following.go.release()
        return following

    def switch(self, ready=None, what="", on=None):
        task = self.current
        task.ready, task.what, task.on = ready, what, on
        if self.pass_on(task) is not task:
            task.go.acquire()
            if self.error is not None:
                raise _Stop
        task.ready = None


machine: Machine = None  # type: ignore[assignment]
policy = Policy()


def _warp_specialize(parts, warps, registers):
    block = machine.current.block
    for (function, args), n in zip(parts[1:], warps):
        machine.spawn(Task(block, function.__name__.strip("_"), n, lambda function=function, args=args: function(*args)))
    function, args = parts[0]
    function(*args)


class Kernel:
    """A kernel as launchers see it."""

    def __init__(self, function):
        self.function = function
        self.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.constants = {n for n, kind in function.__annotations__.items() if "constexpr" in str(kind)}

    def __getitem__(self, grid):
        def launch(*args, maxnreg=None, launch_pdl=False, **named):
            values = dict(zip(self.arg_names, args)) | named
            assert values.keys() == set(self.arg_names), values.keys() ^ set(self.arg_names)
            given = {
                n: x if n in self.constants else Pointer(x) if isinstance(x, torch.Tensor) else val(x)
                for n, x in values.items()
            }
            global machine
            machine = Machine(policy)
            machine.run(grid[0], lambda: self.function(**given), values["num_warps"])

        return launch


# ---- instructions written out in the kernels


def _bits(x):
    return x.data.astype(np.int32).view(np.uint32) if x.dtype is INT32 else x.data.view(np.uint32)


def _prmt(a, b, selector):
    """prmt.b32 in its default mode, without sign replication."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, np.shape(selector)), np.uint32)
    for k in range(4):
        nibble = (np.uint32(selector) >> np.uint32(4 * k)) & np.uint32(15)
        assert not (nibble & 8).any()
        out |= ((both >> (nibble.astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * k)
    return out


def _expand(x, lo, hi):
    x, lo, hi = (np.ascontiguousarray(t.data).view(np.uint32) for t in (x, lo, hi))
    s = x & np.uint32(0x77777777)
    a, b = _prmt(lo, hi, s), _prmt(lo, hi, s >> np.uint32(16))
    t = x << np.uint32(4)
    sign = np.uint32(0x80808080)
    first, second = a | (_prmt(t, x, 0x5140) & sign), b | (_prmt(t, x, 0x7362) & sign)
    return Tensor(first.view(np.int32), INT32), Tensor(second.view(np.int32), INT32)


def _halves(pairs):
    x = pairs.data.astype(np.uint16)
    return (x & 255).astype(np.uint8).view(np.int8), (x >> 8).astype(np.uint8).view(np.int8)


def _separate(pairs):
    return tuple(Tensor(x, INT8) for x in _halves(pairs))


def _widen_e4m3(pairs):
    return tuple(Tensor(x, E4M3).to(FLOAT16) for x in _halves(pairs))


def _widen_e5m2(pairs):
    return tuple(Tensor(x, E5M2).to(FLOAT16) for x in _halves(pairs))


def _nothing(*args):
    return Tensor(np.zeros(args[0].shape if args else (), np.int32), INT32)


def _words(text):
    return " ".join(text.split())


ASM = {
    _words(text): function
    for text, function in {
        "lg2.approx.f32 $0, $1;": lambda x: Tensor(np.log2(x.data), FLOAT32),
        "rcp.approx.f32 $0, $1;": lambda x: Tensor(np.float32(1) / x.data, FLOAT32),
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;": lambda x: val(x),
        # of tensors [warps, lanes]
        "redux.sync.or.b32 $0, $1, 0xffffffff;": lambda x: Tensor(
            np.bitwise_or.reduce(x.data, 1, keepdims=True).repeat(32, 1), INT32
        ),
        "fence.acq_rel.gpu; mov.u32 $0, 0;": _nothing,
        "griddepcontrol.wait; mov.u32 $0, 0;": _nothing,
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;": _nothing,
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;": _nothing,
        "{ .reg .pred p; setp.lt.s32 p, $2, 9; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }": _nothing,
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;": _separate,
        """{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;
        cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }""": _widen_e4m3,
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4420; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l; }": lambda x: (
            _widen_e4m3(x)[0]
        ),
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4431; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l; }": lambda x: (
            _widen_e4m3(x)[1]
        ),
        "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;": _widen_e5m2,
        """{ .reg .b32 s, u, t, a, b; and.b32 s, $2, 0x77777777; shr.u32 u, s, 16; prmt.b32 a, $3, $4, s; prmt.b32 b, $3, $4, u;
        shl.b32 t, $2, 4; prmt.b32 s, t, $2, 0x5140; prmt.b32 u, t, $2, 0x7362;
        lop3.b32 $0, a, s, 0x80808080, 0xF8; lop3.b32 $1, b, u, 0x80808080, 0xF8; }""": _expand,
    }.items()
}


def _asm(text, constraints, args, dtype=None, is_pure=True, pack=1):
    try:
        function = ASM[_words(text)]
    except KeyError:
        raise EmulationError(f"unknown instructions: {_words(text)}") from None
    return function(*args)


# ---- Gluon's functions


def _atomic(change):
    def run(pointer, *values, sem=None, scope=None):
        machine.switch()
        old = _load(pointer)
        _store(pointer, change(old, *values))
        return old

    return run


def _elementwise(function):
    def run(a, b):
        x, y, dtype = _common(a, b)
        return Tensor(function(x, y), dtype)

    return run


def _where(c, a, b):
    x, y, dtype = _common(a, b)
    return Tensor(np.where(val(c).data, x, y), dtype)


def _over_axis(function):
    def run(x, axis):
        data = x.data.astype(np.int32) if x.dtype is BOOL else x.data
        return Tensor(function(data, axis=axis, dtype=data.dtype) if function is np.sum else function(data, axis=axis), INT32 if x.dtype is BOOL else x.dtype)  # fmt: skip

    return run


def _scan(x, axis, function):
    assert function.__name__ == "_add"
    return Tensor(np.cumsum(x.data, axis, dtype=x.data.dtype), x.dtype)


def _expand_dims(x, axis):
    return x._with(np.expand_dims(x.at, axis)) if isinstance(x, Pointer) else Tensor(np.expand_dims(x.data, axis), x.dtype)


def _same(x, layout=None, **_):
    if isinstance(x, Flight):
        raise EmulationError("the result of a product is used before it has been waited for")
    return x


def _range(*args):
    """Loops over run-time bounds count in int32; those over constants are Python's."""
    if not any(isinstance(a, Tensor) for a in args):
        return range(*args)
    return map(val, range(*(int(val(a).data) for a in args)))


def _reduced_float(function):
    return lambda x: Tensor(function(x.data), x.dtype)


def _shaped(function):
    return lambda x, *args: Tensor(function(_same(x).data, *args), x.dtype)


class _Constexpr:
    def __call__(self, x):
        return x

    def __repr__(self):
        return "constexpr"


def _gl():
    return types.SimpleNamespace(
        constexpr=_Constexpr(), tensor=Tensor, int8=INT8, int16=INT16, int32=INT32, int64=INT64, float16=FLOAT16, float32=FLOAT32,
        bfloat16=BFLOAT16, float8e4nv=E4M3, float8e5=E5M2, load=_load, store=_store, atomic_add=_atomic(lambda old, x: old + x),
        atomic_cas=_atomic(lambda old, seen, new: _where(old == seen, new, old)),
        num_warps=lambda: machine.current.warps, program_id=lambda axis: val(machine.current.block.number),
        num_programs=lambda axis: val(machine.grid), arange=lambda a, b, layout=None: Tensor(np.arange(a, b, dtype=np.int32), INT32),
        zeros=lambda shape, dtype, layout=None: Tensor(np.zeros(shape, dtype.np), dtype),
        zeros_like=lambda x: Tensor(np.zeros_like(x.data), x.dtype),
        full=lambda shape, x, dtype, layout=None: Tensor(np.full(shape, x, dtype.np), dtype),
        minimum=_elementwise(np.fmin), maximum=_elementwise(np.fmax), where=_where, cdiv=lambda a, b: (val(a) + b - 1) // b,
        sum=_over_axis(np.sum), max=_over_axis(np.fmax.reduce), min=_over_axis(np.fmin.reduce), associative_scan=_scan,
        exp2=_reduced_float(np.exp2), abs=_reduced_float(np.abs), expand_dims=_expand_dims, convert_layout=_same,
        reshape=_shaped(np.reshape), permute=_shaped(np.transpose),
        join=lambda a, b: Tensor(np.stack([a.data, b.data], -1), a.dtype),
        split=lambda x: (Tensor(x.data[..., 0], x.dtype), Tensor(x.data[..., 1], x.dtype)),
        broadcast=lambda a, b: tuple(Tensor(x, t.dtype) for x, t in zip(np.broadcast_arrays(a.data, b.data), (a, b))),
        inline_asm_elementwise=_asm, static_range=range, allocate_shared_memory=_allocate, warp_specialize=_warp_specialize,
        SliceLayout=lambda *_: None,
    )  # fmt: skip


def _jit(function=None, **options):
    return function if function is not None else Kernel


def _names():
    names = types.ModuleType(f"{PACKAGE}.gluon_names")
    names.gl, names.gluon = _gl(), types.SimpleNamespace(jit=_jit)
    names.aggregate = names.constexpr_function = lambda x: x
    for name in ("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout"):  # fmt: skip
        setattr(names, name, lambda *_: None)
    names.NVMMASharedLayout = lambda width, bits, rank: width
    names.TensorDescriptor = TensorDescriptor
    names.async_copy = types.SimpleNamespace(
        async_copy_global_to_shared=_gather, mbarrier_arrive=_copies_arrive, wait_group=lambda n: None
    )
    names.mbarrier = types.SimpleNamespace(init=_init, expect=_expect, wait=_wait, arrive=_arrive, MBarrierLayout=lambda: None)
    names.tma = types.SimpleNamespace(async_copy_global_to_shared=_bulk_copy)
    names.fence_async_shared, names.thread_barrier = _fence, lambda: None
    names.warpgroup_mma, names.warpgroup_mma_wait = _mma, _mma_wait
    return names


# ---- loading the sources


class _Assignments(ast.NodeTransformer):
    """In device functions a plain assignment makes a run-time value of a number."""

    def visit_FunctionDef(self, node):
        if any("gluon.jit" in ast.unparse(d) for d in node.decorator_list):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign):
                    inner.value = ast.Call(ast.Name("_val", ast.Load()), [inner.value], [])
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                node.body = [_Assignments().visit(n) if isinstance(n, ast.FunctionDef) else n for n in node.body]
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module):
        module.range, module._val = _range, val
        super().exec_module(module)


def emulated(name):
    """A module of ``leanmla.kernels.hopper`` for the emulator."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = []
        sys.modules[PACKAGE] = package
        sys.modules[f"{PACKAGE}.gluon_names"] = _names()
        for part in (
            "launch",
            "host_plan",
            "pages",
            "schedule",
            "arguments",
            "softmax",
            "reduction",
            "dependent_launch",
            "loader",
            "roles",
            "decode_bf16_wide_sm90",
            "fp8_operands",
            "decode_fp8_wide_sm90",
        ):
            emulated(part)
    full = f"{PACKAGE}.{name}"
    if full not in sys.modules:
        path = str(FOLDER / f"{name}.py")
        spec = importlib.util.spec_from_file_location(full, path, loader=_Loader(full, path))
        sys.modules[full] = importlib.util.module_from_spec(spec)
        sys.modules[full].__loader__.exec_module(sys.modules[full])
    return sys.modules[full]


@contextlib.contextmanager
def emulating():
    """The ``hopper`` backend launches emulated kernels."""
    names = ("decode_bf16_sm90", "decode_fp8_sm90", "decode_mxfp4_sm90", "decode_fp8_tile128_sm90")
    before = {n: sys.modules.get(n) for n in (f"leanmla.kernels.hopper.{k}" for k in names)}
    for k in names:
        sys.modules[f"leanmla.kernels.hopper.{k}"] = emulated(k)
    try:
        yield
    finally:
        for n, module in before.items():
            if module is None:
                del sys.modules[n]
            else:
                sys.modules[n] = module


@contextlib.contextmanager
def running(changed):
    """Launch under another :class:`Policy`."""
    global policy
    before, policy = policy, changed
    try:
        yield
    finally:
        policy = before
