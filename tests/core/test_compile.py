"""`torch.compile(fullgraph=True)` of a Llama block for every recipe against eager (B66)."""

from __future__ import annotations

import pytest
import torch
from reference import relative
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from variants import NAMED, assert_same, enable, twin

import lumen_core.quantize as quant

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="sdpa",
)


class LlamaBlock(nn.Module):
    """One decoder layer with its rotary table."""

    def __init__(self) -> None:
        super().__init__()
        CONFIG._attn_implementation = "sdpa"
        self.rotary = LlamaRotaryEmbedding(CONFIG)
        self.layer = LlamaDecoderLayer(CONFIG, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out = self.layer(x, position_embeddings=self.rotary(x, positions))
        return out[0] if isinstance(out, tuple) else out


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(variant: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return enable(LlamaBlock().to(device), variant)


def step(model, run, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward, backward, end of step."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(g)
    quant.step_end(model)
    return {"y": y.detach(), "dx": leaf.grad, **{n: p.grad for n, p in model.named_parameters()}}


def batches(device: torch.device, count: int, tokens: int = 24):
    """Inputs whose amax varies tenfold from step to step."""
    for i in range(count):
        torch.manual_seed(100 + i)
        factor = 10.0 ** (i % 2)
        yield torch.randn(2, tokens, 64, device=device) * factor, torch.randn(2, tokens, 64, device=device) * factor


def compare(variant: str, backend: str, device: torch.device, steps: int, limit: float, make=block) -> None:
    eager = make(variant, device)
    compiled = twin(eager)
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    for i, (x, g) in enumerate(batches(device, steps)):
        want, got = step(eager, eager, x, g), step(compiled, run, x, g)
        for name in want:
            assert relative(want[name], got[name]) <= limit, (i, name)
        if backend == "aot_eager":
            assert_same(quant.state_dict(eager), quant.state_dict(compiled))
        if i == 1:
            warm = counter.frame_count
    assert counter.frame_count == warm <= 2


@pytest.mark.parametrize("variant", NAMED)
def test_b66_full_graph_matches_eager(variant, device):
    """aot_eager runs the same kernels in the same order: bitwise scales, and results to the last bits."""
    compare(variant, "aot_eager", device, 5, 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", NAMED)
def test_b66_inductor_matches_eager(variant, device):
    """Fused kernels may round an intermediate differently, which can move a value to the next code. On a CPU the C++
    compiler takes over ten minutes for a whole block in 4 bits, so two layers stand for it there."""
    make = small if variant == "mxfp4" and device.type == "cpu" else block
    compare(variant, "inductor", device, 3, 5e-2 if variant == "mxfp4" else 2e-2, make)


# Below, one linear layer between two others stands for the block: tracing seven layers in each mode takes minutes.


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def small(variant: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return enable(Small().to(device), variant)


@pytest.mark.parametrize("variant", ["tensorwise", "delayed", "mxfp4"])
def test_b66_with_checkpointing(variant, device):
    eager = small(variant, device)
    compiled = twin(eager)
    run = torch.compile(lambda x: checkpoint(compiled, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    for x, g in batches(device, 3):
        want, got = step(eager, eager, x, g), step(compiled, run, x, g)
        for name in want:
            assert relative(want[name], got[name]) <= 1e-5, name
        assert_same(quant.state_dict(eager), quant.state_dict(compiled))


@pytest.mark.parametrize("variant", ["delayed", "rowwise", "mxfp8", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_b66_token_count_may_change(variant, device):
    """At most two recompilations: graphs for a fixed size, a varying one, and in MX for M that fills whole blocks."""
    eager = small(variant, device)
    compiled = twin(eager)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    for tokens in (24, 32, 17, 40, 20):
        (x, g) = next(batches(device, 1, tokens))
        want, got = step(eager, eager, x, g), step(compiled, run, x, g)
        for name in want:
            assert relative(want[name], got[name]) <= 1e-5, (tokens, name)
    assert counter.frame_count <= 3


def test_b66_one_graph_serves_partial_and_whole_blocks(device):
    """48 tokens leave half a block to fill, 64 none: padding by nothing keeps the strides of a transposed view."""
    layer = enable(nn.Linear(32, 32, device=device), "mxfp4", stochastic_rounding=False)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    eager = twin(layer)
    for count in (48, 64):
        x, g = torch.randn(count, 32, device=device), torch.randn(count, 32, device=device)
        want, got = step(eager, eager, x, g), step(layer, run, x, g)
        for name in want:
            assert relative(want[name], got[name]) <= 1e-5, (count, name)


@pytest.mark.parametrize("variant", ["delayed", "mxfp8"])
def test_b66_evaluation_and_training_compile_once_each(variant, device):
    model = small(variant, device)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        for x, g in batches(device, 1):
            step(model, run, x, g)
        model.eval()
        with torch.no_grad():
            run(x)
        model.train()
    assert counter.frame_count <= 2
