"""Portable GPU kernels in Triton: NVIDIA sm_80 and newer, AMD gfx942 and gfx950. Importing this package imports no Triton."""
