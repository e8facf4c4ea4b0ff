"""A name stands for one schema for good: compiled code that is kept on a user's disk finds an op by its name alone."""

from __future__ import annotations

from pathlib import Path

import torch

from sdm_compile.ops.registry import OPS

SCHEMAS = Path(__file__).with_name("schemas.txt").read_text().splitlines()
"""One of each op that there is or has been. Lines are added, for new names, and never changed."""


def name_of(schema: str) -> str:
    return schema.removeprefix("sdm::").split("(")[0]


def test_every_op_has_the_schema_of_its_name() -> None:
    schemas = {name: str(getattr(torch.ops.sdm, name).default._schema) for name in OPS}
    known = {name_of(line): line for line in SCHEMAS}
    assert schemas == {name: known.get(name) for name in OPS}


def test_no_name_stands_twice() -> None:
    names = [name_of(line) for line in SCHEMAS]
    assert sorted(names) == sorted(set(names))
