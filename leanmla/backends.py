"""Which implementation runs: a registry, a filter and a sentence for every one that cannot."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Protocol

import torch

from . import settings
from .device import DeviceInfo
from .errors import BackendUnavailable, InvalidArgument
from .problem import DecodeArgs, DecodeProblem, LaunchConfig

__all__ = ["NAMES", "Backend", "choose", "get", "prepare", "reasons", "why_not"]

#: Where each backend lives, in the order in which "auto" prefers them.
_MODULES: dict[str, str] = {
    "hopper_cuda": "leanmla.kernels.hopper_cuda.backend",
    "hopper": "leanmla.kernels.hopper.backend",
    "flydsl": "leanmla.kernels.flydsl.backend",
    "triton": "leanmla.kernels.triton.backend",
    "cpu": "leanmla.kernels.cpu.backend",
    "reference": "leanmla.kernels.reference.backend",
}
NAMES: tuple[str, ...] = tuple(_MODULES)


class Backend(Protocol):
    """What a backend offers; each is the ``BACKEND`` object of its module. Importing the module touches no hardware."""

    name: str

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        """None if it can run ``problem`` on ``device``, otherwise one sentence that says why not. Cheap."""

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> object:
        """All scratch memory for problems up to ``problem`` in size."""

    def run(self, args: DecodeArgs, workspace: object) -> None:
        """Write ``args.out`` (and ``args.lse``). On a GPU: allocates nothing, never synchronises."""

    # A backend may also have ``prepare``; see :func:`prepare`.

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        """How it would run ``problem``."""


@functools.cache
def _load(name: str) -> Backend | str:
    """The backend object, or the sentence that says why its module cannot be imported."""
    try:
        return importlib.import_module(_MODULES[name]).BACKEND
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("leanmla.kernels"):
            return "is not part of this version of leanmla"
        return f"needs the module '{error.name}', which is not installed"


def _name(name: str) -> str:
    if not isinstance(name, str) or name not in _MODULES:
        raise InvalidArgument(f"backend: expected 'auto' or one of {', '.join(NAMES)}, got {name!r}.")
    return name


def get(name: str) -> Backend:
    """The backend called ``name``, whether or not it can run here.

    Raises:
        InvalidArgument: there is no such backend. BackendUnavailable: its module cannot be imported.
    """
    loaded = _load(_name(name))
    if isinstance(loaded, str):
        raise BackendUnavailable(f"backend='{name}' cannot run: {loaded}.")
    return loaded


def why_not(name: str, problem: DecodeProblem, device: DeviceInfo) -> str | None:
    """Why backend ``name`` cannot run ``problem`` on ``device``: one sentence, or None if it can."""
    loaded = _load(_name(name))
    return loaded if isinstance(loaded, str) else loaded.why_not(problem, device)


def reasons(problem: DecodeProblem, device: DeviceInfo) -> dict[str, str | None]:
    """:func:`why_not` of every backend, in the order of preference."""
    return {name: why_not(name, problem, device) for name in NAMES}


def prepare(backend: Backend, args: DecodeArgs, workspace: object) -> Callable[[DecodeArgs, object], None]:
    """``backend.run`` for calls like ``args``: what its optional method ``prepare(args, workspace)`` returns, otherwise ``run`` itself.

    Like it are calls with the same problem and ``sm_scale`` whose tensors (q, the cache's, the table's, qo_indptr, out, lse) have the
    same shapes, strides, dtypes and device and addresses that agree modulo 16; otherwise their addresses and contents may
    differ, and so may the workspace if it was made for the same problem. ``prepare`` may refuse as ``run`` does; it must not launch.
    """
    own = getattr(backend, "prepare", None)
    return backend.run if own is None else own(args, workspace)


def choose(problem: DecodeProblem, device: DeviceInfo, backend: str = "auto") -> Backend:
    """The backend that runs ``problem``: the one asked for, or the first that can.

    Raises:
        BackendUnavailable: the one asked for cannot, or none can; the message says why and which others can.
    """
    if backend == "auto":
        backend = settings.default_backend()
        if backend != "auto" and backend not in _MODULES:
            raise InvalidArgument(
                f"LEANMLA_BACKEND: expected 'auto' or one of {', '.join(NAMES)}, got {backend!r}. Unset it or correct it."
            )
    if backend != "auto":
        reason = why_not(backend, problem, device)
        if reason is None:
            return get(backend)
        able = [n for n in NAMES if why_not(n, problem, device) is None]
        raise BackendUnavailable(f"backend='{backend}' cannot run this: {reason}. Can run it: {', '.join(able) or 'none'}.")
    for name in NAMES:
        if why_not(name, problem, device) is None:
            return get(name)
    listing = "; ".join(f"{n}: {r}" for n, r in reasons(problem, device).items())
    raise BackendUnavailable(f"backend='auto': no backend can run {problem} on {device.name}. {listing}.")
