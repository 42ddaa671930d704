"""CUDA C++ for sm_90, compiled when first needed: the decode kernel of the cache format mxfp4_row320."""
