"""Bindings of AITER's kernels for AMD Instinct GPUs."""
