"""One HTML page about one or several results, complete in itself: tables, pictures, environment, comparison."""

from __future__ import annotations

from .compare import Comparison, Difference, compare_runs
from .page import make_report

__all__ = ["Comparison", "Difference", "compare_runs", "make_report"]
