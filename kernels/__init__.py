"""Triton kernels, one file a kernel, each with a plain-torch reference in ``dslib``."""
