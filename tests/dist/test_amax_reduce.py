"""Delayed scaling over ranks: one all-reduce a step, whoever ran what (B21), whatever the values (B25)."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

import lumen_core.quantize as quant


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    return quant.enable(model, recipe="delayed", history_len=4, reduce_amax=True)


def _skipping_rank(rank: int, size: int) -> dict:
    """Rank 1 leaves layer 1 out in step 2 and runs fewer micro-batches; nobody runs layer 2 in step 2."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for step in range(3):
        for micro in range(3 if rank == 0 else 2):
            x = torch.full((4, 16), float(10 * step + micro + 100 * rank + 1))
            x = model[0](x)
            if not (step == 1 and rank == 1):
                x = model[1](x)
            if step != 1:
                x = model[2](x)
            x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: t.clone() for name, t in quant.state_dict(model).items() if name.endswith("history")})
    return {"history": seen, "in_use": [layer.quant_state.in_use.clone() for layer in model]}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_b21_ranks_that_run_different_layers_agree_and_do_not_hang(size: int) -> None:
    answers = run_ranks(_skipping_rank, size, timeout=15.0)
    for other in answers[1:]:
        for mine, theirs in zip(answers[0]["history"], other["history"], strict=True):
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), name
    first, second, third = answers[0]["history"]
    # The maximum over ranks and micro-batches: the last rank's last micro-batch (rank 0 runs three, the others two).
    last = size - 1
    assert first["0.history"][-1, 0] == 100 * last + 1 + 1
    assert second["0.history"][-1, 0] == 10 + 100 * last + 1 + 1
    # Layer 2 was run by nobody in step 2: its history is that of step 1.
    assert torch.equal(second["2.history"], first["2.history"])
    assert not torch.equal(third["2.history"], second["2.history"])
    # Layer 1 was run by rank 0 alone (of two) in step 2: everybody takes what that rank saw.
    assert not torch.equal(second["1.history"], first["1.history"])


def _nan_on(rank: int, size: int, bad_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2):
        x = torch.full((4, 16), 3.0)
        if step == 1 and rank == bad_rank:
            x[0, 0] = float("nan")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[0].quant_state.history.clone(), model[0].quant_state.in_use.clone()


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b25_a_nan_on_any_rank_is_treated_alike(bad_rank: int) -> None:
    """It enters no history, on no rank: the scales of the step before stay in use."""
    for history, in_use in run_ranks(_nan_on, 2, bad_rank, timeout=15.0):
        assert torch.isfinite(history).all()
        assert in_use[0] == 3.0
        assert (history[:, 0] == 3.0).sum() == 1
