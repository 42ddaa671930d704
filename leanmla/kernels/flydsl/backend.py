"""The FlyDSL backend: MLA decode on MI355X (gfx950). Built and emulated, not yet run on hardware.

Importing this module imports neither FlyDSL nor a HIP runtime; kernels are compiled when a workspace is made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from ...errors import CapacityExceeded
from ...formats import no_kernel
from ...problem import DecodeArgs, DecodeProblem, LaunchConfig
from .launch import Scratch, make_scratch, plan_call
from .spec import COMBINE_THREADS, NUM_THREADS, TILE, DecodeSpec
from .splits import work_shape
from .toolchain import flydsl_missing

__all__ = ["BACKEND", "FORMATS", "FlyDslBackend", "Workspace", "unsupported"]

ARCH = "gfx950"
FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")
MAX_SPLITS = 32767  # its square has to fit 31 bits
MAX_THREADS = 1 << 32  # a launch counts its threads in 32 bits
STATUS = "built and emulated, not yet run on hardware"


def unsupported(problem: DecodeProblem) -> str | None:
    """What in ``problem`` the kernels do not cover: one sentence, or None."""
    if problem.format not in FORMATS:
        return no_kernel(problem.format, FORMATS)
    if problem.q_dtype != "bf16":
        return f"takes bf16 queries, not {problem.q_dtype}"
    if problem.max_kv_len >= 1 << 27:
        return f"takes sequences below {1 << 27} keys, the tables allow {problem.max_kv_len}"
    if (problem.num_kv_splits or 0) > MAX_SPLITS:
        return f"takes at most {MAX_SPLITS} splits, got num_kv_splits={problem.num_kv_splits}"
    shape = work_shape(problem)
    merged = problem.batch * problem.num_heads * problem.max_q_len if shape.split_mode != "one" else 0
    threads = max(shape.grid * NUM_THREADS, merged * COMBINE_THREADS)
    if threads >= MAX_THREADS:
        return f"launches fewer than {MAX_THREADS} threads at once, batch {problem.batch} needs {threads}"
    return None


@dataclass
class Workspace:
    """Scratch of a capacity."""

    capacity: DecodeProblem
    scratch: Scratch


@functools.lru_cache(maxsize=256)
def _built(problem: DecodeProblem):
    from .build import build

    return build(problem, ARCH)


class FlyDslBackend:
    """See :class:`leanmla.backends.Backend`."""

    name = "flydsl"

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        """None if it can run ``problem``, otherwise why not."""
        if device.kind != "hip" or device.arch != ARCH:
            return f"needs an AMD Instinct MI355X or MI350X ({ARCH}), this device is {device.arch}"
        return flydsl_missing() or unsupported(problem)

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        """How it would run ``problem``."""
        shape = work_shape(problem)
        spec = DecodeSpec.for_problem(problem, shape.split_mode)
        return LaunchConfig(
            backend=self.name,
            kernel="leanmla/kernels/flydsl/decode.py",
            block_rows=spec.rows,
            block_kv=TILE,
            num_workers=shape.num_workers,
            reason=f"{shape.row_blocks} block(s) of {spec.rows} rows an item; {shape.reason}",
            extra=(
                ("kernel name", spec.name),
                ("blocks a compute unit", str(spec.blocks_per_cu)),
                ("LDS", f"{spec.lds.size} bytes"),
                ("status", STATUS),
            ),
        )

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        """Scratch for problems up to ``problem``; compiles its kernels."""
        _built(problem)
        # Fewer query rows mean smaller row blocks and more workers, so the largest q_len need not need the most.
        shapes = [work_shape(problem.replace(max_q_len=n)) for n in range(1, max(1, problem.max_q_len) + 1)]
        items = max(s.max_items for s in shapes)
        return Workspace(problem, make_scratch(items, problem.batch, max(s.partial_rows for s in shapes), device))

    def run(self, args: DecodeArgs, workspace: object) -> None:
        """Launch plan, decode and combine as the problem needs them, on the current stream."""
        from . import hip

        assert isinstance(workspace, Workspace)
        problem, scratch = args.problem, workspace.scratch
        if problem.batch == 0 or problem.total_q == 0:
            return
        shape = work_shape(problem)
        room = scratch.partial_lse.numel()
        if shape.partial_rows > room or shape.max_items > scratch.items.numel() or problem.batch > scratch.first_item.numel():
            raise CapacityExceeded(
                f"workspace: made for {workspace.capacity}, this call ({problem}) needs room for {shape.partial_rows} partial rows, "
                f"it has {room}. Make a plan with a larger capacity."
            )
        device = args.q.device
        index = device.index if device.index is not None else torch.cuda.current_device()
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(index):
            for kernel, values in plan_call(args, _built(problem), scratch):
                function = hip.load(kernel.hsaco, kernel.name, index)
                hip.launch(function, kernel.grid, kernel.block, kernel.dynamic_lds_bytes, stream, kernel.pack(values))


BACKEND = FlyDslBackend()
