"""Launches of a Triton (or Gluon) kernel that are repeated: found once by Triton's launcher, then handed to the kernel directly.

Triton's launcher looks at every argument of every call to find the kernel compiled for its type, alignment and value, about
50 us for our kernels. Callers that know that all of this is as it was can leave it out.
"""

from __future__ import annotations

__all__ = ["Relaunch"]


class Relaunch:
    """One kernel on one grid of one device, with arguments of which only addresses change.

    The caller guarantees for every call: the same device is current, and addresses are as far aligned as in the first call (a
    multiple of 16 or not). Triton's launch hooks (profilers) are called as usual.

    Args:
        kernel: a ``@triton.jit`` function whose tensor arguments come first.
        grid: as Triton takes it.
        rest: the arguments after the tensors, in order.
        constants: compile-time arguments by name.
        options: num_warps and the like.
    """

    __slots__ = ("_launch", "_tail", "constants", "grid", "kernel", "options", "rest")

    def __init__(self, kernel, grid: tuple[int, ...], rest: tuple, constants: dict, **options) -> None:
        self.kernel, self.rest, self.constants, self.options = kernel, rest, constants, options
        self.grid = (*grid, 1, 1)[:3]
        self._launch = None
        self._tail: tuple = ()

    def __call__(self, *tensors) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: torch tensors in the first call, later their addresses will do.
        """
        if self._launch is not None:
            self._launch(*tensors, *self._tail)
            return
        found = self.kernel[self.grid](*tensors, *self.rest, **self.constants, **self.options)
        if hasattr(found, "packed_metadata"):  # not under the interpreter
            names = self.kernel.arg_names[len(tensors) + len(self.rest) :]
            self._tail = (*self.rest, *(self.constants[name] for name in names))
            self._launch = found[self.grid]

    @property
    def takes_addresses(self) -> bool:
        """Whether the next call may be given integers."""
        return self._launch is not None
