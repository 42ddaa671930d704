"""A decode kernel's launch that is repeated: worked out once by the kernel's own ``launch``, later only addresses change."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType

from ...cache import LatentCache
from ...problem import DecodeArgs
from ..triton.relaunch import Relaunch
from .arguments import POINTERS, pointers
from .launch import HopperLaunch

__all__ = ["Repeat"]


class Repeat:
    """The kernel of a checked call; calling it runs a call like it, see :func:`leanmla.backends.prepare`. Keeps no tensor.

    Args:
        module: the decode kernel's.
        launch: of such a call.
    """

    def __init__(self, module: ModuleType, launch: HopperLaunch) -> None:
        self._module, self._launch = module, launch
        self._found: tuple[Relaunch, list[Callable[[LatentCache], object]]] | None = None

    def __call__(self, args: DecodeArgs, workspace) -> None:
        """Launch on torch's current stream."""
        if self._found is not None:
            relaunch, of_cache = self._found
            relaunch(*[t.data_ptr() for t in pointers(args, workspace)], *[value(args.cache) for value in of_cache])
            return
        launch = _what_it_launches(self._module, args, self._launch, workspace)
        given = launch.given
        named = {n: x for n, x in given.items() if not (hasattr(x, "data_ptr") or _is_map(x))}
        cache_names = [n for n in given if n not in named and n not in POINTERS]
        relaunch = Relaunch(launch.kernel, launch.grid, (*POINTERS, *cache_names), **named)
        relaunch(*(given[n] for n in relaunch.tensors))
        if relaunch.takes_addresses:
            self._found = relaunch, [_of_cache(given[n], args.cache) for n in cache_names]


class _Note:
    """Stands where a kernel is launched and keeps what the launch is given."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return self._launch

    def _launch(self, *given, **named) -> None:
        self.given = dict(zip(self.kernel.arg_names, given), **named)


def _what_it_launches(module: ModuleType, args: DecodeArgs, launch: HopperLaunch, workspace) -> _Note:
    """What ``module.launch`` would launch for a call."""
    name = module.__name__.rpartition(".")[2].removesuffix("_sm90")
    note = _Note(vars(module)[name])
    # The same code with the note in the place of the kernel: what a kernel is given is written down beside it alone.
    FunctionType(module.launch.__code__, {**vars(module), name: note})(args, launch, workspace)
    return note


# -- arguments that follow the cache


def _is_map(given: object) -> bool:
    """Whether an argument is a tensor map (``TensorDescriptor``)."""
    return hasattr(given, "base")


def _of_cache(given, cache: LatentCache) -> Callable[[LatentCache], object]:
    """How to find an argument again in another cache; those of the kernels begin where its data or its scales begin."""
    if _is_map(given):
        assert given.base.data_ptr() == cache.data.data_ptr()
        return _map_like(given)
    if given.data_ptr() == cache.data.data_ptr():
        return lambda cache: cache.data.data_ptr()
    assert cache.scale is not None and given.data_ptr() == cache.scale.data_ptr()
    return lambda cache: cache.scale.data_ptr()  # type: ignore[union-attr]


class _Address:
    """As much of a tensor as Triton's launcher wants of a tensor map's base."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _map_like(given) -> Callable[[LatentCache], object]:
    kind, fields = type(given), {name: x for name, x in vars(given).items() if name != "base"}

    def of(cache: LatentCache) -> object:
        made = object.__new__(kind)  # without its constructor, which checks what has not changed
        vars(made).update(fields, base=_Address(cache.data.data_ptr()))
        return made

    return of
