"""The "mixed-mla" contest (GPU MODE / AMD): its task, its reference, and a runner for submissions as they are.

``leanmla contest test|benchmark|leaderboard|profile SUBMISSION.py`` runs a submission in a process of its own, with ``task``,
``reference`` and ``utils`` importable there, on a GPU or on a CPU alone. With ``$POPCORN_FD`` set it speaks the contest's line
protocol instead of drawing tables (:mod:`leanmla.contest.popcorn`).
"""

from __future__ import annotations

from .cases import RANKED, TESTS, Case, combine_seeds, parse_cases
from .reference import check_implementation, generate_input, ref_kernel
from .runner import Outcome, Session
from .timing import Stats

__all__ = [
    "RANKED",
    "TESTS",
    "Case",
    "Outcome",
    "Session",
    "Stats",
    "check_implementation",
    "combine_seeds",
    "generate_input",
    "parse_cases",
    "ref_kernel",
]
