"""The selection of DeepSeek sparse attention in Triton: the indexer's scores and an exact top-k, as lists shared by 16 queries.

    scores     (64 queries, a run of keys)  I_ts = sum_j w_tj relu(q_tj k_s / sqrt(d)) as ordered integers; maxima of 16 keys each
    threshold  (a query)                    the top_k-th largest and which of its equals are taken: a bit for each key selected
    union      (16 queries, a run of keys)  the keys that any of them selects, and for each key the bits of those that do
    choose     (a row)                      in decoding, where a row has one query: the list of the keys that it selects

The k-th largest of the groups' maxima bounds the k-th largest score from below, so all that is selected lies in the groups whose
maximum reaches it: k groups, and more only where there are equals. The bound, then the threshold, are found by quartering the
range of the integers. Equals are taken from the nearest on; the `local` nearest keys are the largest integer, and a key that the
query must not see is the smallest. Nothing depends on the order in which programs run.

Scores exist for one strip of queries at a time, of bounded size, so that memory grows as T * top_k. DeepSeek-V3.2, 2512.02556.
"""

import torch
import triton
import triton.language as tl

from .launch import architecture, launch, operand_types, options, ready, shared_by_layers, tile, traced
from .reference import segment_runs

QUERIES = 16  # that share a list
GROUP = 16  # keys with one maximum
WHOLE = 256  # keys of a row of scores come in multiples of this, so that a tile's maxima stay in their row
STRIP = 2**29  # bytes of scores at a time, 2,048 queries at 65,536 keys: half of it took 1.2 times as long at 32,768
UNSEEN, LOCAL = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 2)  # integers of what is not to be seen, and of the nearest


@triton.jit
def ordered(x):
    """int32 in the order of fp32 x, -0 and 0 the same, away from the two integers that mean something else."""
    b = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    b ^= (b >> 31) & 0x7FFFFFFF
    return tl.minimum(tl.maximum(b, -(2**31) + 1), 2**31 - 3)


@triton.jit(do_not_specialize=["t0", "T", "S", "R", "NR", "NC", "local"])
def scores_kernel(
    q, k, w, lows, past, length, keys, maxima, scale, t0, T, S, R, W, NR, NC, local,
    J: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_LOWS: tl.constexpr, HAS_PAST: tl.constexpr, RAW: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scores of queries t0 .. t0 + R against CHUNK of the S + T keys, to `keys (B, R, W)`. RAW: as fp32, all of them."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_r, i_b = (i % NC).to(tl.int32), ((i // NC) % NR).to(tl.int32), (i // (NC * NR)).to(tl.int32)
    o_r, o_n = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    o_t = t0 + o_r
    m_t = (o_t < T) & (o_r < R)
    low, first, end = tl.zeros([ROWS], dtype=tl.int32), 0, S + T
    if HAS_LOWS:
        low = tl.load(lows + i_b * T + o_t, mask=m_t, other=S + T)
        first = tl.min(low, axis=0)
    if not RAW:
        end = S + tl.minimum(t0 + i_r * ROWS + ROWS, T)
    first, end = tl.maximum(i_c * CHUNK, first // N * N), tl.minimum(i_c * CHUNK + CHUNK, end)
    if first >= end:
        return
    p_w = w + (i_b.to(tl.int64) * T + o_t) * J
    maxima += (i_b.to(tl.int64) * R + i_r * ROWS) * (W // 16)
    o_row = tl.arange(0, ROWS)[:, None] * (W // 16)
    for n in range(first, end, N):
        o_s = n + o_n
        b_k = k.load([i_b, 0, n, 0]).reshape(N, BD).to(DOT)
        b_I = tl.zeros([ROWS, N], dtype=tl.float32)
        for j in range(J):
            b_q = q.load([i_b, j, t0 + i_r * ROWS, 0]).reshape(ROWS, BD).to(DOT)
            b_w = tl.load(p_w + j, mask=m_t, other=0.0).to(tl.float32) * scale
            b_I += tl.maximum(tl.dot(b_q, tl.trans(b_k), input_precision=PREC), 0.0) * b_w[:, None]
        if RAW:
            keys.store([i_b, 0, i_r * ROWS, n], b_I.reshape(1, 1, ROWS, N))
        else:
            seen = (o_s[None, :] >= low[:, None]) & (o_s[None, :] <= S + o_t[:, None])
            distance = S + o_t[:, None] - o_s[None, :]
            if HAS_PAST:  # the first S keys lie at positions of their own, -1 where there is none
                old = o_s < S
                position = tl.load(past + i_b * S + o_s, mask=old, other=0)
                seen &= (position >= 0)[None, :]
                distance = tl.where(old[None, :], tl.load(length + i_b) + o_t[:, None] - position[None, :], distance)
            b_key = tl.where(distance < local, LOCAL, ordered(b_I))
            b_key = tl.where(seen, b_key, UNSEEN)
            keys.store([i_b, 0, i_r * ROWS, n], b_key.reshape(1, 1, ROWS, N))
            b_max = tl.max(tl.reshape(b_key, [ROWS, N // 16, 16]), axis=2)
            o_g = n // 16 + tl.arange(0, N // 16)
            tl.store(maxima + o_row + o_g[None, :], b_max, mask=m_t[:, None])


@triton.jit
def _at_least(b_x, bound):
    return tl.sum((b_x >= bound).to(tl.int32))


@triton.jit
def _block(keys, groups, i, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Entries i .. i + BLOCK of a list of n: of `keys` itself, or (WIDTH 16) the groups of keys that `groups` names."""
    o, o_w = i + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    b_g = o
    if WIDTH > 1:
        b_g = tl.load(groups + o, mask=o < n, other=0)
    o_s = b_g[:, None] * WIDTH + o_w[None, :]
    return tl.load(keys + o_s, mask=(o < n)[:, None], other=UNSEEN), o_s


@triton.jit
def _quarters(low, high):
    """Three bounds that cut the integers low + 1 .. high into four."""
    width = high - low
    return low + ((width + 3) >> 2), low + ((2 * width + 3) >> 2), low + ((3 * width + 3) >> 2)


@triton.jit
def _reach(b_x, one, two, three):
    """How many are at least as large as each of three bounds, in 21 bits each: one reduction for three counts."""
    some = (b_x >= one.to(tl.int32)).to(tl.int64) + ((b_x >= two.to(tl.int32)).to(tl.int64) << 21)
    return tl.sum(some + ((b_x >= three.to(tl.int32)).to(tl.int64) << 42))


@triton.jit
def _narrowed(counts, low, high, one, two, three, reached, top_k):
    """The quarter that holds the largest integer that top_k reach: low, high (low, if just top_k reach it), how many reach low."""
    by_one, by_two, by_three = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
    if by_three >= top_k:
        low, reached = three, by_three
    elif by_two >= top_k:
        low, reached, high = two, by_two, three - 1
    elif by_one >= top_k:
        low, reached, high = one, by_one, two - 1
    else:
        high = one - 1
    return low, tl.where(reached == top_k, low, high), reached


@triton.jit
def _threshold(keys, groups, n, top_k, least, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The largest integer from `least` on that top_k entries reach, or a smaller one that exactly top_k reach, and how many do; of
    `least` itself, how many entries there are. The first BLOCK of the list stay in registers."""
    b_x, _ = _block(keys, groups, 0, n, BLOCK, WIDTH)
    low, high, reached = least.to(tl.int64), tl.full([], 2**31 - 2, tl.int64), (n * WIDTH).to(tl.int64)
    while low < high:
        one, two, three = _quarters(low, high)
        counts = _reach(b_x, one, two, three)
        for i in range(BLOCK, n, BLOCK):
            counts += _reach(_block(keys, groups, i, n, BLOCK, WIDTH)[0], one, two, three)
        low, high, reached = _narrowed(counts, low, high, one, two, three, reached, top_k)
    return low.to(tl.int32), reached


@triton.jit(do_not_specialize=["t0", "T", "S", "R"])
def threshold_kernel(
    keys, maxima, lows, marks, groups, t0, T, S, R, W, top_k,
    BG: tl.constexpr, BK: tl.constexpr, HAS_LOWS: tl.constexpr,
):  # fmt: skip
    """What query t selects: a bit for each key, 16 keys to an entry of `marks (B, R, W / 16)` int16.

    groups `(B, R, W / 16 + 2 top_k)` int32 is scratch. Of marks, the groups that hold no key the query sees are left as they are.
    """
    i = tl.program_id(0).to(tl.int64)
    i_b, t = i // R, t0 + (i % R).to(tl.int32)
    if t >= T:
        return
    low, end = 0, S + t + 1
    if HAS_LOWS:
        low = tl.load(lows + i_b * T + t)
    keys, maxima, groups, marks = keys + i * W, maxima + i * (W // 16), groups + i * (W // 16 + 2 * top_k), marks + i * (W // 16)
    bound, at, start = tl.full([], -(2**31) + 1, tl.int32), 0, low // 16
    n = tl.where(end > low, (end + 15) // 16 - start, 0)
    if n > top_k:
        bound, _ = _threshold(maxima + start, groups, n, top_k, bound, BG, 1)
    m = 0
    for j in range(0, n, BG):
        o_g = j + tl.arange(0, BG)
        hit = (tl.load(maxima + start + o_g, mask=o_g < n, other=UNSEEN) >= bound) & (o_g < n)
        tl.store(groups + m + tl.cumsum(hit.to(tl.int32), 0) - 1, start + o_g, mask=hit)
        tl.store(marks + start + o_g, tl.zeros([BG], dtype=tl.int16), mask=o_g < n)
        m += tl.sum(hit.to(tl.int32), axis=0)
    tl.debug_barrier()  # the list is read, and marks are written again, by other threads
    if end - low > top_k:
        c, some = 0, groups + W // 16  # keys that reach the first bound: of many not many do, and they are searched by themselves
        for j in range(0, m, BK):
            b_x = tl.reshape(_block(keys, groups, j, m, BK, 16)[0], [BK * 16])
            hit = (b_x >= bound).to(tl.int32)
            place = c + tl.cumsum(hit, 0) - 1
            tl.store(some + place, b_x, mask=(hit > 0) & (place < 2 * top_k))
            c += tl.sum(hit, axis=0)
        tl.debug_barrier()
        # Not below the first bound: keys of other groups lie between.
        if c <= 2 * top_k:
            bound, reached = _threshold(some, groups, c, top_k, bound, BG, 1)
        else:
            bound, reached = _threshold(keys, groups, m, top_k, bound, BK, 16)
        if reached > top_k:  # or fewer than top_k can be seen: then all at the bound are taken
            above = 0
            for j in range(0, m, BK):
                above += _at_least(_block(keys, groups, j, m, BK, 16)[0], bound + 1)
            high, need = end, top_k - above
            while at < high:
                middle = (at + high + 1) >> 1
                equal = 0
                for j in range(0, m, BK):
                    b_x, o_s = _block(keys, groups, j, m, BK, 16)
                    equal += tl.sum(((b_x == bound) & (o_s >= middle)).to(tl.int32))
                if equal >= need:
                    at = middle
                else:
                    high = middle - 1
    for j in range(0, m, BK):
        b_x, o_s = _block(keys, groups, j, m, BK, 16)
        hit = ((b_x > bound) | ((b_x == bound) & (o_s >= at))).to(tl.int32)
        o_g = j + tl.arange(0, BK)
        b_g = tl.load(groups + o_g, mask=o_g < m, other=0)
        b_marks = tl.sum(hit << tl.arange(0, 16)[None, :], axis=1)
        tl.store(marks + b_g, b_marks.to(tl.int16), mask=o_g < m)


@triton.jit
def _entries(x, within, i, n, listed, BLOCK: tl.constexpr):
    """Entries i .. i + BLOCK of n, and where in x they lie: x's first n, or if `listed` the 16 of each group in `within`."""
    o = i + tl.arange(0, BLOCK)
    b_at = o
    if listed:
        b_at = tl.load(within + o // 16, mask=o < n, other=0) * 16 + o % 16
    return tl.load(x + b_at, mask=o < n, other=UNSEEN), b_at


@triton.jit
def _choose(x, within, n, listed, top_k, chosen, BLOCK: tl.constexpr):
    """Write to `chosen`, ascending, where the top_k largest of n entries of x lie, of equals the last ones; returns how many, fewer
    if fewer are to be seen. Entries are those of `_entries`. The range of the integers is quartered until a bound is found; the
    first BLOCK entries stay in registers meanwhile."""
    b_x, _ = _entries(x, within, 0, n, listed, BLOCK)
    low, reached = tl.full([], -(2**31) + 1, tl.int64), n.to(tl.int64)
    high = tl.where(n > top_k, 2**31 - 2, low)
    while low < high:
        one, two, three = _quarters(low, high)
        counts = _reach(b_x, one, two, three)
        for i in range(BLOCK, n, BLOCK):
            counts += _reach(_entries(x, within, i, n, listed, BLOCK)[0], one, two, three)
        low, high, reached = _narrowed(counts, low, high, one, two, three, reached, top_k)
    bound = low.to(tl.int32)
    left = -top_k  # equals that are not taken
    for i in range(0, n, BLOCK):
        left += _at_least(_entries(x, within, i, n, listed, BLOCK)[0], bound)
    left, more, equal = tl.maximum(left, 0), 0, 0
    for i in range(0, n, BLOCK):
        b_x, b_at = _entries(x, within, i, n, listed, BLOCK)
        both = (b_x > bound).to(tl.int32) + ((b_x == bound).to(tl.int32) << 16)
        places = tl.cumsum(both, 0)
        b_more, b_equal = more + (places & 0xFFFF), equal + (places >> 16)
        taken = (b_x > bound) | ((b_x == bound) & (b_equal > left))
        tl.store(chosen + b_more + tl.maximum(b_equal - left, 0) - 1, b_at, mask=taken)
        both = tl.sum(both, axis=0)
        more, equal = more + (both & 0xFFFF), equal + (both >> 16)
    tl.debug_barrier()  # the list is read by other threads
    return more + tl.maximum(equal - left, 0)


@triton.jit(do_not_specialize=["top_k"])
def choose_kernel(keys, maxima, tops, length, groups, index, count, S, W, top_k, BLOCK: tl.constexpr):
    """What a row's one query selects of its length + 1 keys: `index (B, top_k)`, ascending, and `count (B,)`.

    maxima `(B, W / 16)` are those of 16 keys, tops `(B, W / 256)` those of 256. With equals in the order of their positions, the
    top_k largest lie in the top_k groups whose maxima are the largest: never are more than BLOCK or 16 top_k numbers compared.
    groups `(B, 2, top_k)` is scratch.
    """
    i = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(length + i).to(tl.int32), S - 1) + 1
    keys, maxima, tops, index = keys + i * W, maxima + i * (W // 16), tops + i * (W // 256), index + i * top_k
    high, low = groups + i * 2 * top_k, groups + (i * 2 + 1) * top_k
    n, by_tops, by_maxima = (end + 15) // 16, end > 16 * BLOCK, end > BLOCK
    if by_tops:
        n = 16 * _choose(tops, high, (end + 255) // 256, end < 0, top_k, high, BLOCK)
    if by_maxima:
        n = 16 * _choose(maxima, high, n, by_tops, top_k, low, BLOCK)
    else:
        n = end
    tl.store(count + i, _choose(keys, low, n, by_maxima, top_k, index, BLOCK))


@triton.jit
def _marks_of(marks, lows, t, o_g, S, T, W, HAS_LOWS: tl.constexpr):
    """The 16 marks of query t in each of groups o_g. They exist where it sees keys: nowhere if it is padding, whose first key would
    lie behind its own."""
    low, end = 0, tl.where(t < T, tl.minimum(S + t + 1, W), 0)
    if HAS_LOWS:
        low = tl.load(lows + tl.minimum(t, T - 1))
        end = tl.where(low < end, end, 0)
    return tl.load(marks + o_g, mask=(o_g >= low // 16) & (o_g < (end + 15) // 16), other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _ones(x):
    """How many of the 16 bits of x are set."""
    x -= (x >> 1) & 0x5555
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit(do_not_specialize=["t0", "T", "S", "R", "NT", "NS", "NC"])
def union_kernel(
    marks, lows, parts, index, bits, count, t0, T, S, R, W, NT, NS, NC, CAP,
    Q: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr, HAS_LOWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The list of Q queries in runs of RUN groups of keys. COUNT: only how many keys each run has, to `parts (B, NS, NC)`; then
    the keys, ascending, the bits of the queries that read each, and how many there are."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_s, i_b = (i % NC).to(tl.int32), ((i // NC) % NS).to(tl.int32), i // (NC * NS)
    t, o_u = t0 + i_s * Q, tl.arange(0, BG * 16)
    i_tile, parts, lows = i_b * NT + t // Q, parts + (i_b * NS + i_s) * NC, lows + i_b * T
    marks, index, bits = marks + (i_b * R + i_s * Q) * (W // 16), index + i_tile * CAP, bits + i_tile * CAP
    if COUNT:
        o_g, b_any = i_c * RUN + tl.arange(0, RUN), tl.zeros([RUN], dtype=tl.int32)
        for q in tl.static_range(Q):
            b_any |= _marks_of(marks + q * (W // 16), lows, t + q, o_g, S, T, W, HAS_LOWS)
        tl.store(parts + i_c, tl.sum(_ones(b_any), axis=0))
        return
    done = 0
    for c in range(0, i_c, 64):
        o_c = c + tl.arange(0, 64)
        done += tl.sum(tl.load(parts + o_c, mask=o_c < i_c, other=0), axis=0)
    for g in range(i_c * RUN, tl.minimum(i_c * RUN + RUN, (tl.minimum(S + tl.minimum(t + Q, T), W) + 15) // 16), BG):
        b_bits = tl.zeros([BG * 16], dtype=tl.int32)
        for q in tl.static_range(Q):
            b_marks = _marks_of(marks + q * (W // 16), lows, t + q, g + o_u // 16, S, T, W, HAS_LOWS)
            b_bits |= ((b_marks >> (o_u % 16)) & 1) << q
        some = (b_bits != 0).to(tl.int32)
        place = done + tl.cumsum(some, 0) - 1
        tl.store(index + place, g * 16 + o_u, mask=b_bits != 0)
        tl.store(bits + place, b_bits, mask=b_bits != 0)
        done += tl.sum(some, axis=0)
    if i_c == NC - 1:
        tl.store(count + i_tile, done)


# ----------------------------------------------------------------------------------------------------------------------
# Launches

_HOPPER = {
    "scores": {"num_warps": 4, "num_stages": 3, "ROWS": 64, "N": 128, "CHUNK": 2048},
    "threshold": {"num_warps": 4, "num_stages": 1, "BG": 1024, "BK": 128},  # many queries: 6 programs to an SM
    "choose": {"num_warps": 8, "num_stages": 1, "BLOCK": 4096},
    "union": {"num_warps": 4, "num_stages": 1, "BG": 32, "RUN": 256},
}
_WIDE = _HOPPER | {  # operands of 4 bytes
    "scores": {"num_warps": 8, "num_stages": 1, "ROWS": 64, "N": 32, "CHUNK": 2048},
}
_AMPERE = _HOPPER | {
    "scores": {"num_warps": 4, "num_stages": 2, "ROWS": 64, "N": 64, "CHUNK": 2048},
}
LAUNCH = {(80, 2): _AMPERE, (80, 4): _WIDE, (90, 2): _HOPPER, (90, 4): _WIDE, (100, 2): _HOPPER, (100, 4): _WIDE}


def _options(kernel, x):
    return options(LAUNCH, kernel, x)


def padded(n, least=16):
    return max(least, triton.next_power_of_2(n))


def operands(x, kernel):
    """The type of dot operands. Those of fp32 are not split into tf32: 8 warps halve a tile of 16 columns into wgmmas of 8, which
    read 8 columns beyond theirs, and behind the last tile that is an illegal access (Triton #10629)."""
    return operand_types(x, kernel, wide="ieee")


@shared_by_layers
def first_seen(segment_ids, S):
    """The first of the S + T keys that each query may see, `(B, T)` int32: all from there to its own, none at padding."""
    run, valid = segment_runs(segment_ids)
    t = torch.arange(run.shape[1], device=run.device).expand_as(run)
    first = torch.nn.functional.pad(run[:, 1:] != run[:, :-1], (1, 0), value=True)
    low = torch.where(first, t, 0).cummax(1).values + S
    low = torch.where(run == 0, 0, low)
    return torch.where(valid, low, S + run.shape[1]).to(torch.int32)


def _index_inputs(q, k, w):
    """Inputs of `_scores`: contiguous, in rows of whole 16 bytes, the scale of the true width last."""
    pad = -q.shape[-1] % (16 // q.element_size())
    q, k = (torch.nn.functional.pad(x, (0, pad)) if pad else x for x in (q, k))
    return ready(q.contiguous()), ready(k.contiguous()), w.contiguous(), (q.shape[-1] - pad) ** -0.5


def _scores(inputs, lows, past, length, t0, R, S, local, keys, maxima):
    """Launch scores_kernel for queries t0 .. t0 + R; without `maxima`, the scores themselves in fp32."""
    q, k, w, scale = inputs
    B, T, J, D = q.shape
    chosen = _options("scores", q)
    N, ROWS = chosen["N"], chosen["ROWS"]
    NR, NC = triton.cdiv(R, ROWS), triton.cdiv(min(S + t0 + R, keys.shape[-1]), chosen["CHUNK"])
    integers = w if maxima is None else maxima  # stands in for what is not read
    given = {"HAS_LOWS": lows is not None, "HAS_PAST": past is not None, "RAW": maxima is None}
    launch(scores_kernel, J=J, BD=padded(D), **given, **operands(q, scores_kernel), **chosen)(
        B * NR * NC, tile(q, [ROWS, padded(D)]), tile(k[:, :, None], [N, padded(D)]), w, integers if lows is None else lows,
        integers if past is None else past, integers if past is None else length, tile(keys[:, :, None], [ROWS, N]), integers,
        scale, t0, T, S, R, keys.shape[-1], NR, NC, local,
    )  # fmt: skip


def marked(keys, maxima, lows, t0, T, S, top_k):
    """Marks `(B, R, W / 16)` int16 of what rows of keys `(B, R, W)` select."""
    B, R, W = keys.shape
    groups = torch.empty(B * R * (W // GROUP + 2 * top_k), dtype=torch.int32, device=keys.device)
    marks = torch.empty(B, R, W // GROUP, dtype=torch.int16, device=keys.device)
    chosen = dict(_options("threshold", keys))
    chosen["BK"] = min(chosen["BK"], padded(top_k))
    launch(threshold_kernel, HAS_LOWS=lows is not None, **chosen)(
        B * R, keys, maxima, groups if lows is None else lows, marks, groups, t0, T, S, R, W, top_k
    )
    return marks


def choose_options(table, top_k):
    """All of 16 top_k numbers in registers, 16 a thread; beyond 8,192 (16,384 spill) they are read again in every round."""
    block = min(max(table["choose"]["BLOCK"], triton.next_power_of_2(16 * top_k)), 8192)
    return table["choose"] | {"BLOCK": block, "num_warps": table["choose"]["num_warps"] * block // table["choose"]["BLOCK"]}


def chosen_keys(keys, maxima, tops, length, S, top_k):
    """index `(B, top_k)`, ascending, and count `(B,)`: what one query a row selects of the first length + 1 of keys `(B, W)`."""
    B, W = keys.shape
    index, count = (torch.empty(B, *n, dtype=torch.int32, device=keys.device) for n in ((top_k,), ()))
    groups = torch.empty(B, 2, top_k, dtype=torch.int32, device=keys.device)
    options = choose_options(LAUNCH[architecture(keys), 4], top_k)
    launch(choose_kernel, **options)(B, keys, maxima, tops, length, groups, index, count, S, W, top_k)
    return index, count


def _union(marks, lows, lists, t0, T, S):
    """Write the lists of queries t0 .. t0 + R."""
    B, R, groups = marks.shape
    index, bits, count = lists
    chosen, NS = _options("union", bits), triton.cdiv(min(R, T - t0), QUERIES)
    NC = triton.cdiv(groups, chosen["RUN"])
    parts = torch.empty(B, NS, NC, dtype=torch.int32, device=marks.device)
    tensors = marks, parts if lows is None else lows, parts, index, bits, count
    for counting in (True, False):
        launch(union_kernel, Q=QUERIES, HAS_LOWS=lows is not None, COUNT=counting, **chosen)(
            B * NS * NC, *tensors, t0, T, S, R, groups * GROUP, index.shape[1], NS, NC, index.shape[2]
        )


def _new_lists(B, T, keys, top_k, device):
    """index, bits `(B, T / 16, CAP)`, count `(B, T / 16)`, int32: CAP holds what 16 queries can select."""
    NT, CAP = triton.cdiv(T, QUERIES), min(QUERIES * top_k, triton.cdiv(keys, QUERIES) * QUERIES)
    index, bits = (torch.empty(B, NT, CAP, dtype=torch.int32, device=device) for _ in range(2))
    return index, bits, torch.empty(B, NT, dtype=torch.int32, device=device)


def _select_pass(q, k, w, lows, past, length, top_k, local):
    """The lists, strip by strip."""
    B, T, S = *q.shape[:2], k.shape[1] - q.shape[1]
    inputs = _index_inputs(q, k, w)
    lists = _new_lists(B, T, S + T, top_k, q.device)
    W = triton.cdiv(S + T, WHOLE) * WHOLE
    R = min(triton.cdiv(T, 64), max(1, STRIP // (B * 64 * W * 4))) * 64
    keys = torch.empty(B * R * W, dtype=torch.int32, device=q.device)
    maxima = torch.empty(B * R * (W // GROUP), dtype=torch.int32, device=q.device)
    for t0 in range(0, T, R):
        W = triton.cdiv(S + min(t0 + R, T), WHOLE) * WHOLE  # the strip's last query sees no more
        b_keys, b_maxima = keys[: B * R * W].view(B, R, W), maxima[: B * R * (W // GROUP)].view(B, R, -1)
        _scores(inputs, lows, past, length, t0, R, S, local, b_keys, b_maxima)
        _union(marked(b_keys, b_maxima, lows, t0, T, S, top_k), lows, lists, t0, T, S)
    return lists


@torch.library.custom_op("hybrid::sparse_select", mutates_args=())
def _select(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, lows: torch.Tensor | None, past: torch.Tensor | None,
    length: torch.Tensor | None, top_k: int, local: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _select_pass(q, k, w, lows, past, length, top_k, local)


@_select.register_fake
def _(q, k, w, lows, past, length, top_k, local):
    return _new_lists(*q.shape[:2], k.shape[1], top_k, q.device)


# ----------------------------------------------------------------------------------------------------------------------
# The public operators, and the lists


def unsupported(x, index_q=None):
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} inputs"
    if index_q is not None and index_q.shape[3] > 256:
        return f"index heads of {index_q.shape[3]}: at most 256"
    return None


def supports_indexer_scores(q, k, w):
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, w)):
        return "the scores' gradient (indexer_kl has one of its own)"
    return unsupported(q, q)


def supports_select_top_k(scores, distance, top_k, local=0):
    return None if scores.dtype == torch.float32 else f"{scores.dtype} scores: a selection is by fp32"


@torch.library.custom_op("hybrid::indexer_scores", mutates_args=())
def _indexer_scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (B, T), S = q.shape[:2], k.shape[1]
    scores = torch.empty(B, T, triton.cdiv(S, 128) * 128, dtype=torch.float32, device=q.device)
    _scores(_index_inputs(q, k, w), None, None, None, 0, T, S - T, 0, scores, None)
    return scores[..., :S].clone()


@_indexer_scores.register_fake
def _(q, k, w):
    return q.new_empty(*q.shape[:2], k.shape[1], dtype=torch.float32)


def indexer_scores(q, k, w):
    """`reference.indexer_scores`, forward only; the kernels below never hold this matrix."""
    return _indexer_scores(q.detach(), k.detach().to(q.dtype), w.detach())


def select_top_k(scores, distance, top_k, local=0):
    """`reference.select_top_k`; keys must lie in the order of their positions."""
    B, T, S = scores.shape
    distance, scores = distance.expand_as(scores), scores.detach()
    keys = torch.where(scores == 0, 0.0, scores).view(torch.int32)  # as `ordered` does
    keys = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).clamp(-(2**31) + 1, 2**31 - 3)
    keys = torch.where(distance < local, LOCAL.value, keys)
    keys = torch.where(distance >= 0, keys, UNSEEN.value)
    keys = torch.nn.functional.pad(keys, (0, -S % 128), value=UNSEEN.value).view(B * T, 1, -1)
    maxima = keys.unflatten(-1, (-1, GROUP)).amax(-1)
    marks = marked(keys, maxima, None, 0, 1, keys.shape[-1] - 1, top_k)
    selected = (marks[..., None] >> torch.arange(GROUP, device=keys.device, dtype=torch.int16)) & 1
    return selected.bool().view(B, T, -1)[..., :S]


@torch.library.custom_op("hybrid::sparse_lists", mutates_args=())
def lists_of(selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, S = selected.shape
    groups = torch.nn.functional.pad(selected, (0, -S % GROUP)).unflatten(-1, (-1, GROUP))
    marks = (groups.int() << torch.arange(GROUP, device=selected.device)).sum(-1).to(torch.int16)
    lists = _new_lists(B, T, S, S, selected.device)
    _union(marks, None, lists, 0, T, marks.shape[-1] * GROUP)
    return lists


@lists_of.register_fake
def _(selected):
    B, T, S = selected.shape
    return _new_lists(B, T, S, S, selected.device)


def lists_for(index_q, index_k, index_w, top_k, local, past=None, segment_ids=None):
    """What 16 neighbouring queries select between them: index, bits, count."""
    S = index_k.shape[1] - index_q.shape[1]
    lows = None if segment_ids is None else first_seen(segment_ids, S)
    positions, length = (None, None) if past is None else (x.to(torch.int32).contiguous() for x in past[3:])
    index = (x.detach() for x in (index_q, index_k.to(index_q.dtype), index_w))
    inputs = (*index, lows, positions, length, top_k, local)
    return _select(*inputs) if traced(*inputs[:3]) else _select_pass(*inputs)
