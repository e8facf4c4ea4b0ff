"""What the programs of `step_flow_kernels` do but for the gather: they wait for each other, multiply and write.

Pointers are those of a unit's chunk, which its counters belong to.
"""

import triton
import triton.language as tl

from .bound import INTERPRETED
from .decay_write_kernels import write_delta, write_more
from .snapshot_tiles import convert
from .token_gather_kernels import has_slot, row_addresses

# A unit's counters: how many programs have gathered rows to write; have multiplied, or gathered rows to read; have
# written, or made readings.
GATHERED, MULTIPLIED, WRITTEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COUNTERS = tl.constexpr(32)  # int32 that a unit has, so that it shares its cache line with no other


@triton.jit
def counted(p_counter):
    """How many programs have counted. What they stored before is seen by what follows."""
    if INTERPRETED:
        return tl.atomic_add(p_counter, 0, sem="acquire")
    # Measured on an H200, ms per saving call of 2 and 8 streams of 1024 columns: 13.4 and 13.0, but 13.8 and 13.2 with
    # an atomic that adds nothing.
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [p_counter.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for(p_counter, programs):
    """Returns when so many programs have counted."""
    while counted(p_counter) < programs:
        pass
    tl.debug_barrier()


@triton.jit
def count(p_counter):
    """Counts this program, for all that it has stored to be seen by those that wait."""
    tl.debug_barrier()
    tl.atomic_add(p_counter, 1, sem="release")


@triton.jit
def multiply_tile(
    p_matrix,
    p_u,
    p_inter,
    p_out,
    p_awaited,
    awaited,
    p_counter,
    first_row,
    first_column,
    D: tl.constexpr,
    left,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    READINGS: tl.constexpr,
):
    """One tile of `p_matrix` u: a unit's delta or, plus inter, its readings. left: rows of p_out that there are."""
    o_m = first_row + tl.arange(0, BM)
    o_n = first_column + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    p_rows = p_matrix + o_m[:, None] * C
    m_m, m_n = o_m < C, o_n < D
    p_columns = p_u + o_n[None, :]
    x = tl.load(p_rows + o_k[None, :], mask=m_m[:, None] & (o_k < C)[None, :], other=0.0)
    wait_for(p_awaited, awaited)
    total = tl.zeros([BM, BN], tl.float32)
    for _k in range(0, tl.minimum(C, first_row + BM), BK):
        now = x
        values = tl.load(p_columns + o_k[:, None] * D, mask=(o_k < C)[:, None] & m_n[None, :], other=0.0)
        o_k += BK
        x = tl.load(p_rows + o_k[None, :], mask=m_m[:, None] & (o_k < C)[None, :], other=0.0)
        total = tl.dot(now, values, total, input_precision=PRECISION)
    at = o_m[:, None] * D + o_n[None, :]
    if READINGS:
        inter = tl.load(p_inter + at, mask=m_m[:, None] & m_n[None, :], other=0.0)
        total = tl.fma(total, 1.0, inter)  # a sum, but none that the compiler would begin the products' sum with
    tl.store(p_out + at, total.to(p_out.dtype.element_ty), mask=(m_m & (o_m < left))[:, None] & m_n[None, :])
    count(p_counter)


@triton.jit
def columns_of_unit(start, D: tl.constexpr, B: tl.constexpr, BU: tl.constexpr):
    """B columns of a unit of BU from `start` on, and which of them there are."""
    o_d = start + tl.arange(0, B)
    return o_d, o_d < D if D % BU != 0 else tl.full([B], True, tl.int1)


@triton.jit
def _next_rows(p_slot, p_decay, p_weight, o_n, left):
    """Slots, decays and weights of rows o_n, of which `left` are left; -1 is no slot."""
    m_n = o_n < left
    slot = tl.load(p_slot + o_n, mask=m_n, other=-1)
    return slot, tl.load(p_decay + o_n, mask=m_n, other=0.0), tl.load(p_weight + o_n, mask=m_n, other=0.0)


@triton.jit
def _load_rows(p_bank, slot, o_d, m_d, num_slots, D: tl.constexpr):
    """Rows `slot` as they are before the step, zero where there is none; and what of them there is."""
    held = has_slot(slot[:, None], num_slots) & m_d[None, :]
    return tl.load(row_addresses(p_bank, slot, o_d, D), mask=held, other=0.0, eviction_policy="evict_first"), held


@triton.jit
def _save_rows(p_snapshot, ordinal, raw, o_d, held, D: tl.constexpr):
    """Rows as the bank has them into the chunk's rows `ordinal` of the snapshot."""
    kept = convert(raw, p_snapshot.dtype.element_ty)
    tl.store(row_addresses(p_snapshot, ordinal, o_d, D), kept, mask=held, eviction_policy="evict_first")


@triton.jit
def _store_rows(p_first, number, row, o_d, held, D: tl.constexpr):
    """Stores rows `number`, counted from p_first on, not to be kept in the cache.

    Measured on an H200, us per step of 8 streams of 1024 columns: 71.6, and 75.6 with rows marked to go first."""
    row = row.to(p_first.dtype.element_ty)
    tl.store(row_addresses(p_first, number, o_d, D), row, mask=held, cache_modifier=".cs")


@triton.jit
def write_token(
    p_bank,
    p_slot,
    p_decay,
    p_weight,
    p_link,
    p_shared,
    p_rows,
    p_write_w,
    p_next,
    p_delta,
    p_ordinal,
    p_snapshot,
    p_counters,
    multiplied,
    token,
    o_d,
    m_d,
    num_slots,
    D: tl.constexpr,
    W: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
    WRITER: tl.constexpr,
    VERSIONS: tl.constexpr,
):
    """Writes a token's rows, BX at a time as long as other tokens write some of them too, and then BY at a time.

    p_slot to p_rows: see RowWrites; p_write_w and p_next: weight and next entry by entry. WRITER and
    VERSIONS: of the plan, see KeptRows; rows are kept at p_ordinal of p_snapshot.
    """
    ORDINALS: tl.constexpr = WRITER == "write"
    SAVES: tl.constexpr = ORDINALS and not VERSIONS
    p_slot += token * W
    p_decay += token * W
    p_weight += token * W
    p_link += token * W
    if ORDINALS:
        p_ordinal += token * W
    shared = tl.load(p_shared + token)
    left = tl.load(p_rows + token)
    o_x, o_y = tl.arange(0, BX), tl.arange(0, BY)
    slot, decay, weight = _next_rows(p_slot, p_decay, p_weight, o_x, left)
    link = tl.load(p_link + o_x, mask=o_x < shared, other=-1)
    wait_for(p_counters + MULTIPLIED, multiplied)
    delta = tl.load(p_delta + token * D + o_d, mask=m_d, other=0.0)
    while shared > 0:
        raw, held = _load_rows(p_bank, slot, o_d, m_d, num_slots, D)
        # Nearly all of these slots have two writes: what the second takes is asked for at once.
        second = link >= 0
        second_weight = tl.load(p_write_w + link, mask=second, other=0.0)
        p_second = row_addresses(p_delta, link // W, o_d, D)
        second_delta = tl.load(p_second, mask=second[:, None] & m_d[None, :], other=0.0)
        link = tl.load(p_next + link, mask=second, other=-1)
        if ORDINALS:
            ordinal = tl.load(p_ordinal + o_x, mask=o_x < left, other=0)
            p_ordinal += BX
        if SAVES:
            _save_rows(p_snapshot, ordinal, raw, o_d, held, D)
        p_slot += BX
        p_decay += BX
        p_weight += BX
        p_link += BX
        shared -= BX
        left -= BX
        following = _next_rows(p_slot, p_decay, p_weight, o_x, left)
        following_link = tl.load(p_link + o_x, mask=o_x < shared, other=-1)
        row = write_delta(convert(raw, tl.float32) * decay[:, None], weight, delta[None, :])
        row = tl.where(second[:, None], write_delta(row, second_weight, second_delta), row)
        while tl.max(link, axis=0) >= 0:
            more = link >= 0
            weight = tl.load(p_write_w + link, mask=more, other=0.0)
            row = write_more(row, more, weight, row_addresses(p_delta, link // W, o_d, D), m_d)
            link = tl.load(p_next + link, mask=more, other=-1)
        _store_rows(p_snapshot if VERSIONS else p_bank, ordinal if VERSIONS else slot, row, o_d, held, D)
        slot, decay, weight = following
        link = following_link
    slot, decay, weight = _next_rows(p_slot, p_decay, p_weight, o_y, left)
    while left > 0:
        raw, held = _load_rows(p_bank, slot, o_d, m_d, num_slots, D)
        if ORDINALS:
            ordinal = tl.load(p_ordinal + o_y, mask=o_y < left, other=0)
            p_ordinal += BY
        if SAVES:
            _save_rows(p_snapshot, ordinal, raw, o_d, held, D)
        p_slot += BY
        p_decay += BY
        p_weight += BY
        left -= BY
        following = _next_rows(p_slot, p_decay, p_weight, o_y, left)
        row = write_delta(convert(raw, tl.float32) * decay[:, None], weight, delta[None, :])
        _store_rows(p_snapshot if VERSIONS else p_bank, ordinal if VERSIONS else slot, row, o_d, held, D)
        slot, decay, weight = following
    count(p_counters + WRITTEN)
