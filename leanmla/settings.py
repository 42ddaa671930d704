"""Every environment variable this package reads, in one place. They are read when needed, not at import."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InvalidArgument

__all__ = [
    "VARIABLES",
    "cache_directory",
    "cpu_threads",
    "default_backend",
    "popcorn_fd",
    "popcorn_seed",
    "programmatic_launch",
]

#: name -> what it does; printed by ``leanmla info``.
VARIABLES: dict[str, str] = {
    "LEANMLA_BACKEND": "backend to use where the caller says backend='auto'",
    "LEANMLA_CACHE_DIR": "where compiled CUDA kernels are kept (default: leanmla in $XDG_CACHE_HOME or ~/.cache)",
    "LEANMLA_CPU_THREADS": "threads of the cpu backend (default: torch.get_num_threads())",
    "LEANMLA_PDL": "0: Hopper kernels do not begin while the kernel before them ends (programmatic dependent launch; default: 1)",
    "POPCORN_FD": "file descriptor on which 'leanmla contest' speaks the contest's line protocol; unset: tables for people",
    "POPCORN_SEED": "secret seed that the contest's protocol combines with each case's",
}


def default_backend() -> str:
    """What ``backend="auto"`` means: a backend's name, or "auto" itself."""
    return os.environ.get("LEANMLA_BACKEND", "").strip() or "auto"


def cache_directory() -> Path:
    """Where compiled CUDA kernels are kept. It need not exist."""
    chosen = os.environ.get("LEANMLA_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path("~/.cache").expanduser()) / "leanmla"


def cpu_threads() -> int | None:
    """Threads the cpu backend may use, or None to follow torch."""
    text = os.environ.get("LEANMLA_CPU_THREADS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InvalidArgument(f"LEANMLA_CPU_THREADS: expected a positive integer, got {text!r}. Unset it to follow torch.")
    return int(text)


def programmatic_launch() -> bool:
    """Whether a Hopper kernel may be set up while the kernel before it in the stream ends; it reads nothing before that has ended.

    Raises:
        InvalidArgument: it is neither 0 nor 1.
    """
    text = os.environ.get("LEANMLA_PDL", "").strip() or "1"
    if text not in ("0", "1"):
        raise InvalidArgument(f"LEANMLA_PDL: expected 0 or 1, got {text!r}. Unset it for 1.")
    return text == "1"


def popcorn_fd() -> str:
    """The file descriptor to speak the contest's line protocol on, as it was given; "" when unset."""
    return os.environ.get("POPCORN_FD", "").strip()


def popcorn_seed() -> int | None:
    """The contest's secret seed, or None when unset or empty.

    Raises:
        InvalidArgument: it is not an integer.
    """
    text = os.environ.get("POPCORN_SEED", "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(
            f"POPCORN_SEED: expected an integer, got {text!r}. Unset it to use the cases' own seeds."
        ) from None
