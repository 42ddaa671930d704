"""Every environment variable this package reads, in one place. They are read when needed, not at import."""

from __future__ import annotations

import os

from .errors import InvalidArgument

__all__ = ["VARIABLES", "cpu_threads", "default_backend"]

#: name -> what it does; printed by ``leanmla info``.
VARIABLES: dict[str, str] = {
    "LEANMLA_BACKEND": "backend to use where the caller says backend='auto'",
    "LEANMLA_CPU_THREADS": "threads of the cpu backend (default: torch.get_num_threads())",
}


def default_backend() -> str:
    """What ``backend="auto"`` means: a backend's name, or "auto" itself."""
    return os.environ.get("LEANMLA_BACKEND", "").strip() or "auto"


def cpu_threads() -> int | None:
    """Threads the cpu backend may use, or None to follow torch."""
    text = os.environ.get("LEANMLA_CPU_THREADS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InvalidArgument(f"LEANMLA_CPU_THREADS: expected a positive integer, got {text!r}. Unset it to follow torch.")
    return int(text)
