"""The CPU backend: fused decode kernels written in Python, compiled by numba on first use."""
