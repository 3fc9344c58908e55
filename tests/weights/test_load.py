"""Opening and loading a model: complete or refused by name, and every element where the plan puts it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.engine.runner import Runner
from jaxmoe.errors import ConfigError, UnsupportedError, WeightsError
from jaxmoe.models.leaves import scale_name
from jaxmoe.parallel import mesh
from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.formats import FLOAT_ROLES, describe, read_quantization, schemes_of
from jaxmoe.weights.load import ModelFiles, load_leaves, open_model
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.running import BUCKET_TOKENS, plan_for, run_logits, runner_of, scratch, step, tiny_folder
from tests.tolerances import TOLERANCES
from tests.weights.encoders import write

GLM, HUNYUAN = "glm4_moe", "hunyuan_v1_moe"
FAMILIES = (GLM, HUNYUAN)
"""Other families, with fused tensors and prediction blocks, are in test_formats."""
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
GROUP = 32


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def changed(
    folder: Path,
    out: Path,
    *,
    drop: tuple[str, ...] = (),
    add: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 1 << 20,
) -> Path:
    """A copy of a checkpoint without some tensors, with others added or replaced, and other keys in config.json."""
    tensors = {name: array for name, array in tensors_of(folder).items() if name not in drop}
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return write(out, {**data, **(config or {})}, {**tensors, **(add or {})}, max_shard_bytes=max_shard_bytes)


def rounded(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """INT8 values [out, in] and float32 scales [out, ceil(in / GROUP)] of a weight."""
    values, scales = [], []
    for start in range(0, weight.shape[-1], GROUP):
        part = weight[:, start : start + GROUP].astype(np.float32)
        scale = np.abs(part).max(-1, keepdims=True) / np.float32(127)
        values.append(np.rint(part / scale).astype(np.int8))
        scales.append(scale)
    return np.concatenate(values, axis=-1), np.concatenate(scales, axis=-1)


@cache
def quantized_folder(family: str) -> Path:
    """The tiny checkpoint of a family with all that can be quantised in groups of 32."""
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    schemes = {
        entry.path: None if entry.role in FLOAT_ROLES else parse_scheme(f"w8a8-g{GROUP}") for entry in manifest.entries
    }
    tensors = tensors_of(tiny_folder(family))
    for entry in manifest.entries:
        for _, name in entry.tensors() if schemes[entry.path] is not None else ():
            tensors[name], tensors[scale_name(name)] = rounded(tensors[name])
    config = {**tiny.CONFIGS[family], "quantization_config": describe(schemes, manifest, "int8")}
    return write(scratch() / f"{family}-groups-of-{GROUP}", config, tensors)


def load(files: ModelFiles, devices: int = 1, dtype: Any = "float32", **options: Any) -> dict[str, jax.Array]:
    """Leaves by path, scales under the path plus '_scale'."""
    plan = plan_for(files.manifest.config.family, devices)
    leaves, arrays = load_leaves(files, plan, mesh.make(plan.mesh), dtype, **options)
    return {leaf.hub_name(leaf.entry.path): array for leaf, array in zip(leaves, arrays, strict=True)}


def refused(folder: Path, kind: type[Exception] = WeightsError) -> str:
    with pytest.raises(kind) as caught:
        open_model(folder)
    return str(caught.value)


@contextmanager
def leaf_changed(
    runner: Runner, path: str, change: Callable[[np.ndarray], np.ndarray], part: str = "weight"
) -> Iterator[None]:
    """Replaces a leaf of a shared runner for a while."""
    index = next(i for i, leaf in enumerate(runner._leaves) if (leaf.entry.path, leaf.part) == (path, part))
    array = runner._arrays[index]
    try:
        runner._arrays[index] = jax.device_put(change(np.array(array)), array.sharding)
        yield
    finally:
        runner._arrays[index] = array


def logits_of(runner: Runner, ids: np.ndarray) -> np.ndarray:
    return step(runner, ids, 0, BUCKET_TOKENS, bucket=BUCKET_TOKENS)


# Complete or refused.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("folder_of", [tiny_folder, quantized_folder], ids=["float", "int8"])
def test_a_complete_checkpoint_opens(family: str, folder_of: Callable[[str], Path]) -> None:
    files = open_model(folder_of(family))
    assert files.manifest.config.family == family and files.not_loaded == ()
    assert files.tensor_bytes == sum(array.nbytes for array in tensors_of(files.folder).values())


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path / "none", ConfigError)
    assert "is not a folder; give the folder of a Hugging Face checkpoint" in message


def test_case_79_a_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    folder = changed(tiny_folder(GLM), tmp_path / "x", max_shard_bytes=200_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    shards[1].unlink()
    message = refused(folder)
    assert "1 of the" in message and f"are missing: '{shards[1].name}'" in message


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (GLM, EXPERT),
        (GLM, "model.layers.2.self_attn.k_proj.bias"),
        (GLM, "model.layers.1.mlp.gate.e_score_correction_bias"),
        (GLM, "model.layers.2.mlp.shared_experts.down_proj.weight"),
        (GLM, "model.norm.weight"),
        (GLM, f"{EXPERT}_scale"),
        (GLM, "model.layers.0.mlp.gate_proj.weight_scale"),
        (HUNYUAN, "model.layers.0.mlp.experts.7.down_proj.weight"),
        (HUNYUAN, "model.layers.0.mlp.shared_mlp.up_proj.weight_scale"),
        (HUNYUAN, "model.layers.2.self_attn.query_layernorm.weight"),
    ],
)
@pytest.mark.parametrize("folder_of", [tiny_folder, quantized_folder], ids=["float", "int8"])
def test_case_80_a_missing_tensor_is_named_in_every_format(
    tmp_path: Path, family: str, name: str, folder_of: Callable[[str], Path]
) -> None:
    if name.endswith("_scale") and folder_of is tiny_folder:
        assert name not in tensors_of(tiny_folder(family))
        return
    folder = changed(folder_of(family), tmp_path / "x", drop=(name,))
    assert refused(folder) == f"{folder}: 1 tensors are missing: {name}"


def test_many_missing_tensors_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    drop = tuple(name for name in tensors_of(tiny_folder(GLM)) if ".experts.3." in name or ".experts.4." in name)
    folder = changed(tiny_folder(GLM), tmp_path / "x", drop=drop)
    assert refused(folder).startswith(
        f"{folder}: 12 tensors are missing: model.layers.1.mlp.experts.3.down_proj.weight"
    )
    assert refused(folder).endswith(" and 2 more")


@pytest.mark.parametrize("lost_bytes", [1, 1024])
def test_case_81_a_truncated_shard_is_named(tmp_path: Path, lost_bytes: int) -> None:
    folder = changed(quantized_folder(GLM), tmp_path / "x", max_shard_bytes=100_000)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-lost_bytes])
    message = refused(folder)
    assert shard.name in message and str(len(content)) in message and str(len(content) - lost_bytes) in message


def test_case_83_a_stale_index_names_both_sets(tmp_path: Path) -> None:
    folder = changed(tiny_folder(GLM), tmp_path / "x", max_shard_bytes=200_000)
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        shard.rename(folder / shard.name.replace("model-", "weights-"))
    message = refused(folder)
    assert all(f"'{shard.name}'" in message for shard in shards)
    assert all(f"'{shard.name.replace('model-', 'weights-')}'" in message for shard in shards)
    assert "stale index?" in message and "copy index and files from one revision" in message


# The head: four combinations of tie_word_embeddings and lm_head.weight.


def test_case_85_tied_without_a_head(tmp_path: Path) -> None:
    """The embedding is the head: the logits are those of a model whose own head has the embedding's values."""
    folder = changed(tiny_folder(GLM), tmp_path / "x", drop=(HEAD,), config={"tie_word_embeddings": True})
    assert "head.weight" not in load(open_model(folder))
    runner, ids = runner_of(tiny_folder(GLM)), tiny.token_ids()
    with leaf_changed(runner, "head.weight", lambda _: tensors_of(folder)[EMBED]):
        explicit = logits_of(runner, ids)
    # The embedding is not scaled like a head: its logits are 8 times as large, and so is their rounding.
    np.testing.assert_allclose(run_logits(folder, ids), explicit, rtol=0, atol=8 * TOLERANCES["same_logits"].value)


def test_case_85_not_tied_with_a_head() -> None:
    arrays = load(open_model(tiny_folder(GLM)))
    np.testing.assert_array_equal(arrays["head.weight"], tensors_of(tiny_folder(GLM))[HEAD])
    assert (np.asarray(arrays["head.weight"]) != np.asarray(arrays["embed.weight"])).mean() > 0.9


@pytest.mark.parametrize(("family", "head"), [(GLM, HEAD), (HUNYUAN, HEAD), ("kimi_k25", f"language_model.{HEAD}")])
def test_case_86_not_tied_without_a_head(tmp_path: Path, family: str, head: str) -> None:
    folder = changed(tiny_folder(family), tmp_path / "x", drop=(head,))
    assert refused(folder) == (
        f"{folder}: 1 tensors are missing: {head} (config.json says tie_word_embeddings = false; if the head is the "
        "embedding, set it to true)"
    )


def test_case_87_tied_with_the_embedding_as_its_head(tmp_path: Path) -> None:
    embedding = tensors_of(tiny_folder(GLM))[EMBED]
    folder = changed(tiny_folder(GLM), tmp_path / "x", add={HEAD: embedding}, config={"tie_word_embeddings": True})
    files = open_model(folder)
    assert files.not_loaded == (HEAD,) and "head.weight" not in load(files)


@pytest.mark.parametrize("row", [0, 255])
def test_case_87_tied_with_another_head(tmp_path: Path, row: int) -> None:
    head = tensors_of(tiny_folder(GLM))[EMBED]
    head[row, 7] += 1
    folder = changed(tiny_folder(GLM), tmp_path / "x", add={HEAD: head}, config={"tie_word_embeddings": True})
    assert refused(folder) == (
        f"{folder}: config.json says tie_word_embeddings = true, but {HEAD} differs from {EMBED}; set "
        "tie_word_embeddings to false if the head is its own"
    )


@pytest.mark.parametrize("shape", [(255, 64), (256, 32), (64,)])
def test_case_87_tied_with_a_head_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    head = np.zeros(shape, np.float32)
    folder = changed(tiny_folder(GLM), tmp_path / "x", add={HEAD: head}, config={"tie_word_embeddings": True})
    assert f"{HEAD} differs from {EMBED}" in refused(folder)


# Shapes, dtypes, leftovers.


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        (EXPERT, np.zeros((64, 32), np.float32), "has shape [64, 32], config.json asks for [32, 64]"),
        (EMBED, np.zeros((), np.float32), "has shape [], config.json asks for [256, 64]"),
        (EMBED, np.zeros((257, 64), np.float32), "has shape [257, 64], config.json asks for [256, 64]"),
        (EXPERT, np.zeros((32, 64), np.int8), "is int8, expected float32 or float16 or bfloat16 (quantisation: float)"),
        (EXPERT, np.zeros((32, 64), np.float64), "is float64, expected float32 or float16 or bfloat16"),
    ],
)
def test_another_shape_or_dtype_is_refused_by_name(tmp_path: Path, name: str, array: np.ndarray, problem: str) -> None:
    folder = changed(tiny_folder(GLM), tmp_path / "x", add={name: array})
    assert refused(folder) == f"{folder}: {name} {problem}"


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        (EXPERT, np.zeros((32, 64), np.float32), "is float32, expected int8"),
        (EXPERT, np.zeros((32, 64), np.uint8), "is uint8, expected int8"),
        (f"{EXPERT}_scale", np.ones((32, 1), np.float32), "has shape [32, 1], config.json asks for [32, 2]"),
        (f"{EXPERT}_scale", np.ones((2, 32), np.float32), "has shape [2, 32], config.json asks for [32, 2]"),
        (f"{EXPERT}_scale", np.ones((32, 2), ml_dtypes.bfloat16), "is bfloat16, expected float32"),
        (
            "model.layers.1.mlp.gate.weight",
            np.zeros((8, 64), np.int8),
            "is int8, expected float32 or float16 or bfloat16 (quantisation: jaxmoe)",
        ),
    ],
)
def test_quantised_another_shape_or_dtype_is_refused_by_name(
    tmp_path: Path, name: str, array: np.ndarray, problem: str
) -> None:
    folder = changed(quantized_folder(GLM), tmp_path / "x", add={name: array})
    assert refused(folder) == f"{folder}: {name} {problem}"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.1.self_attn.q_proj.weight_scale",
        "vision.weight",
    ],
)
def test_a_tensor_that_belongs_to_nothing_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = changed(tiny_folder(GLM), tmp_path / "x", add={name: np.ones(3, np.float32)})
    assert refused(folder) == f"{folder}: 1 tensors belong to nothing in this model: {name}"


def test_frequencies_that_old_writers_left_behind_are_harmless(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    assert open_model(changed(tiny_folder(GLM), tmp_path / "x", add={name: np.ones(4, np.float32)})).not_loaded == (
        name,
    )


def test_prediction_layers_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    extra = {f"model.layers.3.{part}.weight": np.ones(64, np.float32) for part in ("enorm", "hnorm")}
    config = {"num_nextn_predict_layers": 1}
    message = refused(changed(tiny_folder(GLM), tmp_path / "x", add=extra, config=config))
    assert "tensors are missing: model.layers.3.eh_proj.weight" in message


@pytest.mark.parametrize("prediction", [0, 1])
def test_more_blocks_than_config_json_says_are_no_prediction_layers(tmp_path: Path, prediction: int) -> None:
    """A model is never cut short in silence."""
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": prediction}
    message = refused(changed(tiny_folder(GLM), tmp_path / "x", config=config))
    wrong = "are missing: model.layers.2.eh_proj" if prediction else "belong to nothing in this model: model.layers.2."
    assert wrong in message


# quantization_config.


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_scale_that_is_not_positive_and_finite_is_refused_by_name(tmp_path: Path, value: float, devices: int) -> None:
    name = f"{EXPERT}_scale"
    scale = tensors_of(quantized_folder(GLM))[name]
    scale[31, 1] = value
    files = open_model(changed(quantized_folder(GLM), tmp_path / "x", add={name: scale}))
    with pytest.raises(WeightsError) as caught:
        load(files, devices)
    assert str(caught.value) == f"{name}: a scale is zero, negative, infinite or NaN"


def quantization_of(**changes: Any) -> dict[str, Any]:
    data = json.loads((quantized_folder(GLM) / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return {**data, **changes}


@pytest.mark.parametrize(
    ("quantization", "kind", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            UnsupportedError,
            "quantisation method 'gptq' is not supported; supported",
        ),
        ({"bits": 8}, UnsupportedError, "quantisation method None is not supported"),
        ([], UnsupportedError, "quantisation method None is not supported"),
        ({"version": 2}, UnsupportedError, "quantization_config version 2, this version reads 1"),
        ({"version": 2, "layout": "new"}, UnsupportedError, "quantization_config version 2, this version reads 1"),
        ({"version": True}, ConfigError, "quantization_config.version: True is not a int"),
        ({"layout": "new"}, ConfigError, "quantization_config: unknown key layout; known are"),
        ({"kv_cache": "int2"}, ConfigError, "quantization_config.kv_cache: 'int2' is not one of"),
        ({"tensors": ["x"]}, ConfigError, "quantization_config.tensors: ['x'] is not a table"),
        (
            {"tensors": {"model.layers.{layer}.mlp.shared_mlp.up_proj.weight": "w8a8-g32"}},
            ConfigError,
            "names tensors that the model does not have: model.layers.{layer}.mlp.shared_mlp.up_proj.weight",
        ),
        (
            {"tensors": {"model.layers.1.mlp.experts.0.up_proj.weight": "w8a8-g32"}},
            ConfigError,
            "names tensors that the model does not have: model.layers.1.mlp.experts.0.up_proj.weight",
        ),
        (
            {"tensors": {"model.layers.{layer}.self_attn.o_proj.weight": "w8a8-g100"}},
            ConfigError,
            "model.layers.{layer}.self_attn.o_proj.weight: scheme 'w8a8-g100': a group of 100 is not one of",
        ),
        (
            {"tensors": {"model.layers.{layer}.self_attn.o_proj.weight": "fp4"}},
            ConfigError,
            "model.layers.{layer}.self_attn.o_proj.weight: unknown scheme 'fp4'",
        ),
        (
            {"tensors": {"model.layers.{layer}.mlp.gate.weight": "w8a8-g32"}},
            ConfigError,
            "model.layers.{layer}.mlp.gate.weight: router always stays float",
        ),
        ({"tensors": {"model.norm.weight": "w8a8-g32"}}, ConfigError, "model.norm.weight: norm always stays float"),
        ({"tensors": {EMBED: "w8a8-g32"}}, ConfigError, f"{EMBED}: embed always stays float"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused(
    tmp_path: Path, quantization: Any, kind: type[Exception], message: str
) -> None:
    if isinstance(quantization, dict) and not {"quant_method", "bits"} & set(quantization):
        quantization = quantization_of(**quantization)
    folder = changed(quantized_folder(GLM), tmp_path / "x", config={"quantization_config": quantization})
    text = refused(folder, kind)
    assert message in text and text.startswith(f"{folder / 'config.json'}: ")


def test_a_missing_key_of_the_quantisation_is_named(tmp_path: Path) -> None:
    quantization = quantization_of()
    for key in ("version", "tensors"):
        rest = {k: v for k, v in quantization.items() if k != key}
        folder = changed(quantized_folder(GLM), tmp_path / key, config={"quantization_config": rest})
        assert f"quantization_config: missing key {key}" in refused(folder, ConfigError)


def test_without_its_quantisation_the_integers_are_refused(tmp_path: Path) -> None:
    """Read as float, INT8 values would be plausible weights."""
    folder = changed(quantized_folder(GLM), tmp_path / "x", config={"quantization_config": None})
    assert "is int8, expected float32 or float16 or bfloat16" in refused(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_is_inverted_by_reading(family: str) -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    schemes = {
        entry.path: parse_scheme("w8a16-channel" if entry.role.startswith("shared") else "w8a8-g64")
        for entry in manifest.entries
        if entry.role not in FLOAT_ROLES
    }
    config = {"quantization_config": json.loads(json.dumps(describe(schemes, manifest, "bfloat16")))}
    quantization = read_quantization(config, "config.json")
    assert quantization is not None and quantization.kv_cache == "bfloat16"
    assert schemes_of(quantization, manifest, "config.json") == schemes
    assert read_quantization({}, "config.json") is None


# Every element where the plan puts it.


def logical(leaf_path: str, array: jax.Array, files: ModelFiles, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """The elements of a loaded leaf in logical order, and those of its padding."""
    entry = files.manifest[leaf_path.removesuffix("_scale")]
    whole = np.asarray(array).astype(np.float32)
    if "experts" in entry.axes:
        slots = ExpertPlacement(num_experts=entry.shape[1], num_ranks=devices).slot_of_expert()
        return whole[:, slots], np.delete(whole, slots, axis=1)
    if "vocab" in entry.axes:
        return whole[: entry.shape[0]], whole[entry.shape[0] :]
    return whole, whole[:0]


SIZES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "ten experts": {"n_routed_experts": 10, "num_experts_per_tok": 3},
    "five experts": {"n_routed_experts": 5},
    "odd vocabulary": {"vocab_size": 257},
}


@cache
def sized_folder(name: str) -> Path:
    if name == "as it is":
        return tiny_folder(GLM)
    return tiny.write_checkpoint(scratch() / name.replace(" ", "-"), {**tiny.CONFIGS[GLM], **SIZES[name]})


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("name", [*SIZES, "int8"])
def test_every_element_is_where_the_plan_puts_it(name: str, devices: int) -> None:
    folder = quantized_folder(GLM) if name == "int8" else sized_folder(name)
    files, tensors = open_model(folder), tensors_of(folder)
    for path, array in load(files, devices).items():
        found, padding = logical(path, array, files, devices)
        entry = files.manifest[path.removesuffix("_scale")]
        suffix = "_scale" if path.endswith("_scale") else ""
        for position, tensor in entry.tensors():
            np.testing.assert_array_equal(found[position], tensors[tensor + suffix], err_msg=tensor)
        # No weight, and a scale that is legal, where nothing lives.
        assert (padding == (1 if suffix else 0)).all()


def test_a_device_reads_and_holds_only_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_model(sized_folder("odd vocabulary"))
    read: list[tuple[str, tuple[int, ...]]] = []
    original = type(files.checkpoint).read

    def counted(self: Any, name: str, index: Any = ()) -> np.ndarray:
        array = original(self, name, index)
        read.append((name, array.shape))
        return array

    monkeypatch.setattr(type(files.checkpoint), "read", counted)
    arrays = load(files, 8)
    names = [name for name, _ in read]
    assert [shape[0] for name, shape in read if name == EMBED] == [33] * 7 + [26]
    # Everything but the two tables is one part, read once, on however many devices.
    single = [name for name in names if name not in (EMBED, HEAD)]
    assert len(single) == len(set(single)) == len(tensors_of(files.folder)) - 2
    assert {shard.data.shape for shard in arrays["moe.ffn.up"].addressable_shards} == {(2, 1, 32, 64)}
    assert {shard.data.shape for shard in arrays["embed.weight"].addressable_shards} == {(33, 64)}


def test_devices_of_one_host_share_a_replicated_leaf() -> None:
    arrays = load(open_model(quantized_folder(GLM)), 8)
    shared = [path for path, array in arrays.items() if array.sharding.is_fully_replicated]
    assert {"norm.weight", "moe.attention.q", "moe.attention.o", "moe.attention.o_scale"} <= set(shared)
    for path in shared:
        pointers = {shard.data.unsafe_buffer_pointer() for shard in arrays[path].addressable_shards}
        assert len(arrays[path].addressable_shards) == 8 and len(pointers) == 1, path
    pointers = {shard.data.unsafe_buffer_pointer() for shard in arrays["moe.ffn.up"].addressable_shards}
    assert len(pointers) == 8


def test_progress_counts_every_byte() -> None:
    calls: list[tuple[int, int]] = []
    arrays = load(open_model(quantized_folder(GLM)), 8, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == len(arrays) and {total for _, total in calls} == {sum(a.nbytes for a in arrays.values())}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls}) and calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float_dtypes_are_converted_once(tmp_path: Path, stored: Any, dtype: str) -> None:
    """Router and correction bias are float32 in memory, whatever they are on disk."""
    folder = tiny.write_checkpoint(tmp_path / "x", tiny.CONFIGS[GLM], dtype=stored)
    files, tensors = open_model(folder), tensors_of(folder)
    for path, array in load(files, 8, dtype).items():
        entry = files.manifest[path]
        assert array.dtype == (jnp.float32 if entry.float32 else jnp.dtype(dtype))
        found, _ = logical(path, array, files, 8)
        for position, tensor in entry.tensors():
            expected = tensors[tensor].astype(array.dtype).astype(np.float32)
            np.testing.assert_array_equal(found[position], expected, err_msg=tensor)


# The same model on any number of devices. The references are programs that other tests compile anyway.

NEVER = np.float32(-1e9)
"""A correction bias with which an expert is never chosen."""


def test_ten_experts_and_an_odd_vocabulary_do_not_change_the_logits() -> None:
    """The tiny model with two more experts that no token chooses, and one more token that is a copy of another.

    On eight devices experts lie 1, 1, 1, 2, 1, 1, 1, 2 to a device, and the last one has 26 of 33 rows of the
    vocabulary; on four 2, 3, 2, 3.
    """
    known = [0, 1, 2, 4, 5, 6, 8, 9]
    tensors = tensors_of(tiny_folder(GLM))
    first, last = tensors[EMBED][9].copy(), tensors[HEAD][5].copy()
    tensors[EMBED], tensors[HEAD] = np.vstack([tensors[EMBED], first]), np.vstack([tensors[HEAD], last])
    for layer in (1, 2):
        mlp = f"model.layers.{layer}.mlp"
        for part in ("gate", "up", "down"):
            old = [tensors.pop(f"{mlp}.experts.{expert}.{part}_proj.weight") for expert in range(8)]
            new = dict(zip(known, old, strict=True))
            for expert in range(10):
                name = f"{mlp}.experts.{expert}.{part}_proj.weight"
                tensors[name] = new.get(expert, tiny.draw(f"{name} (never chosen)", old[0].shape))
        for name, value in ((f"{mlp}.gate.weight", 1), (f"{mlp}.gate.e_score_correction_bias", NEVER)):
            wide = np.full((10, *tensors[name].shape[1:]), value, np.float32)
            wide[known] = tensors[name]
            tensors[name] = wide
    config = {**tiny.CONFIGS[GLM], "vocab_size": 257, "n_routed_experts": 10}
    folder = write(scratch() / "ten-experts-257-tokens", config, tensors)
    ids = tiny.token_ids()
    ids[:, [3, 30]] = 9
    expected = run_logits(tiny_folder(GLM), ids)
    copied = np.where((ids == 9) & (np.arange(37) > 10), 256, ids)
    assert (copied == 256).any()
    for devices in (4, 8):
        logits = run_logits(folder, copied, devices=devices)
        np.testing.assert_allclose(logits[..., :256], expected, rtol=0, atol=TOLERANCES["same_logits"].value)
        np.testing.assert_allclose(logits[..., 256], logits[..., 5], rtol=0, atol=TOLERANCES["same_logits"].value)


def test_five_experts_on_eight_devices_do_not_change_the_logits() -> None:
    """Three devices have no expert; the tiny model with the last three never chosen is the same model."""
    drop = tuple(n for n in tensors_of(tiny_folder(GLM)) for expert in (5, 6, 7) if f".experts.{expert}." in n)
    tensors = tensors_of(tiny_folder(GLM))
    gates = {name: array[:5] for name, array in tensors.items() if ".mlp.gate." in name}
    folder = changed(
        tiny_folder(GLM), scratch() / "five-of-eight", drop=drop, add=gates, config={"n_routed_experts": 5}
    )
    runner, ids = runner_of(tiny_folder(GLM)), tiny.token_ids()

    def without_three(bias: np.ndarray) -> np.ndarray:
        bias[:, 5:] = NEVER
        return bias

    with leaf_changed(runner, "moe.ffn.router.bias", without_three):
        expected = logits_of(runner, ids)
    assert np.abs(expected - logits_of(runner, ids)).max() > TOLERANCES["leaf_matters"].value
    logits = run_logits(folder, ids, devices=8)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCES["same_logits"].value)


def relative_error(logits: np.ndarray, exact: np.ndarray) -> float:
    """Median over tokens of the root mean square error, in standard deviations of the exact logits."""
    return float(np.median(np.sqrt(np.mean((logits - exact) ** 2, axis=-1))) / exact.std())


def test_bfloat16_runs_and_stays_near_float32() -> None:
    ids = tiny.token_ids()
    error = relative_error(run_logits(tiny_folder(GLM), ids, dtype="bfloat16"), run_logits(tiny_folder(GLM), ids))
    assert 1e-4 < error < TOLERANCES["bfloat16_logits"].value


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_runs_and_stays_near_float32(family: str) -> None:
    ids = tiny.token_ids()
    error = relative_error(run_logits(quantized_folder(family), ids), run_logits(tiny_folder(family), ids))
    assert 1e-4 < error < TOLERANCES["int8_logits"].value


def _quantized(family: str) -> list[str]:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    return [entry.path for entry in manifest.entries if entry.role not in FLOAT_ROLES]


@pytest.mark.parametrize(("family", "path"), [(family, path) for family in FAMILIES for path in _quantized(family)])
def test_case_26_every_scale_matters(family: str, path: str) -> None:
    """In one layer at a time: every other row's scales doubled, and each row with its neighbour's scales.

    Doubling all rows alike would change nothing where a norm follows (queries and keys of hunyuan_v1_moe).
    """
    runner, ids = runner_of(quantized_folder(family)), tiny.token_ids()
    exact = logits_of(runner, ids)

    def doubled(scale: np.ndarray, layer: int) -> np.ndarray:
        scale[layer, ..., ::2, :] *= 2
        return scale

    def permuted(scale: np.ndarray, layer: int) -> np.ndarray:
        scale[layer] = np.roll(scale[layer], 1, axis=-2)
        return scale

    for layer in range(runner.manifest[path].shape[0]):
        for change in (doubled, permuted):
            with leaf_changed(runner, path, partial(change, layer=layer), "scale"):
                logits = logits_of(runner, ids)
            assert np.isfinite(logits).all()
            assert np.abs(logits - exact).max() > TOLERANCES["leaf_matters"].value, (layer, change.__name__)
    np.testing.assert_array_equal(logits_of(runner, ids), exact)
