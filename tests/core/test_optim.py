"""The optimizer on one process: parity with torch, masters, one-byte moments, the device-side skip, loading."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lumen_core.low_bit_state import block_size
from lumen_core.optim import AdamW, build_optimizer, set_skip_flag

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


class Net(nn.Module):
    """A matrix large enough for one-byte moments, a small one, a bias, a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 5)
        self.to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.wide(x))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    """Steps on fixed random data; the losses."""
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 96, generator=generator).to(weight)
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def torch_adamw(model: Net, **options: object) -> torch.optim.AdamW:
    """What `build_optimizer` should equal, groups included."""
    flat = [p for p in model.parameters() if p.ndim < 2]
    deep = [p for p in model.parameters() if p.ndim >= 2]
    return torch.optim.AdamW([{"params": deep}, {"params": flat, "weight_decay": 0.0}], **OPTIONS, **options)


@pytest.mark.parametrize("fused", ["auto", True, False])
def test_fp32_is_torch_adamw(device: torch.device, fused: str | bool) -> None:
    ours, theirs = Net(device=device), Net(device=device)
    train(ours, build_optimizer(ours, fused=fused, **OPTIONS), 10)
    train(theirs, torch_adamw(theirs, fused=True), 10)
    if fused is False:
        torch.testing.assert_close(values(ours), values(theirs), atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(values(ours), values(theirs))


def test_decay_leaves_out_biases_and_norms() -> None:
    optimizer = build_optimizer(Net(), **OPTIONS)
    decays = {tuple(p.shape): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {(64, 96): 0.1, (5, 64): 0.1, (64,): 0.0, (5,): 0.0}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(2, 3, 4))
            self.up_bias = nn.Parameter(torch.zeros(2, 3))

    optimizer = build_optimizer(Experts(), **OPTIONS)
    assert [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups] == [[(2, 3, 4)], [(2, 3)]]


def test_groups_given_by_the_user_keep_their_options() -> None:
    model = Net()
    groups = [
        {"params": model.wide.parameters(), "lr": 1.0, "weight_decay": 0.5},
        {"params": [*model.norm.parameters(), *model.head.parameters()]},
    ]
    optimizer = build_optimizer(groups, **OPTIONS)
    seen = [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert seen == [(1.0, 0.5, 1), (1e-2, 0.1, 1), (1e-2, 0.0, 3)]


def test_frozen_parameters_are_left_out_and_unused_ones_do_not_move(device: torch.device) -> None:
    model = Net(torch.bfloat16, device)
    model.wide.weight.requires_grad_(False)
    optimizer = build_optimizer(model, **OPTIONS)
    frozen = model.wide.weight.clone()
    unused = nn.Parameter(torch.ones(3, 3, device=device, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [unused], "weight_decay": 0.5})
    train(model, optimizer, 2)
    assert torch.equal(model.wide.weight, frozen) and model.wide.weight not in optimizer.state
    assert torch.equal(unused, torch.ones_like(unused)) and optimizer.state[unused]["step"] == 0
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimizer(model.requires_grad_(False), **OPTIONS)


# -- masters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", ["auto", False])
def test_masters_follow_an_fp32_run_and_weights_are_their_rounding(
    device: torch.device, dtype: torch.dtype, fused: str | bool
) -> None:
    model = Net(dtype, device)
    optimizer = build_optimizer(model, fused=fused, **{**OPTIONS, "lr": 1e-4})
    exact = Net(dtype, device).float()
    reference = torch_adamw(exact)
    reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 1e-4
    start = values(exact)
    for step in range(20):
        torch.manual_seed(step)
        for low, high in zip(model.parameters(), exact.parameters()):
            low.grad = torch.randn(low.shape).to(low)
            high.grad = low.grad.float()
        optimizer.step()
        reference.step()
    masters = dict(optimizer.master_parameters())
    assert len(masters) == 5 and all(m.dtype == torch.float32 for m in masters.values())
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in masters.items())
    got = torch.cat([masters[p].flatten() for p in model.parameters()])
    # Updates of 1e-4 on weights of order 1 would vanish in bf16: what they add up to has to be there.
    torch.testing.assert_close(got - start, values(exact) - start, atol=2e-7, rtol=1e-3)


def test_without_masters_small_updates_are_lost_and_no_copy_is_kept(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16, device=device))
    optimizer = build_optimizer([weight], lr=1e-4, weight_decay=0.0, master_weights=False)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight, torch.ones_like(weight))
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("state", ["fp32", "int8", "fp8"])
def test_low_precision_weights_all_train(state: str, device: torch.device) -> None:
    """B74: memory must not be saved by not training."""
    model = Net(torch.bfloat16, device)
    optimizer = build_optimizer(model, state=state, **OPTIONS)
    before = {p: m.clone() for p, m in optimizer.master_parameters()}
    losses = train(model, optimizer, 4, seed=3)
    assert len(before) == len(optimizer.state) == sum(p.requires_grad for p in model.parameters()) == 5
    assert all(not torch.equal(before[p], m) for p, m in optimizer.master_parameters())
    assert losses[3] < losses[0]


def test_gradient_in_another_memory_layout(device: torch.device) -> None:
    """The fused kernels walk memory; torch's own gives a wrong answer here."""
    start = torch.arange(6.0, device=device).view(2, 3)
    for fused in ("auto", False):
        weight = nn.Parameter(start.t().clone(memory_format=torch.preserve_format))
        gaps = nn.Parameter(torch.arange(12.0, device=device).view(3, 4)[:, :2].detach())
        expected = [weight - torch.tensor([[1.0, 1], [-1, 1], [1, 1]], device=device), gaps - 1]
        weight.grad = torch.tensor([[1.0, 2], [-3, 4], [5, 6]], device=device)
        gaps.grad = torch.ones(3, 2, device=device)
        build_optimizer([weight, gaps], lr=1.0, weight_decay=0.0, fused=fused).step()
        torch.testing.assert_close([weight, gaps], expected)


# -- loading


def copy_in(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict())


def copy_through_state_dict(model: nn.Module, other: nn.Module) -> None:
    taken = model.state_dict()
    for name, tensor in other.state_dict().items():
        taken[name].copy_(tensor)


@pytest.mark.parametrize("load", [copy_in, copy_through_state_dict])
def test_weights_alone_are_loaded_into_the_masters_too(load: object, device: torch.device) -> None:
    """B34: the step after starts from the loaded weight, not from the one the master was made of."""
    model, other = Net(torch.bfloat16, device), Net(torch.bfloat16, device)
    optimizer = build_optimizer(model, **OPTIONS)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    load(model, other)
    fresh = build_optimizer(other, **OPTIONS)
    train(model, optimizer, 1)
    train(other, fresh, 1)
    assert torch.equal(values(model), values(other))
    for (_, mine), (_, theirs) in zip(optimizer.master_parameters(), fresh.master_parameters()):
        assert torch.equal(mine, theirs)


def test_a_saved_state_never_holds_stale_masters() -> None:
    model = Net(torch.bfloat16)
    optimizer = build_optimizer(model, **OPTIONS)
    with torch.no_grad():
        model.wide.weight.mul_(2)
    saved = optimizer.state_dict()["state"]
    assert torch.equal(saved[0]["master"], model.wide.weight.float())
    model.wide.weight.data.mul_(2)  # leaves no trace
    optimizer.refresh_master_weights()
    assert torch.equal(optimizer.state[model.wide.weight]["master"], model.wide.weight.float())


def test_replaced_parameters_are_an_error() -> None:
    model = Net(torch.bfloat16)
    optimizer = build_optimizer(model, **OPTIONS)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"'wide.weight' was replaced .* build the optimizer afterwards"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("state", ["fp32", "int8", "fp8"])
@pytest.mark.parametrize("weights_first", [True, False])
def test_resume_is_bitwise(state: str, weights_first: bool, device: torch.device) -> None:
    through = Net(torch.bfloat16, device)
    optimizer = build_optimizer(through, state=state, **OPTIONS)
    train(through, optimizer, 3)
    weights = copy.deepcopy(through.state_dict())
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    train(through, optimizer, 3, seed=9)

    resumed = Net(torch.bfloat16, device)
    again = build_optimizer(resumed, state=state, **OPTIONS)
    train(resumed, again, 1, seed=5)  # state to be overwritten
    if weights_first:
        resumed.load_state_dict(weights)
    again.load_state_dict(saved)
    if not weights_first:
        resumed.load_state_dict(weights)
    train(resumed, again, 3, seed=9)
    assert torch.equal(values(resumed), values(through))
    for key, tensor in again.state[resumed.wide.weight].items():
        assert torch.equal(tensor, optimizer.state[through.wide.weight][key]), key


@pytest.mark.parametrize("after", ["fp32", "int8", "fp8"])
@pytest.mark.parametrize("before", ["torch", "fp32", "int8", "fp8"])
def test_state_of_another_precision_is_converted(before: str, after: str) -> None:
    first = Net()
    source = torch_adamw(first) if before == "torch" else build_optimizer(first, state=before, **OPTIONS)
    train(first, source, 5)
    second = copy.deepcopy(first)
    target = build_optimizer(second, state=after, **OPTIONS)
    target.load_state_dict(source.state_dict())
    assert {g["state_precision"] for g in target.param_groups} == {after}
    assert target.state[second.wide.weight]["step"] == 5
    start = values(first)
    train(first, source, 1)
    train(second, target, 1)
    moved, expected = values(second) - start, values(first) - start
    low = {before, after} & {"int8", "fp8"} and before != after
    assert (moved - expected).norm() < (0.3 if low else 1e-5) * expected.norm()


@pytest.mark.parametrize("state", ["fp32", "int8", "fp8"])
def test_first_step_moves_by_lr_also_after_resuming(state: str, device: torch.device) -> None:
    """B80: no dummy step has advanced the bias correction."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = nn.Linear(64, 64, bias=False, device=device)
    optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.0, state=state)
    # What a trainer does that saves or restores before its first step.
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    start = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 1
    torch.testing.assert_close(start - model.weight, torch.full_like(start, 1e-2), atol=1e-7, rtol=0)


def test_copies_and_pickles() -> None:
    model = Net(torch.bfloat16)
    optimizer = build_optimizer(model, state="int8", **OPTIONS)
    train(model, optimizer, 2)
    pair = copy.deepcopy((model, optimizer))
    stored = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(model, optimizer, 2)
    assert train(*pair, 2) == expected
    assert train(*stored, 2) == expected


# -- one-byte moments


@pytest.mark.parametrize(("state", "name"), [("int8", "AdamW8bit"), ("fp8", "AdamWFp8")])
def test_one_byte_moments_follow_torchao(state: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ours, theirs = nn.Linear(256, 32), nn.Linear(256, 32)
    theirs.load_state_dict(ours.state_dict())
    mine = build_optimizer(ours, state=state, **OPTIONS)
    groups = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = getattr(torchao.optim, name)(groups, **OPTIONS)
    for step in range(6):
        torch.manual_seed(step)
        for a, b in zip(ours.parameters(), theirs.parameters()):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(values(ours), values(theirs), atol=2e-5, rtol=1e-4)
    state_of = mine.state[ours.weight]
    theirs_avg = reference.state[theirs.weight]["exp_avg"]
    close = (state_of["exp_avg"].int() - theirs_avg.codes.view(torch.uint8).int()).abs() <= 1
    assert close.float().mean() > 0.999
    torch.testing.assert_close(state_of["exp_avg_scale"].view(-1), theirs_avg.scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("state", ["int8", "fp8"])
def test_moments_take_one_byte_a_value(state: str, device: torch.device) -> None:
    model = nn.Linear(512, 256, device=device)
    optimizer = build_optimizer(model, state=state, **OPTIONS)
    weight, bias = optimizer.state[model.weight], optimizer.state[model.bias]
    moments = [t for k, t in weight.items() if k != "step"]
    assert sum(t.numel() * t.element_size() for t in moments) == 2 * 512 * 256 * (1 + 4 / 256)
    assert bias["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 512), 256), ((100, 576), 192), ((64, 100), 100), ((4, 4096), 256), ((4100,), None)]
    + [((8, 128), None), ((4099, 997), None), ((2, 64, 48), 48), ((5000, 16), None)],
)
def test_blocks_fill_rows_exactly(shape: tuple[int, ...], block: int | None) -> None:
    assert block_size(shape) == block


def test_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"state 'fp8' needs torchao .*lumen-train\[train\]"):
        build_optimizer(Net(), state="fp8", **OPTIONS)


# -- skipping and hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["fp32", "int8", "fp8"])
@pytest.mark.parametrize("fused", ["auto", False])
def test_a_skipped_step_changes_no_bit(device: torch.device, dtype: torch.dtype, state: str, fused: str | bool) -> None:
    model = Net(dtype, device)
    optimizer = build_optimizer(model, state=state, fused=fused, **OPTIONS)
    flag = torch.zeros((), device=device)
    set_skip_flag(optimizer, flag)
    empty = nn.Parameter(torch.zeros(0, 4, device=device, dtype=dtype))
    optimizer.add_param_group({"params": [empty]})

    def snapshot() -> list[Tensor]:
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        return [t.detach().clone().view(-1).view(torch.uint8) for t in tensors]

    for steps, bad in enumerate((float("nan"), float("inf"))):  # before the first step and after it
        before = snapshot()
        for p in (*model.parameters(), empty):
            p.grad = torch.full_like(p, bad)
        flag.fill_(1.0)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot()))
        flag.fill_(0.0)
        for p in (*model.parameters(), empty):
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(before[:5], snapshot()))
        assert all(s["step"] == steps + 1 for s in optimizer.state.values())


def test_steps_around_a_skipped_one_are_those_of_a_run_without_it(device: torch.device) -> None:
    models = [Net(device=device), Net(device=device)]
    optimizers = [build_optimizer(m, state="int8", **OPTIONS) for m in models]
    flag = torch.ones((), device=device)
    for model, optimizer, skips in zip(models, optimizers, (True, False)):
        train(model, optimizer, 2)
        if skips:
            set_skip_flag(optimizer, flag)
            train(model, optimizer, 1, seed=8)
            set_skip_flag(optimizer, None)
        train(model, optimizer, 2, seed=4)
    assert torch.equal(values(models[0]), values(models[1]))


@pytest.mark.parametrize("state", ["fp32", "int8", "fp8"])
def test_a_step_with_a_flag_makes_no_host_sync(device: torch.device, state: str) -> None:
    models = [Net(torch.bfloat16, device), Net(torch.bfloat16, device)]
    optimizers = [build_optimizer(m, state=state, **OPTIONS) for m in models]
    set_skip_flag(optimizers[0], torch.zeros((), device=device))
    for model, optimizer in zip(models, optimizers):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()  # compiles on a GPU
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(values(models[0]), values(models[1]))


def test_skip_flag_on_torch_optimizers(device: torch.device) -> None:
    model = Net(device=device)
    optimizer = torch_adamw(model, fused=True)
    set_skip_flag(optimizer, torch.ones((), device=device))
    start = values(model)
    train(model, optimizer, 1)
    assert torch.equal(values(model), start)
    with pytest.raises(TypeError, match=r"AdamW cannot be skipped .*build_optimizer"):
        set_skip_flag(torch_adamw(model, foreach=True), torch.ones((), device=device))
    with pytest.raises(ValueError, match=r"\(1,\) torch.float32; expected a 0-dim float32"):
        set_skip_flag(optimizer, torch.ones(1))


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_global_step_hook_fires_once_and_knows_the_parameters(state: str) -> None:
    model = Net(torch.bfloat16)
    optimizer = build_optimizer(model, state=state, **OPTIONS)
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda o, *_: seen.append({p for g in o.param_groups for p in g["params"]})
    )
    try:
        train(model, optimizer, 3)
    finally:
        handle.remove()
    assert seen == [set(model.parameters())] * 3


def test_schedulers_closures_and_tensor_rates(device: torch.device) -> None:
    model = Net(device=device)
    optimizer = build_optimizer(model, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    start = values(model)
    train(model, optimizer, 1)
    assert torch.equal(values(model), start)  # rate zero
    schedule.step()
    train(model, optimizer, 1)
    assert not torch.equal(values(model), start)
    assert optimizer.step(lambda: 5.0) == 5.0
    for fused in ("auto", False):
        pair = Net(device=device), Net(device=device)
        for net, lr in zip(pair, (1e-2, torch.tensor(1e-2))):
            train(net, build_optimizer(net, lr=lr, state="int8", fused=fused), 3)
        torch.testing.assert_close(values(pair[0]), values(pair[1]), atol=1e-7, rtol=1e-6)


# -- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgd"}, "optimizer name is 'sgd'; allowed: 'adamw'"),
        ({"state": "int4"}, "state is 'int4'; allowed: 'fp32', 'int8', 'fp8'"),
        ({"master_weights": "yes"}, "master_weights is 'yes'; allowed: 'auto', True, False"),
        ({"fused": "no"}, "fused is 'no'; allowed"),
        ({"lr": -1.0}, "lr is -1.0; expected a value of at least 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); expected two values in \[0, 1\)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(Net(), **{**OPTIONS, **options})


def test_bad_parameters() -> None:
    with pytest.raises(TypeError, match="single tensor"):
        build_optimizer(nn.Parameter(torch.ones(2)), **OPTIONS)
    with pytest.raises(TypeError, match="complex64; expected bf16"):
        build_optimizer([nn.Parameter(torch.ones(2, dtype=torch.complex64))], **OPTIONS)
    embedding = nn.Embedding(4, 4, sparse=True)
    optimizer = build_optimizer(embedding, **OPTIONS)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="no sparse gradients"):
        optimizer.step()
    assert isinstance(optimizer, AdamW)
