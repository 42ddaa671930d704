"""Backend ``reference``: fp64, any device torch has, slow. For tests and for settling arguments."""

from __future__ import annotations

import torch

from ...device import DeviceInfo
from ...problem import DecodeArgs, DecodeProblem, LaunchConfig
from ...reference import mla_decode_reference

__all__ = ["BACKEND"]


class ReferenceBackend:
    """Runs :func:`leanmla.reference.mla_decode_reference`. It reads lengths on the host, so it cannot be captured."""

    name = "reference"

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        if device.kind not in ("cpu", "cuda", "hip"):
            return f"needs a CPU or a GPU, this is {device.name}"
        return None

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> object:
        return None

    @torch.no_grad()
    def run(self, args: DecodeArgs, workspace: object) -> None:
        out, lse = mla_decode_reference(
            args.q,
            args.cache,
            args.table,
            sm_scale=args.sm_scale,
            qo_indptr=args.qo_indptr,
            causal=args.problem.causal,
            logit_cap=args.problem.logit_cap,
        )
        args.out.copy_(out)
        if args.lse is not None:
            args.lse.copy_(lse)

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        return LaunchConfig(
            backend=self.name,
            kernel="leanmla/reference.py",
            block_rows=problem.num_heads,
            block_kv=max(problem.max_kv_len, 1),
            num_workers=1,
            reason="the definition in fp64: one query row at a time, no splits",
        )


BACKEND = ReferenceBackend()
