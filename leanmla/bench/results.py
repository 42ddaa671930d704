"""Results as files: JSON that is written whole or not at all, and means of times."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..files import write_whole

__all__ = ["check_writable", "dump_json", "geomean", "read_json", "write_json"]


def _plain(value: Any) -> Any:
    """Only what JSON has: tuples become lists, NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def dump_json(document: dict) -> str:
    """A document as text, lists of numbers on one line."""
    text = json.dumps(_plain(document), indent=1, ensure_ascii=False)
    return _join_number_lists(text) + "\n"


def _join_number_lists(text: str) -> str:
    import re

    numbers = re.compile(r"\[\s*(-?[\d.eE+-]+(?:,\s*-?[\d.eE+-]+)*)\s*\]")
    return numbers.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)


def check_writable(path: Path) -> None:
    """Refuse a result file that could not be written in the end.

    Raises:
        InvalidArgument: the folder is missing or not writable, or the path is a folder.
    """
    folder = path.parent
    if path.is_dir():
        raise InvalidArgument(f"--json: expected a file, {path} is a folder. Name a file in it.")
    if not folder.is_dir():
        raise InvalidArgument(f"--json: the folder {folder} does not exist. Create it first.")
    if not os.access(folder, os.W_OK):
        raise InvalidArgument(f"--json: the folder {folder} cannot be written to. Choose another.")


def write_json(path: Path, document: dict) -> None:
    """Write a document, so that a reader sees the old file or the new one."""
    write_whole(path, dump_json(document).encode("utf-8"))


def read_json(path: Path) -> dict:
    """A result file.

    Raises:
        InvalidArgument: it cannot be read or is not one of ours.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"{path}: cannot be read as a result file ({why}).") from None
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("leanmla-"):
        raise InvalidArgument(f"{path}: is not a result file of leanmla. Pass one that --json wrote.")
    return document


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
