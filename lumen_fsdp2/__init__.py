"""FSDP2 adapter (low-precision all-gather). Reserved name: nothing is exported yet.

A model enabled with `lumen_core.quantize` already trains under PyTorch's own `fully_shard`; what will live here
is the communication of quantized weights.
"""
