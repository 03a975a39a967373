"""Adam moments in one byte a value, by torchao's quantizers.

A moment of a parameter is two ordinary tensors: `codes` (uint8, the parameter's shape) and `scale` (fp32, one
per block along the last dimension). Blocks never cross rows, so any sharding along another dimension cuts
between blocks: the bytes are the same at every world size, and DTensor and DCP treat codes and scales like
any other tensor (torchao's own state tensors count blocks over the flattened *local shard*, so there
precision depends on the world size and a shard that ends inside a block cannot be saved).

Formats: "int8" is the dynamic 8-bit map of "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861);
"fp8" is E4M3 with the block's largest value at 448. E4M3 codes are stored as bytes too, since not every
collective moves FP8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PRECISIONS = ("fp32", "int8", "fp8")
SMALLEST = 4096
"""Tensors with fewer values keep fp32 moments: they cost no memory, and norms are sensitive."""


def block_size(shape: Sequence[int]) -> int | None:
    """Values per scale for a parameter of this *global* shape, or None where its moments stay fp32.

    The largest divisor of the last dimension that lies in 32..256, so that no block is cut short.
    """
    numel = 1
    for size in shape:
        numel *= size
    if len(shape) < 2 or numel < SMALLEST:
        return None
    return next((b for b in range(min(256, shape[-1]), 31, -1) if shape[-1] % b == 0), None)


class Codec:
    """Turns fp32 blocks `[blocks, block]` into (codes uint8 of the same shape, scale fp32 `[blocks]`) and
    back.

    Raises:
        ImportError: torchao is absent, or has none of the quantizers used here.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        try:
            from torchao.optim import quant_utils, subclass_fp8

            self._scale_tensor = quant_utils.scale_tensor
            self._encode_int8 = quant_utils.quantize_8bit_with_qmap
            self._decode_int8 = quant_utils.dequant_with_qmap
            self._encode_fp8 = subclass_fp8.quantize_fp8
            maps = [quant_utils.create_dynamic_map(signed=signed) for signed in (False, True)]
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"optimizer state {precision!r} needs torchao (0.17 or newer): pip install 'lumen-train[train]' "
                f"({error})"
            ) from error
        self._fp8 = subclass_fp8.DTYPE
        self._maps = {"cpu": [torch.tensor(m, dtype=torch.float32) for m in maps]}

    def qmap(self, device: torch.device, signed: bool) -> Tensor:
        """The 256 values of "int8" on `device`; a moment that is never negative uses the unsigned half."""
        key = str(device)
        if key not in self._maps:
            self._maps[key] = [m.to(device) for m in self._maps["cpu"]]
        return self._maps[key][signed]

    def encode(self, x: Tensor, qmap: Tensor) -> tuple[Tensor, Tensor]:
        if self.precision == "fp8":
            codes, scale = self._encode_fp8(x, x.shape[-1])
            return codes.view(torch.uint8), scale
        scaled, scale = self._scale_tensor(x, x.shape[-1])
        return self._encode_int8(scaled, qmap), scale

    def decode(self, codes: Tensor, scale: Tensor, qmap: Tensor) -> Tensor:
        if self.precision == "fp8":
            return codes.view(self._fp8).float() * scale.unsqueeze(-1)
        return self._decode_int8(codes, qmap, scale)


def update(
    param: Tensor,
    grad: Tensor,
    step: Tensor,
    first: tuple[Tensor, Tensor | None, Tensor | None],
    second: tuple[Tensor, Tensor | None, Tensor | None],
    codec: Codec | None,
    lr: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step of one tensor, in place, in fp32 (or wider), undone where `skip` is 1.

    `first` and `second` are (values, None, None), or (codes, scale, map of code values) over rows of one
    block each. The update uses the new moments before they are rounded to bytes.
    """
    beta1, beta2 = betas
    keep = skip > 0
    step.add_(1 - skip)
    weight = param.to(torch.promote_types(param.dtype, torch.float32))
    grad = grad.to(weight.dtype)
    m, v = (x if scale is None else codec.decode(x, scale, qmap) for x, scale, qmap in (first, second))
    m = m.lerp(grad, 1 - beta1)
    v = v.lerp(grad * grad, 1 - beta2)
    # In double: 1 - 0.999 in fp32 is off by 5e-5.
    exact = step.double()
    bias1 = (1 - beta1**exact).to(weight.dtype)
    bias2 = (1 - beta2**exact).to(weight.dtype)
    new = weight * (1 - lr * weight_decay) - lr / bias1 * m / ((v / bias2).sqrt() + eps)
    param.copy_(torch.where(keep, param, new.to(param.dtype)))
    for (stored, scale, qmap), moment in ((first, m), (second, v)):
        if scale is None:
            stored.copy_(torch.where(keep, stored, moment))
        else:
            codes, new_scale = codec.encode(moment, qmap)
            stored.copy_(torch.where(keep, stored, codes))
            scale.copy_(torch.where(keep, scale, new_scale))
