"""Top-k routing of tokens to experts, in fp32 whatever the logits' dtype.

    softmax   scores = softmax(logits)           (Switch, Mixtral, Qwen3)
    sigmoid   scores = sigmoid(logits)           (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16)

With groups, only the `topk_groups` best groups of a token take part. A group's score is the sum of its two best
experts' with sigmoid (DeepSeek-V3) and its best expert's with softmax (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
"""

from __future__ import annotations

import torch

__all__ = ["topk_route"]


def topk_route(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    groups: int | None = None,
    topk_groups: int | None = None,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices of each token's `k` experts, best first.

    Plain torch, which a compiler fuses. Ties go to the lower index, on every device. The gradient reaches the logits
    through the weights; the choice has none. With `k=1` a renormalized weight is 1, and its gradient zero.

    Args:
        logits: `[..., E]`, any float dtype (arithmetic in fp32, fp64 for fp64).
        k: experts a token.
        score: `softmax` or `sigmoid`.
        groups: number of equal groups of neighbouring experts.
        topk_groups: groups that take part; needed with `groups`.
        bias: `[E]`, added to the scores for the choice only, for load balancing without an auxiliary loss.
        renormalize: make a token's weights sum to 1.

    Returns:
        weights `[..., k]` in fp32 (fp64), indices int64 `[..., k]`.

    Raises:
        ValueError: an option is out of range or does not fit the others.
    """
    experts = logits.shape[-1]
    _check(experts, k, score, groups, topk_groups, bias)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    with torch.autocast(logits.device.type, enabled=False):
        scores = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
        choice = scores.detach()
        if bias is not None:
            choice = choice + bias.detach().to(choice.dtype)
        if groups is not None:
            # The bias may make scores negative: those outside must be below all of them.
            choice = choice.masked_fill(~_in_best_groups(choice, score, groups, topk_groups), float("-inf"))
        indices = _best(choice, k)
        weights = scores.gather(-1, indices)
        if renormalize:
            # Sigmoids may all have underflowed to zero: then the weights stay zero, not NaN.
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return weights, indices


def _in_best_groups(choice: torch.Tensor, score: str, groups: int, topk_groups: int) -> torch.Tensor:
    """True for experts `[..., E]` in the token's best groups."""
    grouped = choice.unflatten(-1, (groups, -1))
    members = min(2 if score == "sigmoid" else 1, grouped.shape[-1])
    best = _best(grouped.topk(members, dim=-1).values.sum(-1), topk_groups)
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter(-1, best, True)
    return kept[..., None].expand(grouped.shape).flatten(-2)


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    # Not topk, which breaks ties as it likes.
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def _check(
    experts: int, k: int, score: str, groups: int | None, topk_groups: int | None, bias: torch.Tensor | None
) -> None:
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score={score!r}: must be softmax or sigmoid")
    if not 1 <= k <= experts:
        raise ValueError(f"k={k}: must be between 1 and the number of experts, {experts}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias of shape {tuple(bias.shape)}: must be ({experts},)")
    if (groups is None) != (topk_groups is None):
        raise ValueError(f"groups={groups} and topk_groups={topk_groups}: give both or none")
    if groups is None:
        return
    if groups < 1 or experts % groups:
        raise ValueError(f"groups={groups}: must divide the number of experts, {experts}")
    if not 1 <= topk_groups <= groups:
        raise ValueError(f"topk_groups={topk_groups}: must be between 1 and groups={groups}")
    if k > topk_groups * (experts // groups):
        raise ValueError(f"k={k}: {topk_groups} groups of {experts // groups} hold fewer experts")
