"""Arguments for any op, drawn from its own schema: a strategy per argument name and type, over sizes drawn once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from sdm_compile.ops.checks import accumulate_dtype
from sdm_compile.ops.layout import ChunkFields
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.registry import RegisteredOp
from sdm_compile.ops.staging import stage_inputs
from sdm_compile.ops.write_read_recompute import segments
from tests.harness import DTYPES, LAYOUTS, laid_out
from tests.samples.row_quant import empty_rows

FAMILIES = {
    "call": (  # [P, T, *]
        *("stage_inputs", "stage_inputs_bwd", "unstage_readings_bwd"),
        *("write_read", "write_read_", "write_read_saving", "write_read_bwd"),
        *("write_read_recompute", "write_read_recompute_bwd"),
        *("draft", "commit_"),
    ),
    "staged": ("unstage_readings", "phase1", "phase1_bwd", "solve", "solve_bwd"),  # [steps, P, C, *]
    "step": (  # [P, C, *]
        *("token_gather", "token_gather_bwd", "dual_matmul", "dual_matmul_bwd"),
        *("decay_write", "decay_write_", "decay_write_bwd"),
    ),
    # [..., *]
    "token": ("decode_step_", "snapshot_quantize", "snapshot_dequantize", "product_key_topk", "product_key_topk_bwd"),
}


@dataclass(frozen=True)
class Sizes:
    """What the arguments of one call agree on."""

    family: str
    returns: int  # how many tensors the op returns
    streams: int
    tokens: int
    chunk: int
    writes: int
    reads: int
    width: int
    slots: int  # per stream
    spare_slots: int
    gates: int  # per token
    outer: tuple[int, ...]  # leading dimensions of the "token" family
    factors: tuple[int, ...]
    k: int
    dtype: torch.dtype  # the bank's
    mode: str  # of the snapshot
    saving: bool
    seed: int

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def num_slots(self) -> int:
        streams = prod(self.outer) if self.family == "token" else self.streams
        return streams * self.slots + self.spare_slots

    @property
    def lead(self) -> tuple[int, ...]:
        return {
            "call": (self.streams, self.tokens),
            "staged": self.staged,
            "step": (self.streams, self.chunk),
            "token": self.outer,
        }[self.family]

    @property
    def staged(self) -> tuple[int, ...]:
        return (self.steps, self.streams, self.chunk)

    @property
    def chunked(self) -> tuple[int, ...]:
        """Leading dimensions of what Phase 1 and the solve make; a call's backward takes them flattened."""
        return (prod(self.staged),) if self.family == "call" else self.lead

    def entries(self, per_chunk: int) -> tuple[int, ...]:
        """The shape of so many numbers per chunk."""
        lead = self.chunked[:-1]
        return (self.steps * self.streams * per_chunk,) if self.family == "call" else (*lead, per_chunk)

    def ids(self, width: int, seed: int) -> Tensor:
        """Distinct within a token, each stream's its own, some negative."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(*self.lead, max(width, self.slots), generator=generator).argsort(-1)[..., :width] % self.slots
        stream_dim = {"call": 0, "staged": 1, "step": 0, "token": None}[self.family]
        if stream_dim is None:
            base = torch.arange(prod(self.outer)).view(self.outer)
        else:
            base = torch.arange(self.streams).view(-1, *[1] * (len(self.lead) - stream_dim - 1))
        ids = ids + self.slots * base.unsqueeze(-1)
        hidden = torch.rand(ids.shape, generator=generator) < 0.2
        return ids.masked_fill(hidden, -1).to(torch.int64 if self.family in ("call", "token") else torch.int32)

    @cached_property
    def fields(self) -> ChunkFields:
        """Phase 1 of the call's write slots: what orders the groups that its arguments name."""
        k_idx = self.ids(self.writes, self.seed)
        ones = torch.ones(k_idx.shape)
        if self.family == "call":
            v, beta = ones.new_ones(*self.lead, self.width), ones.new_ones(*self.lead, 1)
            settings: dict[str, Any] = {"num_slots": self.num_slots, "dtype": torch.float32, "chunk_size": self.chunk}
            staged = stage_inputs(k_idx, ones, v, beta, ones, k_idx, ones, **settings)
            return phase1(*(staged[i] for i in (0, 1, 4, 5, 6)))
        if self.family == "step":
            return ChunkFields(*(x[0] for x in phase1(*(x.unsqueeze(0) for x in (k_idx, ones, ones, k_idx, ones)))))
        return phase1(k_idx, ones, ones, k_idx, ones)


def family(op: RegisteredOp) -> str:
    for name, ops in FAMILIES.items():
        if op.name in ops:
            return name
    raise LookupError(f"sdm::{op.name} belongs to no family of FAMILIES")


@st.composite
def sizes(draw: st.DrawFn, op: RegisteredOp) -> Sizes:
    small = st.integers(0, 3)
    writes = draw(st.integers(1, 3))
    factors = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES[1:] if "solve" not in op.name else DTYPES[:2]))
    return Sizes(
        family=family(op),
        returns=len(op.overload._schema.returns),
        streams=draw(small),
        tokens=draw(st.integers(0, 9)),
        chunk=draw(st.integers(1, 5)),
        writes=writes,
        reads=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 6)),
        slots=draw(st.integers(writes, 6)),
        spare_slots=draw(small),
        gates=draw(st.sampled_from([1, writes])),
        outer=tuple(draw(st.lists(small, max_size=2))),
        factors=factors,
        k=draw(st.integers(1, prod(factors))),
        dtype=dtype,
        mode=draw(st.sampled_from(["none"] if dtype == torch.float64 else ["none", "bf16", "fp8", "int4"])),
        saving=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


Shape = Callable[[Sizes], tuple[int, ...]]
Dtype = Callable[[Sizes], SearchStrategy[torch.dtype]]
Strategy = Callable[[Sizes], SearchStrategy[Any]]

seeds = st.integers(0, 2**16)


def bank(s: Sizes) -> SearchStrategy[torch.dtype]:
    return st.just(s.dtype)


def accumulate(s: Sizes) -> SearchStrategy[torch.dtype]:
    return st.just(accumulate_dtype(s.dtype))


def weight(s: Sizes) -> SearchStrategy[torch.dtype]:
    """Users give any; staged, it has the bank's."""
    return st.sampled_from(DTYPES) if s.family in ("call", "token") else bank(s)


def gate(s: Sizes) -> SearchStrategy[torch.dtype]:
    return st.sampled_from(DTYPES) if s.family in ("call", "token") else accumulate(s)


def floats(shape: Shape, dtype: Dtype) -> Strategy:
    def strategy(s: Sizes) -> SearchStrategy[Tensor]:
        def make(seed: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape(s), generator=torch.Generator().manual_seed(seed)).to(dtype)

        return st.builds(make, seeds, dtype(s))

    return strategy


def decays(s: Sizes) -> SearchStrategy[Tensor]:
    """Log-decays, some of them -inf."""
    values = floats(lambda s: (*s.lead, s.gates), gate)(s)
    return values.map(lambda x: (-x.abs()).masked_fill(x > 1, float("-inf")))


def ids(width: Callable[[Sizes], int], own_seed: bool) -> Strategy:
    """With the seed of the call, they are the ones that its groups are of."""

    def strategy(s: Sizes) -> SearchStrategy[Tensor]:
        dtypes = [torch.int32, torch.int64] if s.family in ("call", "token") else [torch.int32]
        seed = seeds if own_seed else st.just(s.seed)
        return st.builds(lambda seed, dtype: s.ids(width(s), seed).to(dtype), seed, st.sampled_from(dtypes))

    return strategy


def pending_slots(s: Sizes) -> SearchStrategy[Tensor]:
    return st.just(s.ids(s.writes, s.seed).int())


def counts(s: Sizes) -> SearchStrategy[Tensor]:
    """Of accepted tokens, some below zero and above the number of tokens."""
    values = st.lists(st.integers(-1, s.tokens + 1), min_size=s.streams, max_size=s.streams)
    return st.builds(lambda x, dtype: torch.tensor(x, dtype=dtype), values, st.sampled_from([torch.int32, torch.int64]))


def group_field(name: str) -> Strategy:
    def strategy(s: Sizes) -> SearchStrategy[Tensor]:
        field = getattr(s.fields, name)
        return st.just(field.flatten() if s.family == "call" else field)

    return strategy


def snapshot_part(part: int) -> Strategy:
    """Payload or scales, for every write entry of the call or step, or for any rows."""

    def strategy(s: Sizes) -> SearchStrategy[Tensor]:
        chunks = {"call": s.steps * s.streams, "step": s.streams}.get(s.family, 1)
        return st.just(empty_rows(chunks * s.chunk * s.writes, torch.empty(0, s.width, dtype=s.dtype), s.mode)[part])

    return strategy


def if_saving(strategy: Strategy) -> Strategy:
    return lambda s: strategy(s) if s.saving else st.none()


def optional(strategy: Strategy) -> Strategy:
    return lambda s: st.none() | strategy(s)


def chosen_slots(s: Sizes) -> SearchStrategy[Tensor]:
    def make(seed: int) -> Tensor:
        order = torch.rand(*s.outer, prod(s.factors), generator=torch.Generator().manual_seed(seed)).argsort(-1)
        return order[..., : s.k].sort(-1).values

    return seeds.map(make)


def square(s: Sizes) -> tuple[int, ...]:
    return (*s.chunked, s.chunk)


def segment_banks(s: Sizes) -> SearchStrategy[Tensor]:
    """As many as the op asks for, which depends on sizes alone."""
    count = segments(s.num_slots, torch.empty(*s.lead, s.writes, device="meta"), s.chunk)
    return floats(lambda s: (count, s.num_slots, s.width), bank)(s)


_bank_rows = floats(lambda s: (s.num_slots, s.width), bank)
_square = floats(square, accumulate)
_writes = floats(lambda s: (*s.chunked, s.writes), accumulate)
_reads = floats(lambda s: (*s.chunked, s.reads), accumulate)
_values = floats(lambda s: (*s.chunked, s.width), accumulate)
_per_group = floats(lambda s: s.entries(s.chunk * s.writes), accumulate)

STRATEGIES: dict[tuple[str, str], Strategy] = {
    **{(name, "Tensor"): _bank_rows for name in ("memory", "bank", "dout", "rows")},
    **{(name, "Tensor"): _square for name in ("A", "QK", "X", "QX", "dA", "dQK", "dX", "dQX")},
    **{(name, "Tensor"): _writes for name in ("k_eff", "write_w", "dk_eff", "dwrite_w")},
    **{(name, "Tensor"): _reads for name in ("q_w", "dq_w")},
    **{(name, "Tensor"): _values for name in ("retrieved", "inter", "delta", "dretrieved", "dinter", "ddelta")},
    **{(name, "Tensor"): _per_group for name in ("group_decay", "dgroup_decay")},
    **{(name, "Tensor"): group_field(name) for name in ("order", "group_start", "group_slot")},
    # Of versions, which the CPU does not keep.
    **{(name, "Tensor"): lambda s: st.just(torch.empty(0, dtype=torch.int32)) for name in ("previous", "latest")},
    ("k_idx", "Tensor"): ids(lambda s: s.writes, own_seed=False),
    ("q_idx", "Tensor"): ids(lambda s: s.reads, own_seed=True),
    ("slots", "Tensor"): pending_slots,
    ("accepted", "Tensor"): counts,
    ("new_rows", "Tensor"): floats(lambda s: (*s.lead, s.writes, s.width), bank),
    ("k_val", "Tensor"): floats(lambda s: (*s.lead, s.writes), weight),
    ("q_val", "Tensor"): floats(lambda s: (*s.lead, s.reads), weight),
    ("v", "Tensor"): floats(lambda s: (*s.lead, s.width), weight),
    ("beta", "Tensor"): floats(lambda s: (*s.lead, 1), gate),
    ("g", "Tensor"): decays,
    ("dk_val", "Tensor"): floats(lambda s: (*s.staged, s.writes), bank),
    ("dq_val", "Tensor"): floats(lambda s: (*s.staged, s.reads), bank),
    ("dv", "Tensor"): floats(lambda s: (*s.staged, s.width), bank),
    ("dbeta", "Tensor"): floats(lambda s: (*s.staged, 1), accumulate),
    ("dg", "Tensor"): floats(lambda s: (*s.staged, s.gates), accumulate),
    ("readings", "Tensor"): floats(lambda s: (*s.lead, s.width), bank),
    ("dreadings", "Tensor"): floats(lambda s: (*s.lead, s.width), bank),
    ("dreadings", "Optional[Tensor]"): optional(floats(lambda s: (*s.lead, s.width), bank)),
    ("dfinal", "Optional[Tensor]"): optional(_bank_rows),
    ("banks", "Tensor"): segment_banks,
    ("payload", "Tensor"): snapshot_part(0),
    ("scales", "Tensor"): snapshot_part(1),
    ("snapshot", "Tensor"): snapshot_part(0),
    ("snapshot", "Optional[Tensor]"): if_saving(snapshot_part(0)),
    ("scales", "Optional[Tensor]"): if_saving(snapshot_part(1)),
    ("scores", "Tensor"): floats(lambda s: (*s.outer, sum(s.factors)), bank),
    ("dvalues", "Tensor"): floats(lambda s: (*s.outer, s.k), bank),
    ("indices", "Tensor"): chosen_slots,
    ("mask", "List[bool]"): lambda s: st.lists(st.booleans(), min_size=s.returns, max_size=s.returns),
    ("factors", "List[int]"): lambda s: st.just(list(s.factors)),
    ("k", "int"): lambda s: st.just(s.k),
    ("num_slots", "int"): lambda s: st.just(s.num_slots),
    ("tokens", "int"): lambda s: st.just(s.tokens),
    ("chunk_size", "int"): lambda s: st.just(s.chunk),
    ("width", "int"): lambda s: st.just(s.width),
    ("dtype", "ScalarType"): lambda s: st.just(s.dtype),
    ("mode", "str"): lambda s: st.just(s.mode),
    ("snapshot_quant", "str"): lambda s: st.just(s.mode),
    ("count_repeats", "bool"): lambda s: st.booleans(),
    ("grad_bank_fp32", "bool"): lambda s: st.booleans(),
}


def strategies(schema: Any) -> list[Strategy]:
    """One for each argument of a schema, in its order."""
    found = [(a.name, str(a.real_type), STRATEGIES.get((a.name, str(a.real_type)))) for a in schema.arguments]
    missing = [f"{type_} {name}" for name, type_, strategy in found if strategy is None]
    if missing:
        raise LookupError(f"{schema.name}: STRATEGIES has none for {', '.join(missing)}")
    return [strategy for _, _, strategy in found if strategy is not None]


@st.composite
def arguments(draw: st.DrawFn, op: RegisteredOp) -> list[Any]:
    """The positional arguments of an op; what it does not write to has any strides."""
    s = draw(sizes(op))
    args = [draw(strategy(s)) for strategy in strategies(op.overload._schema)]
    layouts = st.sampled_from(("contiguous", *LAYOUTS))
    for i, x in enumerate(args):
        if isinstance(x, Tensor) and i not in op.mutated and (layout := draw(layouts)) != "contiguous":
            args[i] = laid_out(x, layout)
    return args
