"""Decode kernels for Hopper (sm_90), written in Gluon, which ships inside Triton."""
