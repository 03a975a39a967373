"""Collectives in two levels, for groups that span nodes: one transport inside a node, another between nodes.

Each byte crosses between nodes once: a gather goes between nodes first, while shards are small, and then inside them; a
reduce-scatter the other way round.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lumen_core.comm.collectives import (
    C10dCollectives,
    Collectives,
    GroupCollectives,
    Label,
    LaterWork,
    ReduceOp,
    check_reducible,
)
from lumen_core.comm.meter import METER, ByteMeter

_NESTING_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class HierarchicalCollectives(GroupCollectives):
    """`Collectives` of a group out of those of its nodes.

    Calls are issued at once and in order; the work of an `async_op` waits for nothing but the stream.
    """

    name = "hierarchical"

    def __init__(
        self, group: dist.ProcessGroup, intra: Collectives, inter: Collectives, meter: ByteMeter = METER
    ) -> None:
        """All ranks of the group must call.

        Args:
            group: all ranks, node after node.
            intra: the ranks of this node, in the group's order, counted in a meter of its own.
            inter: the ranks at this place in every node, in the order of nodes, counted in a meter of its own.
            meter: counts each call once, as if it were one collective over `group`.

        Raises:
            ValueError: the two do not make up the group in this order.
        """
        super().__init__(group, meter)
        self.intra, self.inter = intra, inter
        local, nodes = intra.group.size(), inter.group.size()
        if local * nodes != self.size or inter.group.rank() * local + intra.group.rank() != self.rank:
            raise ValueError(f"{nodes} nodes of {local} ranks, node after node, do not make up {self.size} ranks")
        self._shape = (nodes, local)
        self._flat = C10dCollectives(group, meter)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`."""
        out, part = self._many_to_one(output, input)
        self._record("all_gather", label, out.nbytes)
        nodes, local = self._shape
        between = part.new_empty(nodes * part.numel())
        self.inter.all_gather(between, part)
        gathered = torch.empty_like(out)
        self.intra.all_gather(gathered, between)
        n = part.numel()
        out.view(nodes, local, n).copy_(gathered.view(local, nodes, n).transpose(0, 1))
        return _issued(out, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        *,
        async_op: bool = False,
        label: Label = None,
    ) -> dist.Work | None:
        """See `Collectives`; an `op` that cannot be taken in two steps goes over the whole group in one."""
        check_reducible(input)
        if not any(op == nesting for nesting in _NESTING_OPS):
            return self._flat.reduce_scatter(output, input, op, async_op=async_op, label=label)
        whole, out = self._many_to_one(input, output)
        self._record("reduce_scatter", label, whole.nbytes)
        nodes, local = self._shape
        by_place = whole.view(nodes, local, out.numel()).transpose(0, 1).contiguous()
        inside = out.new_empty(nodes * out.numel())
        self.intra.reduce_scatter(inside, by_place, op)
        self.inter.reduce_scatter(out, inside, op)
        return _issued(out, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`; inside nodes, then between them."""
        check_reducible(tensor)
        if not any(op == nesting for nesting in _NESTING_OPS):
            return self._flat.all_reduce(tensor, op, async_op=async_op, label=label)
        self._record("all_reduce", label, tensor.nbytes)
        self.intra.all_reduce(tensor, op)
        self.inter.all_reduce(tensor, op)
        return _issued(tensor, async_op)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`; over the whole group at once."""
        return self._flat.all_to_all(output, input, async_op=async_op, label=label)


def _issued(result: torch.Tensor, async_op: bool) -> LaterWork | None:
    """A work for what the current stream already holds."""
    if not async_op:
        return None
    work = LaterWork(lambda: None, result.device)
    work.finish()
    return work


def mori_inside_nodes(
    group: dist.ProcessGroup, device: torch.device, meter: ByteMeter, nodes: list[str]
) -> HierarchicalCollectives:
    """MORI inside each node, c10d between nodes; all ranks of the group must call.

    Args:
        nodes: name of each rank's node, equal ones side by side and equally many of each (see `mori.survey`).
    """
    from lumen_core.comm.mori import MoriCollectives

    ranks, me = dist.get_process_group_ranks(group), group.rank()
    local = nodes.count(nodes[0])
    node, place = divmod(me, local)
    # Only the members make each group: other ranks of the job need not take part.
    inside = dist.new_group(ranks[node * local : (node + 1) * local], use_local_synchronization=True)
    between = dist.new_group(ranks[place::local], use_local_synchronization=True)
    intra = MoriCollectives(inside, device, ByteMeter())
    return HierarchicalCollectives(group, intra, C10dCollectives(between, ByteMeter()), meter)
