"""Contract of sample: greedy ties, draws that depend on nothing but their own row, filters that leave what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.ops.sample import sample
from tests.tolerances import TOLERANCES

# Few shapes, since each one compiles.
VOCAB = 16
ROWS = 64
MANY = 4096

jitted = jax.jit(sample)


def run(
    logits: np.ndarray,
    *,
    temperature: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
    top_p: float | np.ndarray = 1.0,
    seeds: int | np.ndarray = 0,
    counters: int | np.ndarray = 0,
) -> np.ndarray:
    """The sampled tokens; scalars are the same for all rows."""

    def rows(value: float | np.ndarray, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype), logits.shape[:1]))

    tokens = jitted(
        logits.astype(np.float32),
        rows(temperature, np.float32),
        rows(top_k, np.int32),
        rows(top_p, np.float32),
        rows(seeds, np.uint32),
        rows(counters, np.int32),
    )
    assert tokens.dtype == jnp.int32
    return np.asarray(tokens)


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2, size=(rows, VOCAB)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max())
    return wide / wide.sum()


def test_greedy_takes_the_smallest_id_among_equals() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1, [5, 9]] = 1
    logits[2] = -np.inf
    logits[2, 7] = -1e30
    assert run(logits, temperature=0)[:4].tolist() == [0, 5, 7, 0]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-30}, {"temperature": 1e-3}])
def test_narrow_filters_equal_greedy(filters: dict[str, float]) -> None:
    logits = random_logits(ROWS)
    logits[:8, 3] = logits[:8, 12] = 9  # ties too, for the filters; a temperature does not break them
    rows = slice(8, None) if "temperature" in filters else slice(None)
    np.testing.assert_array_equal(run(logits, seeds=np.arange(ROWS), **filters)[rows], logits.argmax(-1)[rows])


def test_a_tie_at_a_tiny_temperature_is_drawn_among_the_equals() -> None:
    logits = random_logits(1).repeat(ROWS, axis=0)
    logits[:, [3, 12]] = 9
    assert set(run(logits, temperature=1e-30, counters=np.arange(ROWS)).tolist()) == {3, 12}


def test_the_same_seed_and_counter_give_the_same_token() -> None:
    logits = random_logits(1).repeat(MANY, axis=0)
    counters = np.arange(MANY)
    first = run(logits, seeds=5, counters=counters)
    np.testing.assert_array_equal(first, run(logits, seeds=5, counters=counters))
    # Either number alone makes another stream.
    assert (first != run(logits, seeds=6, counters=counters)).any()
    assert (first[:-1] != first[1:]).any()


@pytest.mark.parametrize("rows", [1, 7])
def test_a_row_does_not_depend_on_its_batch(rows: int) -> None:
    logits = random_logits(ROWS)
    own = {
        "temperature": np.linspace(0, 2, ROWS),
        "top_k": np.arange(ROWS) % 9,
        "top_p": np.linspace(0.3, 1, ROWS),
        "seeds": np.arange(ROWS) + 2**32 - ROWS,
        "counters": np.arange(ROWS) * 100,
    }
    whole = run(logits, **own)
    for start in range(0, ROWS - rows + 1, 7):
        part = slice(start, start + rows)
        np.testing.assert_array_equal(run(logits[part], **{k: v[part] for k, v in own.items()}), whole[part])


def test_greedy_rows_ignore_rows_that_draw() -> None:
    logits = random_logits(ROWS)
    mixed = run(logits, temperature=np.arange(ROWS) % 2, seeds=np.arange(ROWS))
    np.testing.assert_array_equal(mixed[::2], logits.argmax(-1)[::2])
    drawn = run(logits, temperature=1, seeds=np.arange(ROWS))
    np.testing.assert_array_equal(mixed[1::2], drawn[1::2])


@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.0625, 1.0, width=32),
    temperature=st.floats(0.125, 4, width=32),
)
def test_a_draw_stays_in_its_set(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    """The numpy reading of the contract: cut to top_k, renormalise, then the smallest set whose mass reaches top_p."""
    logits = random_logits(1, seed)[0]
    order = np.argsort(-logits, kind="stable")[: top_k or VOCAB]
    before = np.cumsum(probs := softmax(logits[order] / np.float32(temperature))) - probs
    allowed = set(order[before < top_p + TOLERANCES["sample_mass"].value].tolist())
    many = np.broadcast_to(logits, (ROWS, VOCAB))
    drawn = run(many, temperature=temperature, top_k=top_k, top_p=top_p, counters=np.arange(ROWS))
    assert set(drawn.tolist()) <= allowed


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_k": 100}, 8),
        ({"top_p": 0.6}, 2),
        ({"top_k": 3, "top_p": 0.9}, 2),
    ],
    ids=str,
)
def test_frequencies_are_the_renormalised_probabilities(filters: dict[str, float], kept: int) -> None:
    """Ids are shuffled against likelihood, so that a rank that is taken for an id shows."""
    ids = np.array([6, 1, 4, 0, 7, 3, 5, 2])
    logits = np.full(VOCAB, -np.inf)
    logits[ids] = np.log([0.4, 0.25, 0.05, 0.06, 0.06, 0.06, 0.06, 0.06])
    logits[ids[2]] = np.log(0.06001)
    probs = softmax(logits / filters.get("temperature", 1))
    order = np.argsort(-probs, kind="stable")[:kept]
    drawn = run(np.broadcast_to(logits, (MANY, VOCAB)), seeds=11, counters=np.arange(MANY), **filters)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[order].sum() == MANY, "tokens outside the set"
    expected = probs[order] / probs[order].sum() * MANY
    chi_square = ((counts[order] - expected) ** 2 / expected).sum()
    assert chi_square < TOLERANCES["sample_chi_square"].value


def test_top_p_of_1_keeps_all() -> None:
    """Equal tokens whose rounded sum may pass 1 early: the last ones are drawn like the first."""
    drawn = run(np.zeros((512, 300)), counters=np.arange(512))
    assert drawn.max() >= 290 and drawn.min() < 10


def test_top_p_that_is_reached_exactly_adds_no_token() -> None:
    logits = np.full((ROWS, VOCAB), -np.inf)
    logits[:, [4, 9]] = 0
    assert set(run(logits, top_p=0.5, counters=np.arange(ROWS)).tolist()) == {4}
    assert set(run(logits, top_p=0.51, counters=np.arange(ROWS)).tolist()) == {4, 9}


def test_masked_tokens_are_never_drawn() -> None:
    logits = random_logits(ROWS)
    masked = np.random.default_rng(1).random(logits.shape) < 0.8
    masked[:, 2] = False
    logits[masked] = -np.inf
    drawn = run(logits, temperature=4, counters=np.arange(ROWS))
    assert not masked[np.arange(ROWS), drawn].any()
