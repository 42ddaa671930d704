"""Launches of a Triton (or Gluon) kernel that are repeated: found once by Triton's launcher, then handed to the kernel directly.

Triton's launcher looks at every argument of every call to find the kernel compiled for its type, alignment and value, about
50 us for our kernels. Callers that know that all of this is as it was can leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

__all__ = ["Relaunch"]


class Relaunch:
    """One kernel on one grid of one device, with arguments of which only addresses change.

    The caller guarantees for every call: the same device is current, and addresses are as far aligned as in the first call (a
    multiple of 16 or not). Triton's launch hooks (profilers) are called as usual.

    Args:
        kernel: a ``@triton.jit`` or ``@gluon.jit`` function.
        grid: as Triton takes it.
        tensors: names of the arguments that calls give, in the order in which they give them.
        named: all others: arguments, compile-time arguments, num_warps and the like.
    """

    __slots__ = ("_fixed", "_launch", "_ordered", "grid", "kernel", "named", "tensors")

    def __init__(self, kernel, grid: tuple[int, ...], tensors: Sequence[str], /, **named) -> None:
        self.kernel, self.tensors, self.named = kernel, tuple(tensors), named
        self.grid = (*grid, 1, 1)[:3]
        self._launch = None
        self._fixed: tuple = ()

    def __call__(self, *tensors) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: torch tensors or tensor descriptors in the first call; later the addresses of tensors will do.
        """
        if self._launch is not None:
            self._launch(*self._ordered((*tensors, *self._fixed)))
            return
        found = self.kernel[self.grid](**dict(zip(self.tensors, tensors, strict=True)), **self.named)
        if hasattr(found, "packed_metadata"):  # not under the interpreter
            position = {name: i for i, name in enumerate((*self.tensors, *self.named))}
            self._fixed = tuple(self.named.values())
            self._ordered = itemgetter(*(position[name] for name in self.kernel.arg_names))
            self._launch = found[self.grid]

    @property
    def takes_addresses(self) -> bool:
        """Whether the next call may be given integers."""
        return self._launch is not None
