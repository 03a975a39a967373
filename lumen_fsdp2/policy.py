"""`LumenPolicy`: FSDP2's mixed-precision policy, with how weights are quantized and how they travel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from lumen_core.config import QuantConfig
from lumen_core.values import suggestion
from lumen_fsdp2 import torch_internals

MODES = ("auto", "on-demand", "all", "row")
BACKENDS = ("auto", "c10d", "mori")
PLACEMENTS = (None, "shard_by_dim_0")


@dataclass(frozen=True)
class LumenPolicy(MixedPrecisionPolicy):
    """How a sharded model computes, quantizes and communicates. torch's four fields come first and mean what they do.

    Attributes:
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: see `MixedPrecisionPolicy`. Weights are quantized
            from their value in `param_dtype`, before the gather or after it.
        recipe: recipe name, grammar string or `QuantConfig`. None: that of `quant.enable`, which must have been called.
        low_precision_all_gather: send quantized weights; off, weights travel in `param_dtype` and are quantized after,
            to the same bits but for dgrad of 1x32 blocks, which then has its own (`dgrad_weight=direct`): other numbers
            for MXFP4, and for MXFP8 where magnitudes in a block lie far apart.
        all_gather_mode: which blocks of a 1x32 weight travel. `row`: those of fprop, the others are made from them on
            the spot; `on-demand`: those that the coming pass multiplies, `row` where that could be wrong
            (recomputation, a pass without gradients in training mode, compiled blocks, weights kept between passes),
            as the ranks of a group find together at each gather in backward; `all`: both; `auto`: `row`. Moot for
            others.
        wire: recipe of the form that travels, where it is not that of the recipe; `bf16` is `param_dtype`.
        collectives: `c10d` (NCCL, RCCL, gloo), `mori` (MORI-CCL), or `auto`: MORI where it can run. Chosen for each
            group at its first gather.
        low_precision_reduce_scatter: send gradients in FP8 with a scale per 128 values, summed in fp32.
        shard_placement: `shard_by_dim_0` (the default too): banks of experts are cut between experts.
        print_plan: print the plan once, on rank 0, before the first gather.

    Raises:
        TypeError, ValueError: a value that is not allowed, with what is.
    """

    recipe: str | QuantConfig | None = None
    low_precision_all_gather: bool = True
    all_gather_mode: str = "auto"
    wire: str | None = None
    collectives: str = "auto"
    low_precision_reduce_scatter: bool = False
    shard_placement: str | None = None
    print_plan: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("all_gather_mode", MODES),
            ("collectives", BACKENDS),
            ("shard_placement", PLACEMENTS),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(str(word) for word in allowed)
                near = suggestion(getattr(self, name), [word for word in allowed if word])
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {words}{near}")
        for name in ("low_precision_all_gather", "low_precision_reduce_scatter", "print_plan", "cast_forward_inputs"):
            if not isinstance(getattr(self, name), (bool, _AskedAtForward)):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name in ("recipe", "wire"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, QuantConfig):
                object.__setattr__(self, name, QuantConfig.from_recipe(value))
        if not self.low_precision_all_gather and (self.wire is not None or self.all_gather_mode != "auto"):
            raise ValueError(
                "wire and all_gather_mode say how quantized weights travel: low_precision_all_gather=False"
            )
        object.__setattr__(self, "cast_forward_inputs", _AskedAtForward(self.cast_forward_inputs, self))

    def __reduce__(self) -> tuple:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (dict(values, cast_forward_inputs=int(self.cast_forward_inputs) == 1),)


def _rebuild(values: dict[str, Any]) -> LumenPolicy:
    return LumenPolicy(**values)


class _AskedAtForward(int):
    """A truth value that notices being asked.

    FSDP2 asks `if policy.cast_forward_inputs` at each forward of a module, before its first gather, and tells a policy
    nothing else. That is the last moment at which torch's own `fully_shard` can be stopped from ignoring the policy on
    a model that nobody prepared, and the first at which the whole sharded model is there to plan.
    """

    _policy: LumenPolicy

    def __new__(cls, value: bool, policy: LumenPolicy) -> _AskedAtForward:
        self = super().__new__(cls, bool(int(value)))
        self._policy = policy
        return self

    def __bool__(self) -> bool:
        from lumen_fsdp2.attach import at_forward  # here: attach needs LumenPolicy

        state = torch_internals.asking_state()
        if state is not None:
            at_forward(self._policy, state)
        return int(self) == 1

    def __repr__(self) -> str:
        return str(int(self) == 1)
