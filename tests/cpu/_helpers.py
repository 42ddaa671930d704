"""Small makers that several CPU tests share."""

import torch

from leanmla import DecodePlan


def i32(*values):
    """An int32 tensor of ``values``."""
    return torch.tensor(values, dtype=torch.int32)


def cpu_plan(**changes):
    """A small plan for the CPU; ``changes`` replace its options."""
    options = {
        "num_heads": 16, "format": "bf16", "page_size": 64, "max_batch": 4, "max_kv_len": 512, "max_q_len": 2, "device": "cpu",
    }  # fmt: skip
    return DecodePlan(**{**options, **changes})
