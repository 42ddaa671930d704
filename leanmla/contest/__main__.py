"""``python -m leanmla.contest``: the same as ``leanmla contest``."""

from __future__ import annotations

import argparse
import sys

from .cli import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m leanmla.contest")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
