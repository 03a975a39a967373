"""Attention on a GPU."""


def unsupported(query) -> str | None:
    return "not written yet"
