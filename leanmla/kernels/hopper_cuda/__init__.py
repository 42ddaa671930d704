"""CUDA C++ for sm_90, compiled when first needed: the decode kernel of the cache formats mxfp4_row320 and mxfp4."""
