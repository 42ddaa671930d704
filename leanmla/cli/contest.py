"""``leanmla contest``: submissions to the mixed-mla contest; the work is done by :mod:`leanmla.contest`."""

from __future__ import annotations

import argparse

from .output import Output

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla contest``."""
    from ..contest import cli

    cli.add_arguments(parser)


def main(args: argparse.Namespace, out: Output) -> int:
    """Run it."""
    from ..contest import cli

    return cli.main(args)
