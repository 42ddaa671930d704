"""Picture files: rendered in memory, written whole or not at all, and marked with what they were made from."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import unescape

from ..errors import InvalidArgument, LeanMLAError
from ..files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "SUFFIXES",
    "PlottingUnavailable",
    "check_folder",
    "check_target",
    "render",
    "require_matplotlib",
    "save",
    "sha256",
    "sources_of",
]

#: Kinds of picture, by file name.
SUFFIXES = (".png", ".svg", ".pdf")
#: Dots an inch of a PNG.
DPI = 160
_MARK = "made from"


class PlottingUnavailable(LeanMLAError, ImportError):
    """matplotlib, an optional dependency, is not installed."""


def require_matplotlib() -> None:
    """Refuse to draw where nothing can be drawn.

    Raises:
        PlottingUnavailable: says how to install what is missing.
    """
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ImportError:  # an import hook that forbids it
        found = False
    if not found:
        raise PlottingUnavailable("pictures need matplotlib, which is not installed. Run: pip install 'leanmla[plot]'")


def check_target(path: Path, option: str, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """Refuse a file that could not be written in the end, before the work and not after it.

    Raises:
        InvalidArgument: another suffix, a missing folder, or one that cannot be written to.
    """
    if path.suffix.lower() not in suffixes:
        raise InvalidArgument(f"{option}: expected a file name that ends in {', '.join(suffixes)}, got {str(path)!r}.")
    if path.is_dir():
        raise InvalidArgument(f"{option}: expected a file, {path} is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{option}: the folder {path.parent} does not exist. Create it first.")
    check_folder(path.parent, option)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that takes no files. Permissions do not tell (a root user has all, /proc takes no files), so one is made
    and removed.

    Raises:
        InvalidArgument: says what is in the way.
    """
    try:
        tempfile.NamedTemporaryFile(prefix=".leanmla.", suffix=".tmp", dir=folder).close()
    except OSError as error:
        raise InvalidArgument(
            f"{option}: the folder {folder} cannot be written to ({error.strerror}). Choose another."
        ) from None


def sha256(data: bytes) -> str:
    """Hex digest of some bytes."""
    return hashlib.sha256(data).hexdigest()


def render(figure: Figure, kind: str, sources: Mapping[str, str] | None = None) -> bytes:
    """A figure as bytes, the same for the same figure.

    Args:
        kind: "png", "svg" or "pdf".
        sources: file name -> sha256 of what the figure was made from; :func:`sources_of` reads them back.
    """
    import matplotlib

    words = "; ".join(f"{name} sha256:{digest}" for name, digest in sorted((sources or {}).items()))
    about: dict[str, str | None] = {"Title": str(figure.get_label() or "leanmla")}
    if words:
        # PDF has no field for a source; "Subject" is its free text.
        about["Subject" if kind == "pdf" else "Source"] = f"{_MARK} {words}"
    about["CreationDate" if kind == "pdf" else "Date"] = None
    if kind == "png":
        about.pop("Date")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "leanmla", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=about)
    return buffer.getvalue()


def save(figure: Figure, path: Path, sources: Mapping[str, str] | None = None) -> None:
    """Render by the file's suffix and write it whole."""
    write_whole(path, render(figure, path.suffix.lower().removeprefix("."), sources))


def sources_of(path: Path) -> dict[str, str]:
    """file name -> sha256 that :func:`save` was given; empty if it was given none. PNG and SVG."""
    data = path.read_bytes()
    text = _png_source(data) if data.startswith(b"\x89PNG") else _svg_source(data.decode("utf-8", "replace"))
    if not text.startswith(_MARK):
        return {}
    parts = text.removeprefix(_MARK).strip().split("; ")
    return {name: digest for name, _, digest in (part.rpartition(" sha256:") for part in parts)}


def _svg_source(text: str) -> str:
    found = re.search(r"<dc:source>(.*?)</dc:source>", text, re.DOTALL)
    return unescape(found[1].strip()) if found else ""


def _png_source(data: bytes) -> str:
    at = 8
    while at + 8 <= len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"tEXt":
            key, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
            if key == b"Source":
                return value.decode("latin-1")
        at += 12 + length
    return ""
