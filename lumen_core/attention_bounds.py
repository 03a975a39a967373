"""Which keys each query sees, as one interval a query: every mask of `lumen_core.attention` is of this form.

Query i sees keys `first[i] <= j < last[i]`. Causal order, a sliding window and documents that must not see each other
are all such intervals, and both ends never decrease with i. So the queries that see a given key are an interval, too,
and a kernel finds the blocks that it can leave out, and those that need no mask, from four numbers. Everything is
computed on the device: where documents begin is data that the host does not wait for.
"""

from __future__ import annotations

import torch

Window = tuple[int, int]
_FAR = 2**30  # further than any key: a side of a window without an end


def _sides(causal: bool, window: Window | None) -> Window:
    """Keys seen to the left and to the right of a query's own position."""
    left, right = (-1, -1) if window is None else window
    left = _FAR if left < 0 else left
    right = _FAR if right < 0 else right
    return left, min(right, 0) if causal else right


def interval_bounds(
    own: torch.Tensor, begin: torch.Tensor | int, end: torch.Tensor | int, causal: bool, window: Window | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Interval around each query's own position among the keys, within `begin <= j < end`."""
    left, right = _sides(causal, window)
    first = (own - left).clamp(begin, end)
    last = (own + right + 1).clamp(begin, end)
    # A left side that starts beyond the right one leaves nothing; the ends must stay ordered.
    return first.to(torch.int32), torch.maximum(first, last).to(torch.int32)


def dense_bounds(
    queries: int, keys: int, causal: bool, window: Window | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds int32 `[1, queries]` of one sequence; the last query is at the last key's position."""
    own = torch.arange(queries, device=device) + (keys - queries)
    first, last = interval_bounds(own, 0, keys, causal, window)
    return first[None], last[None]


def document_bounds(
    cu_queries: torch.Tensor, cu_keys: torch.Tensor, queries: int, causal: bool, window: Window | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds int32 `[1, queries]` of packed documents, each aligned at its end.

    Args:
        cu_queries, cu_keys: int32 `[documents + 1]`, where each document begins, and where the last one ends. A query
            beyond that end sees nothing.
    """
    token = torch.arange(queries, device=cu_queries.device, dtype=cu_queries.dtype)
    which = torch.searchsorted(cu_queries, token, right=True) - 1
    after = (which + 1).clamp(max=cu_queries.shape[0] - 1)
    begin, end = cu_keys[which].long(), cu_keys[after].long()
    first, last = interval_bounds(token + (end - cu_queries[after]), begin, end, causal, window)
    return first[None], last[None]


def position_bounds(
    position_ids: torch.Tensor, causal: bool, window: Window | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds int32 of rows of documents, told by their positions: one begins wherever a position is not its
    predecessor plus one.

    Args:
        position_ids: int `[B, S]` or `[1, S]`.
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    begin = torch.where(new, index, 0).cummax(dim=1).values
    # A token ends a document where the next one begins another.
    ends = torch.where(torch.nn.functional.pad(new[:, 1:], (0, 1), value=True), index + 1, index.shape[0])
    end = ends.flip(1).cummin(dim=1).values.flip(1)
    return interval_bounds(index.expand_as(begin), begin, end, causal, window)


def query_bounds(first: torch.Tensor, last: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries that see each key, int32 `[.., keys]`, of bounds `[.., queries]`: `begin <= i < end`."""
    key = torch.arange(keys, device=first.device, dtype=torch.int32).expand(first.shape[0], keys).contiguous()
    begin = torch.searchsorted(last, key, right=True, out_int32=True)
    return begin, torch.searchsorted(first, key, right=True, out_int32=True)
