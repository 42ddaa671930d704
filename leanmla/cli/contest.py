"""``leanmla contest``: submissions to the mixed-mla contest; the work is done by :mod:`leanmla.contest`."""

from __future__ import annotations

import argparse

from ..errors import BackendUnavailable
from .output import Output

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla contest``."""
    try:
        from ..contest import cli
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("leanmla"):
            raise
        raise BackendUnavailable("the contest is not part of this version of leanmla.") from None
    cli.add_arguments(parser)


def main(args: argparse.Namespace, out: Output) -> int:
    """Run it."""
    from ..contest import cli

    return cli.main(args)
