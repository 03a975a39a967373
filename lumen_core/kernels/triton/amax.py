"""Largest magnitudes of many tensors in as few launches as possible. Importing this file does not import `triton`."""

from __future__ import annotations

import torch

from lumen_core.kernels.triton.launching import DTYPES, TILE, on_device_of, power_of_two, warps

_STEPS = 8


def absmax(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, fp32 `[len(tensors)]`: 0 for an empty one, NaN where it holds one.

    Two launches for one tensor; for several, whatever their number, two for each input dtype (and for those not
    aligned to 16 bytes). Their addresses then go to the device from pinned memory: the host does not wait, but a CUDA
    graph must not capture it. Equal inputs give equal bits.

    Args:
        tensors: fp32, bf16 or fp16, on one GPU, at least one.

    Raises:
        ValueError: another dtype, or several devices.
    """
    device = tensors[0].device
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    tensors = [t.detach().contiguous() for t in tensors]
    for i, t in enumerate(tensors):
        if t.device != device or t.dtype not in DTYPES:
            raise ValueError(f"absmax: {t.dtype} on {t.device} beside {tensors[0].dtype} on {device}")
        groups.setdefault((t.dtype, t.data_ptr() % 16 == 0), []).append(i)
    out = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    with on_device_of(tensors[0]):
        if len(tensors) == 1:
            _absmax_of_one(tensors[0], out)
        elif len(groups) == 1:
            _absmax_of_many(tensors, out, aligned=next(iter(groups))[1])
        else:
            for (_, aligned), members in groups.items():
                part = torch.zeros(len(members), dtype=torch.int32, device=device)
                _absmax_of_many([tensors[i] for i in members], part, aligned=aligned)
                out[_to_device(torch.tensor(members), device)] = part
    return out.view(torch.float32)


def _absmax_of_one(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.numel() == 0:
        return
    from lumen_core.kernels.triton import cast_kernels as kernels

    steps = _steps(x.numel())
    programs = -(-x.numel() // (TILE * steps))
    kernels.absmax_of_one[(programs,)](x, out, x.numel(), BLOCK=TILE, STEPS=steps, num_warps=warps(TILE))


def _absmax_of_many(tensors: list[torch.Tensor], out: torch.Tensor, *, aligned: bool) -> None:
    steps = _steps(sum(t.numel() for t in tensors))
    first, programs = [], 0
    for t in tensors:
        first.append(programs)
        programs += -(-t.numel() // (TILE * steps))
    if programs == 0:
        return
    import triton.language as tl

    from lumen_core.kernels.triton import cast_kernels as kernels

    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensors[0].dtype]
    table = torch.tensor([first, [t.data_ptr() for t in tensors], [t.numel() for t in tensors]], dtype=torch.int64)
    kernels.absmax_of_many[(programs,)](
        _to_device(table, out.device), out, len(tensors), DTYPE=dtype, ALIGNED=aligned,
        COUNT_BLOCK=power_of_two(len(tensors)), BLOCK=TILE, STEPS=steps, num_warps=warps(TILE),
    )  # fmt: skip


def _steps(values: int) -> int:
    """Blocks that one program reduces: several where enough programs remain to fill the device."""
    return _STEPS if values >= 1024 * _STEPS * TILE else 1


def _to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    # From pageable memory the copy would wait for the stream.
    return table.pin_memory().to(device, non_blocking=True)
