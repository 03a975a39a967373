"""A trainable weight that exists as codes and scales only: what a low-precision parameter gather brings.

Megatron's distributed optimizer holds the fp32 masters, cut over the data-parallel ranks; this parameter is what the
layers compute with. The GEMMs multiply its codes as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lumen_core.amax import WEIGHT, ScalingState
from lumen_core.comm.meter import METER
from lumen_core.config import QuantConfig
from lumen_core.gathered import GatheredWeight, GatherInfo
from lumen_core.pieces import empty_bounds, encode_piece, note_piece, scale_of
from lumen_core.spread import IN, OUT, Spread
from lumen_core.wire import WireFormat

_aten = torch.ops.aten


@dataclass(frozen=True)
class Master:
    """The part of a parameter's fp32 master that this rank holds.

    Attributes:
        values: flat fp32, None where the rank holds nothing of it.
        start: index of its first value in the parameter.
        group: ranks that hold the parts.
    """

    values: torch.Tensor | None
    start: int
    group: dist.ProcessGroup


@dataclass
class Holding:
    """What the aliases of one parameter share.

    Attributes:
        wire: form of the codes.
        shape: `(N, K)`.
        dtype: in which the masters are rounded before they are quantized: the model's own precision.
        codes: flat uint8 `[N * K]`; a view of Megatron's buffer once there is one.
        scale: as `WireFormat.decode` takes it.
        amax: the weight's own, 0-dim fp32, for delayed scaling, else None.
        state: amax history of the layer, for delayed scaling.
        algo: how the history gives an amax.
        spread: over which ranks the weight is cut by tensor parallelism.
        initial: values `[N, K]` in `dtype` on the host, from initialization or a checkpoint, until the first step.
        master: what the last step was quantized from.
    """

    wire: WireFormat
    shape: tuple[int, int]
    dtype: torch.dtype
    codes: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None
    state: ScalingState | None
    algo: str
    spread: Spread
    initial: torch.Tensor | None = None
    master: Master | None = field(default=None, repr=False)

    def bounds(self, piece: torch.Tensor, start: int) -> torch.Tensor:
        """What the scales come from, as far as this piece of the weight tells; a maximum over ranks completes it.

        For delayed scaling the amax that the running step saw comes second: ranks that skipped a layer must not end up
        with another scale.
        """
        bounds = empty_bounds(self.wire, self.shape, self.codes.device)
        note_piece(bounds, piece, start, self.wire, self.shape)
        return bounds if self.state is None else torch.cat([bounds, self.state.current[WEIGHT : WEIGHT + 1]])

    def tensor_parallel_groups(self) -> list[dist.ProcessGroup]:
        """Groups over which `bounds` still lacks a maximum: one scale for the tensor, or for a row, spans ranks."""
        dims = {(0, 0): (OUT, IN), (1, 0): (IN,)}.get(self.wire.block, ())
        return [group for group in map(self.spread.group, dims) if group is not None]

    def set_scales(self, bounds: torch.Tensor, *, step_ends: bool) -> None:
        """Take the scales that complete `bounds` give; codes under the old ones mean nothing from now on.

        Args:
            step_ends: delayed scaling scales by the history that the running step will leave.
        """
        if self.state is not None:
            own, current = bounds[0], bounds[1]
            self.amax.copy_(own)
            scaled_by = self.state.coming_weight_amax(own, current, self.algo) if step_ends else None
            bounds = (self.state.weight_amax(own) if scaled_by is None else scaled_by).reshape(1)
        scale = scale_of(bounds, self.wire, self.shape)
        self.scale.copy_(scale if self.wire.per_tensor else scale.view(torch.uint8).reshape(-1))

    def encode(self, piece: torch.Tensor, start: int) -> None:
        """Replace the codes of one piece of the weight."""
        scale = self.scale
        if not self.wire.per_tensor:
            scale = self.wire.decode(self.codes, self.scale, self.shape).scale
        self.codes[start : start + piece.numel()] = encode_piece(piece, start, scale, self.wire, self.shape)

    def quantize(self, values: torch.Tensor) -> None:
        """Hold `values` `[N, K]` from now on; a collective over the tensor-parallel ranks."""
        values = values.detach().to(self.codes.device, self.dtype)
        flat = values.reshape(-1)
        bounds = maximum_over([self.bounds(flat, 0)], [self.tensor_parallel_groups()])[0]
        self.set_scales(bounds, step_ends=False)
        self.encode(flat, 0)
        self.initial = values.to("cpu", copy=True)

    def full_precision(self) -> torch.Tensor:
        """The masters `[N, K]` rounded to `dtype`; a collective over the ranks that hold parts of them."""
        if self.initial is not None:
            return self.initial.to(self.codes.device)
        whole = torch.zeros(self.shape[0] * self.shape[1], dtype=self.dtype, device=self.codes.device)
        master = self.master
        if master.values is not None:
            whole[master.start : master.start + master.values.numel()] = master.values
        if master.group.size() > 1:
            # Parts do not overlap and are zero elsewhere: the larger byte is the one that somebody has.
            dist.all_reduce(whole.view(torch.uint8), op=dist.ReduceOp.MAX, group=master.group)
        return whole.view(self.shape)


class QuantizedParameter(GatheredWeight):
    """`[N, K]` trainable; made by `quantized_parameter`. Values copied into it are quantized."""

    @staticmethod
    def __new__(cls, holding: Holding, info: GatherInfo) -> QuantizedParameter:
        return torch.Tensor._make_wrapper_subclass(
            cls, holding.shape, dtype=holding.dtype, device=holding.codes.device, requires_grad=False
        )

    def __init__(self, holding: Holding, info: GatherInfo) -> None:
        self.holding = holding
        self._info = info

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Codes and scales; see `WeightView.parts`."""
        held = self.holding
        return (held.codes, held.scale) if held.amax is None else (held.codes, held.scale, held.amax)

    def dequantize(self) -> torch.Tensor:
        """Values in the parameter's dtype: as they were copied in, or from the codes once a step was made."""
        held = self.holding
        return self.dequantize_all() if held.initial is None else held.initial.to(held.codes.device)

    from_float8 = dequantize  # Megatron's name for it with the oldest TransformerEngine

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Values that Megatron's fp32 masters start from."""
        return self.dequantize()

    def clear_high_precision_init_val(self) -> None:
        """Nothing: a checkpoint before the first step needs the values, and other ranks keep theirs, too."""

    def use_memory(self, memory: torch.Tensor) -> None:
        """Keep the codes in `memory`, uint8 of N * K values, which is part of Megatron's buffer."""
        memory = memory.detach().view(-1)
        memory.copy_(self.holding.codes)
        self.holding.codes = memory

    @property
    def data(self) -> torch.Tensor:
        """The same parameter without its place in the graph."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # What `module.to(...)` assigns: another holder of codes, or values.
        if isinstance(value, QuantizedParameter):
            self.holding = value.holding
        else:
            self.holding.quantize(value)

    @property
    def __tensor_flatten__(self) -> None:
        # `module.to(...)` swaps a parameter that can be taken apart for another one, which has none of the attributes
        # that Megatron put there; one that cannot gets its `data` assigned.
        raise AttributeError("a parameter of a low-precision gather cannot be taken apart")

    def _alias(self) -> QuantizedParameter:
        return type(self)(self.holding, self._info)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        held = self.holding
        copied = Holding(
            held.wire, held.shape, held.dtype, held.codes.clone(), held.scale.clone(),
            None if held.amax is None else held.amax.clone(), held.state, held.algo, held.spread,
            None if held.initial is None else held.initial.clone(), held.master,
        )  # fmt: skip
        parameter = torch.nn.Parameter(type(self)(copied, self._info), requires_grad=self.requires_grad)
        memo[id(self)] = parameter
        return parameter

    def __reduce_ex__(self, protocol: object) -> tuple:
        return self.dequantize().__reduce_ex__(protocol)  # files hold plain tensors

    @classmethod
    def _run(cls, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
        first = args[0] if args else None
        if isinstance(first, cls):
            if func is _aten.expand.default and tuple(args[1]) == tuple(first.shape):
                return first._alias()
            if func is _aten.copy_.default:
                source = args[1].dequantize() if isinstance(args[1], cls) else args[1]
                first.holding.quantize(source.expand(first.shape))
                return first
        return super()._run(func, args, kwargs)


def quantized_parameter(
    weight: torch.nn.Parameter, config: QuantConfig, state: ScalingState | None, spread: Spread, name: str
) -> torch.nn.Parameter:
    """`weight` as codes and scales of `config`; a collective over the tensor-parallel ranks.

    Args:
        weight: `[N, K]`, bf16 or fp16; its attributes go over.
        state: amax history of the layer; used for delayed scaling only.
        spread: over which ranks the weight is cut.
        name: for messages.

    Raises:
        ValueError: a recipe or a precision that Megatron's distributed optimizer cannot gather in this way.
    """
    wire = WireFormat.of(config, weight.device)
    if wire is None:
        raise ValueError(f"param_gather with recipe {config}: it does not quantize weights")
    if wire.fmt.packed:
        raise ValueError(
            f"param_gather with recipe {config}: two of its codes share a byte, and Megatron's parameter buffer counts "
            "a byte a value; gather mxfp8 or mxfp8-32x32, or train mxfp4 without param_gather"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"param_gather with {weight.dtype} parameters: Megatron keeps fp32 masters of bf16 and fp16 only (--bf16)"
        )
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    delayed = config.scaling == "delayed"
    scale = torch.ones((), device=device)
    if not wire.per_tensor:
        scale = torch.zeros(wire.scale_bytes(*shape), dtype=torch.uint8, device=device)
    holding = Holding(
        wire, shape, weight.dtype, torch.zeros(shape[0] * shape[1], dtype=torch.uint8, device=device), scale,
        torch.zeros((), device=device) if delayed else None, state if delayed else None, config.amax_algo, spread,
    )  # fmt: skip
    with torch.no_grad():
        holding.quantize(weight)
    parameter = torch.nn.Parameter(QuantizedParameter(holding, GatherInfo(wire, name)), weight.requires_grad)
    parameter.__dict__.update({k: v for k, v in weight.__dict__.items() if k not in parameter.__dict__})
    return parameter


def maximum_over(values: Sequence[torch.Tensor], groups: Sequence[list[dist.ProcessGroup]]) -> list[torch.Tensor]:
    """Each tensor's maximum over its groups, with one all-reduce for each group and dtype.

    Args:
        values: flat, uint8 or fp32; NaN counts as infinity.
        groups: those of each tensor.
    """
    values = list(values)
    together: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
    for index, (value, own) in enumerate(zip(values, groups)):
        for group in own:
            if group.size() > 1:
                together.setdefault((group, value.dtype), []).append(index)
    for (group, _), members in together.items():
        packed = torch.cat([values[index] for index in members])
        if packed.is_floating_point():
            packed = torch.nan_to_num(packed, nan=float("inf"), posinf=float("inf"))
        # Exponent bytes are numbers here, not codes, so not through `comm`, which refuses to reduce bytes.
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
        METER.record("all_reduce", "weight scales", packed.numel() * packed.element_size())
        for index, part in zip(members, packed.split([values[index].numel() for index in members])):
            values[index] = part
    return values
