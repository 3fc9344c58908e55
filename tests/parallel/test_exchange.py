"""The exchanges inside shard_map against numpy: rows split over all devices, over some, over one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.parallel import exchange, mesh
from jaxmoe.parallel.exchange import Axes, ParallelContext
from jaxmoe.parallel.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh and what its axes split; rows are equal along `heads`."""

    mesh: dict[str, int]
    experts: tuple[str, ...]
    heads: tuple[str, ...] = ()
    tokens: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(name for name in self.mesh if name not in self.heads))


LAYOUTS: dict[str, Layout] = {
    "8": Layout(mesh={"data": 1, "expert": 8}, experts=("expert",)),
    "2x4": Layout(mesh={"data": 2, "expert": 4}, experts=("expert",)),
    "2x4-over-both": Layout(mesh={"data": 2, "expert": 4}, experts=("data", "expert")),
    "4x2": Layout(mesh={"expert": 4, "data": 2}, experts=("expert",)),
    "1": Layout(mesh={"data": 1, "expert": 1}, experts=("expert",)),
    "heads": Layout(mesh={"data": 4, "heads": 2}, experts=("data", "heads"), heads=("heads",)),
    "heads-experts-over-data": Layout(mesh={"data": 4, "heads": 2}, experts=("data",), heads=("heads",)),
    "heads-experts-over-heads": Layout(mesh={"data": 4, "heads": 2}, experts=("heads",), heads=("heads",)),
    "heads-outside": Layout(mesh={"heads": 2, "data": 4}, experts=("heads", "data"), heads=("heads",)),
    "heads-between": Layout(
        mesh={"data": 2, "heads": 2, "expert": 2}, experts=("data", "heads", "expert"), heads=("heads",)
    ),
    "heads-alone": Layout(mesh={"heads": 8}, experts=("heads",), heads=("heads",)),
}
layouts = pytest.mark.parametrize("name", LAYOUTS)
ROWS, PART = 3, 2


@cache
def plan_of(name: str) -> Plan:
    layout = LAYOUTS[name]
    rules = {"tokens": layout.tokens, "pages": layout.tokens, "experts": layout.experts, "vocab": layout.experts}
    return Plan(mesh=layout.mesh, rules={**rules, "heads": layout.heads})


def context_of(name: str) -> ParallelContext:
    return ParallelContext.from_plan(plan_of(name))


Coordinate = dict[str, int]
"""Mesh axis -> index of a device."""


def devices(name: str) -> Iterator[Coordinate]:
    """Devices in the mesh's order."""
    sizes = LAYOUTS[name].mesh
    for index in product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, index, strict=True))


def rank(name: str, at: Coordinate, axes: tuple[str, ...]) -> int:
    """Index of a device along mesh axes, row-major."""
    out = 0
    for axis in axes:
        out = out * LAYOUTS[name].mesh[axis] + at[axis]
    return out


def group(name: str, at: Coordinate, axes: tuple[str, ...]) -> list[Coordinate]:
    """The devices that differ from one along these axes only, in rank order."""
    others = [device for device in devices(name) if all(device[axis] == at[axis] for axis in at if axis not in axes)]
    return sorted(others, key=lambda device: rank(name, device, axes))


def split(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes along which rows differ."""
    return tuple(axis for axis in axes if axis in LAYOUTS[name].tokens)


def rows_of(name: str, rest: tuple[int, ...] = (PART,)) -> np.ndarray:
    """[parts, ROWS, ...]: the rows of the devices, in the order in which tokens are split."""
    parts = plan_of(name).ways("tokens")
    return np.random.default_rng(0).integers(-100, 100, size=(parts, ROWS, *rest)).astype(np.float32)


def own(name: str, rows: np.ndarray, at: Coordinate) -> np.ndarray:
    """Rows of one device."""
    return rows[rank(name, at, LAYOUTS[name].tokens)]


def gathered(name: str, rows: np.ndarray, at: Coordinate, axes: tuple[str, ...]) -> np.ndarray:
    """What `gather_rows` has to give on one device."""
    return np.concatenate([own(name, rows, other) for other in group(name, at, split(name, axes))])


def run(name: str, body: Callable[[jax.Array], jax.Array], rows: np.ndarray) -> np.ndarray:
    """[devices, ...]: `body` on each device's rows."""
    plan = plan_of(name)
    step = jax.shard_map(
        body,
        mesh=mesh.make(plan.mesh),
        in_specs=plan.spec(("tokens",)),
        out_specs=PartitionSpec(tuple(plan.mesh)),
        check_vma=False,
    )
    out = np.asarray(jax.jit(step)(rows.reshape(-1, *rows.shape[2:])))
    return out.reshape(plan.num_devices, -1, *out.shape[1:])


def index_of(axes: Axes) -> jax.Array:
    return exchange.rank_index(axes).astype(np.float32)


def test_context_names_only_axes_that_split() -> None:
    eight = (("expert", 8),)
    assert context_of("8") == ParallelContext(token_axes=eight, expert_axes=eight, vocab_axes=eight)
    assert context_of("2x4").token_axes == (("data", 2), ("expert", 4))
    assert context_of("4x2").token_axes == (("expert", 4), ("data", 2))
    assert context_of("1") == ParallelContext()
    both = (("data", 4), ("heads", 2))
    assert context_of("heads") == ParallelContext(
        token_axes=both[:1], expert_axes=both, vocab_axes=both, head_axes=both[1:]
    )
    assert hash(context_of("2x4")) == hash(context_of("2x4"))


def test_a_plan_without_a_rule_for_heads_splits_none() -> None:
    rules = {name: rule for name, rule in plan_of("2x4").rules.items() if name != "heads"}
    assert ParallelContext.from_plan(Plan(mesh=plan_of("2x4").mesh, rules=rules)) == context_of("2x4")


def test_axes_along_which_rows_are_split_and_equal() -> None:
    context = context_of("heads-between")
    assert context.split_rows(context.expert_axes) == (("data", 2), ("expert", 2))
    assert context.same_rows(context.expert_axes) == (("heads", 2),)
    assert context_of("2x4").same_rows(context_of("2x4").token_axes) == ()


def test_ranks_and_placement_of_a_context() -> None:
    assert exchange.num_ranks(()) == 1 and exchange.names(()) == ()
    context = context_of("2x4")
    assert exchange.num_ranks(context.token_axes) == 8
    assert exchange.names(context.token_axes) == ("data", "expert")
    assert context.placement(10).num_ranks == 4 and context_of("1").placement(10).num_ranks == 1
    assert context_of("heads").placement(10).num_ranks == 8


@layouts
def test_rank_index_is_the_order_of_parts(name: str) -> None:
    context, layout = context_of(name), LAYOUTS[name]
    rows = np.zeros((plan_of(name).ways("tokens"), 1), np.int32)
    for axes, names in ((context.token_axes, layout.tokens), (context.expert_axes, layout.experts)):
        out = run(name, lambda part, axes=axes: part * 0 + exchange.rank_index(axes), rows)
        np.testing.assert_array_equal(out[:, 0], [rank(name, at, names) for at in devices(name)])


@layouts
@pytest.mark.parametrize("over", ["tokens", "experts"])
def test_gather_order_is_rank_order(over: str, name: str) -> None:
    context, rows = context_of(name), rows_of(name)
    axes, names = {
        "tokens": (context.token_axes, LAYOUTS[name].tokens),
        "experts": (context.expert_axes, LAYOUTS[name].experts),
    }[over]
    out = run(name, lambda part: context.gather_rows(part, axes), rows)
    np.testing.assert_array_equal(out, [gathered(name, rows, at, names) for at in devices(name)])

    def own_rows(part: jax.Array) -> jax.Array:
        everything = context.gather_rows(part, axes)
        start = exchange.rank_index(context.split_rows(axes)) * ROWS
        return jax.lax.dynamic_slice_in_dim(everything, start, ROWS)

    np.testing.assert_array_equal(run(name, own_rows, rows), [own(name, rows, at) for at in devices(name)])


@layouts
@pytest.mark.parametrize("over", ["tokens", "experts"])
def test_reduce_sums_over_devices_and_keeps_own_rows(over: str, name: str) -> None:
    """Device r of the group contributes (r + 1) times everything, plus which of the equal rows it has."""
    context, rows = context_of(name), rows_of(name)
    axes, names = {
        "tokens": (context.token_axes, LAYOUTS[name].tokens),
        "experts": (context.expert_axes, LAYOUTS[name].experts),
    }[over]

    def body(part: jax.Array) -> jax.Array:
        everything = context.gather_rows(part, axes)
        return context.reduce_rows(everything * (index_of(axes) + 1), axes)

    ranks = exchange.num_ranks(axes)
    expected = [own(name, rows, at) * (ranks * (ranks + 1) // 2) for at in devices(name)]
    np.testing.assert_array_equal(run(name, body, rows), expected)
    assert len(group(name, next(devices(name)), names)) == ranks


@layouts
def test_reduce_undoes_gather_when_one_device_contributes_each_row(name: str) -> None:
    """As an expert layer does: each row is computed on one device of the group, wherever rows are equal."""
    context, rows = context_of(name), rows_of(name, rest=())
    axes = context.expert_axes

    def body(part: jax.Array) -> jax.Array:
        everything = context.gather_rows(part, axes)
        mine = np.arange(everything.shape[0], dtype=np.int32) % exchange.num_ranks(axes) == exchange.rank_index(axes)
        return context.reduce_rows(jax.numpy.where(mine, everything, np.float32(0)), axes)

    np.testing.assert_array_equal(run(name, body, rows), [own(name, rows, at) for at in devices(name)])


@layouts
def test_exchanges_stay_in_their_group(name: str) -> None:
    """A sum over the group's rows, by hand and by the device."""
    context, rows, names = context_of(name), rows_of(name), LAYOUTS[name].experts

    def body(part: jax.Array) -> jax.Array:
        return context.gather_rows(part, context.expert_axes).reshape(-1, ROWS, PART).sum(axis=0)

    expected = [
        np.sum([own(name, rows, other) for other in group(name, at, split(name, names))], axis=0)
        for at in devices(name)
    ]
    np.testing.assert_array_equal(run(name, body, rows), expected)


@layouts
@pytest.mark.parametrize("over", ["tokens", "vocab"])
def test_columns_to_rows_gives_own_rows_with_all_columns_in_rank_order(over: str, name: str) -> None:
    """Each device has its part of a product's columns for all rows of its group, as the output head does."""
    context, rows = context_of(name), rows_of(name, rest=(5,))
    axes, names = {
        "tokens": (context.token_axes, LAYOUTS[name].tokens),
        "vocab": (context.vocab_axes, LAYOUTS[name].experts),
    }[over]
    ranks = exchange.num_ranks(axes)
    weight = np.random.default_rng(1).integers(-9, 10, size=(5, ranks * PART)).astype(np.float32)
    assert len(group(name, next(devices(name)), names)) == ranks

    def body(part: jax.Array) -> jax.Array:
        everything = context.gather_rows(part, axes)
        start = exchange.rank_index(axes) * PART
        mine = everything @ jax.lax.dynamic_slice_in_dim(jax.numpy.asarray(weight), start, PART, axis=1)
        return context.columns_to_rows(mine, axes)

    expected = [own(name, rows, at) @ weight for at in devices(name)]
    np.testing.assert_array_equal(run(name, body, rows), expected)


@layouts
def test_columns_are_gathered_in_rank_order(name: str) -> None:
    """As attention does with the heads of all devices: everybody has all columns of its own rows."""
    context, rows, names = context_of(name), rows_of(name, rest=()), LAYOUTS[name].heads

    def body(part: jax.Array) -> jax.Array:
        mine = part[:, None] * 10 + index_of(context.head_axes)
        return exchange.gather_columns(mine, context.head_axes)

    ranks = len(group(name, next(devices(name)), names))
    expected = [own(name, rows, at)[:, None] * 10 + np.arange(ranks)[None] for at in devices(name)]
    np.testing.assert_array_equal(run(name, body, rows), expected)


@layouts
def test_integers_and_flags_can_be_gathered(name: str) -> None:
    context, rows, names = context_of(name), rows_of(name), LAYOUTS[name].experts
    for dtype in (np.int8, np.bool_):
        out = run(name, lambda part: context.gather_rows(part, context.expert_axes), rows.astype(dtype))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, [gathered(name, rows.astype(dtype), at, names) for at in devices(name)])
