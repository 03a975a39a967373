"""When a step of delayed scaling ends, whose state is saved, and what wrappers, copies and odd models do to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lumen_core.quantize as quant
from lumen_core.linear import QuantLinear


def two_layers(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return quant.enable(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), **{"recipe": "delayed", **options})


def run(model: nn.Module, amax: float = 1.0) -> None:
    x = torch.randn(8, 32)
    model(x / x.abs().max() * amax).sum().backward()


def entries(model: nn.Module) -> list[int]:
    return [int((t != 0).sum(0)[0]) for name, t in quant.state_dict(model).items() if name.endswith("history")]


def test_a_handwritten_update_ends_the_step():
    model = two_layers()
    for _ in range(3):
        run(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    assert entries(model) == [2, 2]  # the third ends when the next pass sees that the weight was written


def test_optimizers_run_inside_backward_make_one_entry_a_step():
    model = two_layers()
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        run(model)
    assert entries(model) == [3, 3]


def test_two_optimizers_make_one_entry_a_step():
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in model]
    for _ in range(3):
        run(model)
        for optimizer in optimizers:
            optimizer.step()
    assert entries(model) == [3, 3]


def test_an_optimizer_of_a_part_still_ends_steps():
    """The other parameters are trainable but nobody steps them: a step ends when the next one is stepped, for a layer
    whose weight is seen to have changed at its next pass."""
    model = two_layers()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)
    for _ in range(3):
        run(model)
        optimizer.step()
    assert entries(model) == [3, 2]


def test_controllers_are_visited_in_the_order_of_enabling(monkeypatch):
    """Their all-reduces must come in the same order on every rank; a set's order is that of memory addresses."""
    models = [two_layers() for _ in range(6)]
    seen = []
    monkeypatch.setattr(
        "lumen_core.controller.end_step", lambda states, *args, **kw: seen.append(id(states[0])), raising=True
    )
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.0)
    for model in models:
        run(model)
    optimizer.step()
    assert seen == [id(m[0].quant_state) for m in models]


def test_infinite_gradients_stay_infinite_once_a_history_is_in_use():
    model = two_layers()
    run(model)
    quant.step_end(model)
    x = torch.randn(8, 32, requires_grad=True)
    grad = torch.ones(8, 32)
    grad[0, 0] = float("inf")
    model(x).backward(grad)
    assert not model[1].weight.grad.isfinite().all() and not x.grad.isfinite().all()


def test_weights_written_in_any_way_are_scaled_by_what_they_are():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quant.enable(model, recipe="delayed")
    run(model)
    quant.step_end(model)
    model.state_dict()["0.weight"].mul_(100)  # how a distributed checkpoint loads in place
    x = torch.rand(8, 32) * 2 - 1
    want = x @ model[0].weight.t()
    assert (model(x) - want).norm() <= 0.05 * want.norm()


def test_parts_enabled_separately_keep_their_own_recipe_and_state():
    model = nn.ModuleDict({"enc": nn.Sequential(nn.Linear(32, 32)), "dec": nn.Sequential(nn.Linear(32, 32))})
    quant.enable(model["enc"], recipe="mxfp8")
    quant.enable(model["dec"], recipe="delayed")
    run(model["dec"], 5.0)
    quant.step_end(model)
    state = quant.state_dict(model)
    assert set(state) == {"dec.0.history", "dec.0.current"} and state["dec.0.history"][-1, 0] == 5.0
    assert {r.name: r.recipe for r in quant.summary(model).rows} == {"enc.0": "mxfp8", "dec.0": "delayed"}
    quant.reset(model)
    quant.load_state_dict(model, state)
    assert model["dec"][0].quant_state.in_use[0] == 5.0


def test_names_are_those_of_the_enabled_model_whatever_wraps_it():
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module  # as DistributedDataParallel calls it

    model = two_layers()
    assert quant.state_dict(Wrapper(model)).keys() == quant.state_dict(model).keys()


def test_state_made_in_inference_mode_can_train():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(32, 32))
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    quant.enable(model, recipe="delayed")
    model.load_state_dict(nn.Sequential(nn.Linear(32, 32)).state_dict(), assign=True)
    with torch.inference_mode():
        model(torch.randn(4, 32))
    run(model)
    quant.step_end(model)
    assert entries(model) == [1]


def test_a_copy_keeps_the_group_and_steps_alone():
    model = two_layers()
    group = object()
    model.__dict__["_lumen"].amax_group = group
    twin = copy.deepcopy(model)
    assert twin.__dict__["_lumen"].amax_group is group and twin.__dict__["_lumen"].model is twin
    run(twin)
    twin.__dict__["_lumen"].amax_group = None
    quant.step_end(twin)
    assert entries(twin) == [1, 1] and entries(model) == [0, 0]


def test_linear_subclasses_and_fused_encoder_layers_are_listed_not_quantized():
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), Mine(32, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
    quant.enable(model, recipe="mxfp8")
    summary = quant.summary(model)
    assert [row.name for row in summary.rows] == ["0"]
    reasons = {name: reason for name, _, reason in summary.skipped}
    assert "subclass" in reasons["1"] and "TransformerEncoderLayer" in reasons["2.linear1"]
    assert "subclass" in reasons["2.self_attn.out_proj"] and summary.quantized_share < 0.5


def test_first_layers_are_those_of_the_uniform_stack():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])
    model = nn.Sequential(nn.Embedding(8, 32), blocks, nn.Linear(32, 8))
    quant.enable(model, recipe="mxfp8", first_layers_bf16=1)
    converted = [name for name, m in model.named_modules() if isinstance(m, QuantLinear)]
    assert converted == ["1.1.0", "1.2.0", "1.3.0", "2"]


def test_a_kernel_that_fails_names_itself_and_the_operands(monkeypatch):
    from lumen_core.kernels import gemm
    from lumen_core.kernels.registry import Candidate, Operation, always

    def boom(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(gemm, "GEMM", Operation("gemm", (Candidate("reference", always, boom),)))
    layer = quant.enable(nn.Linear(32, 32), recipe="mxfp8")
    with pytest.raises(RuntimeError, match=r"gemm by reference failed on .*k=32.*boom"):
        layer(torch.randn(4, 32))


def test_a_quantized_layer_is_not_built_by_hand():
    with pytest.raises(TypeError, match=r"quant\.enable"):
        QuantLinear(4, 4)
