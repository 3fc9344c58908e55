"""Choice of an implementation: order, refusals, names, and sentences that say why."""

from typing import Any

import pytest

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import attention, experts, index_select, kv_write, latent_attention, linear
from jaxmoe.ops.dispatch import Impl, choose
from jaxmoe.ops.report import operator_report


def run(x: int, *, scale: int) -> int:
    return x * scale


def refuse_large(x: int, *, scale: int) -> str | None:
    return f"{x} rows are more than 8" if x > 8 else None


def refuse_odd(x: int, *, scale: int) -> str | None:
    return f"a scale of {scale} is odd" if scale % 2 else None


FAST = Impl(name="fast", run=run, refuse=refuse_large)
MIDDLE = Impl(name="middle", run=run, refuse=refuse_odd)
PLAIN = Impl(name="plain", run=run)


def test_the_first_that_does_not_refuse_is_taken() -> None:
    choice = choose("scale", (FAST, PLAIN), None, 8, scale=2)
    assert choice.impl is FAST
    assert choice.refusals == ()
    assert str(choice) == "scale: fast"


def test_refusals_are_told_in_order() -> None:
    choice = choose("scale", (FAST, MIDDLE, PLAIN), None, 9, scale=3)
    assert choice.impl is PLAIN
    expected = "scale: plain; fast refused: 9 rows are more than 8; middle refused: a scale of 3 is odd"
    assert str(choice) == expected


def test_a_name_skips_the_more_preferred() -> None:
    choice = choose("scale", (FAST, PLAIN), "plain", 8, scale=2)
    assert choice.impl is PLAIN
    assert str(choice) == "scale: plain"


def test_a_named_implementation_that_refuses_is_an_error() -> None:
    with pytest.raises(UnsupportedError) as error:
        choose("scale", (FAST, PLAIN), "fast", 9, scale=2)
    assert str(error.value) == "scale: no implementation accepts these arguments (fast: 9 rows are more than 8)"


def test_all_refusing_is_an_error_with_every_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        choose("scale", (FAST, MIDDLE), None, 9, scale=1)
    assert "(fast: 9 rows are more than 8; middle: a scale of 1 is odd)" in str(error.value)


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError) as error:
        choose("scale", (FAST, PLAIN), "cuda", 9, scale=2)
    assert str(error.value) == "scale has no implementation 'cuda'; it has fast, plain"


def test_packing_is_the_identity_unless_said_otherwise() -> None:
    weight = object()
    assert PLAIN.pack(weight) is weight


@pytest.mark.parametrize(
    "operator",
    [linear, experts, attention, latent_attention, index_select, kv_write],
    ids=lambda o: o.__name__.split(".")[-1],
)
def test_tables_have_distinct_names_and_end_with_the_portable_default(operator: Any) -> None:
    names = [entry.name for entry in operator.IMPLS]
    assert len(set(names)) == len(names)
    assert names[-1] == "xla"


def test_the_report_has_one_line_an_operator() -> None:
    operators = ["linear", "experts", "attention", "latent_attention", "index_select", "kv_write"]
    assert [line.split(":")[0] for line in operator_report()] == operators
