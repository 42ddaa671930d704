"""Which series of a run gets which look."""

from __future__ import annotations

from .runs import Row, Run
from .style import Look, look_of_format, look_of_peer

__all__ = ["looks_of"]


def looks_of(run: Run) -> dict[str, Look]:
    """A look for each series of a run, ours first: the same in all of its pictures.

    Two backends with the same format share a colour; the second is hollow.
    """
    series: dict[str, Row] = {}
    for r in run.rows:
        series.setdefault(r.by, r)
    looks: dict[str, Look] = {}
    used: dict[str, int] = {}
    peers = 0
    for by, r in sorted(series.items(), key=lambda item: item[1].peer):
        if r.peer:
            looks[by] = look_of_peer(peers)
            peers += 1
            continue
        look = look_of_format(r.format)
        times = used[r.format] = used.get(r.format, 0) + 1
        looks[by] = look if times == 1 else Look(look.colour, "osD^v<>"[times % 7], (0, (1, 1)), hollow=True)
    return looks
