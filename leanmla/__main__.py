"""``python -m leanmla`` and the ``leanmla`` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code. Quiet about Ctrl-C while the rest is still being imported, too."""
    try:
        from .cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
