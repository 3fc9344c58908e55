"""The manifest: the golden of a tiny model, and the sizes of released ones."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmoe.assets import asset
from jaxmoe.axes import WEIGHT_AXES
from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import FAMILIES, read_config
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
        "dense": range(0, 1),
        "embed": range(0),
        "head": range(0),
        "moe": range(1, 3),
        "norm": range(0),
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
    names = [name for entry in manifest.entries for _, name in entry.tensors()]
    assert len(names) == len(set(names)) and not any("{" in name for name in names)
    for entry in manifest.entries:
        assert len(entry.shape) == len(entry.axes) and set(entry.axes) <= set(WEIGHT_AXES)
        positions = [position for position, _ in entry.tensors()]
        assert len(positions) == math.prod(entry.shape[: entry.lead])
        assert set(positions) == {(*lead,) for lead in _indices(entry.shape[: entry.lead])}
        assert entry.tensor_shape == entry.shape[entry.lead :]
    assert manifest.num_parameters == sum(math.prod(entry.shape) for entry in manifest.entries)


def _indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [()] if not shape else [(i, *rest) for i in range(shape[0]) for rest in _indices(shape[1:])]


def test_layers_keep_their_hub_numbers() -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    assert dict(manifest["dense.ffn.up"].tensors()) == {(0,): "model.layers.0.mlp.up_proj.weight"}
    names = dict(manifest["moe.ffn.up"].tensors())
    assert names[0, 3] == "model.layers.1.mlp.experts.3.up_proj.weight"
    assert names[1, 7] == "model.layers.2.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("glm-4.5", 352.8e9, 32e9), ("glm-4.5-air", 106.9e9, 12e9), ("hunyuan-a13b", 80.4e9, 13e9)],
)
def test_released_models_have_their_published_size(name: str, parameters: float, active: float) -> None:
    path = asset("configs", "models", f"{name}.json")
    before = {id(array) for array in jax.live_arrays()}
    start = time.monotonic()
    manifest = build_manifest(*read_config(json.loads(path.read_text(encoding="utf-8")), path.name))
    assert time.monotonic() - start < 5
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in new) < 1 << 20, "a manifest holds shapes, no weights"
    # The published totals are rounded to 0.1e9; 0.3 % is less than one layer or one shared expert a layer.
    assert manifest.num_parameters == pytest.approx(parameters, rel=3e-3)
    moe = manifest.config.moe
    routed = sum(math.prod(e.shape) for e in manifest.entries if e.role.startswith("experts."))
    idle = routed * (1 - moe.router.top_k / moe.router.experts)
    # Model cards round to 1e9, and leave out the embedding or not.
    assert manifest.num_parameters - idle == pytest.approx(active, abs=1.8e9)
