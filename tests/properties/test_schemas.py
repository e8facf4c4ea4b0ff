"""Every op over arguments drawn from its own schema: a schema that changes needs a strategy that follows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_compile.ops.registry import OPS, RegisteredOp
from tests.harness import assert_fake_agrees, opcheck_utils
from tests.properties.strategies import FAMILIES, STRATEGIES, arguments, family, strategies

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
quick = settings(deadline=None, derandomize=True, database=None, max_examples=15)


@every_op
@quick
@given(data=st.data())
def test_schema_and_fake_kernel(op: RegisteredOp, data: st.DataObject) -> None:
    args = data.draw(arguments(op))
    torch.library.opcheck(op.overload, args, test_utils=opcheck_utils(args))
    assert_fake_agrees(op.overload, args)


@every_op
@settings(quick, max_examples=2)
@given(data=st.data())
def test_every_opcheck(op: RegisteredOp, data: st.DataObject) -> None:
    args = data.draw(arguments(op))
    utils = (*opcheck_utils(args), "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.overload, args, test_utils=utils)


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ("an_op(Tensor k_idx, Tensor newcomer) -> Tensor", "Tensor newcomer"),
        ("an_op(Tensor? k_idx, Tensor v) -> Tensor", r"Optional\[Tensor\] k_idx"),
        ("an_op(float chunk_size, Tensor[] memory) -> ()", r"float chunk_size, List\[Tensor\] memory"),
    ],
)
def test_an_argument_without_a_strategy_fails(schema: str, missing: str) -> None:
    with pytest.raises(LookupError, match=f"an_op: STRATEGIES has none for {missing}$"):
        strategies(torch._C.parse_schema(schema))


def test_an_op_without_a_family_fails() -> None:
    newcomer = RegisteredOp("newcomer", OPS["solve"].overload, False, ())
    with pytest.raises(LookupError, match="sdm::newcomer belongs to no family"):
        family(newcomer)


def test_no_strategy_and_no_family_is_left_over() -> None:
    used = {(a.name, str(a.real_type)) for op in OPS.values() for a in op.overload._schema.arguments}
    assert set(STRATEGIES) == used
    assert sorted(name for ops in FAMILIES.values() for name in ops) == sorted(OPS)
