"""Learned rounding against float64, and its laws: never worse than its start, and nothing left that one step mends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.ptq.recipe import load_recipe, match_recipe
from jaxmoe.ptq.rounding import NearestOptions, Options, method_of, round_weight
from jaxmoe.ptq.rounding.gptq import NEAREST, GptqOptions
from jaxmoe.ptq.rounding.learned import LearnedOptions, Start
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.quant.qarray import validate_shapes
from jaxmoe.quant.scheme import parse_scheme
from tests import tiny
from tests.ptq.rounding_oracle import (
    RUN,
    Grid,
    expand,
    gram,
    groups_of,
    inputs,
    output_error,
    restored,
)
from tests.tolerances import TOLERANCES

OUT, SIZE, GROUP = 6, 40, 16  # groups of 16, 16 and 8
DEFAULT = LearnedOptions()
DESCENT, EXACT = LearnedOptions(refine=0), LearnedOptions(steps=0)
PARTS = {"both": DEFAULT, "descent": DESCENT, "exact": EXACT}
parts = pytest.mark.parametrize("options", PARTS.values(), ids=PARTS)
starts = pytest.mark.parametrize("start", ["nearest", "ssz", "gptq"])


def learned(weight, hessian, group: int = GROUP, bits: int = 4, options: LearnedOptions = DEFAULT):
    rounded = RUN["learned"](jnp.asarray(weight), jnp.asarray(hessian), group, bits, options)
    return np.array(rounded.qvalue), np.array(rounded.scale), np.array(rounded.status)


def other(options: Options, weight, hessian, group: int = GROUP, bits: int = 4) -> Grid:
    """Another method, with what it needs of a Hessian."""
    method = method_of(options)
    name = {NearestOptions: "nearest", SszOptions: "ssz", GptqOptions: "gptq"}[method.options]
    diagonal = np.ascontiguousarray(np.diagonal(hessian, 0, -2, -1))
    statistic = {"nothing": None, "importance": diagonal, "hessian": hessian}[method.needs]
    statistic = None if statistic is None else jnp.asarray(statistic)
    rounded = RUN[name](jnp.asarray(weight), statistic, group, bits, options)
    return np.asarray(rounded.qvalue), np.asarray(rounded.scale)


STARTS: dict[Start, Options] = {
    "nearest": NearestOptions(),
    "ssz": SszOptions(),
    "gptq": GptqOptions(damping=DEFAULT.damping, most_damping=DEFAULT.damping),
}


def normal(seed: int, shape=(OUT, SIZE)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def hessian_of(seed: int, tokens: int = 200, size: int = SIZE) -> np.ndarray:
    return gram(inputs(np.random.default_rng(seed), tokens, size))


def damped(hessian: np.ndarray, damping: float = DEFAULT.damping) -> np.ndarray:
    h = hessian.astype(np.float64)
    return h + damping * np.mean(np.diagonal(h)) * np.eye(len(h))


def row_costs(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, group: int, hessian: np.ndarray) -> np.ndarray:
    """What is minimised, of each row."""
    error = weight.astype(np.float64) - restored(q, scale, group)
    return np.einsum("oi,ij,oj->o", error, damped(hessian), error)


def same(ours, theirs) -> None:
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, two)


def exact_rounds(weight: np.ndarray, start: Grid, hessian: np.ndarray, group: int, limit: int, rounds: int) -> Grid:
    """Row by row, channel by channel, by the definition: the least of the costs of all integers of the grid."""
    h, size = damped(hessian), weight.shape[-1]
    q, scale = (np.array(x, np.float64) for x in start)
    grid = np.arange(-limit, limit + 1.0)
    for row, w in enumerate(weight.astype(np.float64)):
        for _ in range(rounds):
            for k in range(size):
                candidates = np.repeat(q[row][None], len(grid), axis=0)
                candidates[:, k] = grid
                errors = w - candidates * expand(scale[row], group, size)
                q[row, k] = grid[np.argmin(np.einsum("ni,ij,nj->n", errors, h, errors))]
            for index, channels in groups_of(size, group):
                part = np.zeros(size)
                part[channels] = q[row, channels]
                rest = w - q[row] * expand(scale[row], group, size) + part * scale[row, index]
                if part.any():
                    scale[row, index] = (part @ h @ rest) / (part @ h @ part)
    return q, scale


@starts
@pytest.mark.parametrize(("size", "group"), [(SIZE, GROUP), (SIZE, SIZE), (7, 7), (9, 1), (150, 32)])
def test_exact_steps_find_what_trying_every_integer_finds(size: int, group: int, start: Start) -> None:
    weight, hessian = normal(1, (3, size)), hessian_of(1, 400, size)
    options = LearnedOptions(start=start, steps=0, refine=2)
    q, scale, status = learned(weight, hessian, group, 4, options)
    expected = exact_rounds(weight, other(STARTS[start], weight, hessian, group), hessian, group, 7, 2)
    assert status == 0 and q.dtype == np.int8 and scale.dtype == np.float32
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_allclose(scale, expected[1], rtol=TOLERANCES["learned_scale"].value)


def descent(weight: np.ndarray, start: np.ndarray, hessian: np.ndarray, group: int, limit: int, rates) -> Grid:
    """Signed gradient descent in float64 with the gradients written out; the best of each row."""
    h, w, size = damped(hessian), weight.astype(np.float64), weight.shape[-1]
    offsets, factors = np.zeros(w.shape), np.ones(start.shape)
    least, best_q, best_scale = np.full(len(w), np.inf), np.zeros(w.shape), np.ones(start.shape)
    for rate in [*rates, 0.0]:
        scale = start.astype(np.float64) * factors
        wide = expand(scale, group, size)
        real = w / wide + offsets
        q = np.clip(np.rint(real), -limit, limit)
        errors = w - q * wide
        slopes = errors @ h
        cost = np.sum(errors * slopes, axis=-1)
        better = cost < least
        least[better], best_q[better], best_scale[better] = cost[better], q[better], scale[better]
        inside = np.abs(np.rint(real)) <= limit
        # The error is w - wide * q, where q changes as w / wide + offset does, and not at all beyond the grid.
        by_scale = slopes * (np.where(inside, w / wide, 0) - q) * expand(start, group, size)
        by_factor = np.add.reduceat(by_scale, range(0, size, group), axis=-1)
        offsets = np.clip(offsets + rate * np.sign(slopes * wide * inside), -0.5, 0.5)
        factors = factors - rate * np.sign(by_factor)
    return best_q, best_scale


@pytest.mark.parametrize("start", ["nearest", "ssz"])
def test_descent_follows_the_gradients_of_float64(start: Start) -> None:
    weight, hessian = normal(2), hessian_of(2)
    q, scale, _ = learned(weight, hessian, options=LearnedOptions(start=start, steps=20, refine=0))
    first = other(STARTS[start], weight, hessian)
    expected = descent(weight, first[1], hessian, GROUP, 7, [1 / 20 * (1 - step / 20) for step in range(20)])
    assert (q != first[0]).any()
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_allclose(scale, expected[1], rtol=TOLERANCES["learned_scale"].value)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "group"), [(SIZE, GROUP), (SIZE, SIZE), (200, 32)])
def test_correlated_inputs_are_better_off_than_with_any_other_method(size: int, group: int, bits: int) -> None:
    for seed in range(2):
        weight, x = normal(seed, (16, size)), inputs(np.random.default_rng(seed), 4000, size)
        hessian, unseen = gram(x[:2000]), gram(x[2000:])
        q, scale, _ = learned(weight, hessian, group, bits)
        for options in (NearestOptions(), SszOptions()):
            plain = output_error(weight, *other(options, weight, hessian, group, bits), group, unseen)
            assert output_error(weight, q, scale, group, unseen) < 0.5 * plain
        carried = row_costs(weight, *other(STARTS["gptq"], weight, hessian, group, bits), group, hessian)
        ours = row_costs(weight, q, scale, group, hessian)
        assert (ours <= carried * (1 + TOLERANCES["learned_scale"].value)).all() and ours.sum() < 0.97 * carried.sum()


@pytest.mark.slow
def test_both_parts_are_better_than_either() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1000, 96)) @ (np.eye(96) + 2 * rng.normal(size=(96, 96)) / np.sqrt(96))
    weight, hessian = normal(3, (32, 96)), gram(x.astype(np.float32))
    costs = {
        name: row_costs(weight, *learned(weight, hessian, 32, 4, options)[:2], 32, hessian)
        for name, options in PARTS.items()
    }
    assert costs["both"].sum() < 0.97 * min(costs["descent"].sum(), costs["exact"].sum())
    for alone in ("descent", "exact"):
        assert (costs["both"] <= costs[alone] * (1 + TOLERANCES["learned_scale"].value)).all()


elements = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
tokens = st.floats(-(2**10), 2**10, width=32)


@pytest.mark.parametrize(
    ("options", "bits"), [(DEFAULT, 4), (EXACT, 4), (DESCENT, 8)], ids=["both", "exact", "descent"]
)
@settings(max_examples=40)
@given(
    weight=hnp.arrays(np.float32, (3, SIZE), elements=elements),
    x=hnp.arrays(np.float32, (5, SIZE), elements=tokens),
    start=st.sampled_from(["nearest", "ssz"]),
)
def test_no_row_is_ever_worse_than_its_start(weight, x, start: Start, options: LearnedOptions, bits: int) -> None:
    hessian = gram(x)
    q, scale, status = learned(weight, hessian, bits=bits, options=replace(options, start=start))
    assert (scale > 0).all() and np.isfinite(scale).all()
    assert np.abs(q.astype(np.int32)).max() < 2 ** (bits - 1)
    first = other(STARTS[start] if status == 0 else NearestOptions(), weight, hessian, bits=bits)
    if status != 0:
        same((q, scale), first)
    signal = np.einsum("oi,ij,oj->o", weight.astype(np.float64), damped(hessian), weight.astype(np.float64))
    ours, theirs = (np.sqrt(row_costs(weight, *grid, GROUP, hessian)) for grid in ((q, scale), first))
    # Errors are differences of what float32 holds: the norm of what they come from counts, correlations aside.
    size = np.sqrt(np.trace(damped(hessian))) * np.linalg.norm(weight.astype(np.float64), axis=-1)
    assert (ours <= theirs + TOLERANCES["learned_norm"].value * np.maximum(size, np.sqrt(signal))).all()


def test_no_single_step_mends_anything_after_many_rounds() -> None:
    weight, hessian = normal(4), hessian_of(4)
    q, scale, _ = learned(weight, hessian, options=LearnedOptions(refine=100))
    least = row_costs(weight, q, scale, GROUP, hessian)
    slack = 1 - TOLERANCES["learned_scale"].value
    for k in range(SIZE):
        for change in (-1, 1):
            moved = q.astype(np.int32)
            moved[:, k] = np.clip(moved[:, k] + change, -7, 7)
            assert (row_costs(weight, moved, scale, GROUP, hessian) >= slack * least).all()
    for group in range(scale.shape[-1]):
        for factor in (0.99, 1.01):
            moved = scale.copy()
            moved[:, group] *= np.float32(factor)
            assert (row_costs(weight, q, moved, GROUP, hessian) >= slack * least).all()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nearest", "ssz"])
def test_few_steps_are_few_changes(start: Start) -> None:
    """No integer goes further from its weight than half a step and what the offset can have moved."""
    weight, hessian = normal(5, (64, SIZE)), hessian_of(5)
    first_q, first_scale = other(STARTS[start], weight, hessian)
    changed = []
    for steps, rate in [(1, 0.01), (4, 0.01), (50, 0.02)]:
        q, scale, _ = learned(weight, hessian, options=LearnedOptions(start=start, steps=steps, rate=rate, refine=0))
        reach = rate * (steps + 1) / 2 + 1e-4
        real = np.clip(weight / expand(scale, GROUP, SIZE), -7, 7)
        assert (np.abs(q - real) <= 0.5 + reach).all()
        assert (np.abs(scale / first_scale - 1) <= reach).all()
        changed.append(int((q != first_q).sum()))
    assert 0 < changed[0] < changed[1] < changed[2]
    assert changed[0] < 0.03 * weight.size


def test_without_inputs_rounding_is_to_nearest() -> None:
    """Four experts of one batch: inputs, none, and what no inputs make."""
    weight = normal(6, (4, OUT, SIZE))
    hessian = np.stack([hessian_of(6)] * 4)
    hessian[1] = 0
    hessian[2] *= -1
    hessian[3] -= np.float32(np.trace(hessian[3]) / 8) * np.eye(SIZE, dtype=np.float32)
    q, scale, status = learned(weight, hessian)
    assert status.tolist() == [0, NEAREST, NEAREST, NEAREST]
    plain_q, plain_scale = other(NearestOptions(), weight, hessian)
    same((q[1:], scale[1:]), (plain_q[1:], plain_scale[1:]))
    assert (q[0] != plain_q[0]).any()


def test_uncorrelated_inputs_leave_the_best_integers_of_each_scale() -> None:
    weight = normal(7)
    loudness = np.exp(np.random.default_rng(7).normal(size=SIZE)).astype(np.float32)
    q, scale, _ = learned(weight, np.diag(loudness))
    np.testing.assert_array_equal(q, np.clip(np.rint(weight / expand(scale, GROUP, SIZE)), -7, 7))


def test_dead_channels_end_up_near_their_weights() -> None:
    weight, x = normal(8), inputs(np.random.default_rng(8), 200, SIZE)
    dead = [0, 17, SIZE - 1]
    x[:, dead] = 0
    q, scale, status = learned(weight, gram(x))
    expected = np.clip(np.rint(weight / expand(scale, GROUP, SIZE)), -7, 7)
    assert status == 0
    np.testing.assert_array_equal(q[:, dead], expected[:, dead])
    assert (q[:, dead] != 0).any() and (q != expected).any()


@pytest.mark.parametrize("power", [-90, -3, 1, 90])
def test_a_power_of_two_scales_the_scales_and_nothing_else(power: int) -> None:
    weight, hessian = normal(9), hessian_of(9)
    factor = np.float32(2.0**power)
    q, scale, status = learned(weight, hessian)
    same(learned(weight * factor, hessian), (q, scale * factor, status))
    same(learned(weight, hessian * factor), (q, scale, status))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "bits"), [(32, 4), (96, 8)])
def test_rows_are_independent_and_an_expert_comes_out_alike_in_any_company(group: int, bits: int) -> None:
    weight, hessian = normal(10, (3, 16, 96)), np.stack([hessian_of(seed, 300, 96) for seed in range(3)])
    q, scale, status = learned(weight, hessian, group, bits)
    order = np.random.default_rng(0).permutation(16)
    same(learned(weight[:, order], hessian, group, bits), (q[:, order], scale[:, order], status))
    for index in range(3):
        same(learned(weight[index], hessian[index], group, bits), (q[index], scale[index], status[index]))
        part = slice(index, index + 1)
        same(learned(weight[part], hessian[part], group, bits), (q[part], scale[part], status[part]))
    others, known = np.concatenate([weight] * 3), np.concatenate([hessian] * 3)
    others[0], known[1] = 0, 0
    many_q, many_scale, many_status = learned(others, known, group, bits)
    same((many_q[6:], many_scale[6:], many_status[6:]), (q, scale, status))

    def run(weight, hessian):
        return method_of(DEFAULT).run(weight, hessian, group, bits, DEFAULT)

    mapped = jax.jit(jax.vmap(run))(weight, hessian)
    same((mapped.qvalue, mapped.scale, mapped.status), (q, scale, status))
    mesh, spec = Mesh(np.array(jax.devices()[:3]), ("experts",)), PartitionSpec("experts")
    spread = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(weight, hessian)
    same((spread.qvalue, spread.scale, spread.status), (q, scale, status))


def test_zero_groups_stay_zero() -> None:
    weight = normal(11)
    weight[1, GROUP : 2 * GROUP] = 0
    weight[2] = 0
    weight[3, 2 * GROUP :] = 0  # the short group
    q, scale, _ = learned(weight, hessian_of(11))
    assert (q[weight == 0] == 0).all() and (q[1] != 0).any()
    assert scale[1, 1] == 1 and (scale[2] == 1).all() and scale[3, 2] == 1


@parts
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_show_in_their_group_and_count_as_zeros_elsewhere(
    bad: float, options: LearnedOptions
) -> None:
    weight, hessian = normal(12), hessian_of(12)
    options = replace(options, start="ssz")  # gptq makes up for errors in groups of zeros
    zeros = weight.copy()
    zeros[1, GROUP : 2 * GROUP] = 0
    weight[1, GROUP + 3] = bad
    q, scale, status = learned(weight, hessian, options=options)
    assert status == 0 and np.isnan(scale[1, 1]) and (q[1, GROUP : 2 * GROUP] == 0).all()
    zero_q, zero_scale, _ = learned(zeros, hessian, options=options)
    zero_scale[1, 1] = np.nan
    same((q, scale), (zero_q, zero_scale))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_hessian_that_is_not_finite_shows_everywhere(bad: float) -> None:
    hessian = np.stack([hessian_of(13)] * 2)
    hessian[1, 3, 5] = bad
    weight = normal(13, (2, OUT, SIZE))
    q, scale, _ = learned(weight, hessian)
    assert np.isnan(scale[1]).all() and (q[1] == 0).all()
    same((q[0], scale[0]), learned(weight[0], hessian[0])[:2])


def test_narrow_floats_are_widened_first() -> None:
    weight, hessian = jnp.asarray(normal(14), jnp.bfloat16), hessian_of(14)
    same(learned(weight, hessian), learned(weight.astype(jnp.float32), hessian))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["w4a8-g32", "w8a8-channel"])
def test_the_result_is_a_weight_of_the_scheme(text: str) -> None:
    scheme, weight, hessian = parse_scheme(text), normal(15, (2, OUT, 64)), np.stack([hessian_of(15, size=64)] * 2)
    array, status = jax.jit(round_weight, static_argnums=(2, 3))(
        jnp.asarray(weight), jnp.asarray(hessian), scheme, DEFAULT
    )
    validate_shapes(array, name="learned")
    same(
        (array.integers(), array.scale, status),
        learned(weight, hessian, scheme.group_size(64), scheme.weight_bits),
    )
    with pytest.raises(ValueError, match=r"round_learned .* needs hessian of shape \(2, 64, 64\), got None"):
        round_weight(jnp.asarray(weight), None, scheme, DEFAULT)


def test_options_out_of_range_are_refused() -> None:
    for make, message in [
        (lambda: LearnedOptions(steps=-1), "steps = -1 and refine = 10"),
        (lambda: LearnedOptions(steps=0, refine=0), "a search needs one or more; use method gptq"),
        (lambda: LearnedOptions(refine=-1), "refine = -1"),
        (lambda: LearnedOptions(rate=0.0), r"rate = 0.0, but a step of the search is in \(0, 1\]"),
        (lambda: LearnedOptions(rate=2.0), "rate = 2.0"),
        (lambda: LearnedOptions(damping=0.0), "damping = 0.0"),
        (lambda: LearnedOptions(damping=float("nan")), "damping = nan"),
    ]:
        with pytest.raises(RecipeError, match=message):
            make()


def test_the_shipped_recipe_learns_the_routed_experts_and_nothing_else() -> None:
    recipe = load_recipe("w4a8-experts-learned")
    routed = ("experts.gate", "experts.up", "experts.down")
    for match in match_recipe(recipe, tiny.manifest_of(tiny.CONFIGS["glm4_moe"])):
        expected = DEFAULT if match.entry.role in routed else NearestOptions()
        assert match.options == expected


def test_settings_in_a_recipe(tmp_path) -> None:
    text = (
        "name = 'mine'\n[calibration]\n[[rule]]\nroles = ['experts.down']\nscheme = 'w4a8-g128'\n"
        "rounding = 'learned'\noptions = {}\n"
    )
    path = tmp_path / "mine.toml"

    def options(settings: str) -> Options | None:
        path.write_text(text.format(f"{{ {settings} }}"), encoding="utf-8")
        return load_recipe(path).rule[0].options

    given = options("start = 'nearest', steps = 200, rate = 0.01, refine = 0, damping = 0.01")
    assert given == LearnedOptions(start="nearest", steps=200, rate=0.01, refine=0, damping=0.01)
    with pytest.raises(ConfigError, match="start.*'clip'"):
        options("start = 'clip'")
    with pytest.raises(RecipeError, match="rounding learned: steps = 0"):
        options("steps = 0, refine = 0")
