"""RMS norm, layer norm and rotary embedding against float64, and the laws that make them what they are."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops.norm import layer_norm, rms_norm
from jaxmoe.ops.rope import cos_sin, inverse_frequencies, rotate, yarn_frequencies
from tests.tolerances import TOLERANCES

DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
norm = jax.jit(rms_norm, static_argnames="eps")
centred = jax.jit(layer_norm, static_argnames="eps")
turn = jax.jit(rotate, static_argnames="interleaved")


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


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (7, 13), (2, 3, 64), (8, 128)])
def test_layer_norm_is_the_formula(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    x = (1 + random(*shape)).astype(dtype)
    weight, bias = random(shape[-1], seed=1), random(shape[-1], seed=2)
    out = centred(x, weight, bias, eps=1e-5)
    assert out.dtype == dtype and out.shape == shape
    wide = x.astype(np.float64)
    wide = wide - wide.mean(-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    assert_close(out, expected, "layer_norm")


def test_layer_norm_of_equal_values_is_the_bias_and_shows_nan_in_its_row_only() -> None:
    x = np.stack([np.full(64, 1e3), np.zeros(64), random(64)]).astype(np.float32)
    x[2, 5] = np.nan
    bias = random(64, seed=2)
    out = np.asarray(centred(x, np.ones(64, np.float32), bias, eps=1e-5))
    np.testing.assert_array_equal(out[:2], np.stack([bias, bias]))
    assert np.isnan(out[2]).all()


@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (64, 1e4), (128, 1e6), (64, 1.1e7)])
def test_frequencies_fall_from_1(dim: int, theta: float) -> None:
    frequencies = inverse_frequencies(dim, theta)
    assert frequencies.dtype == np.float32 and frequencies.shape == (dim // 2,)
    assert frequencies[0] == 1
    assert (np.diff(frequencies) < 0).all() and (frequencies > 1 / theta).all()
    if dim > 2:
        np.testing.assert_allclose(frequencies[1], theta ** (-2 / dim), rtol=TOLERANCES["rms_norm"].value)


def turns(pair: int, dim: int, theta: float, positions: int) -> float:
    """How often a pair of dims turns over a context."""
    return positions * theta ** (-2 * pair / dim) / (2 * math.pi)


def yarn_oracle(dim: int, theta: float, *, factor: float, positions: int, fast: float, slow: float) -> np.ndarray:
    """Without rounding of the ramp's ends, by turns: the ramp is linear in the logarithm of a pair's turns."""
    out = []
    for pair in range(dim // 2):
        share = math.log(fast / turns(pair, dim, theta, positions)) / math.log(fast / slow)
        share = min(max(share, 0.0), 1.0)
        out.append(theta ** (-2 * pair / dim) * ((1 - share) + share / factor))
    return np.array(out)


def truncated_yarn_oracle(
    dim: int, theta: float, *, factor: float, positions: int, fast: float, slow: float
) -> np.ndarray:
    """With it: from the last pair that turns at least `fast` times to the first that turns at most `slow` times."""
    first = max([pair for pair in range(dim) if turns(pair, dim, theta, positions) >= fast], default=0)
    last = min([pair for pair in range(dim) if turns(pair, dim, theta, positions) <= slow], default=dim - 1)
    out = []
    for pair in range(dim // 2):
        share = min(max((pair - first) / (last - first), 0.0), 1.0)
        out.append(theta ** (-2 * pair / dim) * ((1 - share) + share / factor))
    return np.array(out)


@pytest.mark.parametrize("truncate", [False, True], ids=["exact", "truncated"])
@pytest.mark.parametrize(
    ("dim", "theta", "factor", "positions", "fast", "slow"),
    [
        (64, 1e4, 40.0, 4096, 32.0, 1.0),
        (64, 150_000.0, 32.0, 4096, 32.0, 1.0),
        (128, 1e6, 4.0, 32_768, 32.0, 1.0),
        (8, 1e4, 2.0, 1024, 32.0, 1.0),
        (16, 1e4, 4.0, 500, 40.0, 2.0),
    ],
)
def test_yarn_is_the_formula(
    dim: int, theta: float, factor: float, positions: int, fast: float, slow: float, truncate: bool
) -> None:
    out = yarn_frequencies(
        dim,
        theta,
        factor=factor,
        original_positions=positions,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    assert out.dtype == np.float32 and out.shape == (dim // 2,)
    formula = truncated_yarn_oracle if truncate else yarn_oracle
    expected = formula(dim, theta, factor=factor, positions=positions, fast=fast, slow=slow)
    np.testing.assert_allclose(out, expected, rtol=TOLERANCES["yarn"].value)
    plain = inverse_frequencies(dim, theta)
    assert (out <= plain).all() and (out >= plain / np.float32(factor) * (1 - TOLERANCES["yarn"].value)).all()
    assert (out < plain).any(), "nothing was stretched"


def yarn_of_8(**changes: float) -> np.ndarray:
    """Four pairs that turn 163, 16.3, 1.63 and 0.163 times over 1024 positions."""
    options = {"factor": 4.0, "original_positions": 1024, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    return yarn_frequencies(8, 1e4, **{**options, **changes})


def test_yarn_by_hand() -> None:
    """Ends of the ramp: log10(1024 / (32 * 2 pi)) = 0.70697 and log10(1024 / (2 pi)) = 2.21212. Rounded outwards to 0
    and 3, the shares are 0, 1/3, 2/3 and 1, and a share s multiplies with 1 - 3/4 s. As they are, the middle shares are
    0.29303 / 1.50515 = 0.194685 and 1.29303 / 1.50515 = 0.859070."""
    np.testing.assert_allclose(yarn_of_8(), [1, 0.075, 0.005, 0.00025], rtol=TOLERANCES["yarn"].value)
    middle = [0.1 * (1 - 0.75 * 0.194685), 0.01 * (1 - 0.75 * 0.859070)]
    exact = yarn_of_8(truncate=False)
    np.testing.assert_allclose(exact, [1, *middle, 0.00025], rtol=TOLERANCES["yarn_by_hand"].value)


def test_yarn_at_its_ends() -> None:
    np.testing.assert_array_equal(yarn_of_8(factor=1.0), inverse_frequencies(8, 1e4))
    # No pair turns 1000 times: the ramp starts at the first. None turns as rarely as 1e-9 times: it ends at dim 7.
    from_first = yarn_of_8(beta_fast=1000.0)
    np.testing.assert_allclose(from_first, [1, 0.075, 0.005, 0.00025], rtol=TOLERANCES["yarn"].value)
    to_last = yarn_of_8(beta_slow=1e-9)
    by_sevenths = [10.0**-pair * (1 - 0.75 * pair / 7) for pair in range(4)]
    np.testing.assert_allclose(to_last, by_sevenths, rtol=TOLERANCES["yarn"].value)
    # A ramp without length: pairs below 8 turns are divided, those above are not.
    steep = yarn_of_8(beta_fast=8.0, beta_slow=8.0, truncate=False)
    np.testing.assert_allclose(steep, [1, 0.1, 0.0025, 0.00025], rtol=TOLERANCES["yarn"].value)


def rotary(positions: list[int], dim: int, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    frequencies = inverse_frequencies(dim, 1e4)
    return jax.jit(partial(cos_sin, frequencies=frequencies, factor=factor))(np.array(positions, np.int32))


@DTYPES
@PAIRINGS
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(64, 64), (32, 64), (2, 5)])
def test_rotation_turns_pairs(rotary_dim: int, head_dim: int, interleaved: bool, dtype: jnp.dtype) -> None:
    positions = [0, 1, 17, 4095]
    x = random(4, 3, head_dim).astype(dtype)
    out = turn(x, *rotary(positions, rotary_dim), interleaved=interleaved)
    assert out.dtype == dtype and out.shape == x.shape
    half = rotary_dim // 2
    first, second = (np.s_[0:rotary_dim:2], np.s_[1:rotary_dim:2]) if interleaved else (np.s_[:half], np.s_[half:])
    # The angle is a float32 product by contract; everything behind it in float64, as complex numbers.
    angle = (np.array(positions, np.float32)[:, None] * inverse_frequencies(rotary_dim, 1e4)).astype(np.float64)
    expected = x.astype(np.float64)
    turning = expected[..., :rotary_dim]
    turned = (turning[..., first] + 1j * turning[..., second]) * np.exp(1j * angle)[:, None]
    turning[..., first], turning[..., second] = turned.real, turned.imag
    assert_close(out, expected, "rope")


def test_interleaved_is_halves_with_the_dims_in_another_order() -> None:
    x, tables = random(4, 3, 32), rotary([0, 1, 17, 4095], 32)
    order = np.concatenate([np.arange(0, 32, 2), np.arange(1, 32, 2)])
    out = np.asarray(turn(x, *tables, interleaved=True))
    np.testing.assert_array_equal(out[..., order], turn(x[..., order], *tables))


@PAIRINGS
def test_position_0_and_partial_dims_pass_unchanged(interleaved: bool) -> None:
    x = random(3, 2, 64)
    out = np.asarray(turn(x, *rotary([0, 5, 99], 32), interleaved=interleaved))
    np.testing.assert_array_equal(out[0], x[0])
    np.testing.assert_array_equal(out[..., 32:], x[..., 32:])


@PAIRINGS
@pytest.mark.parametrize("shift", [1, 100])
def test_scores_depend_on_distance_only(shift: int, interleaved: bool) -> None:
    q, k = random(1, 1, 64), random(1, 1, 64, seed=1)

    def score(first: int, second: int) -> float:
        turned_q = np.asarray(turn(q, *rotary([first], 64), interleaved=interleaved))
        return float(np.sum(turned_q * turn(k, *rotary([second], 64), interleaved=interleaved)))

    assert abs(score(9, 4) - score(9 + shift, 4 + shift)) < TOLERANCES["rope_distance"].value


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_a_factor_on_the_tables_is_one_on_the_rotated_dims(factor: float) -> None:
    """Yarn's attention factor: on queries and keys, so its square is on the scores. The dims that pass have none."""
    x, positions = random(3, 2, 64), [0, 5, 99]
    plain, scaled = rotary(positions, 32), rotary(positions, 32, factor)
    for table, times in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(times, np.asarray(table) * np.float32(factor))
    out = turn(x, *scaled)
    expected = np.asarray(turn(x, *plain), np.float64)
    expected[..., :32] *= factor
    assert_close(out, expected, "rope")
