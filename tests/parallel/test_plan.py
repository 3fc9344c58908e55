"""Sharding plans: what they refuse and how they say it, shapes in memory, other device counts, the shipped files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxmoe.assets import asset
from jaxmoe.axes import AXES
from jaxmoe.errors import ConfigError, PlanError
from jaxmoe.parallel.plan import Plan, load_plan

MESH = {"data": 2, "expert": 4}
RULES: dict[str, tuple[str, ...]] = {
    "tokens": ("data", "expert"),
    "pages": ("data", "expert"),
    "experts": ("expert",),
    "vocab": ("expert",),
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


def test_an_unknown_axis_is_refused() -> None:
    message = refusal(rules={**RULES, "expertz": ()})
    assert message == f"(code): rule for unknown axis expertz; known: {', '.join(AXES)}"


def test_an_axis_that_is_never_split_is_refused() -> None:
    assert refusal(rules={**RULES, "embed": ("data",)}) == "(code): axis embed cannot be split by this version"


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


@pytest.mark.parametrize(
    "rules",
    [
        {"tokens": ("data",), "pages": ("data",)},
        {"pages": ("data",)},
        {"pages": ("expert", "data")},
        {"tokens": (), "pages": ()},
    ],
)
def test_tokens_and_pages_are_split_alike_over_the_whole_mesh(rules: dict[str, tuple[str, ...]]) -> None:
    merged = {**RULES, **rules}
    assert refusal(rules=merged) == (
        f"(code): tokens = {list(merged['tokens'])} and pages = {list(merged['pages'])} must both be split over all "
        "mesh axes ['data', 'expert']: otherwise attention work would be repeated"
    )


def test_a_scalable_axis_must_exist() -> None:
    assert refusal(scalable="model") == f"(code): scalable = 'model' is not a mesh axis of {MESH}"


def test_spec_follows_the_rules() -> None:
    plan = plan_of()
    assert plan.spec(("layers", "experts", "expert_ffn")) == PartitionSpec(None, ("expert",), None)
    assert plan.spec(("tokens",)) == PartitionSpec(("data", "expert"))
    assert plan.spec(()) == PartitionSpec()


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
    assert plan.physical_shape((3, 5), ("rows", "tokens")) == (3, 5)
    assert plan.physical_shape((), ()) == ()
    with pytest.raises(ValueError):
        plan.physical_shape((1, 2), ("vocab",))


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
