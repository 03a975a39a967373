"""FSDP2 with quantized weights on the wire: `fully_shard(module, mp_policy=LumenPolicy(recipe="mxfp8"))`.

With torch's own `fully_shard` the policy works too, on a model that `quant.enable` prepared.
"""

from lumen_fsdp2.attach import plan
from lumen_fsdp2.plan import Plan, PlanRow
from lumen_fsdp2.policy import LumenPolicy
from lumen_fsdp2.shard import fully_shard

__all__ = ["LumenPolicy", "Plan", "PlanRow", "fully_shard", "plan"]
