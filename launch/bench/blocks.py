"""The transformer block that `lumen-bench layer` and `fsdp2` train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

HEADS, KV_HEADS = 32, 8


class Block(nn.Module):
    """A Llama block with fused qkv and gate-up projections: four linear layers."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.head = hidden // HEADS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (HEADS + 2 * KV_HEADS) * self.head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[B, T, hidden]`, causal."""
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, HEADS + 2 * KV_HEADS, self.head).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotations(tokens: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[tokens, head]` of rotary position embedding, bf16."""
    head = hidden // HEADS
    frequencies = 500000.0 ** (-torch.arange(0, head, 2, device=device) / head)
    angle = torch.arange(tokens, device=device)[:, None] * frequencies
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


@contextlib.contextmanager
def one_attention(device: torch.device) -> Iterator[None]:
    """The same attention kernel for all rows: left to itself, torch may choose another for another row."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
        yield
