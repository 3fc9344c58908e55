"""Case 131: what `lax.ragged_dot` does here, and that no operator leans on it (other backends differ in the tail)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmoe.ops.experts import experts
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import Scheme


def test_case_131_ragged_dot_of_int8_is_exact_and_its_tail_is_zero() -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(-127, 128, (6, 32)).astype(np.int8)
    w = generator.integers(-127, 128, (3, 32, 8)).astype(np.int8)
    sizes = np.int32([3, 0, 2])  # an empty group, and a last row that belongs to none
    out = np.asarray(lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.int32))
    expected = np.zeros((6, 8), np.int64)
    expected[:3] = x[:3].astype(np.int64) @ w[0]
    expected[3:5] = x[3:5].astype(np.int64) @ w[2]
    np.testing.assert_array_equal(out, expected)


def test_case_131_experts_do_not_use_it() -> None:
    def stack(*shape: int) -> object:
        return jax.eval_shape(lambda a: quantize_weight(a, Scheme()), jax.ShapeDtypeStruct(shape, jnp.float32))

    x, ids = jax.ShapeDtypeStruct((4, 64), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    traced = jax.jit(lambda *a: experts(*a, layer=0, total_experts=4)).trace(
        x, ids, weights, stack(1, 4, 32, 64), stack(1, 4, 32, 64), stack(1, 4, 64, 32)
    )
    assert "ragged_dot" not in str(traced.jaxpr)
