"""`import lumen_megatron.auto` as the first line of a Megatron script: `--transformer-impl lumen` works from there on.

The one module of this package that acts when it is imported. On a machine without a GPU it also lets Megatron run on
the CPU (see `lumen_megatron.cpu`).
"""

from __future__ import annotations

import torch

from lumen_megatron import cpu, host

if not torch.cuda.is_available():
    cpu.install()
host.install()
