"""The text that a language model learns from: bytes, a validation part, and the batch of each training step.

Which windows a step trains on is a function of the seed and the step alone, so resuming needs no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Byte text cut into a training part and, its last tenth, a validation part.

    Args:
        train, validation: [N] uint8.
        digest: SHA-256 of the whole text, in hexadecimal.
    """

    train: Tensor
    validation: Tensor
    digest: str

    @classmethod
    def from_bytes(cls, text: bytes) -> Corpus:
        """Cuts a text. Raises ValueError where it is too short to be cut."""
        if len(text) < 20:
            raise ValueError(f"the text must hold at least 20 bytes, got {len(text)}")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(text) - len(text) // 10
        return cls(data[:cut], data[cut:], hashlib.sha256(text).hexdigest())

    @classmethod
    def load(cls, files: Sequence[str | Path]) -> Corpus:
        """Reads and joins the files, in the order given; with none, the text of Python's own help topics."""
        if files:
            return cls.from_bytes(b"".join(Path(file).read_bytes() for file in files))
        return cls.from_bytes("".join(topics[name] for name in sorted(topics)).encode())

    def batch(self, step: int, seed: int, batch: int, length: int) -> Tensor:
        """The random windows that training step `step` sees.

        Returns:
            windows: [batch, length + 1] int64; the first `length` bytes are the input, the last `length` what follows.
        Raises:
            ValueError: the training part is shorter than a window.
        """
        starts = len(self.train) - length
        if starts < 1:
            raise ValueError(f"the training text has {len(self.train)} bytes: too few for a window of {length + 1}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        start = torch.randint(starts, (batch, 1), generator=generator)
        return self.train[start + torch.arange(length + 1)].long()
