"""What the tests of whole layers share: every recipe and format, their error bounds, and one forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lumen_core.quantize as quant
from lumen_core.config import QuantConfig

#: Every named recipe but bf16, then the formats that recipes do not name.
VARIANTS: dict[str, dict[str, Any]] = {
    "tensorwise": dict(recipe="tensorwise"),
    "delayed": dict(recipe="delayed"),
    "hybrid": dict(recipe="hybrid"),
    "rowwise": dict(recipe="rowwise"),
    "blockwise": dict(recipe="blockwise"),
    "mxfp8": dict(recipe="mxfp8"),
    "mxfp8-32x32": dict(recipe="mxfp8-32x32"),
    "mxfp4": dict(recipe="mxfp4"),
    "e5m2-dynamic": dict(format="fp8_e5m2", scaling="dynamic"),
    "e5m2-delayed": dict(format="fp8_e5m2", scaling="delayed"),
    "e5m2-rowwise": dict(format="fp8_e5m2", scaling="rowwise"),
    "e5m2-blockwise": dict(format="fp8_e5m2", scaling="blockwise"),
    "hybrid-dynamic": dict(format="hybrid", scaling="dynamic"),
    "hybrid-rowwise": dict(format="hybrid", scaling="rowwise"),
    "hybrid-blockwise": dict(format="hybrid", scaling="blockwise"),
    "fnuz-delayed": dict(recipe="delayed", flavour="fnuz"),
    "fnuz-hybrid": dict(recipe="hybrid", flavour="fnuz"),
    "fnuz-mxfp8": dict(recipe="mxfp8", flavour="fnuz"),
}
NAMED = [name for name, options in VARIANTS.items() if "recipe" in options and "flavour" not in options]
DELAYED = [name for name, options in VARIANTS.items() if "delayed" in name or name == "hybrid"]
every_variant = pytest.mark.parametrize("variant", list(VARIANTS))
every_recipe = pytest.mark.parametrize("variant", NAMED)


def config_of(variant: str, **overrides: Any) -> QuantConfig:
    """The configuration a variant stands for."""
    options = VARIANTS[variant] | overrides
    recipe = options.pop("recipe", None)
    return QuantConfig.from_recipe(recipe, **options) if recipe else QuantConfig(**options)


def enable(model: nn.Module, variant: str, **overrides: Any) -> nn.Module:
    return quant.enable(model, **(VARIANTS[variant] | overrides))


def linear(
    variant: str | None,
    inputs: int = 32,
    outputs: int = 48,
    *,
    bias: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> nn.Linear:
    """One enabled layer (the model itself), or a plain one for variant None; equal weights for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / inputs**0.5)
    layer = layer.to(device, dtype)
    return layer if variant is None else enable(layer, variant, **overrides)


def bound(variant: str, gemm: str = "fprop") -> float:
    """Relative Frobenius error that a whole GEMM on N(0, 1) data may have (cases.md, common rules)."""
    config = config_of(variant)
    if config.format == "mxfp4":
        return 0.25 if gemm != "fprop" and config.stochastic_rounding else 0.18
    operands = {
        "fprop": (config.activation_format, config.weight_format),
        "dgrad": (config.gradient_format, config.weight_format),
        "wgrad": (config.gradient_format, config.activation_format),
    }[gemm]
    return (0.05, 0.08, 0.10)[operands.count("e5m2")]


def run(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor | None = None
) -> dict[str, torch.Tensor | None]:
    """Forward and backward: y, dx and the gradient of each parameter by name (gradients start from None)."""
    for parameter in layer.parameters():
        parameter.grad = None
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Bitwise equality of two results of `run`."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if value is None:
            assert right[name] is None, name
        else:
            assert torch.equal(value, right[name]), f"{name}: max {(value - right[name]).abs().max()}"


def twin(model: nn.Module) -> nn.Module:
    """An independent copy with the same values and scaling state."""
    return copy.deepcopy(model)


class Block(nn.Module):
    """A pre-norm MLP block with a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, a stack of blocks, and a head that may share the embedding's weight."""

    def __init__(self, vocab: int = 64, width: int = 32, hidden: int = 64, depth: int = 2, *, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens(*shape: int, vocab: int = 64, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)).to(device)
