"""Spread: moments and quantiles against numpy, and that merging is a monoid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxmoe.ptq.sensitivity.spread import BINS, Spread, rescaled, spread_of
from tests.tolerances import TOLERANCES

_measure = jax.jit(spread_of)
SIZES = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


def spread(x: np.ndarray, real: np.ndarray | None = None) -> Spread:
    real = np.ones(len(x), bool) if real is None else real
    return rescaled(*_measure(jnp.asarray(x, jnp.float32), jnp.asarray(real)))


def drawn(seed: int, scale: float = 1.0, shape: tuple[int, int] = (16, 12)) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, shape) * scale).astype(np.float32)


def kurtosis(x: np.ndarray) -> float:
    z = (x.astype(np.float64) - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    return float((z**4).mean() - 3)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_moments_are_numpys_at_any_size(scale: float) -> None:
    """The fourth power of 1e9 does not fit float32; nor does that of 1e-12."""
    x = drawn(1, scale)
    seen, rtol = spread(x), TOLERANCES["spread"].value
    assert seen.std_ratio() == pytest.approx(np.abs(x).max() / x.std(dtype=np.float64), rel=rtol)
    assert seen.kurtosis() == pytest.approx(kurtosis(x), rel=rtol, abs=rtol)
    assert seen.elements == x.size


def test_a_mean_far_from_zero_is_taken_off() -> None:
    x = drawn(2) + np.float32(3)
    assert spread(x).kurtosis() == pytest.approx(kurtosis(x), rel=100 * TOLERANCES["spread"].value)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75, 0.95])
def test_quantile_is_in_the_bin_of_numpys(share: float) -> None:
    x = drawn(3, shape=(16, 50))
    exact = np.quantile(x, share, method="inverted_cdf")
    assert spread(x).quantile(share) == pytest.approx(exact, rel=1 / 8)


def test_step_in_interquartile_ranges() -> None:
    x = drawn(4, shape=(16, 50))
    low, high = np.quantile(x, [0.25, 0.75])
    assert spread(x).quantile_ratio() == pytest.approx(2 * np.abs(x).max() / 254 / (high - low), rel=1 / 8)


def test_padding_has_no_part() -> None:
    x, real = drawn(5), np.arange(16) < 11
    x[11:] = 1e30
    padded, alone = spread(x, real), spread(x[:11])
    assert padded.elements == alone.elements == 11 * 12
    np.testing.assert_array_equal(padded.counts, alone.counts)
    assert padded.absmax == alone.absmax
    np.testing.assert_allclose(padded.powers, alone.powers, rtol=TOLERANCES["spread"].value)


@given(arrays(np.float32, (4, 3), elements=SIZES))
def test_every_value_is_in_its_bin(x: np.ndarray) -> None:
    """Bins are ordered by value, symmetric, and hold everything once."""
    counts = spread(x).counts
    assert counts.sum() == x.size
    assert counts[BINS] == (np.abs(x) < 2.0**-40).sum()
    assert counts[:BINS].sum() == (x <= -(2.0**-40)).sum()
    np.testing.assert_array_equal(spread(-x).counts, counts[::-1])


@given(st.lists(arrays(np.float32, (4, 3), elements=SIZES), min_size=1, max_size=4), st.integers(0, 4))
def test_merging_is_associative(parts: list[np.ndarray], cut: int) -> None:
    """Exactly for counts and maxima; sums of powers in float64 move by their last bits only."""
    seen = [spread(part) for part in parts]
    whole = Spread.merge_all(seen)
    halves = Spread.merge_all([Spread.merge_all(seen[:cut]), Spread.merge_all(seen[cut:])])
    np.testing.assert_array_equal(whole.counts, halves.counts)
    assert whole.absmax == halves.absmax
    size = np.abs(np.stack([part.powers for part in seen])).sum(0)
    assert (np.abs(whole.powers - halves.powers) <= 1e-15 * size).all()


def test_arrays_invert() -> None:
    seen = spread(drawn(6))
    back = Spread.from_arrays(seen.arrays())
    assert back.absmax == seen.absmax
    np.testing.assert_array_equal(back.powers, seen.powers)
    np.testing.assert_array_equal(back.counts, seen.counts)


@pytest.mark.parametrize("x", [np.zeros((3, 4), np.float32), np.full((3, 4), 2.5, np.float32)])
def test_values_that_are_all_alike_have_no_ratios(x: np.ndarray) -> None:
    seen = spread(x)
    assert (seen.std_ratio(), seen.kurtosis()) == (None, None)


def test_nothing() -> None:
    seen = Spread.merge_all([])
    assert (seen.elements, seen.std_ratio(), seen.kurtosis(), seen.quantile_ratio()) == (0, None, None, None)
