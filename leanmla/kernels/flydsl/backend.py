"""The FlyDSL backend: MI355X kernels, built and emulated, not yet run on hardware."""

from __future__ import annotations

from ...problem import DecodeProblem

FORMATS = ("bf16", "fp8", "mxfp4")


def unsupported(problem: DecodeProblem) -> str | None:
    """What in ``problem`` the kernels do not cover: one sentence, or None."""
    if problem.format not in FORMATS:
        return f"has no kernel for cache format '{problem.format}' (it has {', '.join(FORMATS)})"
    if problem.q_dtype != "bf16":
        return f"takes bf16 queries, not {problem.q_dtype}"
    return None
