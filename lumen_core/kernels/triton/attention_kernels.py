"""Triton kernels of attention, forward and backward. Needs the `triton` package.

FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, written for the bounds of `lumen_core.attention_bounds`: a
program owns a block of rows and walks over the blocks of columns between the outermost of their bounds; those between
the innermost need no mask. The backward pass is two: one owns queries (dQ), the other keys (dK and dV), so that nothing
is added atomically and equal inputs give equal bits.

`RECIPE`: `bf16` multiplies operands as they are; `fp8` multiplies codes, with scales `[B, H]`, and casts P and dS;
`mxfp8` multiplies bf16 that holds rounded values and rounds P and dS. Operands that are contracted along tokens come
by a pointer of their own, in `fp8` (TURNED) as `[B, H, D, tokens]`, which 8-bit matrix instructions want.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lumen_core.kernels.triton.attention_operand_kernels import mx_rounded, row_codes
from lumen_core.kernels.triton.cast_kernels import _encode

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(
    ptr,
    start,
    end,
    stride,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Tokens `start` to `start + ROWS` of a head as `[ROWS, BD]`; zeros from `end` on where MASKED, and beyond D."""
    if TURNED:
        row = tl.arange(0, ROWS)[None, :]
        column = tl.arange(0, BD)[:, None]
        at = ptr + start + column * stride + row
    else:
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BD)[None, :]
        at = ptr + tl.full([], start, tl.int64) * stride + row * stride + column
    if MASKED and D < BD:
        x = tl.load(at, mask=(row < end - start) & (column < D), other=0.0)
    elif MASKED:
        x = tl.load(at, mask=row < end - start, other=0.0)
    elif D < BD:
        x = tl.load(at, mask=column < D, other=0.0)
    else:
        x = tl.load(at)
    return tl.trans(x) if TURNED else x


@triton.jit
def _store(ptr, x, start, end, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BD)[None, :]
    at = ptr + tl.full([], start, tl.int64) * stride + row * stride + column
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < end - start) & (column < D))


@triton.jit
def _phases(begin_ptr, end_ptr, start, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks that rows `start` to `start + ROWS` see: some that need a mask, then those that all of them see whole, and
    again some with a mask. Gives where the three begin, and how many blocks each has.
    """
    last = tl.minimum(start + ROWS, count) - 1
    begin = tl.load(begin_ptr + start) // BLOCK * BLOCK
    end = tl.load(end_ptr + last)
    full = (tl.load(begin_ptr + last) + BLOCK - 1) // BLOCK * BLOCK
    full = tl.maximum(tl.minimum(full, end), begin)
    after = tl.maximum(tl.load(end_ptr + start) // BLOCK * BLOCK, full)
    return begin, full, after, tl.cdiv(full - begin, BLOCK), (after - full) // BLOCK, tl.cdiv(end - after, BLOCK)


@triton.jit
def _step_start(step, begin, before, after, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where a step begins. One loop, not two, walks over the blocks that need a mask: two take more registers."""
    start = begin + step * BLOCK
    if MASKED:
        start = tl.where(step < before, start, after + (step - before) * BLOCK)
    return start


@triton.jit
def _rounded_dot(
    x,
    y,
    RECIPE: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    TOP: tl.constexpr,
    CAST: tl.constexpr,
    CODES: tl.constexpr,
):
    """`x @ y` with x, P or dS, rounded along the axis that is contracted."""
    if RECIPE == "fp8":
        codes, scale = row_codes(x, y.dtype, LIMIT, EMAX, TOP, CAST)
        product = tl.dot(codes, y) * scale[:, None]
    elif RECIPE == "mxfp8":
        product = tl.dot(mx_rounded(x, CODES, LIMIT, EMAX, TOP, CAST).to(y.dtype), y)
    else:
        product = tl.dot(x.to(y.dtype), y, input_precision="ieee")
    return product


@triton.jit
def _forward_keys(
    acc, total, largest, q, k_ptr, v_ptr, first, last, begin, before, after, steps, keys, k_stride, v_stride, factor,
    RECIPE: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    for step in range(steps):
        start = _step_start(step, begin, before, after, BN, MASKED)
        k = _load(k_ptr, start, keys, k_stride, BN, D, BD, MASKED, False)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if MASKED:
            key = start + tl.arange(0, BN)[None, :]
            s = tl.where((key >= first[:, None]) & (key < last[:, None]), s, float("-inf"))
        higher = tl.maximum(largest, tl.max(s, axis=1))
        base = higher
        if MASKED:  # a row that has seen no key yet has no maximum
            base = tl.where(higher == float("-inf"), 0.0, higher)
        v = _load(v_ptr, start, keys, v_stride, BN, D, BD, MASKED, TURNED)
        shrink = tl.exp2(largest - base)
        if RECIPE == "fp8":
            # 1 becomes the largest power of two that E4M3 holds; the sum carries the same factor.
            p = tl.exp2(s - (base - EMAX)[:, None])
            product = tl.dot(_encode(p, LIMIT, CAST, v.dtype), v)
        elif RECIPE == "mxfp8":
            p = tl.exp2(s - base[:, None])
            product = tl.dot(mx_rounded(p, CODES, LIMIT, EMAX, TOP, CAST).to(v.dtype), v)
        else:
            p = tl.exp2(s - base[:, None])
            product = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, axis=1)
        # A sum of its own: added up in a tensor core, 8-bit products would lose bits on some GPUs.
        acc = acc * shrink[:, None] + product
        largest = higher
    return acc, total, largest


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, bounds_batch,
    queries, keys, scale,
    GROUP: tl.constexpr, RECIPE: tl.constexpr,
    LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, TURNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output `[B, Sq, H, D]` and statistics fp32 `[B, H, Sq]`, both contiguous; a program for a block of queries."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # under a causal mask the longest first
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    kv_head = head // GROUP
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    first_ptr += batch * bounds_batch
    last_ptr += batch * bounds_batch
    row = start + tl.arange(0, BM)
    first = tl.load(first_ptr + row, mask=row < queries, other=0)
    last = tl.load(last_ptr + row, mask=row < queries, other=0)
    q = _load(q_ptr + batch * q_batch + head * q_head, start, queries, q_token, BM, D, BD, True, False)
    factor = scale * LOG2_E
    if RECIPE == "fp8":
        kv = batch * (heads // GROUP) + kv_head
        factor *= tl.load(q_scale_ptr + batch * heads + head) * tl.load(k_scale_ptr + kv)
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    largest = tl.full([BM], float("-inf"), tl.float32)
    begin, full, after, before, whole, rest = _phases(first_ptr, last_ptr, start, queries, BM, BN)
    acc, total, largest = _forward_keys(
        acc, total, largest, q, k_ptr, v_ptr, first, last, begin, before, after, before + rest, keys, k_token, v_token,
        factor, RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BN, True, TURNED,
    )  # fmt: skip
    acc, total, largest = _forward_keys(
        acc, total, largest, q, k_ptr, v_ptr, first, last, full, before, after, whole, keys, k_token, v_token,
        factor, RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BN, False, TURNED,
    )  # fmt: skip
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = (largest + tl.log2(total)) / LOG2_E
    if RECIPE == "fp8":
        inverse *= tl.load(v_scale_ptr + kv)
        lse -= EMAX / LOG2_E
    # The logarithm of nothing is -inf, but not everywhere in hardware.
    lse = tl.where(total == 0.0, float("-inf"), lse)
    _store(out_ptr + (batch * queries * heads + head) * D, acc * inverse[:, None], start, queries, heads * D, BM, D, BD)
    tl.store(lse_ptr + (batch * heads + head) * queries + row, lse, mask=row < queries)


@triton.jit
def _query_steps(
    dq, q, g, base, delta, k_ptr, v_ptr, kt_ptr, first, last, begin, before, after, steps, keys, k_stride,
    v_stride, kt_stride, factor, g_factor,
    RECIPE: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    for step in range(steps):
        start = _step_start(step, begin, before, after, BN, MASKED)
        k = _load(k_ptr, start, keys, k_stride, BN, D, BD, MASKED, False)
        v = _load(v_ptr, start, keys, v_stride, BN, D, BD, MASKED, False)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * factor - base[:, None])
        if MASKED:
            key = start + tl.arange(0, BN)[None, :]
            p = tl.where((key >= first[:, None]) & (key < last[:, None]), p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") * g_factor - delta[:, None])
        kt = k
        if RECIPE != "bf16":
            kt = _load(kt_ptr, start, keys, kt_stride, BN, D, BD, MASKED, TURNED)
        dq += _rounded_dot(ds, kt, RECIPE, LIMIT, EMAX, TOP, CAST, CODES)
    return dq


@triton.jit
def backward_queries(
    q_ptr, k_ptr, v_ptr, g_ptr, kt_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, g_scale_ptr,
    first_ptr, last_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    kt_batch, kt_token, kt_head, bounds_batch, queries, keys, scale,
    GROUP: tl.constexpr, RECIPE: tl.constexpr,
    LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, TURNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ `[B, Sq, H, D]`, contiguous; a program for a block of queries."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    kv_head = head // GROUP
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    kt_ptr += batch * kt_batch + kv_head * kt_head
    first_ptr += batch * bounds_batch
    last_ptr += batch * bounds_batch
    row = start + tl.arange(0, BM)
    inside = row < queries
    first = tl.load(first_ptr + row, mask=inside, other=0)
    last = tl.load(last_ptr + row, mask=inside, other=0)
    statistics = (batch * heads + head) * queries + row
    base = tl.load(lse_ptr + statistics, mask=inside, other=0.0) * LOG2_E
    base = tl.where(base == float("-inf"), 0.0, base)
    delta = tl.load(delta_ptr + statistics, mask=inside, other=0.0)
    q = _load(q_ptr + batch * q_batch + head * q_head, start, queries, q_token, BM, D, BD, True, False)
    g = _load(g_ptr + batch * g_batch + head * g_head, start, queries, g_token, BM, D, BD, True, False)
    factor = scale * LOG2_E
    g_factor = 1.0
    if RECIPE == "fp8":
        kv = batch * (heads // GROUP) + kv_head
        k_scale = tl.load(k_scale_ptr + kv)
        factor *= tl.load(q_scale_ptr + batch * heads + head) * k_scale
        g_factor = tl.load(g_scale_ptr + batch * heads + head) * tl.load(v_scale_ptr + kv)
        scale *= k_scale
    dq = tl.zeros([BM, BD], tl.float32)
    begin, full, after, before, whole, rest = _phases(first_ptr, last_ptr, start, queries, BM, BN)
    dq = _query_steps(
        dq, q, g, base, delta, k_ptr, v_ptr, kt_ptr, first, last, begin, before, after, before + rest, keys, k_token,
        v_token, kt_token, factor, g_factor, RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BN, True, TURNED,
    )  # fmt: skip
    dq = _query_steps(
        dq, q, g, base, delta, k_ptr, v_ptr, kt_ptr, first, last, full, before, after, whole, keys, k_token,
        v_token, kt_token, factor, g_factor, RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BN, False, TURNED,
    )  # fmt: skip
    _store(dq_ptr + (batch * queries * heads + head) * D, dq * scale, start, queries, heads * D, BM, D, BD)


@triton.jit
def _key_steps(
    dk, dv, k, v, q_ptr, g_ptr, qt_ptr, gt_ptr, first_ptr, last_ptr, lse_ptr, delta_ptr, key, begin, before, after,
    steps, queries, q_stride, g_stride, qt_stride, gt_stride, factor, g_factor, q_scale, g_scale,
    RECIPE: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    for step in range(steps):
        start = _step_start(step, begin, before, after, BM, MASKED)
        row = start + tl.arange(0, BM)
        q = _load(q_ptr, start, queries, q_stride, BM, D, BD, MASKED, False)
        g = _load(g_ptr, start, queries, g_stride, BM, D, BD, MASKED, False)
        if MASKED:
            inside = row < queries
            base = tl.load(lse_ptr + row, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
        else:
            base = tl.load(lse_ptr + row)
            delta = tl.load(delta_ptr + row)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * factor - (base * LOG2_E)[None, :])
        if MASKED:
            first = tl.load(first_ptr + row, mask=inside, other=0)
            last = tl.load(last_ptr + row, mask=inside, other=0)
            p = tl.where((key[:, None] >= first[None, :]) & (key[:, None] < last[None, :]), p, 0.0)
        gt = g
        qt = q
        if RECIPE != "bf16":
            gt = _load(gt_ptr, start, queries, gt_stride, BM, D, BD, MASKED, TURNED)
            qt = _load(qt_ptr, start, queries, qt_stride, BM, D, BD, MASKED, TURNED)
        dv += _rounded_dot(p, gt, RECIPE, LIMIT, EMAX, TOP, CAST, CODES) * g_scale
        ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") * g_factor - delta[None, :])
        dk += _rounded_dot(ds, qt, RECIPE, LIMIT, EMAX, TOP, CAST, CODES) * q_scale
    return dk, dv


@triton.jit
def backward_keys(
    q_ptr, k_ptr, v_ptr, g_ptr, qt_ptr, gt_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, g_scale_ptr,
    first_ptr, last_ptr, begin_ptr, end_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    qt_batch, qt_token, qt_head, gt_batch, gt_token, gt_head, bounds_batch, key_bounds_batch, queries, keys, scale,
    GROUP: tl.constexpr, RECIPE: tl.constexpr,
    LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr,
    CODES: tl.constexpr, TURNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV `[B, Sk, Hk, D]`, contiguous; a program for a block of keys, over all queries of the group."""
    start = tl.program_id(0) * BN
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    heads = kv_heads * GROUP
    first_ptr += batch * bounds_batch
    last_ptr += batch * bounds_batch
    begin_ptr += batch * key_bounds_batch
    end_ptr += batch * key_bounds_batch
    k = _load(k_ptr + batch * k_batch + kv_head * k_head, start, keys, k_token, BN, D, BD, True, False)
    v = _load(v_ptr + batch * v_batch + kv_head * v_head, start, keys, v_token, BN, D, BD, True, False)
    key = start + tl.arange(0, BN)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    begin, full, after, before, whole, rest = _phases(begin_ptr, end_ptr, start, keys, BN, BM)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q = q_ptr + batch * q_batch + head * q_head
        g = g_ptr + batch * g_batch + head * g_head
        qt = qt_ptr + batch * qt_batch + head * qt_head
        gt = gt_ptr + batch * gt_batch + head * gt_head
        lse = lse_ptr + (batch * heads + head) * queries
        delta = delta_ptr + (batch * heads + head) * queries
        factor = scale * LOG2_E
        g_factor = 1.0
        q_scale = 1.0
        g_scale = 1.0
        if RECIPE == "fp8":
            kv = batch * kv_heads + kv_head
            q_scale = tl.load(q_scale_ptr + batch * heads + head)
            g_scale = tl.load(g_scale_ptr + batch * heads + head)
            factor *= q_scale * tl.load(k_scale_ptr + kv)
            g_factor = g_scale * tl.load(v_scale_ptr + kv)
        dk, dv = _key_steps(
            dk, dv, k, v, q, g, qt, gt, first_ptr, last_ptr, lse, delta, key, begin, before, after, before + rest,
            queries, q_token, g_token, qt_token, gt_token, factor, g_factor, q_scale, g_scale,
            RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BM, True, TURNED,
        )  # fmt: skip
        dk, dv = _key_steps(
            dk, dv, k, v, q, g, qt, gt, first_ptr, last_ptr, lse, delta, key, full, before, after, whole,
            queries, q_token, g_token, qt_token, gt_token, factor, g_factor, q_scale, g_scale,
            RECIPE, LIMIT, EMAX, TOP, CAST, CODES, D, BD, BM, False, TURNED,
        )  # fmt: skip
    out = (batch * keys * kv_heads + kv_head) * D
    _store(dk_ptr + out, dk * scale, start, keys, kv_heads * D, BN, D, BD)
    _store(dv_ptr + out, dv, start, keys, kv_heads * D, BN, D, BD)
