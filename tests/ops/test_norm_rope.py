"""RMS norm and rotary embedding against float64, and the laws that make them what they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops.norm import rms_norm
from jaxmoe.ops.rope import cos_sin, inverse_frequencies, rotate_half
from tests.tolerances import TOLERANCES

DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
norm = jax.jit(rms_norm, static_argnames="eps")
rotate = jax.jit(rotate_half)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(out: jax.Array, expected: np.ndarray, name: str) -> None:
    """Absolute, inputs of size 1; a bfloat16 result may be one ulp off."""
    slack = 0.0 if out.dtype == jnp.float32 else TOLERANCES["bfloat16_ulp"].value * np.abs(expected)
    assert (np.abs(np.asarray(out, np.float64) - expected) <= TOLERANCES[name].value + slack).all()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (2, 3, 64), (8, 576)])
def test_rms_norm_is_the_formula(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    x, weight = random(*shape).astype(dtype), random(shape[-1], seed=1)
    out = norm(x, weight, eps=1e-5)
    assert out.dtype == dtype and out.shape == shape
    wide = x.astype(np.float64)
    assert_close(out, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight, "rms_norm")


def test_rms_norm_of_zeros_is_zero_and_of_large_values_finite() -> None:
    x = np.stack([np.zeros(64), np.full(64, 1e15)]).astype(np.float32)
    out = np.asarray(norm(x, np.ones(64, np.float32), eps=1e-5))
    assert (out[0] == 0).all()
    assert (np.abs(out[1] - 1) <= TOLERANCES["rms_norm"].value).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65])
def test_case_15_rms_norm_of_a_row_hardly_depends_on_its_batch(rows: int) -> None:
    """Not bit for bit: XLA on CPU sums a row in another order from 8 rows on; a fixed order costs half the speed."""
    x, weight = random(65, 576), random(576, seed=1)
    together, alone = norm(x[:rows], weight, eps=1e-5)[0], norm(x[:1], weight, eps=1e-5)[0]
    assert_close(together, np.asarray(alone, np.float64), "rms_norm")


def test_rms_norm_shows_nan_in_its_row_only() -> None:
    x = random(3, 64)
    x[1, 5] = np.nan
    finite = np.isfinite(norm(x, np.ones(64, np.float32), eps=1e-5))
    np.testing.assert_array_equal(finite.all(-1), [True, False, True])


@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (64, 1e4), (128, 1e6), (64, 1.1e7)])
def test_frequencies_fall_from_1(dim: int, theta: float) -> None:
    frequencies = inverse_frequencies(dim, theta)
    assert frequencies.dtype == np.float32 and frequencies.shape == (dim // 2,)
    assert frequencies[0] == 1
    assert (np.diff(frequencies) < 0).all() and (frequencies > 1 / theta).all()
    if dim > 2:
        np.testing.assert_allclose(frequencies[1], theta ** (-2 / dim), rtol=TOLERANCES["rms_norm"].value)


def rotary(positions: list[int], dim: int) -> tuple[jax.Array, jax.Array]:
    return jax.jit(partial(cos_sin, frequencies=inverse_frequencies(dim, 1e4)))(np.array(positions, np.int32))


@DTYPES
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(64, 64), (32, 64), (2, 5)])
def test_rotation_turns_pairs_of_halves(rotary_dim: int, head_dim: int, dtype: jnp.dtype) -> None:
    positions = [0, 1, 17, 4095]
    x = random(4, 3, head_dim).astype(dtype)
    out = rotate(x, *rotary(positions, rotary_dim))
    assert out.dtype == dtype and out.shape == x.shape
    half = rotary_dim // 2
    # The angle is a float32 product by contract; everything behind it in float64, as complex numbers.
    angle = (np.float32(positions)[:, None] * inverse_frequencies(rotary_dim, 1e4)).astype(np.float64)
    wide = x.astype(np.float64)
    turned = (wide[..., :half] + 1j * wide[..., half:rotary_dim]) * np.exp(1j * angle)[:, None]
    assert_close(out, np.concatenate([turned.real, turned.imag, wide[..., rotary_dim:]], axis=-1), "rope")


def test_position_0_and_partial_dims_pass_unchanged() -> None:
    x = random(3, 2, 64)
    out = np.asarray(rotate(x, *rotary([0, 5, 99], 32)))
    np.testing.assert_array_equal(out[0], x[0])
    np.testing.assert_array_equal(out[..., 32:], x[..., 32:])


@pytest.mark.parametrize("shift", [1, 100])
def test_scores_depend_on_distance_only(shift: int) -> None:
    q, k = random(1, 1, 64), random(1, 1, 64, seed=1)

    def score(first: int, second: int) -> float:
        return float(np.sum(np.asarray(rotate(q, *rotary([first], 64))) * rotate(k, *rotary([second], 64))))

    assert abs(score(9, 4) - score(9 + shift, 4 + shift)) < TOLERANCES["rope_distance"].value
