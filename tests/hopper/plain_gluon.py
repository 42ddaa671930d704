"""Runs device functions of ``leanmla.kernels.hopper`` on the host: just enough of Gluon in numpy for schedule, merge and softmax.

The package's modules are loaded a second time, as ``leanmla.kernels.hopper_on_host``, with this in the place of Gluon. Layouts mean
nothing here, one program runs at a time, and nothing waits.
"""

import importlib
import sys
import types
from pathlib import Path

import numpy as np

import leanmla.kernels

HOST = "leanmla.kernels.hopper_on_host"


class Value(np.ndarray):
    """A scalar or a tensor."""

    def to(self, dtype, bitcast=False):
        return value(
            self.astype(np.float32 if self.dtype.kind == "f" else np.int32).view(dtype) if bitcast else self.astype(dtype)
        )


def value(x):
    x = np.asarray(x)
    return (x.astype(np.float32) if x.dtype.kind == "f" else x.astype(np.int64) if x.dtype.kind == "i" else x).view(Value)


class Pointer:
    """Addresses into one numpy array."""

    def __init__(self, array, at=0):
        self.array, self.at = array, np.asarray(at, dtype=np.int64)
        self.dtype = types.SimpleNamespace(element_ty=np.float32)

    def __add__(self, offset):
        return Pointer(self.array, self.at + np.asarray(offset))

    def __getitem__(self, index):
        return Pointer(self.array, self.at[index])


def load(pointer, mask=True, other=0, cache_modifier=None):
    at, mask = np.broadcast_arrays(pointer.at, mask)
    return value(np.where(mask, pointer.array[np.where(mask, at, 0)], other))


def store(pointer, x, mask=True):
    at, x, mask = np.broadcast_arrays(pointer.at, x, mask)
    pointer.array[at[mask]] = x[mask]


def _names():
    gl = types.SimpleNamespace(
        constexpr=lambda x: x, tensor=object, int32=np.int32, int64=np.int64, float32=np.float32, load=load, store=store,
        num_warps=lambda: 4, arange=lambda a, b, layout=None: value(np.arange(a, b)),
        zeros=lambda shape, dtype, layout=None: value(np.zeros(shape, dtype)),
        full=lambda shape, x, dtype, layout=None: value(np.full(shape, x, dtype)),
        minimum=lambda a, b: value(np.minimum(a, b)), maximum=lambda a, b: value(np.maximum(a, b)),
        where=lambda c, a, b: value(np.where(c, a, b)), cdiv=lambda a, b: value(-(-np.asarray(a) // b)),
        sum=lambda x, axis: value(np.sum(x, axis)), max=lambda x, axis: value(np.max(x, axis)), min=lambda x, axis: value(np.min(x, axis)),
        exp2=lambda x: value(np.exp2(x)), abs=lambda x: value(np.abs(x)), associative_scan=lambda x, axis, f: value(np.cumsum(x, axis)),
        expand_dims=lambda x, axis: Pointer(x.array, np.expand_dims(x.at, axis)) if isinstance(x, Pointer) else value(np.expand_dims(x, axis)),
        convert_layout=lambda x, layout, **_: x, SliceLayout=lambda *_: None,
    )  # fmt: skip
    names = types.ModuleType(f"{HOST}.gluon_names")
    names.gl, names.gluon = gl, types.SimpleNamespace(jit=lambda f: f)
    names.aggregate = names.constexpr_function = lambda x: x
    names.__getattr__ = _other
    return names


def _other(name):
    """Layouts and what only kernels need."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None


def on_host(module):
    """A module of ``leanmla.kernels.hopper`` whose device functions are ordinary functions."""
    if HOST not in sys.modules:
        package = types.ModuleType(HOST)
        package.__path__ = [str(Path(leanmla.kernels.__file__).parent / "hopper")]
        sys.modules[HOST] = package
        sys.modules[f"{HOST}.gluon_names"] = _names()
    return importlib.import_module(f"{HOST}.{module}")
