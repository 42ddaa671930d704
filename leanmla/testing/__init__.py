"""Cases, inputs and comparisons shared by the tests, ``leanmla check`` and ``leanmla bench``."""

from __future__ import annotations

from .cases import DecodeCase, case_grid
from .compare import Report, compare
from .inputs import DecodeInputs, make_inputs

__all__ = ["DecodeCase", "DecodeInputs", "Report", "case_grid", "compare", "make_inputs"]
