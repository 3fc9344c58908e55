"""msModelSlim's YAML: the shapes of the field are understood, and what is not understood is refused by name."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.errors import ConfigError, JaxMoeError, RecipeError, UnsupportedError
from jaxmoe.models.manifest import Manifest
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.recipe import CalibrationRecipe, match_recipe, schemes_of_matches
from jaxmoe.ptq.recipes.modelslim import ModelSlim, read_modelslim
from jaxmoe.ptq.rotation.plan import RotationRecipe, plan_rotation
from jaxmoe.ptq.rounding.gptq import GptqOptions
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.weights.formats import FLOAT_ROLES
from tests import tiny

W8A8 = """
w8a8: &w8a8
  act: {scope: "per_token", dtype: "int8", symmetric: True, method: "minmax"}
  weight: {scope: "per_channel", dtype: "int8", symmetric: True, method: "minmax"}
"""
W4A8 = """
w4a8: &w4a8
  act: {scope: "per_token", dtype: "int8", symmetric: True, method: "minmax"}
  weight: {scope: "per_channel", dtype: "int4", symmetric: True, method: "ssz"}
"""
HY3 = f"""
apiversion: modelslim_v1
metadata:
  config_id: hy3-w8a8
  score: 90
  verified_tags:
    Hy3:
      - - vLLM-Ascend
        - Atlas_A3_Inference
  label: {{w_bit: 8, a_bit: 8, is_sparse: False, kv_cache: False}}
{W8A8}
spec:
  process:
    - type: "linear_quant"
      qconfig: *w8a8
      include:
        - "*"
      exclude:
        - "lm_head"
        - "*.router.gate"
        - "*.mlp.expert_bias"
  save:
    - type: "ascendv1_saver"
      part_file_size: 4
"""
DEEPSEEK = f"""
apiversion: modelslim_v1
metadata:
  config_id: deepseek-w4a8
  label: {{w_bit: 4, a_bit: 8, is_sparse: False, kv_cache: False}}
{W8A8}{W4A8}
spec:
  runner: auto
  process:
    - type: "quarot"
      block_size: 32
    - type: "flex_awq_ssz"
      qconfig:
        act: {{scope: "per_token", dtype: "int8", symmetric: True, method: "minmax"}}
        weight: {{scope: "per_channel", dtype: "int4", symmetric: True, method: "ssz", ext: {{step: 10}}}}
      enable_subgraph_type: ['up-down']
      include: ["*"]
      exclude: ["*.mlp.shared_experts.*"]
    - type: "flex_smooth_quant"
      enable_subgraph_type: ['norm-linear']
      include: ["*"]
      exclude: ["*post_attention_layernorm*"]
    - type: "linear_quant"
      qconfig: *w8a8
      include: ["*self_attn*"]
      exclude: ["*kv_b_proj", "*o_proj"]
    - type: "linear_quant"
      qconfig: *w4a8
      include: ["*mlp*"]
      exclude: ["*gate", "*shared_experts*", "model.layers.0.*", "model.layers.4.*"]
    - type: "linear_quant"
      qconfig: *w8a8
      include: ["*mlp.shared_experts*"]
  dataset: mix_calib.jsonl
  save:
    - type: "ascendv1_saver"
      part_file_size: 4
"""
DEFAULT = f"""
apiversion: modelslim_v1
metadata: {{config_id: default, label: {{w_bit: 8, a_bit: 8}}}}
{W8A8}
spec:
  process:
    - {{type: "iter_smooth", include: ["*"]}}
    - {{type: "linear_quant", qconfig: *w8a8, include: ["*"]}}
  runner: "model_wise"
  save: [{{type: "compressed_tensors"}}]
"""
GLM5 = f"""
apiversion: modelslim_v1
metadata: {{label: {{w_bit: 4, a_bit: 8, kv_cache: True}}}}
{W8A8}{W4A8}
spec:
  process:
    - type: "quarot"
    - type: "flex_smooth_quant"
      alpha: 0.6
    - type: "fa3_quant"
      qconfig: {{dtype: "int8", scope: "per_token", symmetric: True, method: "minmax"}}
      include: ["*indexer*", "*self_attn"]
    - type: "group"
      configs:
        - {{type: "linear_quant", qconfig: *w8a8, include: ["*self_attn*"], exclude: ["*kv_b_proj", "*weights_proj"]}}
        - {{type: "linear_quant", qconfig: *w8a8, include: ["*mlp*"], exclude: ["*gate", "*mlp.experts.*"]}}
        - {{type: "linear_quant", qconfig: *w4a8, include: ["*mlp.experts.*"]}}
"""


def manifest(family: str) -> Manifest:
    return tiny.manifest_of(tiny.CONFIGS[family])


MANIFESTS = {family: manifest(family) for family in tiny.CONFIGS}


def without_mtp(family: str) -> Manifest:
    return tiny.manifest_of(tiny.changed(family, {"num_nextn_predict_layers": 0}))


def unrotated(text: str) -> str:
    """Another step in the place of quarot, so that all keep their numbers."""
    assert text.count('- type: "quarot"') == 1
    return text.replace('- type: "quarot"\n      block_size: 32', '- type: "load"').replace('"quarot"', '"load"')


def read(folder: Path, text: str, family: str | Manifest) -> ModelSlim:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return read_modelslim(path, MANIFESTS[family] if isinstance(family, str) else family)


def schemes(result: ModelSlim, family: str | Manifest) -> dict[str, str]:
    """Path -> scheme of what is quantised."""
    manifest = MANIFESTS[family] if isinstance(family, str) else family
    decided = schemes_of_matches(match_recipe(result.recipe, manifest))
    return {path: scheme.name for path, scheme in decided.items() if scheme is not None}


def test_hy3(tmp_path: Path) -> None:
    result = read(tmp_path, HY3, "hy_v3")
    assert (result.output, result.shard_gib) == ("ascendv1", 4)
    assert (result.recipe.name, result.recipe.kv_cache, result.recipe.calibration) == ("hy3-w8a8", "bfloat16", None)
    linear = {
        *(f"attention.{part}" for part in "qkvo"),
        *(f"{place}.{part}" for place in ("experts", "shared", "ffn") for part in ("gate", "up", "down")),
    }
    expected = {entry.path: "w8a8-channel" for entry in MANIFESTS["hy_v3"].entries if entry.role in linear}
    assert schemes(result, "hy_v3") == expected
    assert result.notes == (
        "step 1 (linear_quant): stay float, as they always do here: model.layers.{layer}.eh_proj",
        "metadata.score, verified_tags: not used; the recipe is checked against the model itself",
    )


def test_deepseek(tmp_path: Path) -> None:
    result = read(tmp_path, unrotated(DEEPSEEK), "deepseek_v3")
    assert result.output == "ascendv1"
    assert result.recipe.calibration == CalibrationRecipe(smooth=0.8, smooth_int4=0.4)
    assert result.recipe.rotation is None
    expected = {}
    for stack in ("dense", "moe", "mtp.block"):
        for part in ("q_a", "q_b", "kv_a"):
            expected[f"{stack}.attention.{part}"] = "w8a8-channel"
    for part in ("gate", "up", "down"):
        # Neither the dense layer 0 nor the MTP block 4, which the 4-bit step excludes; its shared expert is included.
        expected[f"moe.ffn.{part}"] = "w4a8-channel"
        expected[f"moe.ffn.shared.{part}"] = expected[f"mtp.block.ffn.shared.{part}"] = "w8a8-channel"
    assert schemes(result, "deepseek_v3") == expected
    experts = next(
        match for match in match_recipe(result.recipe, MANIFESTS["deepseek_v3"]) if match.entry.path == "moe.ffn.up"
    )
    assert (experts.rounding, experts.options) == ("ssz", SszOptions())
    rule = result.recipe.rule[1]
    assert rule.names == ("*mlp*",)
    assert rule.exclude == ("model.layers.4.*",), "what else it excludes is of other roles"
    no_effect = (
        "include, exclude and enable_subgraph_type have no effect: every norm, value and up projection that feeds a "
        "quantised layer is smoothed, which changes nothing that stays float"
    )
    assert result.notes == (
        "step 2 (flex_awq_ssz): qconfig guides a search there and has no effect here; linear_quant says how weights "
        "are rounded",
        f"step 2 (flex_awq_ssz): {no_effect}",
        f"step 3 (flex_smooth_quant): {no_effect}",
        "step 5 (linear_quant): ssz weighs errors by the mean square of each input channel, which msModelSlim does not",
        "step 2 (flex_awq_ssz), step 3 (flex_smooth_quant): no search for alpha and beta: smoothing by powers of two "
        "with 0.8, and with 0.4 where 4-bit weights read",
        "dataset mix_calib.jsonl: give the file with --calib; 512 samples of 1024 to 4096 tokens are taken from it, "
        "not its rows",
    )


def test_deepseek_rotated(tmp_path: Path) -> None:
    """The whole file, for a checkpoint without prediction blocks: layer 4, which it excludes, is not there."""
    model = without_mtp("deepseek_v3")
    text = DEEPSEEK.replace(', "model.layers.4.*"]', "]")
    turned, plain = read(tmp_path, text, model), read(tmp_path, unrotated(text), model)
    assert turned.recipe.rotation == RotationRecipe(values=True)
    assert replace(turned.recipe, rotation=None) == plain.recipe
    notes = (
        "step 1 (quarot): blocks of 32 (block_size 32) become the largest power of two that divides the width; "
        "max_tp_size 4 has no effect",
        "step 1 (quarot): export_extra_info: the rotation is not exported",
    )
    assert turned.notes == (*notes, *plain.notes)
    assert schemes(turned, model)["moe.ffn.up"] == "w4a8-channel"


def test_a_rotation_that_needs_more_than_the_file_can_say(tmp_path: Path) -> None:
    """Where our own recipes have a key for a decision, the file has none."""
    where = r"file\.yaml: step 1 \(quarot\): "
    says = r", and the file cannot say what becomes of that .*; a recipe of ours can \(\[rotation\] "
    with pytest.raises(RecipeError, match=rf"{where}deepseek_v3 has 1 multi-token-prediction layers{says}mtp\)"):
        read(tmp_path, DEEPSEEK, "deepseek_v3")
    with pytest.raises(RecipeError, match=rf"{where}the head of ernie4_5_moe is its embedding{says}tied\)"):
        read(tmp_path, one_step("{type: quarot}"), "ernie4_5_moe")


def test_values_behind_a_gate_do_not_turn(tmp_path: Path) -> None:
    model = without_mtp("hy_v4")
    result = read(tmp_path, one_step("{type: quarot}"), model)
    assert result.recipe.rotation is not None and result.recipe.rotation == RotationRecipe(values=False)
    note = "step 1 (quarot): values do not turn, because a gate of hy_v4 multiplies each of their channels"
    assert note in result.notes
    assert plan_rotation(model, result.recipe.rotation).changes
    other = read(tmp_path, one_step("{type: quarot}"), "qwen3_moe")
    assert other.recipe.rotation == RotationRecipe(values=True)
    assert not any("do not turn" in note for note in other.notes)


def test_a_given_alpha_is_that_of_all(tmp_path: Path) -> None:
    """4-bit weights among them; without 4 bits, a search needs no second value."""
    text = unrotated(DEEPSEEK).replace('"flex_smooth_quant"', '"flex_smooth_quant"\n      alpha: 0.6')
    assert read(tmp_path, text, "deepseek_v3").recipe.calibration == CalibrationRecipe(smooth=0.6)
    searched = read(tmp_path, one_step("{type: flex_smooth_quant}"), "qwen3_moe")
    assert searched.recipe.calibration == CalibrationRecipe(smooth=0.8)
    assert any(note.endswith("smoothing by powers of two with 0.8") for note in searched.notes)


def test_our_own_format_does_not_take_stacks_that_differ(tmp_path: Path) -> None:
    """The prediction block's experts stay float, and those of the model become 4-bit, under one name."""
    model = MANIFESTS["deepseek_v3"]
    matches = match_recipe(read(tmp_path, unrotated(DEEPSEEK), model).recipe, model)
    message = (
        r"model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight is w4a8-channel and "
        r"model\.layers\.4\.mlp\.experts\.0\.down_proj\.weight float, but output format jaxmoe has one scheme for all "
        r"layers of model\.layers\.\{layer\}\.mlp\.experts\.\{expert\}\.down_proj\.weight; choose patterns that take "
        "both, or --format compressed-tensors or ascendv1"
    )
    with pytest.raises(RecipeError, match=message):
        FORMATS["jaxmoe"].check(matches)
    FORMATS["compressed-tensors"].check(matches)
    FORMATS["ascendv1"].check(matches)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_the_default_practice_on_every_family(tmp_path: Path, family: str) -> None:
    """`include: ["*"]` would take router, head and MTP projection: they stay float, and a note names them."""
    result = read(tmp_path, DEFAULT, family)
    assert result.output == "compressed-tensors"
    assert result.recipe.calibration == CalibrationRecipe(smooth=0.9)
    decided = schemes(result, family)
    entries = MANIFESTS[family].entries
    vectors = ("attention.norm", "attention.bias")
    assert decided == {
        entry.path: "w8a8-channel" for entry in entries if entry.role not in FLOAT_ROLES and entry.role not in vectors
    }
    kept = next(note for note in result.notes if "stay float" in note)
    for entry in entries:
        if entry.role in ("router", "head", "mtp.projection", "attention.kv_b"):
            assert entry.hub.removesuffix(".weight") in kept
    assert "step 1 (iter_smooth): factors are rounded to powers of two, so that floats stay exact" in result.notes
    assert "runner model_wise: layers are always read, rounded and freed one by one" in result.notes


def test_groups_and_caches(tmp_path: Path) -> None:
    model = without_mtp("glm_moe_dsa")
    result = read(tmp_path, GLM5, model)
    assert (result.output, result.shard_gib, result.recipe.name) == (None, None, "file")
    assert result.recipe.kv_cache == "int8"
    assert result.recipe.calibration == CalibrationRecipe(smooth=0.6)
    assert result.recipe.rotation == RotationRecipe(values=True)
    decided = schemes(result, model)
    assert decided["moe.ffn.gate"] == "w4a8-channel" and decided["dense.ffn.gate"] == "w8a8-channel"
    assert decided["indexer.q"] == decided["moe.attention.o"] == decided["moe.ffn.shared.down"] == "w8a8-channel"
    assert not {path for path in decided if "kv_b" in path or "router" in path or path.endswith("indexer.weights")}
    notes = [note for note in result.notes if note.startswith("step 3")]
    assert notes == [
        "step 3 (fa3_quant): keys and values are INT8 in every layer, with a scale for each token and head, which "
        "needs no calibration",
        "step 3 (fa3_quant): queries and attention weights stay float",
    ]
    assert any(note.startswith("step 4.3 (linear_quant): ssz weighs") for note in result.notes)
    assert not any(note.startswith("metadata.label") for note in result.notes)


PATTERNS = (
    "*",
    "*self_attn*",
    "*mlp*",
    "*mlp.experts.*",
    "*shared_experts*",
    "*.o_proj",
    "*gate",
    "*gate_proj",
    "model.layers.0.*",
    "model.layers.1.*",
    "model.layers.[1-3].*",
    "model.layers.4.*",
    "lm_head",
)
_some = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True)
_steps = st.lists(
    st.tuples(_some, st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True), st.sampled_from([32, 64, 128, 256])),
    min_size=1,
    max_size=4,
)


@given(_steps)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_tensor_is_quantised_by_the_first_step_that_takes_it(
    tmp_path: Path, steps: list[tuple[list[str], list[str], int]]
) -> None:
    """Against the rule of the field, tensor by tensor; stacks that it would split are refused, and idle steps."""
    deepseek = MANIFESTS["deepseek_v3"]
    process = [
        f"{{type: linear_quant, qconfig: {{act: {{dtype: int8, scope: per_token}}, weight: {{dtype: int8, scope: "
        f"per_group, ext: {{group_size: {group}}}}}}}, include: {include}, exclude: {exclude}}}"
        for include, exclude, group in steps
    ]
    text = f"{{apiversion: modelslim_v1, spec: {{process: [{', '.join(process)}]}}}}"

    def step_of(name: str) -> int | None:
        for index, (include, exclude, _) in enumerate(steps):
            if any(fnmatchcase(name, p) for p in include) and not any(fnmatchcase(name, p) for p in exclude):
                return index
        return None

    expected, splits = {}, False
    for entry in deepseek.entries:
        if entry.role in FLOAT_ROLES or "norm" in entry.role:
            continue
        by_step = {step_of(name.removesuffix(".weight")) for _, name in entry.tensors()}
        splits |= len(by_step) > 1
        (first, *_) = by_step
        if first is not None:
            expected[entry.path] = f"w8a8-g{steps[first][2]}"
    working = {
        step_of(name.removesuffix(".weight")) for e in deepseek.entries if e.path in expected for _, name in e.tensors()
    }
    if splits:
        with pytest.raises(RecipeError, match="share one scheme|it quantises nothing"):
            read(tmp_path, text, "deepseek_v3")
    elif working != set(range(len(steps))):
        with pytest.raises(RecipeError, match="it quantises nothing"):
            read(tmp_path, text, "deepseek_v3")
    else:
        assert schemes(read(tmp_path, text, "deepseek_v3"), "deepseek_v3") == expected


def one_step(step: str, **parts: str) -> str:
    """A file with a step before a good linear_quant."""
    save = parts.get("save", "[{type: ascendv1_saver}]")
    return (
        f"apiversion: {parts.get('version', 'modelslim_v1')}\n{W8A8}\n{parts.get('top', '')}\n"
        f"spec:\n  process:\n    - {step}\n    - {{type: linear_quant, qconfig: *w8a8}}\n  save: {save}\n"
        f"{parts.get('spec', '')}"
    )


def linear(weight: str, act: str = "{dtype: int8, scope: per_token}", patterns: str = "include: ['*experts*']") -> str:
    return one_step(f"{{type: linear_quant, qconfig: {{act: {act}, weight: {weight}}}, {patterns}}}")


INT8 = "{dtype: int8, scope: per_channel}"


@pytest.mark.parametrize(
    ("weight", "act", "scheme", "options", "notes"),
    [
        (INT8, "{dtype: int8, scope: per_token}", "w8a8-channel", None, ()),
        (INT8, "{dtype: float, scope: per_token, method: none}", "w8a16-channel", None, ()),
        (INT8, "null", "w8a16-channel", None, ()),
        (INT8, "{dtype: int8, scope: per_tensor, symmetric: False}", "w8a8-channel", None, ("per_tensor activations",)),
        (INT8, "{dtype: int8, scope: pd_mix}", "w8a8-channel", None, ("pd_mix activations become per_token",)),
        (INT8, "{dtype: int8, scope: per_token, symmetric: False}", "w8a8-channel", None, ("asymmetric activations",)),
        ("{dtype: int8, scope: per_group, ext: {group_size: 64}}", "null", "w8a16-g64", None, ()),
        ("{dtype: int4, scope: per_group, ext: {group_size: 32}}", "null", "w4a16-g32", None, ()),
        ("{dtype: int4, scope: per_channel}", "null", "w4a16-channel", None, ()),
        (
            "{dtype: int4, scope: per_channel, method: ssz, ext: {step: 10}}",
            "{dtype: int8, scope: per_token}",
            "w4a8-channel",
            SszOptions(steps=10),
            ("ssz weighs errors",),
        ),
        (
            "{dtype: int8, scope: per_group, method: gptq, ext: {group_size: 128, percdamp: 1e-2}}",
            "{dtype: int8, scope: per_token}",
            "w8a8-g128",
            GptqOptions(damping=0.01, scale="minmax", order="natural"),
            ("gptq keeps input channels",),
        ),
        (
            "{dtype: int8, scope: per_channel, method: gptq}",
            "{dtype: int8, scope: per_token}",
            "w8a8-channel",
            GptqOptions(scale="minmax", order="natural"),
            ("gptq keeps input channels",),
        ),
        ("{dtype: float, scope: per_channel, method: none}", "null", "float", None, ()),
    ],
)
def test_qconfigs(tmp_path: Path, weight: str, act: str, scheme: str, options: object, notes: tuple[str, ...]) -> None:
    result = read(tmp_path, linear(weight, act), "qwen3_moe")
    assert (result.recipe.rule[0].scheme, result.recipe.rule[0].options) == (scheme, options)
    assert (result.recipe.calibration is not None) == (options is not None)
    found = [note.removeprefix("step 1 (linear_quant): ") for note in result.notes if note.startswith("step 1 ")]
    assert len(found) == len(notes) and all(map(str.startswith, found, notes))
    assert {schemes(result, "qwen3_moe").get("moe.ffn.up", "float")} == {scheme}
    assert schemes(result, "qwen3_moe")["moe.attention.o"] == "w8a8-channel"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (linear("{dtype: mxfp8, scope: per_block}"), UnsupportedError, "weights as mxfp8 do not.*nearest are int8 and"),
        (
            linear(INT8, "{dtype: int4, scope: per_token}"),
            UnsupportedError,
            "activations as int4 do not.*int8 per_token",
        ),
        (linear(INT8, "{dtype: int8, scope: per_channel}"), UnsupportedError, "activations per_channel do not exist"),
        (
            linear(INT8, "{dtype: int8, scope: per_token, method: kl}"),
            UnsupportedError,
            "act.method 'kl' does not exist",
        ),
        (
            linear(INT8, "{dtype: int8, scope: per_token, ext: {bins: 9}}"),
            UnsupportedError,
            "act.ext bins: activations",
        ),
        (linear("{dtype: int8, scope: per_channel, symmetric: False}"), UnsupportedError, "asymmetric weights do not"),
        (
            linear("{dtype: int8, scope: per_tensor}"),
            UnsupportedError,
            "weights per_tensor do not exist here; use per_ch",
        ),
        (linear("{dtype: int8, scope: per_group}"), RecipeError, "weights per_group need ext.group_size"),
        (linear("{dtype: int8, scope: per_group, ext: {group_size: 48}}"), UnsupportedError, "48 is not one of 32, 64"),
        (
            linear("{dtype: int4, scope: per_channel, ext: {group_size: 64}}"),
            RecipeError,
            "contradict ext.group_size 64",
        ),
        (
            linear("{dtype: int8, scope: per_channel, ext: {group_size: 64}}"),
            RecipeError,
            "contradict ext.group_size 64",
        ),
        (
            linear("{dtype: int8, scope: per_channel, method: mse}"),
            UnsupportedError,
            "weight.method 'mse' does not exist",
        ),
        (
            linear("{dtype: int8, scope: per_channel, method: gptq, ext: {desc_act: True}}"),
            UnsupportedError,
            "weight.ext desc_act of method gptq is not known here; known: group_size, percdamp",
        ),
        (linear("{dtype: int8, scope: per_channel, method: ssz, ext: {step: 0}}"), RecipeError, "steps = 0"),
        (
            linear("{dtype: int8, scope: per_channel, method: ssz, ext: {step: x}}"),
            RecipeError,
            "step = 'x' is not a int",
        ),
        (linear("{dtype: float, scope: per_channel}"), UnsupportedError, "int8 activations with float weights"),
        (
            linear("{dtype: int9, scope: per_channel}"),
            ConfigError,
            "weight.dtype: 'int9' is not one of 'float', 'int8'",
        ),
        (
            linear(INT8, patterns="includes: []"),
            ConfigError,
            r"step 1 \(linear_quant\): unknown key includes; known are",
        ),
        (linear(INT8, patterns="include: '*'"), ConfigError, r"include: '\*' is not a list"),
        (
            linear(INT8, patterns="include: ['*expert.*']"),
            RecipeError,
            r"include pattern '\*expert\.\*' matches no tensor",
        ),
        (
            linear(INT8, patterns="exclude: ['*compressor.wgate']"),
            RecipeError,
            r"step 1 \(linear_quant\): exclude pattern '\*compressor.wgate' matches no tensor of this model",
        ),
        (
            linear(INT8, patterns="include: ['lm_head', '*.gate']"),
            RecipeError,
            "quantises nothing: what it includes always",
        ),
        (
            linear(INT8, patterns="include: ['*']"),
            RecipeError,
            r"step 2 \(linear_quant\): it quantises nothing: earlier",
        ),
        (
            linear(INT8, patterns="include: ['model.layers.1.*']"),
            RecipeError,
            r"the patterns take model.layers.1.\S+ but not model.layers.0.\S+; both are in the stack",
        ),
        (one_step("{type: quarot, online: True}"), UnsupportedError, "rotations while serving"),
        (one_step("{type: quarot, down_proj_online_layers: [1]}"), UnsupportedError, "rotations while serving"),
        (one_step("{type: quarot, block_size: 48}"), RecipeError, "block_size 48 is neither -1 nor a power of two"),
        (
            one_step("{type: quarot}\n    - {type: quarot}"),
            RecipeError,
            "step 1 .quarot. and step 2 .quarot. rotate twice",
        ),
        (one_step("{type: iter_smooth, symmetric: False}"), UnsupportedError, "asymmetric smoothing"),
        (one_step("{type: iter_smooth, alpha: 0}"), RecipeError, r"alpha = 0.0, which is not in \(0, 1\]"),
        (
            one_step("{type: iter_smooth, include: ['*self_atn*']}"),
            RecipeError,
            r"pattern '\*self_atn\*' matches no module",
        ),
        (one_step("{type: smooth_quant, enable_subgraph_type: [ov]}"), ConfigError, "unknown key enable_subgraph_type"),
        (
            one_step("{type: flex_smooth_quant, enable_subgraph_type: [vo]}"),
            ConfigError,
            "'vo' is not one of 'norm-linear'",
        ),
        (one_step("{type: flex_smooth_quant, alpha: 0.5, beta: 0.3}"), UnsupportedError, "beta 0.3 with alpha 0.5"),
        (one_step("{type: flex_smooth_quant, qconfig: *w8a8}"), RecipeError, "flex_smooth_quant has no qconfig"),
        (one_step("{type: flex_awq_ssz}"), RecipeError, r"step 1 \(flex_awq_ssz\): missing key qconfig"),
        (
            one_step("{type: iter_smooth}\n    - {type: smooth_quant}"),
            RecipeError,
            r"several values of alpha \(step 1 \(iter_smooth\) 0.9, step 2 \(smooth_quant\) 0.5\)",
        ),
        (
            one_step("{type: iter_smooth}\n    - {type: quarot}"),
            RecipeError,
            r"step 2 \(quarot\) comes after step 1 \(iter_smooth\), but rotation is always applied before smoothing",
        ),
        (
            one_step("{type: dynamic_cache, qconfig: {dtype: fp8_e4m3}}"),
            UnsupportedError,
            "keys and values as fp8_e4m3",
        ),
        (one_step("{type: dynamic_cache}"), RecipeError, "missing key qconfig"),
        (
            one_step("{type: autoround_quant}"),
            UnsupportedError,
            "step 1: processor autoround_quant is not.*rounding = 'learned'",
        ),
        (
            one_step("{type: linear_qant}"),
            ConfigError,
            "step 1: unknown processor 'linear_qant'; known: group, linear_quant",
        ),
        (one_step("{qconfig: *w8a8}"), ConfigError, "step 1: .* has no type; known types: group, linear_quant"),
        (
            one_step("{type: group, config: []}"),
            ConfigError,
            r"step 1 \(group\): unknown key config; known are configs, type",
        ),
        (
            one_step("{type: group, configs: [{type: load}, {type: smooth}]}"),
            ConfigError,
            "step 1.2: unknown processor 'smooth'",
        ),
        (
            one_step("{type: load}", save="[{type: mindie_format_saver}]"),
            UnsupportedError,
            "spec.save 'mindie_format_saver'",
        ),
        (
            one_step("{type: load}", save="[{type: ascendv1_saver}, {type: compressed_tensors}]"),
            UnsupportedError,
            "asks for ascendv1_saver and compressed_tensors; one output",
        ),
        (one_step("{type: load}", save="[{type: ascendv1_saver, part_file_size: -1}]"), RecipeError, "-1 is negative"),
        (
            one_step("{type: load}", save="[{type: ascendv1_saver, ext: {a: 1}}]"),
            UnsupportedError,
            "ext a is not supported",
        ),
        (
            one_step("{type: load}", spec="  datasets: x\n"),
            ConfigError,
            "spec: unknown key datasets; known are dataset",
        ),
        (one_step("{type: load}", spec="  runner: fast\n"), ConfigError, "spec.runner: 'fast' is not one of 'auto'"),
        (
            one_step("{type: load}", version="modelslim_v0"),
            UnsupportedError,
            "'modelslim_v0' is not 'modelslim_v1': the old",
        ),
        (one_step("{type: load}", version="v9"), UnsupportedError, r"apiversion 'v9' is not 'modelslim_v1'\Z"),
        (
            one_step("{type: load}", top="metadata: {label: {is_sparse: True}}"),
            UnsupportedError,
            "is_sparse: sparse weights",
        ),
        (one_step("{type: load}", top="metadata: {labels: {}}"), ConfigError, "metadata: unknown key labels"),
        (one_step("{type: load, type: saver}"), ConfigError, "line 10: key type is given twice"),
        ("apiversion: modelslim_v1\n", ConfigError, "missing key spec"),
        ("[1]", ConfigError, "holds a list where a table was expected"),
        ("a: [", ConfigError, "is not readable as YAML: "),
        ("a: &a [*a]", ConfigError, "line 1: an anchor refers to itself"),
        (
            "{apiversion: modelslim_v1, spec: {process: [{type: quarot}]}}",
            RecipeError,
            "no linear_quant step quantises any",
        ),
    ],
)
def test_refusals(tmp_path: Path, text: str, error: type[JaxMoeError], message: str) -> None:
    with pytest.raises(error, match=f"{tmp_path}/file.yaml.*{message}"):
        read(tmp_path, text, "qwen3_moe")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (one_step("{type: smooth_quant}"), "step 1 (smooth_quant): include, exclude and enable_subgraph_type have no"),
        (
            one_step("{type: iter_smooth, scale_min: 1e-5}"),
            "step 1 (iter_smooth): scale_min 1e-05: factors are between",
        ),
        (
            one_step("{type: awq, weight_qconfig: {dtype: int8, scope: per_channel}}"),
            "step 1 (awq): factors come from largest magnitudes, not from means; weight_qconfig and n_grid have no",
        ),
        (
            one_step("{type: flex_smooth_quant}\n    - {type: iter_smooth}"),
            "step 1 (flex_smooth_quant): no search for alpha: 0.9 of another step is used",
        ),
        (
            one_step("{type: flex_smooth_quant}"),
            "step 1 (flex_smooth_quant): no search for alpha and beta: smoothing by powers",
        ),
        (
            one_step("{type: dynamic_cache, qconfig: {dtype: int8, scope: per_channel}}"),
            "step 1 (dynamic_cache): keys and values are INT8 in every layer",
        ),
        (one_step("{type: kv_smooth}"), "step 1 (kv_smooth): smooth_factor 1.0 is not applied"),
        (
            one_step("{type: load}", spec="  dataset: mix.jsonl\n"),
            "dataset mix.jsonl: not read, because nothing in the",
        ),
        (
            one_step("{type: load}", spec="  prior: [{process: [{type: iter_smooth}], dataset: a}]\n  dataset: b\n"),
            "datasets a, b: all statistics come from one calibration run",
        ),
        (
            one_step("{type: load}", spec="  prior: [{process: [{type: iter_smooth}]}]\n"),
            "prior stages: their steps are applied in the same pass as the others",
        ),
        (
            one_step("{type: load}", version="multimodal_vlm_modelslim_v1"),
            "apiversion multimodal_vlm_modelslim_v1: only the language model is quantised",
        ),
        (one_step("{type: load}", top="w4: &w4 {a: [1]}"), "w4: no step refers to it"),
        (
            one_step("{type: load}", top="metadata: {label: {w_bit: 4}}"),
            "metadata.label.w_bit is 4, but the steps make 8",
        ),
        (
            one_step("{type: load}", top="metadata: {label: {a_bit: 16}}"),
            "metadata.label.a_bit is 16, but the steps make 8",
        ),
        (
            one_step("{type: load}", top="metadata: {label: {kv_cache: True}}"),
            "metadata.label says that keys and values are",
        ),
    ],
)
def test_what_differs_is_noted(tmp_path: Path, text: str, note: str) -> None:
    result = read(tmp_path, text, "qwen3_moe")
    assert [found for found in result.notes if found.startswith(note)], result.notes
    match_recipe(result.recipe, MANIFESTS["qwen3_moe"])


def test_a_file_without_differences_has_no_notes(tmp_path: Path) -> None:
    text = one_step("{type: load}", spec="  runner: layer_wise\n").replace(
        "qconfig: *w8a8", "qconfig: *w8a8, exclude: ['lm_head', '*.gate']"
    )
    assert read(tmp_path, text, "qwen3_moe").notes == ()


def test_prior_stages_come_first(tmp_path: Path) -> None:
    text = one_step("{type: iter_smooth}", spec="  prior: [{process: [{type: quarot}]}]\n")
    result = read(tmp_path, text, "qwen3_moe")
    assert result.recipe.calibration == CalibrationRecipe(smooth=0.9)
    assert result.recipe.rotation == RotationRecipe(values=True)
    assert result.notes[0].startswith("prior 1, step 1 (quarot): blocks of the whole width (block_size -1) become")


def test_merge_keys_count_as_use(tmp_path: Path) -> None:
    text = one_step(
        f"{{type: linear_quant, qconfig: {{<<: *half, weight: {INT8}}}, include: ['*experts*']}}",
        top="half: &half\n  act: {dtype: int8, scope: per_token}",
    )
    result = read(tmp_path, text, "qwen3_moe")
    assert not [note for note in result.notes if "refers" in note]
    assert replace(result.recipe.rule[0], roles=()).scheme == "w8a8-channel"


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        read_modelslim(tmp_path / "absent.yaml", MANIFESTS["olmoe"])
