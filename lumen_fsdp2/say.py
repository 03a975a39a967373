"""Lines for the user."""

from __future__ import annotations

import torch

_said: set[str] = set()


def say_once(text: str, detail: str = "") -> None:
    """Print a line on rank 0; another one that differs in `detail` only is not printed."""
    if text in _said:
        return
    _said.add(text)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"lumen_fsdp2: {' '.join(filter(None, (text, detail)))}", flush=True)
