"""The public write/read at a case's chunk size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sdm_compile import sdm_write_read
from tests.cases import Case


def call(case: Case, **settings: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return functools.partial(sdm_write_read, chunk_size=case.chunk_size, **settings)
