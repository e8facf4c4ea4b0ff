"""All steps of a slab in one launch, whose programs wait for each other where a launch per stage would wait for all.

A unit is one stream's chunk, restricted to a block of columns: one or two pieces of 128 bytes of each row. Units of
other streams or columns are independent, so one unit's write runs beside another one's gather, and still finds its rows
in the L2 cache, where the rows of a whole step would not fit. Which rows a token writes has been sorted out before, see
`row_writes_kernels`.

| of a unit                | programs           | wait for                          | count      |
| ------------------------ | ------------------ | --------------------------------- | ---------- |
| gather of rows to write  | per token, piece   | written, of the step before       | gathered   |
| gather of rows to read   | per token, piece   | written, of the step before       | multiplied |
| delta = X u              | one per tile       | gathered                          | multiplied |
| decay-and-write          | one per token      | multiplied                        | written    |
| readings = QX u + inter  | one per tile       | multiplied                        | written    |

A program waits only for programs with smaller numbers. GPUs start programs in the order of their numbers, so that a
waiting one never keeps out the one that it waits for: CUDA does not promise that order, but single-pass scans, such as
CUB's, rely on it as well. Every sum has a fixed order. SPEC section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .dual_matmul_kernels import matmul_precision
from .layout import ChunkFields, Staged
from .row_writes_kernels import RowWrites, empty_row_writes
from .snapshot import KEEPS_NOTHING, SnapshotPlan
from .step_flow_programs import (
    COUNTERS,
    GATHERED,
    MULTIPLIED,
    WRITTEN,
    columns_of_unit,
    count,
    multiply_tile,
    wait_for,
    write_token,
)
from .token_gather_kernels import (
    TokenGatherConfig,
    columns_per_program,
    load_entries,
    row_sum,
)

REGISTERS = 65536  # of a processor, on every GPU so far

# The launch's sizes, for none of which it is compiled anew.
SIZES = ["num_slots", "steps", "streams", "all_streams", "tokens", "first_token", "multiply_later", "write_later"]


@triton.jit(do_not_specialize=SIZES)
def _step_flow_kernel(
    p_bank,
    p_k_idx,
    p_k_eff,
    p_q_idx,
    p_q_w,
    p_v,
    p_beta,
    p_X,
    p_QX,
    p_write_w,
    p_next,
    p_slot,
    p_decay,
    p_weight,
    p_link,
    p_shared,
    p_rows,
    p_u,
    p_inter,
    p_delta,
    p_counters,
    p_readings,
    p_ordinal,
    p_snapshot,
    p_kept,
    num_slots,
    D: tl.constexpr,
    steps,
    streams,
    all_streams,
    tokens,
    first_token,
    multiply_later,
    write_later,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BU: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    WRITER: tl.constexpr,
    VERSIONS: tl.constexpr,
):
    """A tick has the gathers of a unit, the products of the unit `multiply_later` ticks before, and the write and the
    readings of the one `write_later` ticks before. The chunks of the readings [P, T, D] begin at token `first_token`.
    WRITER and VERSIONS: of the plan, see `KeptRows`. With versions p_k_idx, p_q_idx and p_slot are addresses of rows.
    Steps of what is kept are those of all streams."""
    across: tl.constexpr = (BU + BN - 1) // BN
    tiles: tl.constexpr = ((C + BM - 1) // BM) * across
    pieces: tl.constexpr = BU // BD
    programs: tl.constexpr = 2 * tiles + C + 2 * C * pieces
    unit = tl.program_id(0) // programs
    n = tl.program_id(0) % programs
    if n < tiles:
        unit -= multiply_later
    elif n < 2 * tiles + C:
        unit -= write_later
    parts: tl.constexpr = (D + BU - 1) // BU
    units = streams * parts  # of a step
    if (unit >= 0) & (unit < steps * units):
        step = unit // units
        stream = ((unit % units) // parts).to(tl.int64)
        first_column = (unit % parts) * BU
        chunk = step * streams + stream
        p_counters += unit.to(tl.int64) * COUNTERS
        p_u += stream * C * D
        p_inter += stream * C * D
        p_delta += stream * C * D
        p_k_idx += chunk * (C * W)
        p_write_w += chunk * (C * W)
        if WRITER is not None:
            p_ordinal += chunk * (C * W)
            p_snapshot += (step * all_streams + stream) * (C * W) * D
        if n < 2 * tiles:
            first_row = (n % tiles) // across * BM
            first_column += n % across * BN
            if n < tiles:
                p_X += chunk * C * C
                awaited = p_counters + GATHERED
                done = p_counters + MULTIPLIED
                multiply_tile(
                    p_X, p_u, p_inter, p_delta, awaited, C * pieces, done, first_row, first_column, D, C,
                    C, BM, BN, BK, PRECISION, False,
                )  # fmt: skip
            else:
                p_QX += chunk * C * C
                t = first_token + step * C
                p_readings += (stream * tokens + t) * D
                awaited = p_counters + MULTIPLIED
                done = p_counters + WRITTEN
                multiply_tile(
                    p_QX, p_u, p_inter, p_readings, awaited, C * pieces + tiles, done, first_row, first_column, D,
                    tokens - t, C, BM, BN, BK, PRECISION, True,
                )  # fmt: skip
        elif n < 2 * tiles + C:
            first = chunk * (C * W)
            o_u, m_u = columns_of_unit(first_column, D, BU, BU)
            write_token(
                p_bank, p_slot + first, p_decay + first, p_weight + first, p_link + first, p_shared + chunk * C,
                p_rows + chunk * C, p_write_w, p_next + first, p_delta, p_ordinal, p_snapshot, p_counters,
                C * pieces + tiles, n - 2 * tiles, o_u, m_u, num_slots, D, W, BX, BY, WRITER, VERSIONS,
            )  # fmt: skip
        else:
            n -= 2 * tiles + C
            token = n % C
            o_d, m_d = columns_of_unit(first_column + n // (2 * C) * BD, D, BD, BU)
            p_before = p_counters - units.to(tl.int64) * COUNTERS + WRITTEN
            if n % (2 * C) < C:
                p_idx, p_weight = p_k_idx + token * W, p_k_eff + (chunk * C + token) * W
                of_writes = load_entries(p_idx, p_weight, tl.arange(0, BW), W)
                v = tl.load(p_v + (chunk * C + token) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                beta = tl.load(p_beta + chunk * C + token)
                if step > 0:
                    wait_for(p_before, C + tiles)
                p_saved = None
                if WRITER == "gather":
                    p_saved = p_ordinal + token * W
                retrieved = row_sum(
                    p_bank, p_idx, p_weight, of_writes, o_d, m_d, num_slots, D, W, BW, BD, "", p_saved, p_snapshot
                )
                if p_kept is not None:
                    at = ((step * all_streams + stream) * C + token) * D
                    tl.store(p_kept + at + o_d, retrieved, mask=m_d)
                tl.store(p_u + token * D + o_d, beta * (v - retrieved), mask=m_d)
                count(p_counters + GATHERED)
            else:
                p_idx, p_weight = p_q_idx + (chunk * C + token) * R, p_q_w + (chunk * C + token) * R
                of_reads = load_entries(p_idx, p_weight, tl.arange(0, BR), R)
                if step > 0:
                    wait_for(p_before, C + tiles)
                inter = row_sum(p_bank, p_idx, p_weight, of_reads, o_d, m_d, num_slots, D, R, BR, BD, "evict_first")
                tl.store(p_inter + token * D + o_d, inter, mask=m_d)
                count(p_counters + MULTIPLIED)


@dataclass(frozen=True)
class StepFlowConfig:
    gather: TokenGatherConfig
    columns: int  # of a unit, which a write takes
    shared_rows: int  # that a write takes at a time, of those that several tokens write
    rows: int  # and of those that one token writes
    tile: int
    inner: int
    stages: int  # of the products' tiles
    registers: int

    @staticmethod
    def from_shapes(
        streams: int, chunk: int, writes: int, reads: int, head_dim: int, itemsize: int, saves: bool
    ) -> StepFlowConfig:
        columns, width = unit_columns(streams, head_dim, itemsize), triton.next_power_of_2(writes)
        few = max(writes, reads) <= 16 and columns * itemsize <= 128
        return StepFlowConfig(
            gather=TokenGatherConfig.from_shapes(writes, reads, head_dim, itemsize),
            columns=columns,
            shared_rows=min(1024 // (columns * itemsize), width, 4 if few else width),
            rows=min(4096 // (columns * itemsize), width, 8 if few else width),
            tile=16,
            inner=min(32, max(16, triton.next_power_of_2(chunk))),
            # What products take of a processor's shared memory its cache loses, where rows arrive. Measured on an H200,
            # ms per call as graph replay with three stages and with one: of 16 writes of 64 columns 1.80 and 1.73; of
            # 2 and 8 streams of 1024 columns and a chunk of 256 9.21, 9.75 and 8.94, and 9.23, 9.79 and 9.10; saving
            # 10.89, 10.22 and 9.86, and 10.57, 9.99 and 9.67.
            stages=1 if few or saves else 3,
            # Measured on an H200, us per step of 8 streams of 1024 columns at a chunk of 64, and of 256: 69.0 and 465,
            # 69.6 and 469 with half as many rows, 69.5 and 511 with 104 registers, so that 19 programs fit a processor.
            # With 16 writes of 64 columns 13.9, 17.7 with 96 registers, 14.8 with twice as many rows.
            registers=64 if few else 96,
        )

    def lags(self, streams: int, chunk: int, head_dim: int, processors: int) -> tuple[int, int]:
        """How many ticks after its gathers a unit multiplies, and writes; which reaches no bit.

        What runs at a time, and half as much again; but a write must not come behind the gather of the step after it.
        Measured on an H200, us per step of 8 streams of 1024 columns, with 4, 8, 11, 12 and 16 ticks: 74.2, 70.3, 69.0,
        68.2 and 69.5; at a chunk of 256, with 1, 2, 3, 4 and 8: 566, 504, 465, 462 and 469.
        """
        running = REGISTERS // (32 * self.registers) * processors / self.programs(chunk)
        write_later = max(1, min(round(1.5 * running), streams * self.parts(head_dim) // 2))
        return -(-write_later // 2), write_later

    def parts(self, head_dim: int) -> int:
        """Units per chunk."""
        return triton.cdiv(head_dim, self.columns)

    def programs(self, chunk: int) -> int:
        """Programs per unit."""
        tiles = triton.cdiv(chunk, self.tile) * triton.cdiv(self.columns, self.tile)
        return 2 * tiles + chunk + 2 * chunk * (self.columns // self.gather.columns)


def unit_columns(streams: int, head_dim: int, itemsize: int) -> int:
    """Pieces of 256 bytes of a row, which memory takes in faster than smaller ones, where that leaves units enough.

    It reaches no bit.
    Measured on an H200, us per step with 128 and 256 bytes: 17.2 and 20.1 with 2 streams of 1024 columns, 71.2 and 69.0
    with 8; with 8 and a chunk of 256 463 and 465, and 625 and 609 where the write saves the rows.
    """
    pieces = 2 if streams * head_dim * itemsize >= 32 * 256 else 1
    return min(pieces * columns_per_program(head_dim, itemsize), triton.next_power_of_2(head_dim))


class FlowMemory(NamedTuple):
    """Working memory of a launch: what it is to write, and what a unit keeps from one of its programs to the next."""

    rows: RowWrites
    addresses: tuple[Tensor, Tensor] | None  # with versions: of the rows at k_idx and q_idx, see `version_rows_call`
    u: Tensor  # [P, C, D] float32
    inter: Tensor  # [P, C, D] float32
    delta: Tensor  # [P, C, D] float32
    counters: Tensor  # [steps, units, COUNTERS] int32, zero before each launch


def empty_flow_memory(
    steps: int,
    streams: int,
    chunk: int,
    writes: int,
    reads: int,
    head_dim: int,
    like: Tensor,
    plan: SnapshotPlan,
) -> FlowMemory:
    """Fresh `FlowMemory`. plan: of the rows that the steps keep."""
    parts = triton.cdiv(head_dim, unit_columns(streams, head_dim, like.element_size()))
    counters = like.new_empty(steps, streams * parts, COUNTERS.value, dtype=torch.int32)
    u, inter, delta = (like.new_empty(streams, chunk, head_dim, dtype=torch.float32) for _ in range(3))
    tokens = (steps, streams, chunk)
    rows = empty_row_writes(tokens, writes, like, plan.writer == "write", plan.versions)
    of_writes, of_reads = (like.new_empty(*tokens, n, dtype=torch.int64) for n in (writes, reads))
    return FlowMemory(rows, (of_writes, of_reads) if plan.versions else None, u, inter, delta, counters)


class KeptRows(NamedTuple):
    """Where a saving launch keeps rows, of its first step; those of the next one are behind all streams' of it.

    Compact rows are stored by the plan's writer before they are overwritten. Versions are stored by the write, there
    alone, once it has made them: the bank stays as it is.
    """

    plan: SnapshotPlan
    ordinals: Tensor | None  # [steps, P, C, W] int32, see `launch_phase1`
    snapshot: Tensor  # [P * E, D] row p * E + ordinal
    retrieved: Tensor  # [P, C, D] float32, which the gather stores
    all_streams: int


def step_flow_call(
    bank: Tensor,
    staged: Staged,
    fields: ChunkFields,
    links: Tensor,
    X: Tensor,
    QX: Tensor,
    memory: FlowMemory,
    readings: Tensor,
    first_token: int,
    saving: KeptRows | None = None,
) -> KernelCall:
    """All steps of a slab, in place on the bank, and their readings [P, T, D] from `first_token` on; all contiguous.

    links: [steps * P, E] int32, by entry: the slot's next entry, or -1.
    """
    steps, streams, chunk, writes = staged.k_idx.shape
    reads, (num_slots, width), tokens = staged.q_idx.shape[3], bank.shape, readings.shape[1]
    processors = torch.cuda.get_device_properties(bank.device).multi_processor_count if bank.is_cuda else 1
    config = StepFlowConfig.from_shapes(
        streams, chunk, writes, reads, width, bank.element_size(), saves=saving is not None
    )
    lags = config.lags(streams, chunk, width, processors)
    rows, plan, ordinals, snapshot, kept, all_streams = memory.rows, KEEPS_NOTHING, None, None, None, streams
    if saving is not None:
        plan, ordinals, snapshot, kept, all_streams = saving
        if rows.ordinal is not None:
            ordinals = rows.ordinal
    k_rows, q_rows = (staged.k_idx, staged.q_idx) if memory.addresses is None else memory.addresses
    tensors = (
        *(bank, k_rows, fields.k_eff, q_rows, fields.q_w, staged.v, staged.beta, X, QX),
        *(fields.write_w, links, rows.slot, rows.decay, rows.weight, rows.link, rows.shared, rows.rows),
        *(memory.u, memory.inter, memory.delta, memory.counters, readings, ordinals, snapshot, kept),
    )
    sizes = (num_slots, width, steps, streams, all_streams, tokens, first_token)
    options = dict(
        C=chunk,
        W=writes,
        R=reads,
        BW=config.gather.rows_w,
        BR=config.gather.rows_r,
        BD=config.gather.columns,
        BU=config.columns,
        BX=config.shared_rows,
        BY=config.rows,
        BM=config.tile,
        BN=config.tile,
        BK=config.inner,
        PRECISION=matmul_precision(bank.dtype),
        WRITER=plan.writer,
        VERSIONS=plan.versions,
        num_warps=1,
        num_stages=config.stages,
        maxnreg=config.registers,
        enable_fp_fusion=True,
    )
    ticks = steps * streams * config.parts(width) + lags[1]
    return KernelCall(_step_flow_kernel, (ticks * config.programs(chunk),), (*tensors, *sizes, *lags), options)
