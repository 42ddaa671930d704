"""The command line: picks the command, and turns what went wrong into a sentence and an exit code.

Exit codes: 0 all right; 1 a result is wrong; 2 the request cannot be served; 130 interrupted; 141 the reader of our output
went away. One file a command; a command module has ``add_arguments(parser)`` and ``main(args, out) -> int``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

#: command -> one line for ``leanmla --help``; the module is ``leanmla.cli.<command>``.
COMMANDS: dict[str, str] = {
    "run": "decode the contest's ranked cases with every cache format on this machine, checked",
    "check": "run the correctness grid and report the worst case of every kind",
    "bench": "check, then time: against measured ceilings and whatever peers are installed",
    "explain": "which backend runs a problem, why not the others, and the schedule",
    "warmup": "compile the usual kernels now, so that no first call has to",
    "build": "code objects for a GPU that need not be here, and a manifest to launch them from",
    "accuracy": "what each cache format costs in accuracy, and which one fits an error budget",
    "report": "one HTML page about result files: tables, pictures, comparison of runs",
    "info": "versions, hardware, settings, and what each backend can run here",
    "contest": "run submissions to the mixed-mla contest",
}

#: What writing fails with where a disk is full, a quota reached or a device broken.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv`` by default) and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets "?", not a traceback
    try:
        try:
            code = _run(argv)
        except SystemExit as stop:  # argparse, after --help or a mistake
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nleanmla: interrupted; no file was left half-written.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_stdout()  # whoever read our output has enough
        return 141
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_stdout()
        print(f"leanmla: {error.filename or 'the output'} cannot be written ({error.strerror}).", file=sys.stderr)
        return 2


def _open_missing_streams() -> None:
    """Where the caller closed stdout or stderr (``>&-``), what is printed goes nowhere, and no file of ours gets its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _drop_stdout() -> None:
    """Python flushes stdout once more at exit: give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    parser, commands = _parser()
    if not argv:
        parser.print_help()
        return 0

    from ..errors import LeanMLAError
    from .output import Output

    command = next((a for a in argv if not a.startswith("-")), "")
    try:
        if command in commands:
            _fill(commands[command], command)
        args = parser.parse_args(argv)
        return args.run(args, Output(json_path=args.json, quiet=args.quiet))
    except LeanMLAError as error:
        print(f"leanmla {command}: {error}", file=sys.stderr)
        return 2


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="leanmla",
        description="MLA decode attention with latent KV caches in bf16, fp8 and MXFP4.",
        epilog="leanmla COMMAND --help says more. Exit codes: 0 all right, 1 a result is wrong, 2 cannot be served.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = {name: subparsers.add_parser(name, help=text, description=_sentence(text)) for name, text in COMMANDS.items()}
    return parser, commands


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _fill(parser: argparse.ArgumentParser, command: str) -> None:
    """Give a command its own options; only the command that runs is imported."""
    module = importlib.import_module(f"leanmla.cli.{command}")
    module.add_arguments(parser)
    taken = parser._option_string_actions
    if "--json" not in taken:
        parser.add_argument("--json", metavar="FILE", help="also write the results as JSON; - for stdout")
    if "--quiet" not in taken:
        parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=module.main)


class _Version(argparse.Action):
    def __call__(self, parser, *_):
        from .. import __version__

        print(f"leanmla {__version__}")
        parser.exit()
