"""Scheme names: the text and the scheme determine each other; all other texts are refused with a reason."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jaxmoe.errors import RecipeError
from jaxmoe.quant.scheme import Scheme, parse_scheme

SCHEMES = [
    Scheme(weight_bits=weights, activation_bits=activations, group=group)
    for weights in (4, 8)
    for activations in (8, 16)
    for group in (32, 64, 128, 256, None)
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_name_and_scheme_determine_each_other(scheme: Scheme) -> None:
    assert parse_scheme(scheme.name) == scheme


@given(st.text(max_size=12) | st.from_regex(r"w[48]a(8|16)-(g\d{1,4}|channel)\n?", fullmatch=True))
def test_a_text_is_the_name_of_its_scheme_or_is_refused(text: str) -> None:
    try:
        scheme = parse_scheme(text)
    except RecipeError:
        assert text not in {scheme.name for scheme in SCHEMES}
    else:
        assert scheme.name == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "w8a8",
        "W8A8-g128",
        "w4a4-g128",
        "w2a8-g128",
        "w8a4-g128",
        "w8a8-g",
        "w8a8-g-1",
        "w8a8-channel\n",
        " w8a8-g128",
    ],
)
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_scheme(text)
    assert repr(text) in str(error.value)
    assert "use w8a8-g128" in str(error.value)


@pytest.mark.parametrize("text", ["w8a8-g0", "w8a8-g0128", "w8a8-g١٢٨"])
def test_other_spellings_of_a_group_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=f"{text}'.*32, 64, 128"):
        parse_scheme(text)


@pytest.mark.parametrize("group", ["1", "13", "127", "512", "9" * 5000], ids=len)
def test_illegal_groups_are_refused(group: str) -> None:
    with pytest.raises(RecipeError, match=f"a group of {group} is not one of 32, 64, 128, 256"):
        parse_scheme(f"w8a8-g{group}")


def test_default_is_the_documented_scheme() -> None:
    assert Scheme() == parse_scheme("w8a8-g128")


@given(group=st.sampled_from([32, 64, 128, 256, None]), size=st.integers(1, 2000))
def test_groups_cover_the_input_axis_once(group: int | None, size: int) -> None:
    scheme = Scheme(group=group)
    width, count = scheme.group_size(size), scheme.num_groups(size)
    assert 1 <= width <= size
    assert (count - 1) * width < size <= count * width


@pytest.mark.parametrize("activations", [8, 16])
def test_4_bits_have_the_groups_of_a_name(activations: Literal[8, 16]) -> None:
    message = "weight_bits=4 with group=13: 4-bit weights have one scale per 32, 64, 128 or 256 inputs or one a row"
    with pytest.raises(RecipeError, match=message):
        Scheme(weight_bits=4, activation_bits=activations, group=13)


@pytest.mark.parametrize(
    ("scheme", "dtype", "values", "scales", "stored"),
    [
        ("w8a8-g128", np.int8, (2, 5, 300), (2, 5, 3), 3000 + 120),
        ("w8a16-channel", np.int8, (2, 5, 300), (2, 5, 1), 3000 + 40),
        ("w4a8-g128", np.uint8, (2, 5, 150), (2, 5, 3), 1500 + 120),
        ("w4a16-g256", np.uint8, (2, 5, 150), (2, 5, 2), 1500 + 80),
        ("w4a8-channel", np.uint8, (2, 5, 150), (2, 5, 1), 1500 + 40),
    ],
)
def test_what_is_stored(
    scheme: str, dtype: type, values: tuple[int, ...], scales: tuple[int, ...], stored: int
) -> None:
    parsed, shape = parse_scheme(scheme), (2, 5, 300)
    assert (parsed.values_dtype, parsed.values_shape(shape)) == (np.dtype(dtype), values)
    assert (parsed.scales_shape(shape), parsed.stored_bytes(shape)) == (scales, stored)


def test_an_odd_input_axis_has_no_pairs() -> None:
    assert Scheme().values_shape((4, 13)) == (4, 13)
    for name in ("w4a8-g32", "w4a8-channel"):
        with pytest.raises(RecipeError) as error:
            parse_scheme(name).stored_bytes((4, 13))
        assert str(error.value) == (
            f"a weight of shape (4, 13) cannot be stored as {name}: 4-bit values are stored in pairs and its input "
            "axis of 13 is odd; choose a scheme with 8-bit weights"
        )


@pytest.mark.parametrize("fields", [{"weight_bits": 5}, {"activation_bits": 4}, {"group": 0}, {"group": -128}], ids=str)
def test_no_scheme_breaks_its_invariants(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises((RecipeError, TypeCheckError), match=f"{name}(=|'[^=]*: ){value}"):
        Scheme(**fields)
