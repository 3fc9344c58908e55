"""Sampling parameters refuse what makes no sense; a sequence counts its tokens."""

from typing import Any

import pytest

from jaxmoe.engine.request import SamplingParams, Sequence
from jaxmoe.errors import RequestError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0 is below 1"),
        ({"max_tokens": -3}, "max_tokens = -3 is below 1"),
        ({"temperature": -0.1}, "temperature = -0.1 is not a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature = nan is not a finite number of at least 0"),
        ({"temperature": float("inf")}, "temperature = inf is not a finite number of at least 0"),
        ({"top_k": -1}, "top_k = -1 is below 0"),
        ({"top_p": 0.0}, "top_p = 0.0 is not in (0, 1]"),
        ({"top_p": 1.5}, "top_p = 1.5 is not in (0, 1]"),
        ({"top_p": float("nan")}, "top_p = nan is not in (0, 1]"),
        ({"seed": -1}, "seed = -1 is not in 0..2**32-1"),
        ({"seed": 2**32}, f"seed = {2**32} is not in 0..2**32-1"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)
    assert str(error.value) == message


def test_the_ends_of_the_ranges_are_accepted() -> None:
    SamplingParams(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    SamplingParams(max_tokens=10**6, temperature=100.0, top_k=10**6, top_p=1e-9, seed=2**32 - 1)


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.ignore_eos) == (0.0, 0, 1.0, False)


def test_a_sequence_counts_its_tokens() -> None:
    sequence = Sequence(request_id=0, tokens=[5, 6, 7], prompt_length=3, params=SamplingParams(max_tokens=10))
    assert (sequence.most_tokens, sequence.pending, sequence.shard, sequence.pages) == (13, 3, -1, [])
    sequence.computed = 3
    sequence.tokens.append(8)
    assert (sequence.most_tokens, sequence.pending) == (13, 1)
