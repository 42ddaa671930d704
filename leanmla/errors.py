"""The kinds of refusal. Every message names the argument, what was expected, what came and what to do."""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CapacityExceeded",
    "InvalidArgument",
    "InvalidDtype",
    "InvalidTable",
    "LeanMLAError",
    "MissingScale",
    "PlanMismatch",
]


class LeanMLAError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidArgument(LeanMLAError, ValueError):
    """An argument has the wrong shape, stride, device or value."""


class InvalidDtype(InvalidArgument, TypeError):
    """An argument has a dtype that this package does not take there."""


class InvalidTable(InvalidArgument):
    """The contents of a page table or of an offset array do not describe a batch."""


class MissingScale(InvalidArgument):
    """A quantised cache came without the scale that gives its numbers a meaning."""


class CapacityExceeded(InvalidArgument):
    """A call is larger than the plan or table it was given."""


class PlanMismatch(InvalidArgument):
    """A plan was built for another problem than the one it is asked to run."""


class BackendUnavailable(LeanMLAError, RuntimeError):
    """No backend, or not the one asked for, can run the problem; the message gives each one's reason."""
