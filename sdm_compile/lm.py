"""A small byte-level language model of SDM layers: the model that the main job trains and generates from.

A block is, with every sub-layer added to the residual stream,

    h = silu(conv(norm(x)))         a short causal depthwise convolution: what the last few bytes were
    x = x + h + sdm(h)              the memory: what was seen before
    x = x + mlp(norm(x))            SwiGLU

between a byte embedding and a norm with a linear head. Both the convolution's last inputs and the memories are part of
the decode state, so a sequence may be cut anywhere, down to one byte at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .config import SparseDeltaMemoryConfig
from .layer import SparseDeltaMemory
from .ops import SDMPending
from .ops.checks import check_devices, check_shape, check_type
from .ops.situation import autocast_is_on
from .state import SDMState, check_writable

VOCABULARY = 256  # one token per byte value


@dataclass(frozen=True)
class LMConfig:
    """Sizes of a LanguageModel; the SDM fields are those of SparseDeltaMemoryConfig.

    Args:
        dim: width of the residual stream.
        num_layers: number of blocks.
        hidden_dim: width of the MLPs.
        conv_width: number of tokens that the causal convolution sees, the current one included.
        num_heads, slots_per_head, num_writes, num_reads, chunk_size: of every SDM layer.
    Raises:
        ValueError: a size is no int of at least one.
    """

    dim: int = 128
    num_layers: int = 2
    hidden_dim: int = 384
    conv_width: int = 4
    num_heads: int = 2
    slots_per_head: int = 256
    num_writes: int = 8
    num_reads: int = 8
    chunk_size: int = 32

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "hidden_dim", "conv_width"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {getattr(self, name)!r}")

    def sdm(self) -> SparseDeltaMemoryConfig:
        """The configuration of each SDM layer."""
        return SparseDeltaMemoryConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            slots_per_head=self.slots_per_head,
            num_writes=self.num_writes,
            num_reads=self.num_reads,
            chunk_size=self.chunk_size,
            normalize_readings=True,
            output_gate=True,
        )


@dataclass(eq=False)
class LMState:
    """Decode state of a LanguageModel, a pytree.

    Never run calls on one pool at the same time, not even for different entries: each call rewrites all rows of the
    tails, with what they were where it does not advance them.

    Args:
        memories: one SDMState per block, without entries of its own.
        tails: per block [B, conv_width - 1, dim], the last inputs of its convolution.
        entries: [B] int64, of a state that is a pool (`init_state(capacity)`): what each batch row uses of every block,
            as in SDMState. The tails have `capacity` rows then; a padding row reads zeros and writes no tail.
    """

    memories: list[SDMState]
    tails: list[Tensor]
    entries: Tensor | None = None

    @property
    def sequences(self) -> int | None:
        """How many it has room for, if it has tails."""
        return self.tails[0].shape[0] if self.tails else None

    def at(self, entries: Tensor | None) -> LMState:
        """The same memories and tails, of which a call advances these entries."""
        return LMState(self.memories, self.tails, entries)

    def detach(self) -> LMState:
        """The same state, cut off from the autograd graph."""
        return LMState([memory.detach() for memory in self.memories], [x.detach() for x in self.tails], self.entries)

    def clone(self) -> LMState:
        """A copy that later calls on this state leave alone: of the entries too, if there are any."""
        entries = None if self.entries is None else self.entries.clone()
        return LMState([memory.clone() for memory in self.memories], [x.clone() for x in self.tails], entries)

    def to(self, *args: Any, **kwargs: Any) -> LMState:
        """The state in another dtype or on another device, shared where nothing changes, like `torch.Tensor.to`.

        Entries stay int64, and go to the tails' device.
        """
        tails = [x.to(*args, **kwargs) for x in self.tails]
        entries = self.entries if self.entries is None or not tails else self.entries.to(tails[0].device)
        return LMState([memory.to(*args, **kwargs) for memory in self.memories], tails, entries)


@dataclass(eq=False)
class LMPending:
    """What a LanguageModel drafted, a pytree, for `LanguageModel.commit_`.

    Args:
        memories: one SDMPending per block.
        windows: per block [B, conv_width - 1 + T, dim], the inputs of its convolution: a tail and the drafted tokens.
        entries: [B] int64, a copy of those of the drafted state, if it has any.
    """

    memories: list[SDMPending]
    windows: list[Tensor]
    entries: Tensor | None = None


pytree.register_dataclass(LMPending, serialized_type_name="sdm_compile.LMPending")
pytree.register_dataclass(LMState, serialized_type_name="sdm_compile.LMState")
torch.serialization.add_safe_globals([LMState])


class CausalConv(nn.Module):
    """Depthwise causal convolution over time. Equivalent code: y[t] = sum_j weight[j] * x[t - width + 1 + j].

    It is written as a sum of shifted products, which one fused loop computes at any length.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, dim))

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Convolves x [B, T, dim] after tail [B, width - 1, dim]; returns the result and the next tail, a view."""
        window = torch.cat([tail, x], dim=1)
        return self.convolve(window), window[:, x.shape[1] :]

    def convolve(self, window: Tensor) -> Tensor:
        """The convolution [B, T, dim] of a tail and T tokens, [B, width - 1 + T, dim]."""
        length = window.shape[1] - (self.width - 1)
        y = window[:, :length] * self.weight[0]
        for j in range(1, self.width):
            y = y + window[:, j : j + length] * self.weight[j]
        return y


class MLP(nn.Module):
    """SwiGLU. Equivalent code: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Convolution and memory, then MLP; see the top of this file."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim)
        self.conv = CausalConv(config.dim, config.conv_width)
        self.sdm = SparseDeltaMemory(config.sdm())
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config.dim, config.hidden_dim)

    def forward(self, x: Tensor, tail: Tensor, memory: SDMState | None) -> tuple[Tensor, Tensor, SDMState]:
        h, tail = self.conv(self.norm(x), tail)
        h = F.silu(h)
        y, memory = self.sdm(h, memory)
        return self._add(x, h, y), tail, memory

    def draft(self, x: Tensor, tail: Tensor, memory: SDMState) -> tuple[Tensor, Tensor, SDMPending]:
        """`forward` for tokens that may be taken back: the convolution's inputs and the pending rows."""
        window = torch.cat([tail, self.norm(x)], dim=1)
        h = F.silu(self.conv.convolve(window))
        y, pending = self.sdm.draft(h, memory)
        return self._add(x, h, y), window, pending

    def _add(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        x = x + h + y
        return x + self.mlp(self.mlp_norm(x))


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; expected int64 [B, T]")


class LanguageModel(nn.Module):
    """Byte-level language model of SDM layers.

    Args:
        config: the sizes.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises every parameter; the SDM layers do so themselves. A new model predicts nearly uniformly."""
        dim = self.config.dim
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=0.1 * dim**-0.5)
        self.norm.reset_parameters()
        for block in self._blocks():
            block.norm.reset_parameters()
            block.mlp_norm.reset_parameters()
            nn.init.normal_(block.conv.weight, std=self.config.conv_width**-0.5)
            block.sdm.init_weights()
            nn.init.normal_(block.mlp.up.weight, std=dim**-0.5)
            nn.init.normal_(block.mlp.down.weight, std=(2 * self.config.num_layers * self.config.hidden_dim) ** -0.5)

    def init_state(self, batch: int) -> LMState:
        """A new decode state for `batch` sequences: the initial memories, and zeros before the first token.

        With `batch` as its capacity it is also what a pool is made from; see `LMState.at`.
        """
        memories = [block.sdm.init_state(batch) for block in self._blocks()]
        with torch.inference_mode(False):
            return LMState(memories, [self._empty_tail(batch) for _ in self._blocks()])

    def forward(self, tokens: Tensor, state: LMState | None = None) -> tuple[Tensor, LMState]:
        """Logits of the byte after each token, and the state after the last.

        Args:
            tokens: [B, T] int64, byte values.
            state: where the sequences stand; None for their beginning. With grad mode on it is left untouched and
                gradient flows through it; otherwise it is advanced in place. With entries, each sequence stands
                where its entry does, as in `SparseDeltaMemory.forward`.
        Returns:
            logits: [B, T, 256], the parameters' dtype.
            state: a new one, or the same object where it was advanced in place.
        Raises:
            ValueError: tokens are no [B, T] ints, or the state is not of this model, this batch or one pool.
            TypeError: the state is no LMState. IndexError: an entry at or above the capacity (CPU).
        """
        _check_tokens(tokens)
        if state is not None:
            self._check_state(state, tokens.shape[0], tokens.device, advances=not torch.is_grad_enabled())
        places = None if state is None else _places(state)
        x = self.embedding(tokens)
        memories, tails = [], []
        for i, block in enumerate(self._blocks()):
            tail = self._empty_tail(tokens.shape[0]) if state is None else state.tails[i]
            memory = None if state is None else state.memories[i].at(state.entries)
            x, tail, memory = block(x, tail if places is None else places.read(tail), memory)
            memories.append(memory)
            tails.append(tail)
        logits = self.head(self.norm(x))
        if state is not None and places is not None:
            tails = [places.write(*pair) for pair in zip(state.tails, tails, strict=True)]
            memories = [memory.at(None) for memory in memories]
        if state is None or torch.is_grad_enabled():
            tails = [tail.clone() for tail in tails]
            return logits, LMState(memories, tails, None if state is None else state.entries)
        for kept, tail in zip(state.tails, tails, strict=True):
            kept.copy_(tail)
        return logits, state

    def draft(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMPending]:
        """Logits of the byte after each drafted token, without advancing the state.

        Args:
            tokens: [B, T] int64, byte values; at most 64 of each sequence.
            state: where the sequences stand. It is left as it is.
        Returns:
            logits: [B, T, 256], those of decoding token by token up to rounding. They have no derivative.
            pending: what `commit_` takes.
        """
        _check_tokens(tokens)
        self._check_state(state, tokens.shape[0], tokens.device, advances=False)
        places = _places(state)
        x = self.embedding(tokens)
        memories, windows = [], []
        for block, memory, tail in zip(self._blocks(), state.memories, state.tails, strict=True):
            tail = tail if places is None else places.read(tail)
            x, window, pending = block.draft(x, tail, memory.at(state.entries))
            memories.append(pending)
            windows.append(window)
        entries = None if state.entries is None else state.entries.clone()
        return self.head(self.norm(x)), LMPending(memories, windows, entries)

    def commit_(self, state: LMState, pending: LMPending, accepted: Tensor) -> None:
        """Advances the state in place by the first so many tokens of a draft.

        Args:
            state: the draft's, unchanged since but for its entries: those of the draft count.
            pending: what `draft` returned.
            accepted: [B] int32 or int64, how many tokens of each sequence, cut off at 0 and T on the device.
        Raises:
            TypeError, ValueError, RuntimeError: see `SparseDeltaMemory.commit_`. Nothing has been written then.
        """
        check_type("state", state, LMState)
        check_type("pending", pending, LMPending)
        blocks = len(self.blocks)
        if not len(pending.memories) == len(pending.windows) == blocks:
            got = f"{len(pending.memories)} memories and {len(pending.windows)} windows"
            raise ValueError(f"pending has {got}; the model has {blocks} blocks")
        state = state.at(pending.entries)
        first = pending.windows[0]
        self._check_state(state, first.shape[0], first.device, advances=True, computes=False)
        of_blocks = (self._blocks(), state.memories, pending.memories, state.tails, pending.windows)
        for block, memory, rows, tail, window in zip(*of_blocks, strict=True):
            block.sdm.check_commit(memory, rows, accepted)
            shape = (accepted.shape[0], tail.shape[1] + rows.slots.shape[1], tail.shape[2])
            check_shape("a window of pending", window, shape, "[B, conv_width - 1 + T, dim]")
            check_devices(tail=tail, window=window)
        with torch.no_grad():
            self._commit_(state, pending, accepted)

    def _commit_(self, state: LMState, pending: LMPending, accepted: Tensor) -> None:
        for block, memory, rows in zip(self._blocks(), state.memories, pending.memories, strict=True):
            block.sdm.commit_(memory, rows, accepted)
        places = _places(state)
        for tail, window in zip(state.tails, pending.windows, strict=True):
            width = tail.shape[1]
            first = accepted.long().clamp(0, window.shape[1] - width)
            place = first.unsqueeze(1) + torch.arange(width, device=first.device)  # [B, conv_width - 1]
            new = window.gather(1, place.unsqueeze(2).expand(-1, -1, window.shape[2]))
            tail.copy_(new if places is None else places.write(tail, new))

    def _blocks(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.blocks)

    def _check_state(
        self, state: LMState, batch: int, device: torch.device, advances: bool, computes: bool = True
    ) -> None:
        """Before any block advances its part of the state.

        advances: whether the call does, in place. computes: whether it computes with the tails.
        """
        check_type("state", state, LMState)
        if len(state.memories) != len(self.blocks) or len(state.tails) != len(self.blocks):
            raise ValueError(f"the state is of {len(state.memories)} blocks; the model has {len(self.blocks)}")
        shape = (batch, self.config.conv_width - 1, self.config.dim)
        for block, memory, tail in zip(self._blocks(), state.memories, state.tails, strict=True):
            if memory.entries is not None:
                raise ValueError("a memory of the state has entries of its own; give them to all: state.at(entries)")
            block.sdm.check_state(memory.at(state.entries), batch, device, advances)
            if state.entries is not None:
                shape = (block.sdm.capacity(memory.bank), *shape[1:])
            check_type("a tail of the state", tail, Tensor)
            if tail.shape != shape:
                raise ValueError(f"a tail of the state has shape {tuple(tail.shape)}; expected {shape}")
            if tail.device != device:
                raise ValueError(f"a tail of the state is on {tail.device}; expected {device}, where the input is")
            dtype = self.embedding.weight.dtype
            if computes and torch.promote_types(tail.dtype, dtype) != dtype and not autocast_is_on(device):
                raise ValueError(
                    f"a tail of the state is {tail.dtype}; expected {dtype}, like the model, or a narrower one"
                )
            if advances:
                check_writable("a tail of the state", tail)

    def _empty_tail(self, batch: int) -> Tensor:
        return self.embedding.weight.new_zeros(batch, self.config.conv_width - 1, self.config.dim)


def _places(state: LMState) -> _Places | None:
    """None where a state's tails are the batch's own."""
    return None if state.entries is None else _Places(state.entries, capacity=state.tails[0].shape[0])


class _Places:
    """Where a batch's tails are among those of a pool."""

    def __init__(self, entries: Tensor, capacity: int) -> None:
        self.row = entries.clamp(0, capacity - 1)
        self.nowhere = ((entries < 0) | (entries >= capacity))[:, None, None]
        # An entry keeps its own row of [tails; the batch's tails], or takes the batch row that is its. That every entry
        # looks for its batch row leaves a padding row, which belongs to no entry, with nowhere to write.
        own = torch.arange(capacity, device=entries.device)[:, None]
        batch = torch.arange(entries.shape[0], device=entries.device)
        self.source = torch.cat([own, (entries == own) * (batch + capacity)], dim=1).amax(1)  # [capacity]

    def read(self, tails: Tensor) -> Tensor:
        """[capacity, ...] to each batch row's [B, ...]; zeros for padding."""
        return tails[self.row].masked_fill(self.nowhere, 0)

    def write(self, tails: Tensor, new: Tensor) -> Tensor:
        """The pool's tails after the batch's: [capacity, ...], fresh memory."""
        return torch.cat([tails, new])[self.source]
