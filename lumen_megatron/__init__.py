"""Megatron-Core adapter. Reserved name: nothing is exported yet."""
