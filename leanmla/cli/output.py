"""Where a command's words go: tables, progress and JSON, each only if wanted."""

from __future__ import annotations

import stat
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..bench.results import check_writable, dump_json, write_json
from ..errors import InvalidArgument

__all__ = ["Output", "Steps", "new_table"]

#: Width where the output is no terminal (rich would take 80).
PLAIN_WIDTH = 100
#: Where the words of a fact begin.
FACT_INDENT = 13
#: Seconds between progress lines where stderr is no terminal.
PLAIN_INTERVAL = 15.0


class _PipeConsole(Console):
    """A console that lets a broken pipe reach ``leanmla.cli.main``, which is silent about it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(stream) -> Console:
    width = None if stream.isatty() else PLAIN_WIDTH
    return _PipeConsole(file=stream, width=width, highlight=False, soft_wrap=False)


def new_table(title: str, *columns: str) -> Table:
    """A plain table. A column whose name starts with ">" is aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def _keep_numbers_whole(table: Table) -> None:
    """Columns aligned to the right do not become narrower than what stands in them; their names are folded between words."""
    for column in table.columns:
        if column.justify == "right":
            column.min_width = max(len(words) for words in (*map(str, column.cells), *str(column.header).split(), ""))


class Steps:
    """Progress of one long piece of work; see :meth:`Output.steps`."""

    def __init__(self, total: int, what: str, progress: Progress | None, console: Console | None) -> None:
        self.total, self.done, self.what = total, 0, what
        self._progress, self._console = progress, console
        self._task = progress.add_task("", total=total) if progress else None
        self._start = self._last = time.monotonic()

    def now(self, label: str) -> None:
        """Say what is being done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=label)
        elif self._console is not None and time.monotonic() - self._last >= PLAIN_INTERVAL:
            self._last = time.monotonic()
            elapsed = self._last - self._start
            left = f", about {elapsed / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            self._console.print(f"{self.what}: {self.done}/{self.total}, {elapsed:.0f} s{left}; now {label}", markup=False)

    def advance(self, steps: int = 1) -> None:
        """Some steps are done."""
        self.done += steps
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self.done)


def _is_special(path: Path) -> bool:
    """A device or a pipe: written to as it is, since a file put in its place would be no use to anyone."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _cannot_write(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"--json: {path} cannot be written ({error.strerror}). Choose another place.")


def _probe(path: Path) -> None:
    """Refuse a result file that could not be written in the end. Permissions do not tell (a root user has all, /proc takes
    no files), so a file is made beside it and removed.

    Raises:
        InvalidArgument: says what is in the way.
    """
    try:
        if path.is_dir() or not _is_special(path):
            check_writable(path)
            tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent).close()
    except OSError as error:
        raise _cannot_write(path, error) from None


class Output:
    """Prints for people on stdout (on stderr with ``--json -``), progress on stderr, JSON to a file or stdout.

    Args:
        json_path: where JSON goes; "-" is stdout; None writes none.
        quiet: print nothing.
    """

    def __init__(self, *, json_path: str | None = None, quiet: bool = False) -> None:
        self.json_path, self.quiet = json_path, quiet
        if json_path not in (None, "-"):
            _probe(Path(json_path))  # before the work, not after it
        self.console = _console(sys.stderr if json_path == "-" else sys.stdout)

    def print(self, *things: Any) -> None:
        """Print tables and text for people. Text is taken as it is, without markup; numbers are never cut or folded."""
        if not self.quiet:
            for thing in things:
                if isinstance(thing, Table):
                    _keep_numbers_whole(thing)
                # A table that is wider than the terminal all the same is left to the terminal to wrap.
                self.console.print(thing, markup=False, crop=False)

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print a name and words on each line; longer words go on below themselves."""
        if self.quiet:
            return
        for name, words in rows:
            room = max(20, self.console.width - FACT_INDENT)
            for i, line in enumerate(textwrap.wrap(words, room, break_on_hyphens=False) or [""]):
                self.print(f"{'' if i else name:<{FACT_INDENT}}{line}")

    def json(self, document: dict) -> None:
        """Hand over the results: written whole or not at all. Call it before printing tables."""
        if self.json_path == "-":
            sys.stdout.write(dump_json(document))
        elif self.json_path is not None:
            path = Path(self.json_path)
            try:
                if _is_special(path):
                    path.write_text(dump_json(document), encoding="utf-8")
                else:
                    write_json(path, document)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise _cannot_write(path, error) from None

    @contextmanager
    def steps(self, total: int, what: str) -> Iterator[Steps]:
        """Show progress with an estimate: a bar on a terminal, a line now and then elsewhere."""
        if self.quiet:
            yield Steps(total, what, None, None)
            return
        console = _console(sys.stderr)
        if not console.is_terminal:
            yield Steps(total, what, None, console)
            return
        # What is being done comes last and is cut to what room there is, so that nothing before it moves.
        now = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (TextColumn(what), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                   TimeRemainingColumn(), now)  # fmt: skip
        with Progress(*columns, console=console, transient=True, expand=True) as progress:
            yield Steps(total, what, progress, None)
