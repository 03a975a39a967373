"""Kernel implementations and the registry that chooses among them."""
