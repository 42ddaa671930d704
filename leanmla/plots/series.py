"""Which series of a run gets which look."""

from __future__ import annotations

from .runs import Row, Run
from .style import Look, look_of_format, look_of_peer

__all__ = ["looks_of"]


def looks_of(run: Run) -> dict[str, Look]:
    """A look for each series of a run, ours first: the same in all of its pictures.

    Colour and marker are the format's. The first backend is filled, with the format's dash; the second is hollow and dotted, further ones
    are half filled, with dots and dashes.
    """
    series: dict[str, Row] = {}
    for r in run.good:
        series.setdefault(r.by, r)
    looks: dict[str, Look] = {}
    backends: list[str] = []
    peers = 0
    for by, r in sorted(series.items(), key=lambda item: item[1].peer):
        if r.peer:
            looks[by] = look_of_peer(peers)
            peers += 1
            continue
        backend = by.partition(" ")[0]
        if backend not in backends:
            backends.append(backend)
        look, place = look_of_format(r.format), backends.index(backend)
        if place == 1:
            look = Look(look.colour, look.marker, (0, (1, 1)), hollow=True)
        elif place > 1:
            look = Look(look.colour, look.marker, (0, (4, 1.5, *(1, 1.5) * (place - 1))), half=True)
        looks[by] = look
    return looks
