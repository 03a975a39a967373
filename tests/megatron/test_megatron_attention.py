"""Core attention of Megatron layers: every backend, packed documents, context parallelism, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HEADS, GROUPS, WIDTH = 4, 2, 16


def _attention(layout: Any, options: dict[str, Any], config: dict[str, Any] | None = None, **extra: Any) -> Any:
    from gpt import set_up
    from megatron.core.transformer.enums import AttnMaskType

    from lumen_megatron.attention import LumenCoreAttention
    from lumen_megatron.options import configure

    sizes = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    made = configure(set_up(layout, **{**sizes, **(config or {})}), "bf16", **options)
    return LumenCoreAttention(made, 1, AttnMaskType.causal, "self", **extra)


def _inputs(tokens: int, *batch: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(tokens, *batch, heads, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`[t, heads, d]` by the definition, with a table of what each query sees."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def _documents(lengths: list[int], window: int | None = None) -> torch.Tensor:
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(which.shape[0])
    visible = (which[:, None] == which) & (index[:, None] >= index)
    return visible if window is None else visible & (index[:, None] - index <= window)


def _packed(lengths: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths))


def _own_tokens(lengths: list[int], rank: int, ranks: int) -> torch.Tensor:
    """Tokens of a rank under context parallelism: of each document chunks r and 2n-1-r, by slicing."""
    out, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        out += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(out)


LENGTHS = [16, 8, 32, 8]


def _run_packed(rank: int, size: int, window: int | None) -> tuple[torch.Tensor, ...]:
    from gpt import Layout

    config = {} if window is None else {"window_size": (window, 0)}
    attention = _attention(Layout(cp=size), {"attention_backend": "lumen"}, config)
    own = _own_tokens(LENGTHS, rank, size)
    whole = _inputs(sum(LENGTHS))
    q, k, v = (x.detach()[own].requires_grad_() for x in whole)
    out = attention(q, k, v, None, packed_seq_params=_packed(LENGTHS))
    (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
    return own, out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [1, 2])
def test_packed_documents_never_see_each_other(ranks, size: int, window: int | None) -> None:
    answers = ranks(size).run(_run_packed, window)
    q, k, v = _inputs(sum(LENGTHS))
    out = _exact(q, k, v, _documents(LENGTHS, window)).reshape(sum(LENGTHS), -1)
    factors = [torch.arange(a[1].numel()).view_as(a[1]).sin() for a in answers]
    sum((out[a[0]] * f).sum() for a, f in zip(answers, factors)).backward()
    for own, got, *gradients in answers:
        assert torch.allclose(got, out[own], atol=1e-12)
        for gradient, x in zip(gradients, (q, k, v)):
            assert torch.allclose(gradient, x.grad[own], atol=1e-12)


def _run_dense(rank: int, size: int, options: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    from gpt import Layout

    attention = _attention(Layout(), options)
    q, k, v = _inputs(32, 2, dtype=dtype)
    mask = torch.ones(1, 1, 32, 32).triu(1).bool()
    return attention(q, k, v, mask).detach()


def test_backends_agree(ranks) -> None:
    q, k, v = _inputs(32, 2)
    want = torch.stack([_exact(q[:, i], k[:, i], v[:, i], _documents([32])) for i in range(2)], dim=1)
    for backend in ("lumen", "megatron", "auto"):
        got = ranks(1).run(_run_dense, {"attention_backend": backend}, torch.float64)[0]
        assert torch.allclose(got, want.reshape(32, 2, -1), atol=1e-6), backend


@pytest.mark.parametrize("recipe,bound", [("fp8", 20.0), ("mxfp8", 20.0)])
def test_low_precision_attention(ranks, recipe: str, bound: float) -> None:
    want, got = (
        ranks(1).run(_run_dense, {"attention": r, "attention_backend": "lumen"}, torch.float32)[0]
        for r in ("bf16", recipe)
    )
    snr = -20 * torch.log10((got - want).norm() / want.norm())
    assert bound < snr < 40


def _values_of_another_width(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    from gpt import Layout

    attention = _attention(Layout(), {}, k_channels=24, v_channels=8, softmax_scale=None)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(16, 1, HEADS, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(16, 1, HEADS, 8, generator=generator, dtype=torch.float64)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / 24**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)
    return attention(q, k, v, None), torch.einsum("bhqk,kbhd->qbhd", scores, v).reshape(16, 1, -1)


def test_values_of_another_width_than_keys(ranks) -> None:
    got, want = ranks(1).run(_values_of_another_width)[0]
    assert torch.allclose(got, want, atol=1e-12)


def _refused(rank: int, size: int, options: dict[str, Any], config: dict[str, Any]) -> str:
    from gpt import Layout

    try:
        _attention(Layout(cp=size), options, config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "size,options,config,words",
    [
        (1, {"attention": "fp8"}, {"attention_dropout": 0.1}, ["attention=fp8", "attention_dropout=0.1"]),
        (2, {}, {"attention_dropout": 0.1}, ["context_parallel_size=2", "attention_dropout=0.1"]),
        (2, {"attention_backend": "megatron"}, {}, ["megatron", "context_parallel_size=2"]),
        (1, {"attention": "fp9"}, {}, ["attention='fp9'", "mxfp8"]),
        (1, {"attention": "fp8", "attention_backend": "megatron"}, {}, ["attention=fp8", "megatron"]),
    ],
)
def test_what_nobody_computes_is_refused_when_the_model_is_built(ranks, size, options, config, words) -> None:
    for message in ranks(size).run(_refused, options, config):
        assert all(word in message for word in words), message


def _with_a_bias(rank: int, size: int) -> str:
    from gpt import Layout

    attention = _attention(Layout(), {"attention_backend": "lumen", "attention": "mxfp8"})
    try:
        attention(*_inputs(8, 1), None, attention_bias=torch.zeros(1, 1, 8, 8))
    except ValueError as error:
        return str(error)
    return ""


def test_a_bias_is_refused_where_megatron_cannot_help(ranks) -> None:
    assert "attention_bias" in ranks(1).run(_with_a_bias)[0]


def _by_transformer_engine(rank: int, size: int) -> list[str]:
    import ast
    import inspect
    from pathlib import Path

    from gpt import Layout
    from megatron.core.extensions import transformer_engine as te

    said = []
    try:
        _attention(Layout(), {"attention_backend": "te"})
    except ValueError as error:
        said.append(str(error))
    # The signature of Megatron's wrapper, from its source: without TransformerEngine the class itself is a stand-in.
    tree = ast.parse(Path(inspect.getsourcefile(te)).read_text())
    wrapper = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention")
    methods = {n.name: [a.arg for a in n.args.args] for n in wrapper.body if isinstance(n, ast.FunctionDef)}

    class Strict(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            names = methods["__init__"][1:]
            assert len(args) <= len(names) and set(kwargs) <= set(names), (args, kwargs)
            said.append("made")

        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            assert len(args) <= 1 and set(kwargs) <= set(methods["forward"]), kwargs
            said.append("called")
            return query.reshape(*query.shape[:2], -1)

    real = te.HAVE_TE, te.TEDotProductAttention
    te.HAVE_TE, te.TEDotProductAttention = True, Strict
    try:
        attention = _attention(Layout(), {"attention_backend": "auto"}, attention_dropout=0.1, cp_comm_type="p2p")
        assert type(attention) is Strict, "names in checkpoints are those of TransformerEngine's module"
        attention(*_inputs(8, 1), None, attn_mask_type=None, attention_bias=None, packed_seq_params=None)
    finally:
        te.HAVE_TE, te.TEDotProductAttention = real
    return said


def test_transformer_engine_computes_attention_where_installed(ranks) -> None:
    missing, *rest = ranks(1).run(_by_transformer_engine, seconds=60.0)[0]
    assert "attention_backend=te" in missing and "not installed" in missing
    assert rest == ["made", "called"]
