"""Steps with a NaN or an infinity: skipped, explained, and in the end too many (B25, B28)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_job import losses, tiny_job, train_rows
from torch.distributed.tensor import DTensor

from launch import loop
from launch.nonfinite import NonFiniteError
from launch.step import TrainStep
from lumen_core import quantize as quant
from lumen_core.amax import GRADIENT


@pytest.fixture
def at_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a hook factory that is in force while the given steps are computed, and when they are run again."""

    def install(steps: set[int], hook: Callable[[torch.nn.Module], object]) -> None:
        original = loop.Trainer.__init__

        def init(self: loop.Trainer, *args: object) -> None:
            original(self, *args)
            backward = self.step.backward
            bad: set[int] = set()

            def watched(batches: list) -> tuple:
                # Known by its identity: the loop keeps the very object it may have to run again.
                if self.position.step + 1 in steps:
                    bad.add(id(batches))
                if id(batches) not in bad:
                    return backward(batches)
                handle = hook(self.model)
                try:
                    return backward(batches)
                finally:
                    handle.remove()

            self.step.backward = watched

        monkeypatch.setattr(loop.Trainer, "__init__", init)

    return install


def spoil_output(name: str, value: float) -> Callable[[torch.nn.Module], object]:
    def hook(model: torch.nn.Module) -> object:
        return model.get_submodule(name).register_forward_hook(
            lambda module, args, output: output * value, prepend=True
        )

    return hook


def spoil_gradient(name: str) -> Callable[[torch.nn.Module], object]:
    def hook(model: torch.nn.Module) -> object:
        def spoil(module: torch.nn.Module, grads: tuple, outputs: tuple) -> tuple:
            return tuple(None if g is None else g * float("inf") for g in grads)

        return model.get_submodule(name).register_full_backward_hook(spoil, prepend=True)

    return hook


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_bad_step_is_skipped_named_and_leaves_no_trace(
    tmp_path: Path, at_steps: Callable, capsys: pytest.CaptureFixture[str], recipe: str, device: torch.device
) -> None:
    at_steps({5}, spoil_output("model.layers.1.mlp.up_proj", float("nan")))
    changes = {"train__max_steps": 14, "checkpoint__interval": 0, "backend__device": device.type}
    cfg = tiny_job(tmp_path, quant__recipe=recipe, **changes)
    result = loop.run(cfg)
    rows = train_rows(cfg.run_dir)
    assert [r["step"] for r in rows if r["skipped"]] == [5] and result.nonfinite_steps == 1
    assert rows[4]["loss"] is None and all(r["loss"] is not None for r in rows if r["step"] != 5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    out = capsys.readouterr().out
    assert "step 5 was skipped" in out and "the output of model.layers.1.mlp.up_proj (rank 0)" in out


def test_running_it_again_changes_nothing(tmp_path: Path, at_steps: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    at_steps({5}, spoil_output("model.layers.0.self_attn.v_proj", float("inf")))
    curves = []
    for explain in (True, False):
        if not explain:
            monkeypatch.setattr("launch.nonfinite.find_culprit", lambda *args: None)
        cfg = tiny_job(
            tmp_path,
            run_dir=str(tmp_path / str(explain)),
            quant__recipe="delayed",
            quant__options={"stochastic_rounding": True},
        )
        loop.run(cfg)
        curves.append(losses(cfg.run_dir))
    assert curves[0] == curves[1]


def test_weights_moments_and_histories_are_untouched(
    tmp_path: Path, at_steps: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_steps({4}, spoil_output("lm_head", float("nan")))  # every gradient is NaN, every activation is fine
    original, changed = TrainStep.__call__, []

    def state(step: TrainStep) -> dict[str, torch.Tensor]:
        tensors = {f"weight {n}": p.detach() for n, p in step.model.named_parameters()}
        for name, param in step.model.named_parameters():
            tensors |= {f"{kind} {name}": value for kind, value in step.optimizer.state[param].items()}
        tensors = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
        histories = quant.state_dict(step.model)
        tensors |= {f"gradient {n}": t[:, GRADIENT] for n, t in histories.items() if n.endswith(".history")}
        return {n: t.clone() for n, t in tensors.items()}

    def observed(self: TrainStep, batches: list, **options: bool) -> torch.Tensor:
        before = state(self)
        answer = original(self, batches, **options)
        changed.append({n.split()[0] for n, t in state(self).items() if not torch.equal(t, before[n])})
        return answer

    monkeypatch.setattr(TrainStep, "__call__", observed)
    loop.run(tiny_job(tmp_path, quant__recipe="delayed", optim__weight_decay=0.5))
    everything = {"weight", "step", "exp_avg", "exp_avg_sq", "gradient"}
    assert changed == [everything] * 3 + [set()] + [everything] * 4


@pytest.mark.parametrize(
    "hook, named",
    [
        (spoil_gradient("model.layers.1.self_attn.o_proj"), "model.layers.1.self_attn.o_proj"),
        (spoil_output("lm_head", float("inf")), "lm_head"),
    ],
    ids=["backward", "head"],
)
def test_too_many_end_the_run_with_step_and_module(tmp_path: Path, at_steps: Callable, hook, named: str) -> None:
    at_steps({2, 5, 6}, hook)
    cfg = tiny_job(tmp_path, train__max_nonfinite_steps=3)
    with pytest.raises(NonFiniteError) as caught:
        loop.run(cfg)
    assert caught.value.step == 5 and caught.value.module == named
    assert f"of {named} (rank 0)" in str(caught.value) and "step 5 (and 1 more up to step 6)" in str(caught.value)
    assert "train.max_nonfinite_steps=3" in str(caught.value)
    assert [r["step"] for r in train_rows(cfg.run_dir) if r["skipped"]] == [2, 5, 6]


def test_a_value_made_between_modules_is_the_parents(tmp_path: Path, at_steps: Callable) -> None:
    def hook(model: torch.nn.Module) -> object:
        def spoil(module: torch.nn.Module, args: tuple) -> tuple:
            return (args[0] * float("nan"), *args[1:])

        # Before the observer's own hook: as if the attention's code had computed it.
        return model.get_submodule("model.layers.0.self_attn.o_proj").register_forward_pre_hook(spoil, prepend=True)

    at_steps({1}, hook)
    with pytest.raises(NonFiniteError) as caught:
        loop.run(tiny_job(tmp_path, train__max_nonfinite_steps=1))
    assert caught.value.module == "model.layers.0.self_attn"


def test_a_bad_weight_is_told(tmp_path: Path, at_steps: Callable) -> None:
    class Restore:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight, self.kept = weight, weight.clone()

        def remove(self) -> None:
            self.weight.copy_(self.kept)

    def hook(model: torch.nn.Module) -> object:
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight").detach().to_local()
        restore = Restore(weight)
        weight[0, 0] = float("inf")
        return restore

    at_steps({1}, hook)
    with pytest.raises(NonFiniteError, match="its weight is not finite.*model.layers.1.mlp.down_proj"):
        loop.run(tiny_job(tmp_path, train__max_nonfinite_steps=1, quant__recipe="bf16"))


def test_a_passing_fault_is_called_one(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    original, calls = TrainStep.backward, []

    def once(self: TrainStep, batches: list) -> tuple:
        loss, tokens = original(self, batches)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 2 else loss), tokens

    monkeypatch.setattr(TrainStep, "backward", once)
    loop.run(tiny_job(tmp_path))
    assert "step 2 was skipped" in (out := capsys.readouterr().out)
    assert "run again with the present weights, its batch gave finite values" in out
