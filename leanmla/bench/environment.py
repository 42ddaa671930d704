"""What a result depends on: versions, hardware, commit and command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from .. import __version__, device, settings

__all__ = ["command_line", "commit", "environment", "package_versions"]

#: Packages worth naming in a result: what computes, and whom we compare with.
PACKAGES = ("torch", "triton", "numpy", "numba", "rich", "flash_mla", "flashinfer-python", "flydsl", "aiter")


def package_versions() -> dict[str, str]:
    """Version of every package of :data:`PACKAGES` that is installed; imports none of them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """The commit this package runs from, "+changes" if files differ from it; None outside a repository."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", "leanmla")
    return head[:12] + ("+changes" if changes else "")


def command_line() -> str:
    """How this was started, as one would type it."""
    return "leanmla " + shlex.join(sys.argv[1:])


def environment(where: torch.device | str, known_commit: str | None = None) -> dict:
    """Everything about machine and software that a result depends on.

    Args:
        known_commit: to record instead of what the repository says, for copies of a tree that are no repository or another commit's.
    """
    where = torch.device(where)
    info = device.describe(where)
    facts: dict = {
        "leanmla": __version__,
        "commit": known_commit or commit(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "cpu": device.describe("cpu").name,
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "device": {
            "kind": info.kind,
            "name": info.name,
            "arch": info.arch,
            "num_sms": info.num_sms,
            "total_memory": info.total_memory,
            "last_level_cache": device.last_level_cache(where),
        },
        "settings": {name: os.environ[name] for name in settings.VARIABLES if name in os.environ},
    }
    if info.kind == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["nvidia_smi"] = _nvidia_smi(where)
    elif info.kind == "hip":
        facts["hip"] = torch.version.hip
    return facts


def _nvidia_smi(where: torch.device) -> dict[str, str] | None:
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    uuid = getattr(torch.cuda.get_device_properties(where), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid is not None else []
    line = _output("nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return dict(zip(fields, (v.strip() for v in line.splitlines()[0].split(",")))) if line else None


def _output(*command: str) -> str | None:
    """stdout of a short command, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
