"""The table that `quantize.summary` prints: what each layer computes in, and with which kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.config import QuantConfig
from lumen_core.controller import Controller
from lumen_core.experts import QuantExperts
from lumen_core.formats import element_format, resolve_flavour
from lumen_core.fused import Fused
from lumen_core.kernels.gemm import GEMM
from lumen_core.kernels.query import GemmQuery
from lumen_core.linear import QuantLinear
from lumen_core.names import plain_name

# Kernels are named for a token count that suits every alignment; an odd count may fall to a slower one.
_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """One quantized weight.

    Attributes:
        name: full dotted name of the module, with the projection for expert banks.
        shape: of the weight.
        recipe: the recipe's name.
        gemms: precision of fprop, dgrad, wgrad as operand formats (`e4m3*e4m3`) or `bf16`.
        kernels: implementation that runs each of the three.
        trainable: whether wgrad runs at all.
    """

    name: str
    shape: tuple[int, ...]
    recipe: str
    gemms: tuple[str, str, str]
    kernels: tuple[str, str, str]
    trainable: bool


@dataclass(frozen=True)
class Summary:
    """What `enable` did to a model. `str()` gives a table.

    Attributes:
        config: the recipe in force (the first one, where parts of the model were enabled separately).
        flavour: encoding of FP8 codes here, `ocp` or `fnuz`.
        rows: quantized weights.
        skipped: `(name, shape, reason)` of linear weights that stay in high precision.
        fused: names of norms and MLPs that run by our operations.
    """

    config: QuantConfig
    flavour: str
    rows: list[Row]
    skipped: list[tuple[str, tuple[int, ...], str]]
    fused: tuple[str, ...] = ()

    @property
    def quantized_share(self) -> float:
        """Share of the linear weights, by number of elements, that the recipe covers (0 to 1)."""
        quantized = sum(_numel(row.shape) for row in self.rows)
        total = quantized + sum(_numel(shape) for _, shape, _ in self.skipped)
        return quantized / max(total, 1)

    def __str__(self) -> str:
        header = ("module", "weight", "recipe", "fprop", "dgrad", "wgrad", "kernels")
        lines = [header]
        for row in self.rows:
            kernels = row.kernels[0] if len(set(row.kernels)) == 1 else " ".join(row.kernels)
            gemms = row.gemms if row.trainable else (*row.gemms[:2], "frozen")
            lines.append((row.name or "(model)", _shape(row.shape), row.recipe, *gemms, kernels))
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
        table.insert(1, "  ".join("-" * w for w in widths))
        table += [f"left as it is: {n or '(model)'} {_shape(s)}: {reason}" for n, s, reason in self.skipped]
        if self.fused:
            table.append(f"{len(self.fused)} norms and MLPs run by fused operations")
        table.append(
            f"{len(self.rows)} weights quantized with {self.config} ({self.flavour}; dgrad weight: "
            f"{self.config.dgrad_weight}), {self.quantized_share:.1%} of linear weights"
        )
        return "\n".join(table)


def summarize(model: torch.nn.Module, controllers: list[Controller]) -> Summary:
    """Summary of `model`, all or parts of which `controllers` enabled."""
    rows, device, configs = [], torch.device("cpu"), []
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            weights = {name: module.weight}
        elif isinstance(module, QuantExperts):
            weights = {f"{name}.{p}".lstrip("."): getattr(module, p) for p in module.quant_states}
        else:
            continue
        config = module.quant_config
        configs.append(config)
        for label, weight in weights.items():
            device = weight.device
            rows.append(row_of(label, weight, config))
    skipped = [entry for controller in controllers for entry in controller.skipped]
    config = configs[0]  # all alike; an adapter may have settled where dgrad takes its weight from
    fused = tuple(plain_name(name) for name, module in model.named_modules() if isinstance(module, Fused))
    return Summary(config, resolve_flavour(config.flavour, device), rows, skipped, fused)


def row_of(name: str, weight: torch.Tensor, config: QuantConfig) -> Row:
    """The row of one quantized weight `[N, K]`, or `[E, N, K]`."""
    n, k = weight.shape[-2:]
    kernels = _kernels(config, n, k, weight.device)
    return Row(name, tuple(weight.shape), config.recipe, _gemms(config), kernels, weight.requires_grad)


def _gemms(config: QuantConfig) -> tuple[str, str, str]:
    a, w, g = config.activation_format, config.weight_format, config.gradient_format
    if not config.quantize_activation:
        a = g = "bf16"
    operands = {"fprop": (a, w), "dgrad": (g, w), "wgrad": (g, a)}
    return tuple(
        "bf16" if getattr(config, gemm) == "bf16" or set(pair) == {"bf16"} else "*".join(pair)
        for gemm, pair in operands.items()
    )


def _kernels(config: QuantConfig, n: int, k: int, device: torch.device) -> tuple[str, str, str]:
    if config.format == "bf16":
        return ("matmul_bf16",) * 3
    flavour = resolve_flavour(config.flavour, device)
    a = (element_format(config.activation_format, flavour), config.activation_block)
    w = (element_format(config.weight_format, flavour), config.weight_block)
    g = (element_format(config.gradient_format, flavour), config.gradient_block)
    # Row-wise dgrad folds the weight's scales into the gradient and multiplies bare codes.
    w_dgrad = (w[0], TENSOR_BLOCK) if w[1] == ROW_BLOCK else w
    out = []
    for gemm, left, right, cols, depth in (
        ("fprop", a, w, n, k),
        ("dgrad", g, w_dgrad, k, n),
        ("wgrad", g, a, k, _TOKENS),
    ):
        if getattr(config, gemm) == "bf16" or not config.quantize_activation:
            out.append("matmul_bf16")
            continue
        query = GemmQuery(device.type, *left, *right, _TOKENS, cols, depth, torch.bfloat16)
        out.append(GEMM.choose(query).name)
    return tuple(out)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
