"""Sharding plans: what they refuse and how they say it, shapes in memory, other device counts, the shipped files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxmoe import axes
from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, PlanError
from jaxmoe.parallel.plan import Plan, load_plan

MESH = {"data": 2, "expert": 4}
RULES: dict[str, tuple[str, ...]] = {
    "tokens": ("data", "expert"),
    "pages": ("data", "expert"),
    "experts": ("expert",),
    "vocab": ("expert",),
}
TENSOR_MESH = {"data": 4, "heads": 2}
TENSOR_RULES: dict[str, tuple[str, ...]] = {
    "tokens": ("data",),
    "pages": ("data",),
    "experts": ("data", "heads"),
    "vocab": ("data", "heads"),
    "heads": ("heads",),
}


def plan_of(mesh: Mapping[str, int] = MESH, rules: Mapping[str, Any] = RULES, **options: Any) -> Plan:
    return Plan(mesh=mesh, rules=rules, **options)


def refusal(**arguments: Any) -> str:
    with pytest.raises(PlanError) as error:
        plan_of(**arguments)
    return str(error.value)


def test_devices_and_ways() -> None:
    plan = plan_of()
    assert plan.num_devices == 8
    assert [plan.ways(axis) for axis in ("tokens", "pages", "experts", "vocab", "embed")] == [8, 8, 4, 4, 1]


def test_ways_follow_the_rule_of_an_axis() -> None:
    plan = plan_of(TENSOR_MESH, TENSOR_RULES)
    assert plan.num_devices == 8
    assert [plan.ways(axis) for axis in ("tokens", "rows", "pages", "experts", "vocab")] == [4, 4, 4, 8, 8]
    assert [plan.ways(axis) for axis in ("q_heads", "kv_heads", "attention_out")] == [2, 2, 2]
    assert [plan.ways(axis) for axis in ("embed", "latent", "heads_in", "index_heads", "kv_lora")] == [1] * 5
    assert plan.mesh_axes("experts") == ("data", "heads") and plan.mesh_axes("embed") == ()


def test_rules_of_the_vocabulary_are_of_known_axes() -> None:
    assert set(axes.RULE_OF_AXIS.values()) == set(axes.RULES) and set(axes.RULE_OF_AXIS) <= set(axes.AXES)
    plan = plan_of()
    assert {axis for axis in axes.AXES if plan.ways(axis) > 1} <= set(axes.RULE_OF_AXIS)


def test_an_unknown_axis_is_refused() -> None:
    message = refusal(rules={**RULES, "expertz": ()})
    assert message == f"(code): rule for unknown axis expertz; known: {', '.join(axes.RULES)}"


@pytest.mark.parametrize("axis", ["embed", "q_heads", "rows"])
def test_an_axis_without_a_rule_of_its_own_is_refused(axis: str) -> None:
    """Never split, or split by another rule."""
    message = refusal(rules={**RULES, axis: ("data",)})
    assert message == f"(code): rule for unknown axis {axis}; known: {', '.join(axes.RULES)}"


@pytest.mark.parametrize("rule", ["tokens", "pages", "experts", "vocab"])
def test_rules_for_all_but_heads_must_be_there(rule: str) -> None:
    rules = {name: mesh_axes for name, mesh_axes in RULES.items() if name != rule}
    assert refusal(rules=rules) == f"(code): no rule for axis {rule}; write [] for replicated"


def test_heads_may_be_left_out() -> None:
    assert plan_of().ways("q_heads") == 1 == plan_of(rules={**RULES, "heads": ()}).ways("q_heads")


def test_a_missing_rule_is_refused() -> None:
    rules = {axis: rule for axis, rule in RULES.items() if axis not in ("vocab", "experts")}
    assert refusal(rules=rules) == "(code): no rule for axis experts, vocab; write [] for replicated"


@pytest.mark.parametrize("rule", [("model",), ("expert", "expert")])
def test_an_unknown_or_repeated_mesh_axis_is_refused(rule: tuple[str, ...]) -> None:
    message = refusal(rules={**RULES, "vocab": rule})
    assert message == (
        f"(code): rule vocab = {list(rule)} does not fit the mesh {MESH}: each mesh axis may appear once and must exist"
    )


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int) -> None:
    assert refusal(mesh={**MESH, "data": size}) == f"(code): mesh axis data has size {size}; sizes start at 1"


@pytest.mark.parametrize("axis", ["tokens", "pages", "experts", "vocab"])
def test_mesh_axes_come_in_the_meshs_order(axis: str) -> None:
    """Row-major rank order is the one order that exchanges, pages and weights share."""
    message = refusal(rules={**RULES, axis: ("expert", "data")})
    assert message == (
        f"(code): rule {axis} = ['expert', 'data'] must name mesh axes in the mesh's order ['data', 'expert']"
    )


def attention_refusal(mesh: Mapping[str, int], rules: Mapping[str, tuple[str, ...]]) -> str:
    return (
        f"(code): tokens = {list(rules['tokens'])} and pages = {list(rules['pages'])} must be equal, and every mesh "
        f"axis of {list(mesh)} must split either them or heads = {list(rules.get('heads', ()))}: otherwise attention "
        "work would be repeated"
    )


@pytest.mark.parametrize(
    "rules",
    [
        {"tokens": ("data",), "pages": ("data",)},
        {"pages": ("data",)},
        {"tokens": (), "pages": ()},
        {"tokens": ("data",)},
    ],
)
def test_tokens_and_pages_are_split_alike_over_the_whole_mesh(rules: dict[str, tuple[str, ...]]) -> None:
    merged = {**RULES, **rules}
    assert refusal(rules=merged) == attention_refusal(MESH, merged)


@pytest.mark.parametrize(
    "rules",
    [
        {"heads": ()},
        {"heads": ("data",)},
        {"heads": ("data", "heads")},
        {"tokens": ("data", "heads"), "pages": ("data", "heads")},
        {"tokens": ("data", "heads"), "pages": ("data", "heads"), "heads": ("data", "heads")},
        {"pages": ("data", "heads")},
        {"tokens": (), "pages": ()},
    ],
)
def test_every_mesh_axis_splits_either_tokens_or_heads(rules: dict[str, tuple[str, ...]]) -> None:
    """In neither, or in both."""
    merged = {**TENSOR_RULES, **rules}
    assert refusal(mesh=TENSOR_MESH, rules=merged) == attention_refusal(TENSOR_MESH, merged)
    assert plan_of(TENSOR_MESH, TENSOR_RULES).num_devices == 8


def test_a_scalable_axis_must_exist() -> None:
    assert refusal(scalable="model") == f"(code): scalable = 'model' is not a mesh axis of {MESH}"


def test_spec_follows_the_rules() -> None:
    plan = plan_of()
    assert plan.spec(("layers", "experts", "expert_ffn")) == PartitionSpec(None, ("expert",), None)
    assert plan.spec(("tokens",)) == PartitionSpec(("data", "expert"))
    assert plan.spec(()) == PartitionSpec()
    plan = plan_of(TENSOR_MESH, TENSOR_RULES)
    assert plan.spec(("layers", "q_heads", "embed")) == PartitionSpec(None, ("heads",), None)
    assert plan.spec(("layers", "attention_out", "heads_in")) == PartitionSpec(None, ("heads",), None)
    assert plan.spec(("layers", "pages", "page", "kv_heads")) == PartitionSpec(None, ("data",), None, ("heads",))
    assert plan.spec(("layers", "pages", "page", "latent")) == PartitionSpec(None, ("data",), None, None)


def test_one_mesh_axis_cannot_split_two_axes_of_an_array() -> None:
    with pytest.raises(PlanError) as error:
        plan_of().spec(("experts", "embed", "vocab"))
    assert str(error.value) == (
        "(code): mesh axis expert would split both experts and vocab of an array with axes "
        "['experts', 'embed', 'vocab']"
    )


def test_physical_shape_pads_split_weight_axes_only() -> None:
    plan = plan_of()
    assert plan.physical_shape((2, 10, 7), ("layers", "experts", "embed")) == (2, 12, 7)
    assert plan.physical_shape((257, 7), ("vocab", "embed")) == (260, 7)
    assert plan.physical_shape((8,), ("vocab",)) == (8,)
    assert plan.physical_shape((3, 5), ("page", "top_k")) == (3, 5)
    assert plan.physical_shape((8, 16), ("rows", "tokens")) == (8, 16)
    assert plan.physical_shape((), ()) == ()
    with pytest.raises(ValueError):
        plan.physical_shape((1, 2), ("vocab",))


@pytest.mark.parametrize(("axis", "ways"), [("q_heads", 2), ("kv_heads", 2), ("attention_out", 2), ("pages", 4)])
def test_what_cannot_be_padded_must_divide(axis: str, ways: int) -> None:
    plan = plan_of(TENSOR_MESH, TENSOR_RULES)
    assert plan.physical_shape((3, ways * 9), ("layers", axis)) == (3, ways * 9)
    with pytest.raises(PlanError) as error:
        plan.physical_shape((3, ways * 9 - 1), ("layers", axis))
    rule = axes.RULE_OF_AXIS[axis]
    assert str(error.value) == (
        f"(code): axis {axis} of size {ways * 9 - 1} cannot be split {ways} ways (mesh {TENSOR_MESH}, rule {rule} = "
        f"{list(TENSOR_RULES[rule])}); choose a divisor"
    )


@given(size=st.integers(1, 10_000), ways=st.integers(1, 16))
def test_physical_shape_is_the_least_multiple(size: int, ways: int) -> None:
    plan = plan_of(mesh={"data": 1, "expert": ways})
    (physical,) = plan.physical_shape((size,), ("experts",))
    assert physical % ways == 0 and size <= physical < size + ways
    assert plan.physical_shape((physical,), ("experts",)) == (physical,)


@pytest.mark.parametrize(("devices", "expert"), [(2, 1), (8, 4), (16, 8), (6, 3)])
def test_the_scalable_axis_takes_other_device_counts(devices: int, expert: int) -> None:
    plan = plan_of(scalable="expert", source="somewhere").with_devices(devices)
    assert dict(plan.mesh) == {"data": 2, "expert": expert} and list(plan.mesh) == list(MESH)
    assert plan.num_devices == devices
    assert (plan.rules, plan.scalable, plan.source) == (RULES, "expert", "somewhere")


@pytest.mark.parametrize("scalable", ["", "expert"])
def test_every_plan_runs_on_one_device_and_on_its_own_count(scalable: str) -> None:
    plan = plan_of(scalable=scalable)
    assert dict(plan.with_devices(1).mesh) == {"data": 1, "expert": 1}
    assert plan.with_devices(8) is plan


def test_a_plan_scales_down_and_up_again() -> None:
    plan = plan_of(mesh={"data": 1, "expert": 4}, scalable="expert")
    assert plan.with_devices(1).with_devices(4) == plan


def test_heads_keep_their_split_when_another_axis_scales() -> None:
    plan = plan_of(TENSOR_MESH, TENSOR_RULES, scalable="data")
    assert dict(plan.with_devices(2).mesh) == {"data": 1, "heads": 2}
    assert dict(plan.with_devices(16).mesh) == {"data": 8, "heads": 2}
    assert plan.with_devices(1).ways("q_heads") == 1


@pytest.mark.parametrize("devices", [3, 7, 0, -2])
def test_other_counts_are_refused(devices: int) -> None:
    with pytest.raises(PlanError) as error:
        plan_of(scalable="expert").with_devices(devices)
    assert str(error.value) == (
        f"(code): the mesh {MESH} cannot be put on {devices} devices; axis expert scales in steps of 2"
    )


def test_a_plan_without_a_scalable_axis_refuses_other_counts() -> None:
    with pytest.raises(PlanError) as error:
        plan_of().with_devices(4)
    assert str(error.value) == f"(code): the mesh {MESH} cannot be put on 4 devices; it names no scalable axis"


_PLANS = sorted(asset("sharding").rglob("*.toml"))


def test_plans_are_shipped() -> None:
    assert len(_PLANS) >= 2


@pytest.mark.parametrize("path", _PLANS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_plan_loads(path: Path) -> None:
    plan = load_plan(path)
    assert plan.source == str(path)
    assert plan.with_devices(1).num_devices == 1
    assert plan.scalable and plan.with_devices(2 * plan.num_devices).num_devices == 2 * plan.num_devices


def test_the_shipped_plan_with_split_heads_is_the_one_of_these_tests() -> None:
    plan = load_plan(asset("sharding") / "default" / "cpu8_tp2.toml")
    assert (dict(plan.mesh), dict(plan.rules)) == (TENSOR_MESH, TENSOR_RULES)


_TEXT = """
[mesh]
data = 2

[rules]
tokens = ["data"]
pages = ["data"]
experts = []
vocab = []
"""


def test_a_plan_file_is_decoded_strictly(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(_TEXT)
    assert load_plan(path) == plan_of(
        mesh={"data": 2},
        rules={"tokens": ("data",), "pages": ("data",), "experts": (), "vocab": ()},
        source=str(path),
    )
    path.write_text("scaleable = 'data'\n" + _TEXT)
    with pytest.raises(ConfigError, match="plan.toml: unknown key scaleable; known are mesh, rules, scalable"):
        load_plan(path)
    path.write_text(_TEXT.replace("experts = []", "experts = 'data'"))
    with pytest.raises(ConfigError, match="plan.toml.rules.experts: 'data' is not a list"):
        load_plan(path)
    path.write_text(_TEXT.replace("data = 2", "data = 2.0"))
    with pytest.raises(ConfigError, match="plan.toml.mesh.data: 2.0 is not a int"):
        load_plan(path)
    path.write_text(_TEXT.replace("vocab = []", ""))
    with pytest.raises(PlanError, match="plan.toml: no rule for axis vocab; write"):
        load_plan(path)
    with pytest.raises(ConfigError, match="absent.toml does not exist"):
        load_plan(tmp_path / "absent.toml")
