"""AdamW whose additions to `torch.optim.AdamW` are all per-parameter state.

Parameter groups hold the model's own parameters, so schedulers, clipping, global step hooks and
`torch.distributed.checkpoint` see nothing unusual. State is `step`, `exp_avg`, `exp_avg_sq` as in
`torch.optim.AdamW`, plus `master` (fp32) where the parameter is bf16 or fp16, and `exp_avg_scale`,
`exp_avg_sq_scale` where moments are one byte a value.

All arithmetic runs on local shards, so DTensor and plain parameters mix freely and a rank may own nothing.
State is made when the optimizer is, not by a step with zero gradients: such a step would advance Adam's bias
correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from lumen_core.low_bit_state import PRECISIONS, Codec, block_size, update
from lumen_core.weight_watch import WeightWatch

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_SUPPORTED = (*_LOW_PRECISION, torch.float32, torch.float64)
_FUSED_DEVICES = ("cpu", "cuda")
_CHUNK = 1 << 26
"""Values whose fp32 gradients are alive at once (256 MiB): casting all would cost as much as the masters."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: its very memory and write counter.

    `to_local()` gives the same but costs an autograd view per call, which hundreds of parameters a step notice.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(param: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`local` as a tensor of global `shape` distributed as `param` is (as it is where `param` is not)."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride() if shape != tuple(param.shape) else param.stride(),
    )


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with the options of `build_optimizer`, whose arguments these are.

    Groups may hold any floating-point parameters. Moments and masters are fp32 (fp64 for fp64 parameters).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        state: str = "fp32",
        master_weights: str | bool = "auto",
        fused: str | bool = "auto",
    ) -> None:
        for option, value, allowed in (
            ("state", state, PRECISIONS),
            ("master_weights", master_weights, ("auto", True, False)),
            ("fused", fused, ("auto", True, False)),
        ):
            if value not in allowed or type(value) is int:  # 0 == False
                raise ValueError(f"{option} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        for option, value, good in (
            ("lr", lr, isinstance(lr, Tensor) or lr >= 0),
            ("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not good:
                limits = "two values in [0, 1)" if option == "betas" else "a value of at least 0"
                raise ValueError(f"{option} is {value!r}; expected {limits}")
        self.precision = state
        self.master_weights = bool(master_weights)
        self.fused = fused
        self._derive()
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "state_precision": state})

    def _derive(self) -> None:
        """What is neither configuration nor state."""
        self.skip_flag: Tensor | None = None
        self._codec = Codec(self.precision) if self.precision != "fp32" else None
        self._compiled: Callable[..., None] | None = None
        self._watch: WeightWatch | None = None
        # Write counters of each parameter as its master was last made from it or written to it.
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; state of the new parameters is made here."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in _SUPPORTED:
                raise TypeError(f"AdamW: a parameter is {param.dtype}; expected bf16, fp16, fp32 or fp64")
            if self.fused is True and param.device.type not in (*_FUSED_DEVICES, "meta"):
                raise ValueError(f"fused=True: {param.device.type} has no fused kernel; use fused='auto'")
            if not param.is_meta:
                self._state_of(param)

    # -- state

    def _block(self, param: Tensor) -> int | None:
        """Block size of one-byte moments; None keeps fp32. Looks at global properties only."""
        if self.precision == "fp32" or param.dtype == torch.float64:
            return None
        placements = param.placements if isinstance(param, DTensor) else ()
        if any(isinstance(p, Shard) and p.dim % param.ndim == param.ndim - 1 for p in placements):
            return None  # shards would cut blocks
        return block_size(param.shape)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The parameter's state, made on first use (a parameter on the meta device has no values before)."""
        state = self.state[param]
        if "step" in state:
            return state
        local = _local(param).detach()
        wide = torch.promote_types(param.dtype, torch.float32)
        state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        block = self._block(param)
        for key in _MOMENTS:
            if block is None:
                state[key] = _like(param, torch.zeros_like(local, dtype=wide), tuple(param.shape))
                continue
            self._codec.qmap(local.device, key == "exp_avg")  # copied now: a step makes the host wait for nothing
            codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
            lines = (*local.shape[:-1], local.shape[-1] // block)
            state[key] = _like(param, codes, tuple(param.shape))
            state[f"{key}_scale"] = _like(
                param,
                torch.zeros(lines, dtype=torch.float32, device=local.device),
                (*param.shape[:-1], param.shape[-1] // block),
            )
        if self.master_weights and param.dtype in _LOW_PRECISION:
            state["master"] = _like(param, local.to(wide, copy=True), tuple(param.shape))
            self._versions[param] = self._version(param)
        return state

    @staticmethod
    def _version(param: Tensor) -> tuple[int, int]:
        # A write to a DTensor counts on the wrapper or on its local tensor, depending on who writes.
        return param._version, _local(param)._version

    @torch.no_grad()
    def refresh_master_weights(self, *, force: bool = True) -> None:
        """Re-derive masters from parameters that somebody else has written, such as a loaded checkpoint.

        `step` and `state_dict` do this by themselves for writes that leave a trace: `load_state_dict`, DCP,
        in-place operations. Call it after writing through `param.data`. A master that still rounds to its
        parameter keeps its low bits, so the order in which weights and optimizer state are loaded does not
        matter.
        """
        for param, master in self.master_parameters():
            if force or self._versions.get(param) != self._version(param):
                ours, theirs = _local(master), _local(param)
                same = (ours.to(theirs.dtype) == theirs).all()
                ours.copy_(torch.where(same, ours, theirs.to(ours.dtype)))
                self._versions[param] = self._version(param)

    def master_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, fp32 master) of each parameter that has one."""
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state[param].get("master") if param in self.state else None
                if master is not None:
                    yield param, master

    def watch(self, model: nn.Module) -> None:
        """Notice what write counters do not show: writes into `model.state_dict()`, replaced parameters."""
        self._watch = WeightWatch(model, self)

    def expect_foreign_writes(self) -> None:
        """Compare every master with its parameter before the next step, whatever the write counters say."""
        self._versions.clear()

    # -- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless the skip flag (`set_skip_flag`) is up."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._watch is not None:
            self._watch.check_replaced(p for g in self.param_groups for p in g["params"] if p.grad is None)
        self.refresh_master_weights(force=False)
        skip = None if self.skip_flag is None else (self.skip_flag != 0).float()
        written = []
        for group in self.param_groups:
            fused, single = [], []
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self._state_of(param)
                written.append(param)
                if _local(param).numel() == 0:
                    state["step"] += 1 if skip is None else 1 - skip
                elif self._can_fuse(param, state):
                    fused.append(param)
                else:
                    single.append(param)
            for chunk in _chunks(fused):
                self._step_fused(group, chunk, skip)
            if single:
                self._step_single(group, single, skip)
        self._publish(written)
        return loss

    def _can_fuse(self, param: Tensor, state: dict[str, Tensor]) -> bool:
        if self.fused is False or "exp_avg_scale" in state or param.device.type not in _FUSED_DEVICES:
            return False
        # Fused kernels walk memory, not indices: a view with gaps has another layout than its state.
        return _local(param).stride() == _local(state["exp_avg"]).stride()

    def _gradient(self, param: Tensor, target: Tensor) -> Tensor:
        """The local gradient in the dtype and memory layout of `target`."""
        grad = param.grad
        if grad.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients (nn.Embedding(sparse=True))")
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        grad = grad.to_local() if isinstance(grad, DTensor) else grad  # waits for a collective still under way
        if grad.dtype == target.dtype and grad.stride() == target.stride():
            return grad
        # A gradient in another layout would silently be applied to other elements.
        return torch.empty_like(target).copy_(grad)

    def _step_fused(self, group: dict[str, Any], params: list[Tensor], skip: Tensor | None) -> None:
        states = [self._state_of(p) for p in params]
        locals_ = [_local(p) for p in params]
        wide = [_local(s["exp_avg"]).dtype for s in states]
        targets = [_local(s["master"]) if "master" in s else x.to(w) for s, x, w in zip(states, locals_, wide)]
        beta1, beta2 = group["betas"]
        adamw(
            targets,
            [self._gradient(p, t) for p, t in zip(params, targets)],
            [_local(s["exp_avg"]) for s in states],
            [_local(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            foreach=False,
            found_inf=skip,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        apart = [(x, t) for s, x, t in zip(states, locals_, targets) if "master" not in s and t is not x]
        if apart:
            torch._foreach_copy_([x for x, _ in apart], [t for _, t in apart])

    def _step_single(self, group: dict[str, Any], params: list[Tensor], skip: Tensor | None) -> None:
        for param in params:
            state = self._state_of(param)
            target = _local(state.get("master", param))
            device = target.device
            grad = self._gradient(param, target)
            gate = torch.zeros((), device=device) if skip is None else skip.to(device, non_blocking=True)
            lr = group["lr"]
            lr = (
                lr.to(device, torch.float32, non_blocking=True)
                if isinstance(lr, Tensor)
                else torch.full((), lr, device=device)
            )
            weight, moments, step = target, [], update
            if "exp_avg_scale" in state:
                blocks = _local(state["exp_avg_scale"]).numel()
                weight, grad = target.reshape(blocks, -1), grad.reshape(blocks, -1)
                step = self._update_on(device)
            for key, signed in zip(_MOMENTS, (True, False)):
                stored, scale = _local(state[key]), state.get(f"{key}_scale")
                if scale is None:
                    moments.append((stored, None, None))
                else:
                    qmap = self._codec.qmap(device, signed)
                    moments.append((stored.view(weight.shape), _local(scale).view(-1), qmap))
            options = (group["betas"], group["eps"], group["weight_decay"])
            step(weight, grad, state["step"], *moments, self._codec, lr, gate, *options)
            if weight.data_ptr() != target.data_ptr():
                target.copy_(weight.view(target.shape))

    def _update_on(self, device: torch.device) -> Callable[..., None]:
        """One kernel per tensor on a GPU; a CPU would spend longer compiling than it ever saves."""
        if device.type != "cuda" or self.fused is False:
            return update
        if self._compiled is None:
            self._compiled = torch.compile(update, dynamic=True)
        return self._compiled

    def _publish(self, params: list[Tensor]) -> None:
        """Copy masters into their parameters and let every write counter show the write."""
        pairs = [(p, self.state[p]["master"]) for p in params if "master" in self.state[p]]
        if pairs:
            torch._foreach_copy_([_local(p) for p, _ in pairs], [_local(m) for _, m in pairs])
        if params:  # neither fused kernels nor writes to a local tensor count by themselves
            torch.autograd.graph.increment_version(params)
        for param, _ in pairs:
            self._versions[param] = self._version(param)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with masters that agree with the parameters as they are now."""
        self.refresh_master_weights(force=False)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but each tensor keeps the dtype it has here instead of taking its parameter's.

        State of `torch.optim.AdamW`, or of this optimizer with another `state`, is converted; masters that
        the state lacks are made from the parameters.
        """
        kept = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(kept)
        # The loaded groups may carry the precision of another run.
        before = [group.get("state_precision", "fp32") for group in self.param_groups]
        for group in self.param_groups:
            group["state_precision"] = self.precision
        for precision, saved, group in zip(before, state_dict["param_groups"], self.param_groups):
            for index, param in zip(saved["params"], group["params"]):
                self._adopt(self._state_of(param), state_dict["state"].get(index, {}), precision)
        self.expect_foreign_writes()

    def _adopt(self, state: dict[str, Any], saved: dict[str, Any], precision: str) -> None:
        """Copy `saved` into `state`, through fp32 where it stores moments another way; zero what it lacks."""
        for key in ("step", *_MOMENTS):
            target = _local(state[key])
            scale = _local(state[f"{key}_scale"]) if f"{key}_scale" in state else None
            if key not in saved:
                for tensor in (target, scale):
                    _ = tensor is None or tensor.zero_()
                continue
            source = _local(torch.as_tensor(saved[key]))
            if source.numel() != target.numel():
                raise ValueError(f"saved {key} has {source.numel()} values on this rank, here {target.numel()}")
            source_scale = _local(saved[f"{key}_scale"]) if f"{key}_scale" in saved else None
            if source_scale is not None and scale is not None and precision == self.precision:
                scale.copy_(source_scale)
            elif source.numel() and (source_scale is not None or scale is not None):
                source = source.to(target.device)
                if source_scale is not None:
                    codec = Codec(precision)
                    rows = source.reshape(source_scale.numel(), -1)
                    qmap = codec.qmap(rows.device, key == "exp_avg")
                    source = codec.decode(rows, source_scale.reshape(-1).to(rows.device), qmap)
                if scale is not None:
                    rows = source.reshape(scale.numel(), -1).float()
                    source, new_scale = self._codec.encode(rows, self._codec.qmap(rows.device, key == "exp_avg"))
                    scale.copy_(new_scale.view(scale.shape))
            target.copy_(source.reshape(target.shape))
        if "master" in state and "master" in saved:
            _local(state["master"]).copy_(_local(saved["master"]))

    def __getstate__(self) -> dict[str, Any]:
        options = {k: self.__dict__[k] for k in ("precision", "master_weights", "fused")}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_versions" not in self.__dict__:  # a copy or an unpickled optimizer: make what is derived
            self._derive()


def _chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of about `_CHUNK` local values."""
    chunk: list[Tensor] = []
    total = 0
    for param in params:
        chunk.append(param)
        total += _local(param).numel()
        if total >= _CHUNK:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
