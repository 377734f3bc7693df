"""Triton kernels of packed attention's gradients: of the queries, and of the keys and values (see `kernels.py`)."""

import triton
import triton.language as tl

from jaxglue.ops.attention.kernels import (
    FIRST,
    LOG2_E,
    MASKED,
    REST,
    VALUES,
    VALUES_REST,
    capped,
    gaps,
    jump,
    key_tile,
    last_tile,
    load_tile,
    own_keys,
    query_tile,
    store_heads,
    store_values,
    visible_keys,
)


@triton.jit
def query_gradient(
    q, k, v, q_rest, k_rest, v_rest, starts, out, lse, dout, delta, row, first, end, pack, spec: tl.constexpr
):
    """Store delta = Σ out·dout of one tile, and return the two parts of its dq."""
    N: tl.constexpr = spec.K * spec.G
    TOKENS: tl.constexpr = spec.block_m // spec.P
    head, kv_head = pack * spec.P, pack * spec.P // spec.G
    last = end - 1
    lane, slots = tl.arange(0, spec.block_m), tl.arange(0, spec.block_n)
    tokens = first + lane // spec.P
    starts += row * (spec.bounds * spec.T)
    low, all_low, lows = visible_keys(starts, first, last, tokens, spec)
    first_own, last_own = own_keys(starts, first, spec), own_keys(starts, last, spec)
    last_visible = own_keys(starts, tokens, spec)
    dout_tile = load_tile(dout, row, first, head, N, TOKENS, spec.P, False, VALUES, spec)
    out_tile = load_tile(out, row, first, head, N, TOKENS, spec.P, False, VALUES, spec)
    if spec.values_rest > 0:
        dout_more = load_tile(dout, row, first, head, N, TOKENS, spec.P, False, VALUES_REST, spec)
        out_more = load_tile(out, row, first, head, N, TOKENS, spec.P, False, VALUES_REST, spec)
    # Loaded last, as a load by descriptor waits. It lands in registers, of which dout would take too many.
    q_tile = load_tile(q, row, first, head, N, TOKENS, spec.P, spec.q_descriptor, FIRST, spec)
    if spec.rest > 0:
        q_more = load_tile(q_rest, row, first, head, N, TOKENS, spec.P, spec.q_descriptor, REST, spec)
    stats = ((row * (N // spec.P) + pack) * spec.T + first) * spec.P + lane
    # Σ weights · dweights of softmax's gradient, without another pass over the keys.
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if spec.values_rest > 0:
        row_delta += tl.sum(out_more.to(tl.float32) * dout_more.to(tl.float32), 1)
    tl.store(delta + stats, row_delta, mask=tokens < end)
    row_lse = tl.load(lse + stats, mask=tokens < spec.T, other=0.0) * LOG2_E

    acc = tl.full((spec.block_m, spec.width), 0.0, tl.float32)
    more = tl.full((spec.block_m, spec.rest if spec.rest > 0 else 1), 0.0, tl.float32)
    stop = last_own + 1
    if spec.forks:
        gap_starts, gap_ends = gaps(starts, tokens, spec)
        any_start, any_end = -tl.max(-tl.where(gap_ends > gap_starts, gap_starts, spec.S), 0), tl.max(gap_ends, 0)
        stop, bend, shift, skipped = jump(gap_starts, gap_ends, low, stop, spec.block_n)
    dscores = tl.full((spec.block_m, spec.block_n), 0.0, tl.float32)
    for i in range(low, stop, spec.block_n):
        j, before = i, tl.maximum(i - spec.block_n, low)
        if spec.forks:
            j, before = tl.where(i < bend, i, i + shift), tl.where(before < bend, before, before + shift)
        k_tile = load_tile(k, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, FIRST, spec.keys)
        v_tile = load_tile(
            v, row, j, spec.V - spec.K + kv_head, spec.V, spec.block_n, 1, spec.descriptors, VALUES, spec.keys
        )
        scores = tl.dot(q_tile, tl.trans(k_tile))
        if spec.rest > 0:
            k_more = load_tile(k_rest, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, REST, spec.keys)
            scores = tl.dot(q_more, tl.trans(k_more), scores)
        scores = capped(scores, spec)
        dweights = tl.dot(dout_tile, tl.trans(v_tile))
        if spec.values_rest > 0:
            v_more = load_tile(
                v_rest, row, j, spec.V - spec.K + kv_head, spec.V, spec.block_n, 1, spec.descriptors, VALUES_REST,
                spec.keys,
            )  # fmt: skip
            dweights = tl.dot(dout_more, tl.trans(v_more), dweights)
        if spec.late:  # as in the forward kernel
            before_tile = load_tile(
                k, row, before, kv_head, spec.K, spec.block_n, 1, spec.descriptors, FIRST, spec.keys
            )
            acc = tl.dot(dscores.to(k_tile.dtype), before_tile, acc)
            if spec.rest > 0:
                before_more = load_tile(
                    k_rest, row, before, kv_head, spec.K, spec.block_n, 1, spec.descriptors, REST, spec.keys
                )
                more = tl.dot(dscores.to(k_tile.dtype), before_more, more)
        cut = (j < all_low) | (j + spec.block_n - 1 > first_own)
        if spec.forks:
            cut = cut | ((j < any_end) & (j + spec.block_n > any_start))
        if cut:
            keys = j + slots
            visible = (keys[None, :] <= last_visible[:, None]) & (keys[None, :] >= lows[:, None])
            if spec.forks:
                visible &= (keys[None, :] < gap_starts[:, None]) | (keys[None, :] >= gap_ends[:, None])
                visible &= (keys[None, :] < skipped) | (i >= bend)
            scores = tl.where(visible, scores, MASKED)
        weights = tl.exp2(scores * (spec.factor * LOG2_E) - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None])
        if spec.softcap is not None:  # the derivative of tanh; MASKED has a finite square, times a weight of 0
            dscores *= 1.0 - scores * scores
        if not spec.late:
            acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
            if spec.rest > 0:
                more = tl.dot(dscores.to(k_tile.dtype), k_more, more)
    if spec.late:
        j = last_tile(low, stop, spec.block_n)
        if spec.forks:
            j = tl.where(j < bend, j, j + shift)
        k_tile = load_tile(k, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, FIRST, spec.keys)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
        if spec.rest > 0:
            k_more = load_tile(k_rest, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, REST, spec.keys)
            more = tl.dot(dscores.to(k_tile.dtype), k_more, more)
    return acc * spec.scale, more * spec.scale


@triton.jit
def dq_kernel(q, k, v, q_rest, k_rest, v_rest, starts, units, out, lse, dout, dq, delta, spec: tl.constexpr):
    """Compute dq of one tile, and delta for `dkdv_kernel`; grid (query tiles · N // P, B)."""
    row, first, end, pack = query_tile(units, spec)
    if first >= end:
        return
    gradient, rest = query_gradient(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, starts=starts, out=out, lse=lse, dout=dout,
        delta=delta, row=row, first=first, end=end, pack=pack, spec=spec,
    )  # fmt: skip
    N: tl.constexpr = spec.K * spec.G
    store_heads(dq, gradient, rest, row, first, end, pack * spec.P, N, spec.block_m // spec.P, spec.P, spec)


@triton.jit
def key_value_gradients(
    q, k, v, q_rest, k_rest, v_rest, ends, lse, delta, dout, dout_rest, row, first, end, kv_head, spec: tl.constexpr
):
    """Return (dk, its rest, dv, its rest) of one tile, summed over the group of query heads.

    Without `spec.dkeys` or dvalues some are none.

    Scores are transposed, [keys, queries], so that no accumulator needs to be.
    """
    N: tl.constexpr = spec.K * spec.G
    TOKENS: tl.constexpr = spec.block_m // spec.P
    last = end - 1
    lane = tl.arange(0, spec.block_m)
    keys = first + tl.arange(0, spec.block_n)
    ends += row * spec.ends
    reach = ends + spec.S * (1 + spec.split)  # positions of keys
    stop, all_stop = tl.load(ends + last), tl.load(ends + first)
    stops = tl.load(ends + keys, mask=keys < spec.S, other=0)
    first_query, last_query, queries = first, last, keys
    if spec.split:
        first_query, last_query = tl.load(ends + spec.S + first), tl.load(ends + spec.S + last)
        queries = tl.load(ends + spec.S + keys, mask=keys < spec.S, other=0)
    if spec.far:
        positions = tl.load(reach + keys, mask=keys < spec.S, other=0)
    elif spec.window > 0:
        stop, all_stop = tl.minimum(stop, last + spec.window), tl.minimum(all_stop, first + spec.window)
        stops = tl.minimum(stops, keys + spec.window)
    if spec.forks:  # a beginning's keys are seen further on than its first continuation's
        stop, all_stop = tl.max(stops, 0), -tl.max(-stops, 0)
    if spec.dkeys:
        v_tile = load_tile(v, row, first, spec.V - spec.K + kv_head, spec.V, spec.block_n, 1, False, VALUES, spec.keys)
        if spec.values_rest > 0:
            v_more = load_tile(
                v_rest, row, first, spec.V - spec.K + kv_head, spec.V, spec.block_n, 1, False, VALUES_REST, spec.keys
            )
    if spec.rest > 0:
        k_more = load_tile(k_rest, row, first, kv_head, spec.K, spec.block_n, 1, False, REST, spec.keys)
    # Loaded last, as a load by descriptor waits. It lands in registers, which leave no room for values beside it.
    k_tile = load_tile(k, row, first, kv_head, spec.K, spec.block_n, 1, spec.k_descriptor, FIRST, spec.keys)

    dk_acc = tl.full((spec.block_n, spec.width if spec.dkeys else 1), 0.0, tl.float32)
    dk_more = tl.full((spec.block_n, spec.rest if spec.dkeys and spec.rest > 0 else 1), 0.0, tl.float32)
    dv_acc = tl.full((spec.block_n, spec.width if spec.dvalues else 1), 0.0, tl.float32)
    dv_more = tl.full((spec.block_n, spec.rest if spec.dvalues and spec.values_rest > 0 else 1), 0.0, tl.float32)
    for part in range(0, spec.G // spec.P):  # the group's sum is formed here, in one order
        pack = kv_head * (spec.G // spec.P) + part
        for i in range(first_query, stop, TOKENS):
            tokens = i + lane // spec.P
            stats = ((row * (N // spec.P) + pack) * spec.T + i) * spec.P + lane
            q_tile = load_tile(q, row, i, pack * spec.P, N, TOKENS, spec.P, spec.descriptors, FIRST, spec)
            if spec.rest > 0:
                q_more = load_tile(q_rest, row, i, pack * spec.P, N, TOKENS, spec.P, spec.descriptors, REST, spec)
            dout_tile = load_tile(dout, row, i, pack * spec.P, N, TOKENS, spec.P, spec.descriptors, VALUES, spec)
            if spec.values_rest > 0:
                dout_more = load_tile(
                    dout_rest, row, i, pack * spec.P, N, TOKENS, spec.P, spec.descriptors, VALUES_REST, spec
                )
            row_lse = tl.load(lse + stats, mask=tokens < spec.T, other=0.0) * LOG2_E
            if spec.dkeys:
                row_delta = tl.load(delta + stats, mask=tokens < spec.T, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile))
            if spec.rest > 0:
                scores = tl.dot(k_more, tl.trans(q_more), scores)
            scores = capped(scores, spec)
            if spec.dkeys:
                dweights = tl.dot(v_tile, tl.trans(dout_tile))
                if spec.values_rest > 0:
                    dweights = tl.dot(v_more, tl.trans(dout_more), dweights)
            # From the last key's first query to the first key's last one, all queries see all keys.
            cut = (i < last_query) | (i + TOKENS > all_stop)
            if spec.far:  # in every tile: positions do not grow along the row
                cut = i >= first_query
            if cut:
                visible = (queries[:, None] <= tokens[None, :]) & (tokens[None, :] < stops[:, None])
                if spec.far:
                    reached = tl.load(reach + (spec.S if spec.split else 0) + tokens, mask=tokens < spec.T, other=0)
                    visible &= reached[None, :] < positions[:, None] + spec.window
                scores = tl.where(visible, scores, MASKED)
            weights = tl.exp2(scores * (spec.factor * LOG2_E) - row_lse[None, :])
            if spec.dvalues:
                dv_acc = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_acc)
                if spec.values_rest > 0:
                    dv_more = tl.dot(weights.to(dout_tile.dtype), dout_more, dv_more)
            if spec.dkeys:
                dscores = weights * (dweights - row_delta[None, :])
                if spec.softcap is not None:
                    dscores *= 1.0 - scores * scores
                dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc)
                if spec.rest > 0:
                    dk_more = tl.dot(dscores.to(q_tile.dtype), q_more, dk_more)
    return dk_acc * spec.scale, dk_more * spec.scale, dv_acc, dv_more


@triton.jit
def dkdv_kernel(q, k, v, q_rest, k_rest, v_rest, ends, units, lse, delta, dout, dout_rest, dk, dv, spec: tl.constexpr):
    """Compute dk and dv of one tile; grid (key tiles · K, B)."""
    row, first, end, head = key_tile(units, spec.keys)
    if first >= end:
        return
    dkeys, dkeys_rest, dvalues, dvalues_rest = key_value_gradients(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, ends=ends, lse=lse, delta=delta, dout=dout,
        dout_rest=dout_rest, row=row, first=first, end=end, kv_head=head, spec=spec,
    )  # fmt: skip
    store_heads(dk, dkeys, dkeys_rest, row, first, end, head, spec.K, spec.block_n, 1, spec.keys)
    store_values(dv, dvalues, dvalues_rest, row, first, end, spec.V - spec.K + head, spec.V, spec.block_n, 1, spec.keys)


@triton.jit
def dk_kernel(q, k, v, q_rest, k_rest, v_rest, ends, units, lse, delta, dout, dout_rest, dk, spec: tl.constexpr):
    """Do as `dkdv_kernel` for dk alone."""
    row, first, end, head = key_tile(units, spec.keys)
    if first >= end:
        return
    dkeys, dkeys_rest, _, _ = key_value_gradients(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, ends=ends, lse=lse, delta=delta, dout=dout,
        dout_rest=dout_rest, row=row, first=first, end=end, kv_head=head, spec=spec,
    )  # fmt: skip
    store_heads(dk, dkeys, dkeys_rest, row, first, end, head, spec.K, spec.block_n, 1, spec.keys)


@triton.jit
def dv_kernel(q, k, v, q_rest, k_rest, v_rest, ends, units, lse, delta, dout, dout_rest, dv, spec: tl.constexpr):
    """Do as `dkdv_kernel` for dv alone."""
    row, first, end, head = key_tile(units, spec.keys)
    if first >= end:
        return
    _, _, dvalues, dvalues_rest = key_value_gradients(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, ends=ends, lse=lse, delta=delta, dout=dout,
        dout_rest=dout_rest, row=row, first=first, end=end, kv_head=head, spec=spec,
    )  # fmt: skip
    store_values(dv, dvalues, dvalues_rest, row, first, end, spec.V - spec.K + head, spec.V, spec.block_n, 1, spec.keys)
