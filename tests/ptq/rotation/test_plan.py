"""The plan: every parameter beside a stream turns, none other does, and what cannot turn is refused with its reason."""

import dataclasses
import re

import pytest

from jaxmoe.decode import decode
from jaxmoe.errors import ConfigError, RecipeError, UnsupportedError
from jaxmoe.models.family import View
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.nn.config import AttentionConfig
from jaxmoe.ptq.rotation.hadamard import Rotation
from jaxmoe.ptq.rotation.plan import RotationPlan, RotationRecipe, plan_rotation
from tests import tiny


def plan_of(family: str, recipe: RotationRecipe, **changes: object) -> tuple[Manifest, RotationPlan]:
    manifest = tiny.manifest_of(tiny.changed(family, changes))
    return manifest, plan_rotation(manifest, recipe)


def columns(plan: RotationPlan, path: str) -> Rotation:
    """What turns the columns of a parameter."""
    side = plan.changes[path].columns
    assert side is not None
    return side.rotation


def untied(family: str) -> dict[str, bool]:
    """Kimi's wrapper says it again outside its text part."""
    return {} if "text_config" in tiny.CONFIGS[family] else {"tie_word_embeddings": False}


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_residual_turns_what_lies_beside_it_and_nothing_else(family: str) -> None:
    recipe = RotationRecipe(mtp="residual")
    if tiny.read(family, {}).mtp_layers and not tiny.read(family, {}).mtp_copies:
        with pytest.raises(RecipeError, match=f"layers of {family} share the head, which takes the gain of one norm"):
            plan_of(family, recipe)
        return
    manifest, plan = plan_of(family, recipe, **untied(family))
    residual = columns(plan, "embed.weight")
    assert (residual.size, residual.block) == (64, 64)
    for entry in manifest.entries:
        change = plan.changes.get(entry.path)
        sides = set() if change is None else {side.rotation for side in (change.rows, change.columns) if side}
        beside = {"embed", "embed_pair", "attention_out"} & set(entry.axes)
        assert bool(sides or (change and change.ones)) == bool(beside or entry.path.endswith("hyper.fn")), entry.path
        assert sides <= {residual}
        if change is None or change.ones:
            continue
        reads = change.columns is not None and entry.role not in ("embed", "hyper", "attention.bias", "experts.bias")
        width = sum(manifest[gain.at((0,))[0]].shape[-1] for gain in change.gains)
        assert width == (entry.shape[-1] if reads else 0), entry.path


def test_gains_come_from_the_norm_of_the_same_layer() -> None:
    manifest, plan = plan_of("glm_moe_dsa", RotationRecipe(latents=True), num_nextn_predict_layers=0)

    def places(path: str) -> list[tuple[tuple[str, tuple[int, ...]], ...]]:
        return [gain.places for gain in plan.changes[path].gains]

    moe = "moe.attention_norm.weight"
    assert places("moe.attention.q_a") == [tuple((moe, (at,)) for at in range(5))]
    # Layers 0, 1 and 4 have an indexer; layer 0 is the dense one.
    assert places("indexer.k") == [(("dense.attention_norm.weight", (0,)), (moe, (0,)), (moe, (3,)))]
    q_norm = "attention.q_a_norm.weight"
    assert places("indexer.q") == [((f"dense.{q_norm}", (0,)), (f"moe.{q_norm}", (0,)), (f"moe.{q_norm}", (3,)))]
    assert places("head.weight") == [(("norm.weight", ()),)]
    assert not places("embed.weight") and not places("moe.ffn.down")
    assert manifest["moe.ffn.router.weight"].float32 and plan.changes["moe.ffn.router.weight"].columns is not None


def test_gains_of_a_prediction_block_are_its_own() -> None:
    _, plan = plan_of("deepseek_v32", RotationRecipe(mtp="residual"))
    block = "mtp.block.attention_norm.weight"
    for path, norms in {
        "mtp.indexer.weights": [block],
        "mtp.block.attention.kv_a": [block],
        "mtp.block.ffn.gate": ["mtp.block.ffn_norm.weight"],
        "mtp.head": ["mtp.norm.weight"],
        "mtp.projection": ["mtp.embed_norm.weight", "mtp.hidden_norm.weight"],
        "mtp.embed": [],
    }.items():
        assert [gain.places for gain in plan.changes[path].gains] == [((norm, (0,)),) for norm in norms], path


def test_values_turn_head_by_head() -> None:
    manifest, plan = plan_of("gpt_oss", RotationRecipe(residual=False, values=True))
    assert set(plan.changes) == {"moe.attention.v", "moe.attention.v_bias", "moe.attention.o"}
    values = columns(plan, "moe.attention.o")
    assert isinstance(manifest.config.attention, AttentionConfig)
    assert values.size == manifest.config.attention.head_dim
    for path, change in plan.changes.items():
        side = change.rows if path == "moe.attention.v" else change.columns
        assert side is not None and (side.rotation, side.period, side.start) == (values, 16, 0)


def test_the_value_halves_of_kv_b_turn() -> None:
    _, plan = plan_of("glm_moe_dsa", RotationRecipe(residual=False, values=True))
    assert set(plan.changes) == {
        f"{stack}.attention.{part}" for stack in ("dense", "moe", "mtp.block") for part in ("kv_b", "o")
    }
    rows = plan.changes["moe.attention.kv_b"].rows
    assert rows is not None and (rows.rotation.size, rows.period, rows.start) == (24, 16 + 24, 16)
    assert rows.rotation.block == 8


def test_latents_turn_between_their_projections() -> None:
    _, plan = plan_of("deepseek_v2", RotationRecipe(residual=False, latents=True))
    attention = {f"attention.{part}" for part in ("q_a", "q_a_norm.weight", "q_b", "kv_a", "kv_a_norm.weight", "kv_b")}
    assert set(plan.changes) == {f"{stack}.{path}" for stack in ("dense", "moe") for path in attention}
    rows = plan.changes["moe.attention.kv_a"].rows
    # The rotary key behind the latent does not turn.
    assert rows is not None and (rows.rotation.size, rows.period, rows.start) == (32, 40, 0)
    assert plan.changes["moe.attention.q_a_norm.weight"].ones


def test_every_kind_turns_by_its_own_signs() -> None:
    _, plan = plan_of("deepseek_v2", RotationRecipe(values=True, latents=True))
    paths = ("embed.weight", "moe.attention.o", "moe.attention.q_b", "moe.attention.kv_b")
    assert len({columns(plan, path).seed for path in paths}) == 4


def test_the_block_of_the_recipe_is_the_residual_s() -> None:
    _, plan = plan_of("glm4_moe", RotationRecipe(block=16, values=True))
    residual, values = columns(plan, "embed.weight"), columns(plan, "moe.attention.o")
    assert (residual.block, values.block) == (16, 16)
    _, other = plan_of("glm4_moe", RotationRecipe(block=4, values=True))
    assert columns(other, "embed.weight").block == 4 and columns(other, "moe.attention.o") == values


REFUSALS = [
    ("glm4_moe", {"residual": False}, {}, "residual, values and latents are all false"),
    ("glm4_moe", {"seed": -1}, {}, "seed -1 is negative"),
    ("glm4_moe", {"block": 128}, {}, "64 channels are no multiple of the block 128"),
    ("glm4_moe", {"latents": True}, {}, "glm4_moe has no latents"),
    ("ernie4_5_moe", {}, {}, "the head of ernie4_5_moe is its embedding (256 x 64)"),
    ("hy_v4", {"values": True, "residual": False}, {}, "values of hy_v4 cannot turn: a gate multiplies"),
    ("deepseek_v3", {}, {}, "1 multi-token-prediction layers normalise what the final norm made"),
    ("hy_v3", {"mtp": "residual"}, {}, "layers of hy_v3 share the head"),
    (
        "glm4_moe",
        {"residual": False, "values": True, "block": 16, "tied": "untie"},
        {},
        "block = 16, tied = 'untie': of no effect with residual = false, because only the residual stream needs it; "
        "leave out block, tied, or set residual = true",
    ),
    ("deepseek_v2", {"residual": False, "latents": True, "mtp": "drop"}, {}, "mtp = 'drop': of no effect"),
    ("deepseek_v2", {"residual": False, "latents": True, "not_run": "drop"}, {}, "not_run = 'drop': of no effect"),
]


@pytest.mark.parametrize(("family", "recipe", "changes", "message"), REFUSALS)
def test_refuses(family: str, recipe: dict, changes: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        plan_of(family, RotationRecipe(**recipe), **changes)


def test_a_new_part_beside_the_residual_stream_is_refused() -> None:
    """A part that is added to the models cannot be forgotten here."""
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    new = Entry(
        path="moe.adapter",
        shape=(2, 8, 64),
        axes=("layers", "ffn", "embed"),
        role="adapter",
        float32=False,
        hub="model.layers.{layer}.adapter.weight",
        own="model.layers.{layer}.adapter.weight",
        view=View(),
        layers=(1, 2),
    )
    manifest = dataclasses.replace(manifest, entries=(*manifest.entries, new))
    with pytest.raises(UnsupportedError, match=r"axis embed of moe\.adapter \(role adapter\) .* no rule says"):
        plan_rotation(manifest, RotationRecipe())
    assert "moe.adapter" not in plan_rotation(manifest, RotationRecipe(residual=False, values=True)).changes


def test_a_recipe_file_can_say_it() -> None:
    recipe = decode(RotationRecipe, {"values": True, "tied": "untie", "block": 32}, where="x.toml: rotation")
    assert recipe == RotationRecipe(values=True, tied="untie", block=32)
    with pytest.raises(ConfigError, match="tied"):
        decode(RotationRecipe, {"tied": "sometimes"}, where="x.toml: rotation")
