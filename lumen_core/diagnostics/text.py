"""Plain-text tables, for programs that must work without any extra package."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; a column whose cells are all numbers or `-` is aligned to the right.

    Cells are shown as `str` gives them; round numbers before.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [bool(cells) and all(_is_number(cell) for cell in column) for column in zip(*cells)] or [False] * len(
        header
    )

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def _is_number(cell: str) -> bool:
    if cell == "-":
        return True
    try:
        float(cell.rstrip("%x"))
    except ValueError:
        return False
    return True
