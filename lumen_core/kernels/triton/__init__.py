"""Portable Triton kernels (NVIDIA and ROCm): launchers here import without `triton`, `*_kernels` modules need it."""
