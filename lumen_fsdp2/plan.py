"""What each parameter of a sharded model sends, and why: the same on every rank, decided before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from lumen_core.wire import COLUMN_BLOCK_ROWS, WireFormat

ROW, ON_DEMAND, ALL = "row", "on-demand", "all"


@dataclass(frozen=True)
class PlanRow:
    """One parameter.

    Attributes:
        name: as the root of the sharded model calls it.
        shape: of the whole parameter (of this rank's part under tensor parallelism).
        wire: recipe of what travels, or the dtype in which it does.
        mode: `row`, `on-demand`, `all`, or `-` where there is nothing to choose.
        bytes_per_gather: of the gathered output over all ranks; 0 at one rank.
        gathers: a step and micro-batch: 2 where the weight is dropped after the forward pass, else 1.
        reason: why it travels this way.
        plain: the dtype in which it would travel unquantized.
    """

    name: str
    shape: tuple[int, ...]
    wire: str
    mode: str
    bytes_per_gather: int
    gathers: int
    reason: str
    plain: torch.dtype

    @property
    def numel(self) -> int:
        """Values of the parameter."""
        return math.prod(self.shape)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of its gathers in one forward and backward pass; recomputation adds none."""
        return self.bytes_per_gather * self.gathers


@dataclass
class Plan:
    """All parameters of a sharded model; `print(plan)` is a table."""

    rows: list[PlanRow] = field(default_factory=list)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of all parameter gathers in one forward and backward pass."""
        return sum(row.bytes_per_step for row in self.rows)

    def __str__(self) -> str:
        lines = ["low-precision all-gather:"]
        table = [("parameter", "shape", "wire", "mode", "MB/gather", "gathers", "why")]
        table += [
            (
                r.name,
                "x".join(map(str, r.shape)),
                r.wire,
                r.mode,
                f"{r.bytes_per_gather / 1e6:.3f}",
                str(r.gathers),
                r.reason,
            )
            for r in _merged(self.rows)
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
        lines += ["  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]) for row in table]
        quantized = [r for r in self.rows if r.mode != "-"]
        numel = sum(r.numel for r in quantized)
        if numel:
            plain = dict.fromkeys(str(r.plain).removeprefix("torch.") for r in quantized)
            unquantized = sum(r.numel * r.gathers * r.plain.itemsize for r in quantized)
            lines.append(
                f"  {numel / 1e6:.2f} M of {sum(r.numel for r in self.rows) / 1e6:.2f} M values travel quantized: "
                f"{sum(r.bytes_per_step for r in quantized) / numel:.4f} bytes a value and step (in "
                f"{', '.join(plain)}: {unquantized / numel:.4g}); all parameters "
                f"{self.bytes_per_step / 1e6:.3f} MB a step"
            )
        return "\n".join(lines)


def _merged(rows: list[PlanRow]) -> list[PlanRow]:
    """One row for the same parameter of many equal layers, with a star for the layer's number."""
    out: dict[tuple, list[PlanRow]] = {}
    for row in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in row.name.split("."))
        out.setdefault((pattern, row.shape, row.wire, row.mode, row.gathers, row.reason, row.plain), []).append(row)
    return [replace(same[0], name=key[0] if len(same) > 1 else same[0].name) for key, same in out.items()]


def choose_mode(
    wire: WireFormat, shape: tuple[int, ...], world: int, mode: str, multiplied: WireFormat | None, recipe: str
) -> tuple[str, str]:
    """`(mode, why)` of a weight that travels as `wire`: a matrix `[N, K]` or a bank `[E, N, K]` cut between experts.

    Args:
        mode: that was asked for.
        multiplied: the form that the recipe named `recipe` multiplies; None where it multiplies values.
    """
    if wire.one_copy:
        return ROW, "one copy serves both passes"
    if mode in ("auto", ROW):
        loss = ", which costs dgrad up to 3 dB in 4 bits" if wire.fmt.packed else ""
        return ROW, f"dgrad's blocks are made from the rows{loss}"
    rows = shape[-2] if len(shape) == 3 else shape[0] // world
    if rows % COLUMN_BLOCK_ROWS or shape[-1] % COLUMN_BLOCK_ROWS:
        return ROW, f"{mode} needs shards of whole {COLUMN_BLOCK_ROWS}x{COLUMN_BLOCK_ROWS} blocks"
    if not wire.same_numbers(multiplied):
        return ROW, f"{mode} gains nothing: {recipe} multiplies no {wire.name} blocks"
    return mode, "both directions travel" if mode == ALL else "each pass gets the direction that it multiplies"


def why_not(wire: WireFormat, shape: tuple[int, ...], world: int) -> str | None:
    """Why a weight cannot travel as `wire`, from its whole shape, or None."""
    if shape[0] % world:
        what = "experts" if len(shape) == 3 else "rows"
        return f"{shape[0]} {what} do not divide over {world} ranks"
    rows = shape[1] if len(shape) == 3 else shape[0] // world
    if rows % wire.row_multiple:
        what = "an expert's" if len(shape) == 3 else "a shard's"
        return f"{what} {rows} rows end inside a block of {wire.row_multiple}"
    return None


def part_bytes(wire: WireFormat, shape: tuple[int, ...], mode: str, *, delayed: bool = False) -> list[int]:
    """Bytes of each tensor of one gathered weight, all ranks together, in the order in which they are sent.

    Args:
        delayed: the experts of a bank with one scale each send their own amax, too, for the history.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    codes = wire.code_bytes(rows, columns)
    if wire.per_tensor:  # a matrix's scale is known before; a bank has one an expert
        return [codes, *[4 * shape[0]] * (1 + delayed)] if len(shape) == 3 else [codes]
    parts = [codes, wire.scale_bytes(rows, columns)]
    return parts + [codes, rows // COLUMN_BLOCK_ROWS * columns] if mode == ALL else parts
