"""The memory of a batch of sequences between two calls of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class SDMState:
    """What a layer carries from one segment of a sequence to the next. SPEC section 7.

    A pytree of one tensor. `torch.save` and `torch.load` take it as it is, `weights_only=True` included.

    Args:
        bank: [batch * num_heads * slots_per_head, head_dim]; sequence b's head h owns the `slots_per_head` rows from
            `(b * num_heads + h) * slots_per_head` on.
    """

    bank: Tensor

    def detach(self) -> SDMState:
        """The same memory, cut off from the autograd graph. Equivalent code: SDMState(bank.detach())."""
        return SDMState(self.bank.detach())

    def clone(self) -> SDMState:
        """A copy that later calls on this state leave alone. Equivalent code: SDMState(bank.clone())."""
        return SDMState(self.bank.clone())

    def to(self, *args: Any, **kwargs: Any) -> SDMState:
        """The state in another dtype or on another device, shared where nothing changes, like `torch.Tensor.to`."""
        return SDMState(self.bank.to(*args, **kwargs))


pytree.register_dataclass(SDMState, serialized_type_name="sdm_compile.SDMState")
torch.serialization.add_safe_globals([SDMState])
