"""The exchanges inside shard_map, on 8 devices, on 2 x 4 in both orders, and on one."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxmoe.parallel import exchange, mesh
from jaxmoe.parallel.exchange import Axes, ParallelContext
from jaxmoe.parallel.plan import Plan

MESHES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "8": ({"data": 1, "expert": 8}, ("data", "expert")),
    "2x4": ({"data": 2, "expert": 4}, ("data", "expert")),
    "2x4-inner-first": ({"data": 2, "expert": 4}, ("expert", "data")),
    "1": ({"data": 1, "expert": 1}, ("data", "expert")),
}
meshes = pytest.mark.parametrize("name", MESHES)
ROWS = 3


def plan_of(name: str) -> Plan:
    sizes, order = MESHES[name]
    return Plan(mesh=sizes, rules={"tokens": order, "pages": order, "experts": ("expert",), "vocab": ("expert",)})


def context_of(name: str) -> ParallelContext:
    return ParallelContext.from_plan(plan_of(name))


def run(name: str, body: Callable[[jax.Array], jax.Array], x: np.ndarray) -> np.ndarray:
    """`body` on each device's part of x, whose first axis is split as tokens are; the results in that order."""
    plan = plan_of(name)
    spec = plan.spec(("tokens",))
    grid = mesh.make(plan.mesh)
    return np.asarray(jax.jit(jax.shard_map(body, mesh=grid, in_specs=spec, out_specs=spec))(x))


def rows_of(name: str, *, rest: tuple[int, ...] = (2,)) -> np.ndarray:
    ranks = exchange.num_ranks(context_of(name).token_axes)
    return np.random.default_rng(0).integers(-100, 100, size=(ranks * ROWS, *rest)).astype(np.float32)


def test_context_names_only_axes_that_split() -> None:
    assert context_of("8") == ParallelContext(
        token_axes=(("expert", 8),), expert_axes=(("expert", 8),), vocab_axes=(("expert", 8),)
    )
    assert context_of("2x4").token_axes == (("data", 2), ("expert", 4))
    assert context_of("2x4-inner-first").token_axes == (("expert", 4), ("data", 2))
    assert context_of("1") == ParallelContext()
    assert hash(context_of("2x4")) == hash(context_of("2x4"))


def test_ranks_and_placement_of_a_context() -> None:
    assert exchange.num_ranks(()) == 1 and exchange.names(()) == ()
    context = context_of("2x4")
    assert exchange.num_ranks(context.token_axes) == 8
    assert exchange.names(context.token_axes) == ("data", "expert")
    assert context.placement(10).num_ranks == 4 and context_of("1").placement(10).num_ranks == 1


@meshes
def test_rank_index_is_the_order_of_parts(name: str) -> None:
    axes, plan = context_of(name).token_axes, plan_of(name)
    x = np.arange(plan.num_devices, dtype=np.int32)
    np.testing.assert_array_equal(run(name, lambda part: part * 0 + exchange.rank_index(axes), x), x)


@meshes
def test_gather_order_is_rank_order(name: str) -> None:
    axes, x = context_of(name).token_axes, rows_of(name)
    ranks = exchange.num_ranks(axes)
    out = run(name, lambda part: exchange.gather_rows(part, axes), x)
    np.testing.assert_array_equal(out, np.tile(x, (ranks, 1)))

    def own_rows(part: jax.Array) -> jax.Array:
        everything = exchange.gather_rows(part, axes)
        return jax.lax.dynamic_slice_in_dim(everything, exchange.rank_index(axes) * ROWS, ROWS)

    np.testing.assert_array_equal(run(name, own_rows, x), x)


@meshes
def test_reduce_sums_over_devices_and_keeps_own_rows(name: str) -> None:
    axes, x = context_of(name).token_axes, rows_of(name)
    ranks = exchange.num_ranks(axes)

    def body(part: jax.Array) -> jax.Array:
        everything = exchange.gather_rows(part, axes)
        # Device r contributes (r + 1) times everything: the sum of 1..ranks comes back.
        return exchange.reduce_rows(everything * (exchange.rank_index(axes) + 1).astype(np.float32), axes)

    np.testing.assert_array_equal(run(name, body, x), x * (ranks * (ranks + 1) // 2))


@meshes
def test_reduce_undoes_gather_when_one_device_contributes_each_row(name: str) -> None:
    axes, x = context_of(name).token_axes, rows_of(name, rest=())
    ranks = exchange.num_ranks(axes)

    def body(part: jax.Array) -> jax.Array:
        everything = exchange.gather_rows(part, axes)
        mine = np.arange(ranks * ROWS, dtype=np.int32) % ranks == exchange.rank_index(axes)
        return exchange.reduce_rows(jax.numpy.where(mine, everything, np.float32(0)), axes)

    np.testing.assert_array_equal(run(name, body, x), x)


@pytest.mark.parametrize("name", ["2x4", "2x4-inner-first"])
def test_exchanges_over_one_of_two_axes_stay_in_their_group(name: str) -> None:
    plan, axes = plan_of(name), context_of(name).expert_axes
    x = rows_of(name)
    by_rank = x.reshape(8, ROWS, 2)
    order = [plan.mesh[axis] for axis in plan.rules["tokens"]]
    grid = by_rank.reshape(*order, ROWS, 2)
    expert_at = plan.rules["tokens"].index("expert")
    expected = np.broadcast_to(grid.sum(axis=expert_at, keepdims=True), grid.shape).reshape(x.shape)

    def body(part: jax.Array) -> jax.Array:
        everything = exchange.gather_rows(part, axes)
        return everything.reshape(-1, ROWS, 2).sum(axis=0)

    np.testing.assert_array_equal(run(name, body, x), expected)


@meshes
def test_columns_to_rows_is_a_transpose_of_parts(name: str) -> None:
    axes: Axes = context_of(name).token_axes
    ranks, part = exchange.num_ranks(axes), 2
    whole = np.random.default_rng(1).normal(size=(ranks * ROWS, ranks * part)).astype(np.float32)
    # What device r has: all rows, columns r * part .. (r + 1) * part - 1.
    columns = np.concatenate(np.split(whole, ranks, axis=1), axis=0)
    assert columns.shape == (ranks * ranks * ROWS, part)
    np.testing.assert_array_equal(run(name, lambda x: exchange.columns_to_rows(x, axes), columns), whole)


@meshes
def test_integers_and_flags_can_be_gathered(name: str) -> None:
    axes, x = context_of(name).token_axes, rows_of(name)
    ranks = exchange.num_ranks(axes)
    for dtype in (np.int8, np.bool_):
        out = run(name, lambda part: exchange.gather_rows(part, axes), x.astype(dtype))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, np.tile(x.astype(dtype), (ranks, 1)))
