"""A weight that arrived quantized: the parameter that FSDP2 puts on a module between a gather and the next reshard.

`GatheredWeight` looks like the high-precision parameter (shape, dtype, gradient) and holds codes and scales. The
quantized linear reads these as they are; any other operation sees the dequantized values, so that code which looks at
`layer.weight` stays right, if slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from lumen_core.tensor import QuantizedTensor
from lumen_core.wire import WireFormat

ROWS, COLUMNS, BOTH = "rows", "columns", "both"


@dataclass(eq=False)
class GatherInfo:
    """What the bytes of a gathered weight are at this moment; shared by all wrappers of one parameter.

    Attributes:
        wire: their form.
        name: of the parameter, for messages.
        direction: `rows` (blocked as fprop multiplies), `columns` (as dgrad does) or `both`. It changes with each
            gather in mode `on-demand`.
        on_demand: columns are sent for the backward pass unless that is ruled out.
        rows_only: it is (recomputation was seen, or a compiler read the weight).
    """

    wire: WireFormat
    name: str
    direction: str = ROWS
    on_demand: bool = False
    rows_only: bool = False

    def notice_pass(self, training: bool) -> None:
        """Rule columns out where this forward pass will run again inside backward, after they have come.

        A checkpointed pass runs under saved-tensor hooks, or without gradients although it trains.
        """
        if self.on_demand and not self.rows_only:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self.rows_only = hooks is not None or (training and not torch.is_grad_enabled())


@dataclass(frozen=True)
class WeightView:
    """A gathered weight `[N, K]` as the GEMMs read it.

    Attributes:
        parts: flat codes and scales; with `both` directions the transposed pair after them; for delayed scaling the
            weight's own amax at the end (of a bank one an expert).
        info: what they are.
        shape: `(N, K)`.
        dtype: of the parameter.
    """

    parts: tuple[torch.Tensor, ...]
    info: GatherInfo
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.parts[0].device

    @property
    def amax(self) -> torch.Tensor | None:
        """The weight's own largest magnitude, 0-dim fp32, where it came along."""
        if len(self.parts) % 2 == 0:
            return None
        amax = self.parts[-1]
        return amax.view(torch.float32).reshape(()) if amax.dtype == torch.uint8 else amax

    @property
    def has_columns(self) -> bool:
        """True where the bytes hold the transposed weight, blocked for dgrad."""
        return self.info.direction != ROWS

    def rows(self) -> QuantizedTensor:
        """The weight as fprop multiplies it.

        Raises:
            RuntimeError: only the other direction was gathered.
        """
        if self.info.direction == COLUMNS:
            raise RuntimeError(
                f"{self.info.name}: a forward pass met a weight that was gathered for the backward pass "
                "(all_gather_mode='on-demand' under recomputation that was not seen beforehand); use 'row' or 'auto'"
            )
        return self.info.wire.decode(self.parts[0], self.parts[1], self.shape)

    def columns(self) -> QuantizedTensor:
        """The transposed weight `[K, N]` as it was gathered for dgrad.

        Raises:
            RuntimeError: only the other direction was gathered.
        """
        if not self.has_columns:
            raise RuntimeError(f"{self.info.name}: a backward pass met a weight that was gathered for the forward pass")
        codes, scale = self.parts[2:4] if self.info.direction == BOTH else self.parts[:2]
        return self.info.wire.decode_columns(codes, scale, self.shape)

    def dense(self) -> torch.Tensor:
        """High-precision values, `[N, K]` in `dtype`, from whichever direction is there."""
        if self.info.direction == COLUMNS:
            return self.columns().dequantize(self.dtype).t()
        return self.rows().dequantize(self.dtype)


class GatheredWeight(torch.Tensor):
    """A parameter of one shape and dtype whose values are codes and scales; see the module's docstring.

    `[N, K]`, or a bank of experts `[E, N, K]` that `unbind(0)` takes apart. Made by `GatheredWeight(parts, ...)`.
    """

    @staticmethod
    def __new__(
        cls, parts: Sequence[torch.Tensor], info: GatherInfo, shape: Sequence[int], dtype: torch.dtype
    ) -> GatheredWeight:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=parts[0].device)

    def __init__(
        self, parts: Sequence[torch.Tensor], info: GatherInfo, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._set_parts(parts)
        self._info = info

    # Operations are decided below autograd, where gradients of the whole parameter already have their formula.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def _set_parts(self, parts: Sequence[torch.Tensor]) -> None:
        self._count = len(parts)
        for index, part in enumerate(parts):
            setattr(self, f"_part{index}", part)

    def refresh(self, parts: Sequence[torch.Tensor], direction: str) -> None:
        """Point to what the newest gather brought."""
        self._set_parts(parts)
        self._info.direction = direction

    def view_of(self) -> WeightView:
        """The weight for the GEMMs; of a matrix only."""
        rows, columns = self.shape
        return WeightView(self.parts(), self._info, (rows, columns), self.dtype)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Codes and scales, flat; see `WeightView.parts`."""
        return tuple(getattr(self, f"_part{index}") for index in range(self._count))

    def experts(self) -> list[GatheredWeight]:
        """The matrices of a bank, sharing its bytes."""
        count, rows, columns = self.shape
        parts = self.parts()
        pieces = [part.view(count, -1).unbind(0) for part in parts]
        return [
            GatheredWeight([piece[i] for piece in pieces], self._info, (rows, columns), self.dtype)
            for i in range(count)
        ]

    def dequantize_all(self) -> torch.Tensor:
        """High-precision values in the parameter's shape and dtype."""
        if self.dim() == 2:
            return self.view_of().dense().contiguous()
        return torch.stack([expert.view_of().dense() for expert in self.experts()])

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        # A compiled graph fixes at once what its backward pass reads: the bytes must not change meaning in between.
        self._info.rows_only = True
        return [f"_part{index}" for index in range(self._count)], (self._info, tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        info, shape, dtype = context
        return GatheredWeight([inner[f"_part{index}"] for index in range(len(inner))], info, shape, dtype)

    @classmethod
    def __metadata_guard__(cls, compiled: tuple, now: tuple) -> bool:
        """True where a graph compiled for one weight serves another: layers of a stack share it."""
        a, b = compiled[0], now[0]
        return (a.wire, a.direction, *compiled[1:]) == (b.wire, b.direction, *now[1:])

    def __repr__(self) -> str:
        info = self._info
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, wire={info.wire.name}, direction={info.direction})"

    @property
    def data(self) -> torch.Tensor:
        """The same weight without its place in the graph; it cannot be given another."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise _read_only(self)

    def __setitem__(self, index: object, value: object) -> None:
        raise _read_only(self)

    def _alias(self) -> GatheredWeight:
        return type(self)(self.parts(), self._info, self.shape, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_view(func) and not args[0].is_inference():
            # What stands for a view of a tensor that was made outside has to be made there, too.
            with torch.inference_mode(False), torch.no_grad():
                return cls._run(func, args, kwargs)
        return cls._run(func, args, kwargs)

    @classmethod
    def _run(cls, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
        first = args[0] if args else None
        if _is_whole(func, args, cls):
            return first._alias()
        if func is _aten.unbind.int and first.dim() == 3 and (len(args) < 2 or args[1] == 0):
            return first.experts()
        if func in _FACTORIES:
            # Only shape and dtype are asked for, maybe while the bytes are freed.
            stub = torch.empty(1, dtype=first.dtype, device=first.device).expand(first.shape)
            return func(stub, *args[1:], **kwargs)
        if func._schema.is_mutable:
            _check_writes(func, args, kwargs, cls)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.dequantize_all(), (args, kwargs))
        return func(*args, **kwargs)


def _is_whole(func: torch._ops.OpOverload, args: tuple, cls: type) -> bool:
    """True for an operation that gives the same weight again under another name."""
    if func is _aten.as_strided.default:
        return (tuple(args[1]), tuple(args[2])) == (tuple(args[0].shape), args[0].stride())
    if func is _aten.view.default:
        return tuple(args[1]) == tuple(args[0].shape)
    if func is _aten.view_as.default:
        return isinstance(args[0], cls) and args[1].shape == args[0].shape
    return func in _SAME and isinstance(args[0], cls)


def _is_view(func: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _check_writes(func: torch._ops.OpOverload, args: tuple, kwargs: dict, cls: type) -> None:
    """Refuse an operation that writes to a gathered weight: itself, an `out=`, or one of a list."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, cls):
                    raise _read_only(each)


def _read_only(weight: GatheredWeight) -> RuntimeError:
    return RuntimeError(
        f"{weight._info.name}: a gathered weight is a read-only copy; write to the sharded parameter instead"
    )


_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
_FACTORIES = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.new_empty_strided.default,
}
