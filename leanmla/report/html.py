"""Small pieces of HTML, everything escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Cell", "document", "heading", "paragraph", "picture", "preformatted", "table"]

_CSS = """
:root { color-scheme: light; --ink: #1b2333; --muted: #5b6577; --line: #dfe3ea; --faster: #0b6e4f; --slower: #a3243b; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 70rem; color: var(--ink); background: #fff;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; border-bottom: 2px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; } p { margin: .4rem 0; max-width: 60rem; } .muted { color: var(--muted); }
nav a { margin-right: 1.2rem; } a { color: #1d4f9f; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0 1rem; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { border-bottom: 2px solid var(--ink); white-space: nowrap; } td.n, th.n { text-align: right; white-space: nowrap; padding-left: .7rem; }
tr.group td { border-top: 2px solid var(--line); } .faster { color: var(--faster); font-weight: 600; } .slower, .bad { color: var(--slower); font-weight: 600; }
pre { background: #f4f6f9; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; border-radius: 4px; }
figure { margin: 1rem 0 1.6rem; } figure img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; }
details > summary { cursor: pointer; color: var(--muted); } .callout { border-left: 4px solid var(--ink); padding: .3rem .9rem; background: #f4f6f9; }
@media print { body { max-width: none; padding: 0; } h2 { break-before: page; } figure, tr { break-inside: avoid; } }
"""


class Cell(str):
    """Text of a table cell with a CSS class."""

    css: str

    def __new__(cls, text: str, css: str = "") -> Cell:
        cell = super().__new__(cls, text)
        cell.css = css
        return cell


def heading(level: int, text: str, anchor: str = "") -> str:
    mark = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{mark}>{escape(text)}</h{level}>\n"


def paragraph(text: str, css: str = "") -> str:
    mark = f' class="{escape(css)}"' if css else ""
    return f"<p{mark}>{escape(text)}</p>\n"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, group_by_first: bool = False) -> str:
    """A table. A column whose name starts with ">" is aligned to the right.

    Args:
        group_by_first: show a first cell only where it changes, with a line above it.
    """
    right = [c.startswith(">") for c in columns]
    parts = ['<div class="scroll"><table><thead><tr>']
    parts += [f"<th{' class=n' if r else ''}>{escape(c.removeprefix('>'))}</th>" for c, r in zip(columns, right)]
    parts.append("</tr></thead><tbody>\n")
    last = None
    for row in rows:
        fresh = not group_by_first or row[0] != last
        parts.append('<tr class="group">' if group_by_first and fresh and last is not None else "<tr>")
        for j, (cell, r) in enumerate(zip(row, right)):
            css = " ".join(filter(None, ("n" if r else "", getattr(cell, "css", ""))))
            text = "" if j == 0 and not fresh else cell
            parts.append(f'<td class="{escape(css)}">{escape(text)}</td>' if css else f"<td>{escape(text)}</td>")
        parts.append("</tr>\n")
        last = row[0]
    parts.append("</tbody></table></div>\n")
    return "".join(parts)


def picture(svg: bytes, description: str) -> str:
    """An SVG inside the page. As an image of its own its ids cannot clash with those of another."""
    data = base64.b64encode(svg).decode("ascii")
    return f'<figure><img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}"></figure>\n'


def document(title: str, body: str) -> str:
    """A whole page that fetches nothing."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<style>{_CSS}</style></head>\n<body>\n{body}</body></html>\n"
    )
