"""The memory of a batch of sequences between two calls of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .ops.checks import made_in_inference_mode
from .ops.situation import runs_now


@dataclass(eq=False)
class SDMState:
    """What a layer carries from one segment of a sequence to the next. SPEC section 7.

    A pytree of its tensors. `torch.save` and `torch.load` take it as it is, `weights_only=True` included.

    With `entries` the bank is a pool: it has room for `capacity` sequences, of which a call advances those that the
    entries name, one per batch row. `init_state(capacity)` makes such a bank.

    Args:
        bank: [batch * num_heads * slots_per_head, head_dim]; sequence b's head h owns the `slots_per_head` rows from
            `(b * num_heads + h) * slots_per_head` on. With entries, `capacity` stands in place of `batch`, and
            `entries[b]` in place of b.
        entries: [batch] int64, on the bank's device: the pool entry of each batch row. A negative one is padding: its
            batch row reads zeros and writes nothing. One at or above the capacity raises IndexError on the CPU and is
            padding on CUDA, where values are not looked at. The same entry in two batch rows is the caller's error,
            and nothing checks for it. None: the batch rows are the bank's sequences, in order.
    """

    bank: Tensor
    entries: Tensor | None = None

    def at(self, entries: Tensor | None) -> SDMState:
        """The same bank, of which a call advances these entries. Equivalent code: SDMState(bank, entries)."""
        return SDMState(self.bank, entries)

    def detach(self) -> SDMState:
        """The same memory, cut off from the autograd graph. Equivalent code: SDMState(bank.detach(), entries)."""
        return SDMState(self.bank.detach(), self.entries)

    def clone(self) -> SDMState:
        """A copy that later calls on this state leave alone: of the bank, and of the entries if there are any."""
        return SDMState(self.bank.clone(), None if self.entries is None else self.entries.clone())

    def to(self, *args: Any, **kwargs: Any) -> SDMState:
        """The state in another dtype or on another device, shared where nothing changes, like `torch.Tensor.to`.

        Entries stay int64, and go to the bank's device.
        """
        bank = self.bank.to(*args, **kwargs)
        return SDMState(bank, None if self.entries is None else self.entries.to(bank.device))


def check_writable(name: str, x: Tensor) -> None:
    """Raises where a call that runs now could not write to `x`, a part of a state that it advances in place.

    Raises:
        ValueError: elements of it share memory, or it is sparse. RuntimeError: it was made in inference mode, which is
        over.
    """
    if not runs_now(x):
        return
    if x.layout is not torch.strided or any(
        n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True)
    ):
        raise ValueError(f"{name} has no memory of its own for each element, such as after expand(): pass its clone()")
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise made_in_inference_mode(name)


pytree.register_dataclass(SDMState, serialized_type_name="sdm_compile.SDMState")
torch.serialization.add_safe_globals([SDMState])
