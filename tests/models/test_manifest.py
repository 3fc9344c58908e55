"""The manifest: the golden of a tiny model, and the sizes of released ones."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmoe.assets import asset
from jaxmoe.axes import WEIGHT_AXES
from jaxmoe.models.family import WHOLE, Family, View
from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import FAMILIES, read_config
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from tests import tiny

LAYER = "model.layers.{layer}."
GOLDEN = Path(__file__).parent.parent / "golden" / "manifest_glm4_moe.json"
GLM4_MOE: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
"""Path -> shape, axes, role, hub template, and whether it stays float32."""

HUNYUAN_NAMES = {
    "moe.attention.q_norm.weight": f"{LAYER}self_attn.query_layernorm.weight",
    "moe.attention.k_norm.weight": f"{LAYER}self_attn.key_layernorm.weight",
    "moe.ffn.router.weight": f"{LAYER}mlp.gate.wg.weight",
    "moe.ffn.shared.gate": f"{LAYER}mlp.shared_mlp.gate_proj.weight",
    "moe.ffn.shared.up": f"{LAYER}mlp.shared_mlp.up_proj.weight",
    "moe.ffn.shared.down": f"{LAYER}mlp.shared_mlp.down_proj.weight",
}
"""What hunyuan_v1_moe names otherwise."""


@pytest.fixture(params=FAMILIES)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return tiny.manifest_of(tiny.CONFIGS[request.param])


def test_tiny_glm4_moe_is_the_golden_one() -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    found = {}
    for entry in manifest.entries:
        found[entry.path] = {
            "shape": list(entry.shape),
            "axes": list(entry.axes),
            "role": entry.role,
            "hub": entry.hub,
            **({"float32": True} if entry.float32 else {}),
        }
    assert found == GLM4_MOE
    assert list(found) == list(GLM4_MOE) == sorted(found, key=lambda path: path.split("."))
    assert {e.path.split(".")[0]: e.layers for e in manifest.entries} == {
        "dense": (0,),
        "embed": (),
        "head": (),
        "moe": (1, 2),
        "norm": (),
    }


def test_tiny_hunyuan_differs_in_names_and_parts() -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS["hunyuan_v1_moe"])
    assert {entry.path for entry in manifest.entries} == {
        path for path in GLM4_MOE if not path.startswith("dense.") and not path.endswith("bias")
    }
    for entry in manifest.entries:
        golden = GLM4_MOE[entry.path]
        assert (list(entry.axes), entry.role) == (golden["axes"], golden["role"])
        assert entry.hub == HUNYUAN_NAMES.get(entry.path, golden["hub"])


@pytest.mark.parametrize(
    ("family", "changes", "absent"),
    [
        ("glm4_moe", {"attention_bias": False}, {"q_bias", "k_bias", "v_bias"}),
        ("glm4_moe", {"use_qk_norm": False}, {"q_norm", "k_norm"}),
        ("glm4_moe", {"first_k_dense_replace": 0}, {"dense"}),
        ("glm4_moe", {"n_shared_experts": 0}, {"shared"}),
        ("glm4_moe", {"tie_word_embeddings": True}, {"head"}),
        ("hunyuan_v1_moe", {"tie_word_embeddings": True}, {"head"}),
        ("hunyuan_v1_moe", {"num_shared_expert": [0, 0, 0]}, {"shared"}),
    ],
)
def test_options_remove_parts(family: str, changes: dict[str, object], absent: set[str]) -> None:
    paths = {entry.path for entry in tiny.manifest_of(tiny.CONFIGS[family]).entries}
    fewer = {entry.path for entry in tiny.manifest_of({**tiny.CONFIGS[family], **changes}).entries}
    assert fewer == {path for path in paths if not absent & set(path.split("."))} != paths


def test_shared_experts_are_one_wide_expert() -> None:
    manifest = tiny.manifest_of({**tiny.CONFIGS["glm4_moe"], "n_shared_experts": 3})
    assert manifest["moe.ffn.shared.up"].shape == (2, 96, 64)


def test_an_entry_spreads_over_its_tensors(manifest: Manifest) -> None:
    for entry in manifest.entries:
        names = [name for _, name in entry.tensors()]
        assert len(names) == len(set(names)) and not any("{" in name for name in names)
        assert len(entry.shape) == len(entry.axes) and set(entry.axes) <= set(WEIGHT_AXES)
        positions = [position for position, _ in entry.tensors()]
        assert len(positions) == math.prod(entry.shape[: entry.lead])
        assert set(positions) == {(*lead,) for lead in _indices(entry.shape[: entry.lead])}
        assert entry.part_shape == entry.shape[entry.lead :]
    assert manifest.num_parameters == sum(math.prod(entry.shape) for entry in manifest.entries)


def test_only_fused_tensors_are_shared(manifest: Manifest) -> None:
    """Each tensor's bytes belong to parameters once."""
    bytes_of: dict[str, float] = {}
    for entry in manifest.entries:
        for _, name in entry.tensors():
            bytes_of[name] = bytes_of.get(name, 0) + math.prod(entry.part_shape) / math.prod(entry.tensor_shape)
            assert entry.view.parts > 1 or bytes_of[name] == 1
    assert set(bytes_of.values()) == {1}


def _indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [()] if not shape else [(i, *rest) for i in range(shape[0]) for rest in _indices(shape[1:])]


def test_layers_keep_their_hub_numbers() -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    assert dict(manifest["dense.ffn.up"].tensors()) == {(0,): "model.layers.0.mlp.up_proj.weight"}
    names = dict(manifest["moe.ffn.up"].tensors())
    assert names[0, 3] == "model.layers.1.mlp.experts.3.up_proj.weight"
    assert names[1, 7] == "model.layers.2.mlp.experts.7.up_proj.weight"


# Names. Of each family the tensors of one layer of a kind, without the layer's prefix.

FUSED_GPT_OSS = {
    "moe.ffn.gate": ("mlp.experts.gate_up_proj", View(parts=2, interleaved=True, transposed=True), (8, 64, 64)),
    "moe.ffn.up": ("mlp.experts.gate_up_proj", View(start=1, parts=2, interleaved=True, transposed=True), (8, 64, 64)),
    "moe.ffn.down": ("mlp.experts.down_proj", View(transposed=True), (8, 32, 64)),
    "moe.ffn.gate_bias": ("mlp.experts.gate_up_proj_bias", View(parts=2, interleaved=True), (8, 64)),
    "moe.ffn.up_bias": ("mlp.experts.gate_up_proj_bias", View(start=1, parts=2, interleaved=True), (8, 64)),
    "moe.ffn.down_bias": ("mlp.experts.down_proj_bias", WHOLE, (8, 64)),
}
FUSED_HY4 = {
    "moe.ffn.gate": ("mlp.experts.gate_up_proj", View(parts=2), (8, 64, 64)),
    "moe.ffn.up": ("mlp.experts.gate_up_proj", View(start=1, parts=2), (8, 64, 64)),
    "moe.ffn.down": ("mlp.experts.down_proj", WHOLE, (8, 64, 32)),
}


@pytest.mark.parametrize(("family", "expected"), [("gpt_oss", FUSED_GPT_OSS), ("hy_v4", FUSED_HY4)])
def test_fused_experts(family: str, expected: dict[str, tuple[str, View, tuple[int, ...]]]) -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    for path, (name, view, shape) in expected.items():
        entry = manifest[path]
        assert (entry.hub, entry.view, entry.tensor_shape) == (LAYER + name, view, shape)
        own = {name for _, name in entry.own_tensors()}
        assert own.isdisjoint(name for _, name in entry.tensors()), "each expert has a tensor in our own checkpoints"


def test_ernie_has_an_axis_of_one() -> None:
    entry = tiny.manifest_of(tiny.CONFIGS["ernie4_5_moe"])["moe.ffn.router.bias"]
    assert (entry.hub, entry.tensor_shape) == (f"{LAYER}mlp.moe_statics.e_score_correction_bias", (1, 8))
    assert (entry.own, entry.own_shape) == (f"{LAYER}mlp.gate.e_score_correction_bias", (8,))


@pytest.mark.parametrize(
    ("family", "path", "hubs"),
    [
        ("gpt_oss", "moe.ffn.gate", ("mlp.experts.gate_up_proj_blocks", "mlp.experts.{expert}.gate_proj.weight")),
        ("gpt_oss", "moe.ffn.down", ("mlp.experts.down_proj_blocks", "mlp.experts.{expert}.down_proj.weight")),
        ("gpt_oss", "moe.ffn.up_bias", ("mlp.experts.{expert}.up_proj.bias",)),
        ("hy_v4", "moe.ffn.up", ("mlp.experts.{expert}.up_proj.weight",)),
        ("hy_v4", "moe.ffn.router.weight", ("mlp.router.gate.weight",)),
        ("hy_v4", "moe.ffn.router.bias", ("mlp.expert_bias",)),
        ("hy_v4", "moe.ffn.shared.gate", ("mlp.shared_experts.linear_gate.weight", "mlp.shared_mlp.gate_proj.weight")),
        ("hy_v4", "dense.ffn.gate", ("mlp.linear_gate.weight",)),
        ("hy_v4", "moe.attention.sinks", ("self_attn.sinks",)),
        ("hy_v4", "moe.attention.gate", ("self_attn.gate_proj.weight",)),
        ("hy_v4", "dense.ffn_hyper.scale", ("hc_pre.hc_mlp_layer.hc_scale", "ffn_hc.scale")),
        ("ernie4_5_moe", "moe.ffn.router.bias", ("mlp.gate.e_score_correction_bias",)),
    ],
)
def test_a_checkpoint_decides_between_names(family: str, path: str, hubs: tuple[str, ...]) -> None:
    found, config = read_config(tiny.CONFIGS[family], "config.json")
    released = build_manifest(found, config)
    for hub in hubs:
        name = LAYER + hub
        last = released[path].layers[-1]
        present = {name.replace("{layer}", str(last)).replace("{expert}", "3")}
        entry = build_manifest(found, config, present)[path]
        assert entry.hub == name != released[path].hub
        assert entry.shape == released[path].shape


def test_packed_blocks_lend_no_name_to_our_own_checkpoints() -> None:
    """Tensors of that name hold another format's integers."""
    found, config = read_config(tiny.CONFIGS["gpt_oss"], "config.json")
    present = {f"model.layers.0.mlp.experts.{part}_proj_blocks" for part in ("gate_up", "down")}
    manifest = build_manifest(found, config, present)
    assert manifest["moe.ffn.up"].tensor_shape == (8, 64, 64) and manifest["moe.ffn.down"].tensor_shape == (8, 64, 32)
    for part in ("gate", "up", "down"):
        assert manifest[f"moe.ffn.{part}"].own == f"{LAYER}mlp.experts.{{expert}}.{part}_proj.weight"


@pytest.mark.parametrize("prefix", ["language_model.model.blocks.", "model.language_model.layers."])
def test_kimi_as_transformers_saves_it(prefix: str) -> None:
    found, config = read_config(tiny.CONFIGS["kimi_k25"], "config.json")
    released = build_manifest(found, config)
    assert released["head.weight"].hub == "language_model.lm_head.weight"
    layers = {entry.hub.partition("{layer}")[0] for entry in released.entries if entry.layers}
    assert layers == {"language_model.model.layers."}
    names = {n.replace("language_model.model.layers.", prefix) for e in released.entries for _, n in e.tensors()}
    saved = build_manifest(found, config, names)
    assert {name for entry in saved.entries for _, name in entry.tensors()} == names


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.blocks.0.mlp.fc0.bias",
        "mm_projector.proj.2.weight",
        "model.mm_projector.pre_norm.bias",
        "model.vision_tower.layers.0.norm1.weight",
    ],
)
def test_kimi_pictures_are_not_read(name: str) -> None:
    pattern = FAMILIES["kimi_k25"].ignored
    assert pattern and re.fullmatch(pattern, name)
    assert not re.fullmatch(pattern, f"language_model.{name}")


def test_indexers_are_one_stack_over_full_layers() -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS["glm_moe_dsa"])
    entry = manifest["indexer.q"]
    assert (entry.layers, entry.shape) == ((0, 1, 4), (3, 32 * 16, 48))
    assert [name for _, name in entry.tensors()] == [
        f"model.layers.{layer}.self_attn.indexer.wq_b.weight" for layer in (0, 1, 4)
    ]


@pytest.mark.parametrize(
    ("family", "layer", "norm"),
    [
        ("deepseek_v3", "model.layers.4.", "shared_head.norm.weight"),
        ("hy_v3", "model.layers.3.", "final_layernorm.weight"),
        ("hy_v4", "model.mtp_layers.0.", "final_layernorm.weight"),
    ],
)
def test_multi_token_prediction_blocks(family: str, layer: str, norm: str) -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    names = {e.path: [name for _, name in e.tensors()] for e in manifest.entries if e.path.startswith("mtp.")}
    assert all(name.startswith(layer) for found in names.values() for name in found)
    assert names["mtp.projection"] == [f"{layer}eh_proj.weight"] and names["mtp.norm.weight"] == [layer + norm]
    # A block of its own has all that an expert layer has but hyper-connections, and an indexer where the model has one.
    block = {path.removeprefix("mtp.block.") for path in names if path.startswith("mtp.block.")}
    moe = {e.path.removeprefix("moe.") for e in manifest.entries if e.path.startswith("moe.")}
    assert block == {path for path in moe if "_hyper" not in path}
    assert ("mtp.indexer.q" in names) == (family == "hy_v4") and ("mtp.embed" in names) == (family == "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_rules_name_each_parameter_once(family: Family) -> None:
    paths = [rule.path for rule in family.tensors]
    assert len(paths) == len(set(paths))
    for rule in family.tensors:
        names = [hub.name for hub in rule.hubs]
        assert len(names) == len(set(names)) and rule.own.view == WHOLE


# Sizes of released models.


def count(config: DecoderConfig) -> int:
    """Elements of a model without multi-token prediction, by arithmetic on its sizes (reference: formula of totals)."""
    embed, layers, moe, router = config.embed, config.layers, config.moe, config.moe.router
    attention = config.attention
    total = config.vocab * embed * (1 if config.tied_head else 2) + embed
    if isinstance(attention, AttentionConfig):
        heads, kv, dim = attention.heads, attention.kv_heads, attention.head_dim
        each = 2 * embed * (heads + kv) * dim + attention.bias * (heads + 2 * kv) * dim + attention.out_bias * embed
        each += {"none": 0, "flat": (heads + kv) * dim}.get(attention.qk_norm, 2 * dim) + attention.sinks * heads
    else:
        heads, q_lora, kv_lora = attention.heads, attention.q_lora, attention.kv_lora
        query = heads * (attention.nope_dim + attention.rope_dim)
        each = (embed * q_lora + q_lora + q_lora * query) if q_lora else embed * query
        each += embed * (kv_lora + attention.rope_dim) + kv_lora
        each += kv_lora * heads * (attention.nope_dim + attention.v_dim)
        each += (1 + attention.gate) * embed * heads * attention.v_dim + attention.sinks * heads
        if attention.indexer:
            width, n = attention.indexer.head_dim, attention.indexer.heads
            total += len(attention.indexer.full_layers) * ((q_lora * n + embed + 2) * width + embed * n)
    each += 2 * embed
    if config.hyper:
        streams = config.hyper.streams
        each += 2 * (2 * streams * (streams * embed + 1) + 2)
        total += streams * (streams * embed + 1) + 1
    expert = 3 * embed * moe.expert_ffn + moe.expert_bias * (2 * moe.expert_ffn + embed)
    sparse = router.experts * (expert + embed + router.correction_bias + router.logit_bias) + 3 * embed * moe.shared_ffn
    return total + layers * each + config.dense_layers * 3 * embed * config.ffn + config.moe_layers * sparse


# Billions of parameters as published, with and without multi-token prediction, and active ones.
PUBLISHED: dict[str, tuple[float, float, float]] = {
    "deepseek-v2-lite": (15.7, 15.7, 2.4),
    "deepseek-v2.5": (236, 236, 21),
    "deepseek-v3": (671, 685, 37),
    "deepseek-v3.2": (671, 685, 37),
    "dots-llm1": (142, 142, 14),
    "ernie-4.5-21b-a3b": (21.8, 21.8, 3),
    "glm-4.5": (355, 358, 32),
    "glm-4.5-air": (106, 110, 12),
    "glm-4.7-flash": (30, 31, 3.6),
    "glm-5": (744, 754, 40),
    "glm-5.2": (743, 753, 40),
    "gpt-oss-120b": (117, 117, 5.1),
    "gpt-oss-20b": (21, 21, 3.6),
    "hunyuan-a13b": (80, 80, 13),
    "hy3-preview": (295, 298.8, 21),
    "hy4-preview": (770, 780, 49),
    "kimi-k2": (1026.4, 1026.4, 32),
    "kimi-k2.5": (1026.4, 1026.4, 32),
    "minimax-m2": (229, 229, 10),
    "mixtral-8x7b": (46.7, 46.7, 12.9),
    "olmoe-1b-7b": (6.9, 6.9, 1.3),
    "qwen3-235b-a22b": (235, 235, 22),
    "qwen3-30b-a3b": (30.5, 30.5, 3.3),
}


def released(name: str) -> Manifest:
    path = asset("configs", "models", f"{name}.json")
    return build_manifest(*read_config(json.loads(path.read_text(encoding="utf-8")), path.name))


def test_every_release_is_counted() -> None:
    presets = {path.stem for path in asset("configs", "models").glob("*.json")}
    assert {name for name in presets if not name.endswith("_tiny")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_models_have_their_published_size(name: str) -> None:
    total, with_prediction, active = PUBLISHED[name]
    before = {id(array) for array in jax.live_arrays()}
    start = time.monotonic()
    manifest = released(name)
    assert time.monotonic() - start < 5
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in new) < 1 << 20, "a manifest holds shapes, no weights"
    prediction = sum(math.prod(e.shape) for e in manifest.entries if e.path.startswith("mtp."))
    main = manifest.num_parameters - prediction
    assert main == count(manifest.config)
    # Published totals are rounded to three figures, or to 1e9.
    assert main == pytest.approx(total * 1e9, rel=0.01)
    assert manifest.num_parameters == pytest.approx(with_prediction * 1e9, rel=0.01)
    moe = manifest.config.moe
    experts = (e for e in manifest.entries if e.path.startswith("moe.") and e.axes[1:2] == ("experts",))
    routed = sum(math.prod(e.shape) for e in experts)
    idle = routed * (1 - moe.router.top_k / moe.router.experts)
    # Model cards round to 1e9, and leave out the embedding or not.
    assert main - idle == pytest.approx(active * 1e9, abs=1.8e9)


def test_hy4_preview_tensor_by_tensor() -> None:
    """Counts from the headers of the released files, as published by who read them all."""
    manifest = released("hy4-preview")
    names = {name for entry in manifest.entries for _, name in entry.tensors()}
    prediction = {name for name in names if name.startswith("model.mtp_layers.0.")}
    assert (len(names), len(prediction)) == (2006, 27)
    in_prediction = sum(math.prod(e.shape) for e in manifest.entries if e.path.startswith("mtp."))
    assert (manifest.num_parameters - in_prediction, in_prediction) == (769_907_408_797, 10_053_583_936)
    shapes = {entry.hub.removeprefix(LAYER): entry.tensor_shape for entry in manifest.entries}
    assert shapes["self_attn.q_b_proj.weight"] == (16384, 2048)
    assert shapes["self_attn.kv_b_proj.weight"] == (28672, 512)
    assert shapes["self_attn.kv_a_proj_with_mqa.weight"] == (576, 6144)
    assert shapes["self_attn.linear_gate.weight"] == (16384, 6144)
    assert shapes["self_attn.indexer.wq_b.weight"] == (4096, 2048)
    assert shapes["hc_attn_layer.hc_pre.hc_fn"] == (8, 24576)
    assert shapes["mlp.experts.gate_up_proj"] == (256, 4096, 6144)
    assert shapes["model.mtp_layers.{layer}.eh_proj.weight"] == (6144, 12288)


def test_glm_5_2_has_as_many_tensors_as_released() -> None:
    """118,629 tensors of the FP8 files, 59,044 of them scales."""
    names = {name for entry in released("glm-5.2").entries for _, name in entry.tensors()}
    assert len(names) == 118_629 - 59_044
