"""Checkpoints of other tools: complete or refused by name, decoded or kept, on any number of devices."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, JaxMoeError, UnsupportedError, WeightsError
from jaxmoe.models.manifest import Entry, build_manifest
from jaxmoe.models.registry import read_config
from jaxmoe.ops.linear.reference import unpack_pairs
from jaxmoe.parallel import mesh
from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.parallel.plan import Plan, load_plan
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.decoded import Fp8Blocks, Fp8Scales, Int4Groups, MxFp8
from jaxmoe.weights.encodings import Integers, Plain
from jaxmoe.weights.foreign import ForeignFormat, read_side_files
from jaxmoe.weights.formats import read_quantization, schemes_of, without_quantization
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.load import ModelFiles, load_leaves, open_model
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint
from tests import tiny
from tests.running import scratch, tiny_folder
from tests.weights import encoders
from tests.weights.test_cells import expected as view_of

FAMILY_OF = {
    "fp8": "deepseek_v3",
    "mxfp8": "hy_v4",
    "mxfp4": "gpt_oss",
    "int4": "kimi_k25",
    "int8-channel": "glm4_moe",
    "int8-groups": "hunyuan_v1_moe",
    "int4-bytes": "qwen3_moe",
    "int8-words": "olmoe",
    "fp8-tensor": "minimax_m2",
    "ascend": "deepseek_v2",
}
"""Format -> a family that is released in it, or may be."""
FORMATS = tuple(FAMILY_OF)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@cache
def encoded(kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny checkpoint in a format and the float64 values of its logical tensors."""
    config = tiny.CONFIGS[FAMILY_OF[kind]]
    # Names that the family has for packed blocks, and uses where a checkpoint has them.
    blocks = [f"model.layers.0.mlp.experts.{name}_blocks" for name in ("gate_up_proj", "down_proj")]
    manifest = build_manifest(*read_config(config, "config.json"), blocks if kind == "mxfp4" else [])
    folder, exact = encoders.write_encoded(scratch() / f"tiny-{kind}", kind, config, manifest)
    if kind == "int4":
        path = folder / "config.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        data["text_config"]["quantization_config"] = data.pop("quantization_config")
        path.write_text(json.dumps(data), encoding="utf-8")
    return folder, exact


@cache
def own_folder() -> Path:
    """A result of ours: fused experts split, in four bits where there are many."""
    folder = scratch() / "tiny-own-w4a8"
    quantize(prepare(tiny_folder("hy_v4"), load_recipe("w4a8-experts")), folder)
    return folder


def folder_of(kind: str) -> Path:
    return own_folder() if kind == "jaxmoe" else encoded(kind)[0]


@pytest.fixture
def opened_without(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], ModelFiles]:
    """Opens a model as if a tensor were not in its files."""

    def opened(folder: Path, lost: str) -> ModelFiles:
        def without(path: Path) -> Checkpoint:
            checkpoint = open_checkpoint(path)
            kept = {name: meta for name, meta in checkpoint.tensors.items() if name != lost}
            assert len(kept) == len(checkpoint.tensors) - 1
            return dataclasses.replace(checkpoint, tensors=kept)

        monkeypatch.setattr("jaxmoe.weights.load.open_checkpoint", without)
        return open_model(folder)

    return opened


def rewritten(folder: Path, out: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with other tensors or another config.json."""
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(tensors, config)
    encoders.write(out, config, tensors)
    for path in folder.glob("quant_model_description.json"):
        (out / path.name).write_bytes(path.read_bytes())
    return out


def refused(folder: Path, kind: type[Exception] = WeightsError) -> str:
    with pytest.raises(kind) as caught:
        open_model(folder)
    return str(caught.value)


# Complete or refused.


@pytest.mark.parametrize("kind", [*FORMATS, "jaxmoe"])
def test_a_complete_checkpoint_opens(kind: str) -> None:
    files = open_model(folder_of(kind))
    assert files.not_loaded == ()
    parts = {
        part.name for name, tensor in files.source.stored.items() for part in tensor.encoding.parts(name, tensor.shape)
    }
    assert parts == set(files.checkpoint.tensors)
    labels = {tensor.encoding.label() for tensor in files.source.stored.values()}
    assert len(labels) >= 2, "plain tensors and others"
    if kind != "jaxmoe":
        for entry in files.manifest.entries:
            scheme = files.schemes.get(entry.path)
            wanted = encoders.scheme_of(kind, entry.role)
            assert (None if scheme is None else scheme.name) == wanted, entry.path
        assert files.kv_cache == "float32"


@pytest.mark.parametrize("kind", [*FORMATS, "jaxmoe"])
def test_case_80_every_tensor_that_is_lost_is_named(
    kind: str, opened_without: Callable[[Path, str], ModelFiles]
) -> None:
    """Each tensor, scale, packed part and shape, one at a time; none is a default, none is left over.

    One of each sort: layers and experts differ in their numbers, and in what is plain.
    """
    folder = folder_of(kind)
    sorts = {
        (re.sub(r"\.\d+\.", ".N.", name), meta.dtype): name for name, meta in open_checkpoint(folder).tensors.items()
    }
    assert len(sorts) > 20
    for name in sorts.values():
        with pytest.raises(WeightsError) as caught:
            opened_without(folder, name)
        assert str(caught.value).startswith(f"{folder}: 1 tensors are missing: {name}"), name


@pytest.mark.parametrize("kind", FORMATS)
def test_case_80_every_tensor_too_many_is_named(tmp_path: Path, kind: str) -> None:
    suffixes = {"fp8": "_scale_inv", "mxfp4": "_scales", "int4": "_packed", "ascend": "_offset"}
    name = f"model.layers.0.mlp.other_proj.weight{suffixes.get(kind, '_scale')}"
    if kind == "mxfp4":
        name = "model.layers.0.mlp.experts.other_proj_scales"

    def add(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors[name] = np.ones(3, np.float32)

    message = refused(rewritten(folder_of(kind), tmp_path / "x", add))
    assert f"1 tensors belong to nothing in this model: {name} (there is no " in message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fp8", "is float8_e4m3fn, expected float32 or float16 or bfloat16 (quantisation: float)"),
        ("mxfp8", "is float8_e4m3fn, expected float32 or float16 or bfloat16 (quantisation: float)"),
        ("mxfp4", "_blocks is uint8, expected float32 or float16 or bfloat16 (quantisation: float)"),
        ("int8-channel", "is int8, expected float32 or float16 or bfloat16 (quantisation: float)"),
        ("int4", "_packed, "),
        ("int4", ": is it stored in another way than its configuration says?)"),
    ],
)
def test_numbers_without_a_configuration_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    """Read as floats, codes would be plausible weights."""

    def lose(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        plain = without_quantization(config)
        config.clear()
        config.update(plain)

    assert message in refused(rewritten(folder_of(kind), tmp_path / "x", lose))


def test_another_format_than_the_configuration_says(tmp_path: Path) -> None:
    def rename(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config["quantization_config"] = encoders.CONFIGS["fp8"]

    message = refused(rewritten(folder_of("mxfp8"), tmp_path / "x", rename))
    assert "_scale_inv" in message and "_scale: is it stored in another way than its configuration says?)" in message


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "int4", "int8-channel"])
def test_a_configuration_that_no_tensor_follows(tmp_path: Path, kind: str) -> None:
    folder = tiny.write_checkpoint(
        tmp_path / "x", {**tiny.CONFIGS["glm4_moe"], "quantization_config": encoders.CONFIGS[kind]}
    )
    method = "modelopt" if kind == "mxfp8" else "fp8" if kind == "fp8" else "compressed-tensors"
    assert f"its configuration says quantisation method {method!r}, but no tensor is stored so" in refused(folder)


@pytest.mark.parametrize(
    ("kind", "suffix", "array", "problem"),
    [
        ("fp8", "_scale_inv", np.ones((1, 1), np.float32), "has shape [1, 1], config.json asks for [2, 2]"),
        ("fp8", "_scale_inv", np.ones((2, 2), np.uint8), "is uint8, expected float32 or bfloat16"),
        ("mxfp8", "_scale", np.ones((32, 2), np.float32), "is float32, expected uint8"),
        ("int8-channel", "_scale", np.ones((2, 32), np.float32), "asks for [32, 1] or [32]"),
        ("int8-channel", "_scale", np.ones(32, np.float64), "is float64, expected float32 or float16 or bfloat16"),
        ("int8-channel", "", np.zeros((32, 64), np.float32), "is float32, expected int8"),
        ("ascend", "_offset", np.zeros((32, 2), np.float32), "has shape [32, 2], config.json asks for [32, 1]"),
    ],
)
def test_another_shape_or_dtype_is_refused_by_name(
    tmp_path: Path, kind: str, suffix: str, array: np.ndarray, problem: str
) -> None:
    stem = "model.layers.1.mlp.shared_experts.gate_proj.weight" if kind == "mxfp8" else EXPERT

    def change(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        assert f"{stem}{suffix}" in tensors
        tensors[f"{stem}{suffix}"] = array

    message = refused(rewritten(folder_of(kind), tmp_path / "x", change))
    assert f"{stem}{suffix} " in message and problem in message


def test_layers_of_different_kinds_are_refused(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"

    def change(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors[name] = tiny.draw(name, tensors[name].shape)
        del tensors[f"{name}_scale"]

    assert refused(rewritten(folder_of("int8-channel"), tmp_path / "x", change), UnsupportedError) == (
        "model.layers.1.self_attn.o_proj.weight is stored as INT8 (w8a8-channel), "
        f"{name} as plain floats: all layers and experts of a parameter need the same kind"
    )


def test_integers_of_a_role_without_an_integer_operator_are_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.gate.weight"
    parts, exact = encoders.int8_channel(name, (8, 64), np.random.default_rng(3))
    folder = rewritten(folder_of("int8-channel"), tmp_path / "x", lambda tensors, _: tensors.update(parts))
    with caplog.at_level(logging.INFO, logger="jaxmoe"):
        files = open_model(folder)
    assert "1 tensors of integers are decoded to floats: their roles have no integer operator" in caplog.text
    np.testing.assert_array_equal(load(files)["moe.ffn.router.weight"][0], exact.astype(np.float32))


# Parts that are not run, and multi-token prediction.


def test_a_vision_tower_is_counted_and_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["vision_tower.patch_embed.weight", "vision_tower.blocks.0.weight", "mm_projector.weight"]

    def add(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors.update({name: np.ones((2, 2), np.float32) for name in names})

    folder = rewritten(folder_of("int4"), tmp_path / "x", add)
    with caplog.at_level(logging.INFO, logger="jaxmoe"):
        files = open_model(folder)
    assert files.not_loaded == tuple(sorted(names))
    assert f"{folder}: 3 tensors belong to parts that are not run" in caplog.text


def test_prediction_blocks_are_loaded_where_the_checkpoint_has_them() -> None:
    files = open_model(folder_of("fp8"))
    assert files.mtp_layers == 1 and files.manifest.config.mtp_copies
    arrays, exact = load(files), encoded("fp8")[1]
    layer = tiny.CONFIGS["deepseek_v3"]["num_hidden_layers"]
    for path, name in (("mtp.projection", "eh_proj"), ("mtp.embed", "embed_tokens"), ("mtp.head", "shared_head.head")):
        values = exact[f"model.layers.{layer}.{name}.weight"].astype(np.float32)
        np.testing.assert_array_equal(arrays[path][0], values)


def test_prediction_blocks_that_are_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = tiny.CONFIGS["deepseek_v3"]["num_hidden_layers"]

    def drop(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.{layer}.")]:
            del tensors[name]

    folder = rewritten(tiny_folder("deepseek_v3"), tmp_path / "x", drop)
    with caplog.at_level(logging.INFO, logger="jaxmoe"):
        files = open_model(folder)
    assert files.mtp_layers == 0 and not any(e.path.startswith("mtp.") for e in files.manifest.entries)
    where = folder / "config.json"
    assert f"{where} names 1 multi-token-prediction layers, the checkpoint carries none" in caplog.text


@pytest.mark.parametrize("parts", [("embed_tokens", "shared_head.head"), ("shared_head.head",)])
def test_prediction_blocks_without_their_copies(tmp_path: Path, parts: tuple[str, ...]) -> None:
    layer = tiny.CONFIGS["deepseek_v3"]["num_hidden_layers"]
    names = [f"model.layers.{layer}.{part}.weight" for part in parts]

    def drop(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        for name in names:
            tensors.pop(name, None)

    folder = rewritten(tiny_folder("deepseek_v3"), tmp_path / "x", drop)
    if len(parts) == 1:
        assert refused(folder) == f"{folder}: 1 tensors are missing: {names[0]}"
    else:
        files = open_model(folder)
        assert files.mtp_layers == 1 and not files.manifest.config.mtp_copies


def test_prediction_blocks_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    def forget(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config["num_nextn_predict_layers"] = 0

    folder = rewritten(tiny_folder("deepseek_v3"), tmp_path / "x", forget)
    assert "belong to nothing in this model: model.layers.4." in refused(folder)


# Every element where the plan puts it.


def load(files: ModelFiles, plan: Plan | None = None) -> dict[str, jax.Array]:
    """Leaves by path, scales under the path plus '_scale'."""
    if plan is None:
        plan = load_plan(asset("sharding", "default", "cpu8.toml")).with_devices(1)
    leaves, arrays = load_leaves(files, plan, mesh.make(plan.mesh), "float32")
    return {leaf.hub_name(leaf.entry.path): array for leaf, array in zip(leaves, arrays, strict=True)}


def logical(entry: Entry, array: jax.Array, plan: Plan) -> np.ndarray:
    """The elements of a loaded leaf in logical order, without padding."""
    whole = np.asarray(array)
    if "experts" in entry.axes:
        placement = ExpertPlacement(num_experts=entry.shape[1], num_ranks=plan.ways("experts"))
        whole = whole[:, placement.slot_of_expert()]
    return whole[tuple(slice(0, size) for size in entry.shape[:-1])]


@pytest.mark.parametrize("plan_name", ["cpu8", "cpu8_tp2"])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in encoders.SCHEMES])
def test_decoded_values_are_where_the_plan_puts_them(kind: str, plan_name: str) -> None:
    """On eight devices, attention heads whole or split two ways; fused experts, views and slots included."""
    folder, exact = encoded(kind)
    files = open_model(folder)
    plan = load_plan(asset("sharding", "default", f"{plan_name}.toml"))
    arrays = load(files, plan)
    assert set(arrays) == {entry.path for entry in files.manifest.entries}
    split = {axis for axis in ("q_heads", "attention_out") if plan.ways(axis) > 1}
    assert any(split & set(entry.axes) for entry in files.manifest.entries) == (plan_name == "cpu8_tp2")
    for entry in files.manifest.entries:
        found = logical(entry, arrays[entry.path], plan)
        for position, name in entry.tensors():
            part = view_of(exact[name].astype(np.float32), entry.view, bias=entry.role == "experts.bias")
            np.testing.assert_array_equal(found[position], part, err_msg=f"{entry.path}: {name}")


@pytest.mark.parametrize("plan_name", ["cpu8", "cpu8_tp2"])
@pytest.mark.parametrize("kind", encoders.SCHEMES)
def test_integers_stay_as_they_are(kind: str, plan_name: str) -> None:
    """Scales of a weight whose rows are split are split alike."""
    folder, exact = encoded(kind)
    files = open_model(folder)
    plan = load_plan(asset("sharding", "default", f"{plan_name}.toml"))
    arrays = load(files, plan)
    for entry in files.manifest.entries:
        scheme = files.schemes.get(entry.path)
        found = logical(entry, arrays[entry.path], plan)
        if scheme is not None:
            assert found.dtype == scheme.values_dtype
            if scheme.weight_bits == 4:
                found = unpack_pairs(found, scheme.group_size(entry.shape[-1]))
            scales = logical(entry, arrays[f"{entry.path}_scale"], plan)
            assert scales.dtype == np.float32 and scales.shape == scheme.scales_shape(entry.shape)
            group = scheme.group_size(entry.shape[-1])
            found = found * np.repeat(scales.astype(np.float64), group, axis=-1)[..., : entry.shape[-1]]
        for position, name in entry.tensors():
            np.testing.assert_array_equal(found[position], exact[name], err_msg=name)


def test_our_own_result_is_loaded_as_it_was_written() -> None:
    """Four-bit experts of a fused source, packed on disk as in memory."""
    files = open_model(own_folder())
    arrays = load(files)
    bits = {entry.role: s.weight_bits for entry in files.manifest.entries if (s := files.schemes.get(entry.path))}
    assert bits["experts.up"] == 4 and bits["attention.o"] == 8
    for entry in files.manifest.entries:
        scheme = files.schemes.get(entry.path)
        suffix = "_packed" if scheme is not None and scheme.weight_bits == 4 else ""
        for position, name in entry.own_tensors():
            raw = files.checkpoint.read(f"{name}{suffix}")
            assert arrays[entry.path].dtype == raw.dtype
            np.testing.assert_array_equal(arrays[entry.path][position], raw, err_msg=name)
            if scheme is not None:
                scales = files.checkpoint.read(f"{name}_scale")
                np.testing.assert_array_equal(arrays[f"{entry.path}_scale"][position], scales, err_msg=name)


def test_a_device_reads_only_its_experts_of_a_fused_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_model(folder_of("mxfp8"))
    read: dict[str, int] = {}
    original = Checkpoint.read

    def counted(self: Checkpoint, name: str, index: Any = ()) -> np.ndarray:
        array = original(self, name, index)
        read[name] = read.get(name, 0) + array.nbytes
        return array

    monkeypatch.setattr(Checkpoint, "read", counted)
    load(files, load_plan(asset("sharding", "default", "cpu8.toml")))
    for name, size in read.items():
        assert size <= files.checkpoint.tensors[name].nbytes, name


# Configurations.


def ct(weights: Mapping[str, Any] = {}, storage: str = "int-quantized", inputs: Any = None, **top: Any) -> Any:
    return {**encoders.compressed(weights, storage, inputs), **top}


INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("quantization", "encoding"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Blocks()),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0", "modules_to_not_convert": []},
            Fp8Blocks(block=(64, 32)),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "float8_e4m3fn"}, Fp8Blocks()),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, MxFp8()),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "group_size": 32}}, MxFp8()),
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "weight_block_size": [1, 32]}, MxFp8()),
        (ct(INT4, "pack-quantized"), Int4Groups(group=32)),
        (ct({"num_bits": 4}, "pack-quantized"), Int4Groups(group=None)),
        (ct({**FP8, "strategy": "channel"}, "float-quantized"), Fp8Scales(block=(1, None))),
        (ct(FP8, "float-quantized", {**FP8, "dynamic": True}), Fp8Scales(block=(None, None))),
        (ct(FP8, "naive-quantized", FP8), Fp8Scales(block=(None, None), static_inputs=True)),
        (
            ct(
                {**FP8, "strategy": "block", "block_structure": [64, 32]},
                "float-quantized",
                {"type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
            ),
            Fp8Scales(block=(64, 32)),
        ),
        (
            ct({**FP8, "strategy": "block", "block_structure": "128x128"}, "float-quantized"),
            Fp8Scales(block=(128, 128)),
        ),
    ],
)
def test_a_configuration_that_is_decoded(quantization: dict[str, Any], encoding: Any) -> None:
    found = read_quantization({"quantization_config": quantization}, "config.json")
    assert isinstance(found, ForeignFormat) and found.encodings == (encoding,) and not found.keeps_integers
    assert read_quantization({"text_config": {"quantization_config": quantization}}, "config.json") == found
    assert schemes_of(found, tiny.manifest_of(tiny.CONFIGS["glm4_moe"]), "config.json") == {}


@pytest.mark.parametrize(
    ("quantization", "scheme", "storage"),
    [
        (ct(inputs=encoders.PER_TOKEN), "w8a8-channel", "own"),
        (ct(storage="naive-quantized"), "w8a16-channel", "own"),
        (ct({"strategy": "group", "group_size": 128}, inputs=encoders.PER_TOKEN), "w8a8-g128", "own"),
        (ct(storage="pack-quantized"), "w8a16-channel", "words"),
        (ct({**INT4, "num_bits": 8}, "pack-quantized"), "w8a16-g32", "words"),
        (ct(INT4, inputs=encoders.PER_TOKEN), "w4a8-g32", "bytes"),
        (ct({"num_bits": 4}, inputs=encoders.PER_TOKEN), "w4a8-channel", "bytes"),
        (ct({"num_bits": 4}), "w4a16-channel", "bytes"),
    ],
)
def test_a_configuration_that_keeps_integers(quantization: dict[str, Any], scheme: str, storage: str) -> None:
    found = read_quantization({"quantization_config": quantization}, "config.json")
    assert isinstance(found, ForeignFormat) and found.keeps_integers
    (encoding,) = found.encodings
    assert isinstance(encoding, Integers) and (encoding.scheme.name, encoding.storage) == (scheme, storage)
    with pytest.raises(UnsupportedError, match="the tensors decide what is INT8; give the folder"):
        schemes_of(found, tiny.manifest_of(tiny.CONFIGS["glm4_moe"]), "config.json")


@pytest.mark.parametrize(
    ("quantization", "kind", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            UnsupportedError,
            "quantisation method 'gptq' is not supported; supported",
        ),
        ({"quant_method": ["fp8"]}, UnsupportedError, "quantisation method ['fp8'] is not supported"),
        ({"quant_method": "fp8"}, UnsupportedError, "weight_block_size = None: only FP8 with one scale a block"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, UnsupportedError, "weight_block_size = [128]: only FP8"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
            UnsupportedError,
            "fmt = 'e5m2' is not supported, only 'e4m3' or 'float8_e4m3fn'",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            UnsupportedError,
            "activation_scheme = 'static' is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": [1, 1], "zero": 1}, ConfigError, "unknown key zero"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            UnsupportedError,
            "quant_algo = 'NVFP4' is not supported",
        ),
        ({"quant_method": "modelopt"}, UnsupportedError, "quant_algo = None is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16},
            UnsupportedError,
            "group_size = 16 is not supported, only None or 32",
        ),
        (
            {"quant_method": "mxfp8", "weight_block_size": [1, 16]},
            UnsupportedError,
            "weight_block_size = (1, 16) is not supported",
        ),
        (
            ct({**INT4, "num_bits": 3}, "pack-quantized"),
            UnsupportedError,
            "weights.num_bits = 3 is not supported, only 8 or 4",
        ),
        (
            ct({**INT4, "group_size": 48}, inputs=encoders.PER_TOKEN),
            UnsupportedError,
            "group_0.weights: no scheme has weight_bits=4 with group=48: 4-bit weights have one scale per 32, 64",
        ),
        (ct({**INT4, "actorder": "group"}, "pack-quantized"), UnsupportedError, "weights.actorder = 'group'"),
        (ct({**INT4, "symmetric": False}, "pack-quantized"), UnsupportedError, "weights.symmetric = False"),
        (ct({**INT4, "group_size": None}, "pack-quantized"), ConfigError, "strategy 'group' with group_size = None"),
        (ct({"strategy": "tensor"}), UnsupportedError, "weights.strategy = 'tensor' is not supported"),
        (ct({"type": "bool"}), UnsupportedError, "weights.type = 'bool' is not supported, only 'int' or 'float'"),
        (ct({"type": "float"}), UnsupportedError, "format = 'int-quantized' is not supported, only 'float-quantized'"),
        (ct({**FP8, "num_bits": 4}, "float-quantized"), UnsupportedError, "weights.num_bits = 4 is not supported"),
        (
            ct({**FP8, "strategy": "group", "group_size": 128}, "float-quantized"),
            UnsupportedError,
            "weights.strategy = 'group' is not supported, only 'channel' or 'tensor' or 'block'",
        ),
        (
            ct({**FP8, "strategy": "block", "block_structure": [128]}, "float-quantized"),
            ConfigError,
            "strategy 'block' with block_structure = [128], which is not two sizes",
        ),
        (
            ct(FP8, "float-quantized", {**FP8, "strategy": "channel"}),
            UnsupportedError,
            "input_activations.strategy = 'channel' is not supported, only 'tensor'",
        ),
        (ct(FP8, "float-quantized", {"strategy": "tensor"}), UnsupportedError, "input_activations = (8, 'int')"),
        (ct({"dynamic": "local"}), UnsupportedError, "weights.dynamic = 'local'"),
        (ct(storage="float-quantized"), UnsupportedError, "format = 'float-quantized' is not supported"),
        (ct(INT4, "pack-quantized", encoders.PER_TOKEN), UnsupportedError, "input_activations = "),
        (ct(inputs={"strategy": "tensor"}), UnsupportedError, "input_activations = (8, 'int', True, 'tensor', False)"),
        (ct(transform_config={"rotation": {}}), UnsupportedError, "transform_config = "),
        (ct(sparsity_config={"format": "sparse-24"}), UnsupportedError, "sparsity_config = "),
        (ct(kv_cache_scheme={"num_bits": 8}), UnsupportedError, "kv_cache_scheme = "),
        (ct(quantization_status="frozen"), UnsupportedError, "quantization_status = 'frozen'"),
        (ct(more=1), ConfigError, "unknown key more"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, ConfigError, "missing key config_groups"),
    ],
)
def test_a_configuration_that_cannot_be_read(quantization: Any, kind: type[JaxMoeError], message: str) -> None:
    with pytest.raises(kind) as caught:
        read_quantization({"quantization_config": quantization}, "config.json")
    assert str(caught.value).startswith("config.json: quantization_config") and message in str(caught.value)


def groups_of(*groups: tuple[list[str], Any]) -> ForeignFormat:
    """One configuration of several groups: (targets, a configuration of one)."""
    config = ct()
    config["config_groups"] = {
        f"group_{index}": {**one["config_groups"]["group_0"], "format": one["format"], "targets": targets}
        for index, (targets, one) in enumerate(groups)
    }
    found = read_quantization({"quantization_config": {**config, "format": "mixed-precision"}}, "config.json")
    assert isinstance(found, ForeignFormat)
    return found


def meta(*parts: str, dtype: Any = np.int8) -> dict[str, TensorMeta]:
    """Tensors of a module x.q_proj by the ends of their names."""
    names = [f"x.q_proj.{part}" for part in parts]
    return {
        name: TensorMeta(name=name, dtype=np.dtype(dtype), shape=(2, 2), file=Path(), offset_bytes=0) for name in names
    }


CHANNEL = ct(inputs=encoders.PER_TOKEN)
GROUPS = ct({"strategy": "group", "group_size": 32}, inputs=encoders.PER_TOKEN)


@pytest.mark.parametrize(
    ("first", "second", "scheme"),
    [
        (["Linear"], ["x.q_proj"], "w8a8-g32"),
        (["Linear"], [r"re:.*q_proj$"], "w8a8-g32"),
        (["x.q_proj"], [r"re:.*q_proj$"], "w8a8-channel"),
        ([r"re:.*k_proj", r"re:x\.q"], ["Linear"], "w8a8-channel"),
        (["Linear"], ["re:q_proj", "y.q_proj"], "w8a8-channel"),
    ],
)
def test_groups_are_chosen_by_their_targets(first: list[str], second: list[str], scheme: str) -> None:
    """A name goes before a pattern, which is matched from the start, and a pattern before a class."""
    found = groups_of((first, CHANNEL), (second, GROUPS))
    encoding = found.encoding_of("x.q_proj.weight", meta("weight", "weight_scale"))
    assert isinstance(encoding, Integers) and encoding.scheme.name == scheme


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (["Linear"], ["Linear"], "targets of several config_groups match it"),
        (["re:x"], [r"re:.*q_proj"], "targets of several config_groups match it"),
        (["x.k_proj"], ["re:y"], "no target of its config_groups matches it"),
    ],
)
def test_groups_that_do_not_decide(first: list[str], second: list[str], why: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        groups_of((first, CHANNEL), (second, GROUPS)).encoding_of("x.q_proj.weight", meta("weight"))
    assert str(caught.value) == (
        f"x.q_proj.weight may be INT8 (w8a8-channel) or INT8 (w8a8-g32): {why}; name its module in one of them"
    )


@pytest.mark.parametrize("targets", ["Linear", [], [1], None])
def test_targets_are_a_list_of_names(targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"group_0\.targets = .* is not a list of names of modules"):
        groups_of((targets, CHANNEL))
    with pytest.raises(ConfigError, match=r"group_0\.targets: 're:\(' is no pattern"):
        groups_of((["re:("], CHANNEL))


def test_tensors_decide_between_kinds_before_targets_do() -> None:
    """Whose own parts are there: packed words, FP8 or INT8 numbers, one encoding each."""
    int4, fp8 = ct(INT4, "pack-quantized"), ct({**FP8, "strategy": "channel"}, "float-quantized")
    found = groups_of((["re:none"], int4), (["re:none"], fp8), (["re:none"], CHANNEL))
    name, scale = "x.q_proj.weight", meta("weight_scale", dtype=np.float32)
    for parts, kind in (
        (meta("weight_packed", "weight_shape"), Int4Groups),
        (meta("weight", dtype=ml_dtypes.float8_e4m3fn), Fp8Scales),
        (meta("weight"), Integers),
    ):
        assert type(found.encoding_of(name, {**parts, **scale})) is kind
    assert isinstance(found.encoding_of(name, meta("weight", dtype=np.float32)), Plain)


def test_two_configurations_that_contradict_each_other() -> None:
    config = {
        "quantization_config": encoders.CONFIGS["fp8"],
        "text_config": {"quantization_config": encoders.CONFIGS["mxfp8"]},
    }
    with pytest.raises(ConfigError, match="quantization_config and text_config.quantization_config contradict"):
        read_quantization(config, "config.json")


# Files beside config.json.


def test_model_opt_in_a_file_of_its_own(tmp_path: Path) -> None:
    beside = {"producer": {"name": "modelopt", "version": "1"}, "quantization": {"quant_algo": "MXFP8"}}

    def lose(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        del config["quantization_config"]

    folder = rewritten(folder_of("mxfp8"), tmp_path / "x", lose)
    (folder / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert open_model(folder).source.stored == {
        name: stored for name, stored in open_model(folder_of("mxfp8")).source.stored.items()
    }
    (folder / "config.json").write_bytes((folder_of("mxfp8") / "config.json").read_bytes())
    assert isinstance(open_model(folder).quantization, ForeignFormat)
    beside["quantization"]["quant_algo"] = "FP8"
    (folder / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert "quant_algo = 'FP8' is not supported" in refused(folder, UnsupportedError)


def described(folder: Path, out: Path, **changes: Any) -> Path:
    rewritten(folder, out, lambda tensors, config: None)
    path = out / "quant_model_description.json"
    data = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {EXPERT: "W4A4_DYNAMIC"},
            UnsupportedError,
            f"{EXPERT} is 'W4A4_DYNAMIC'; supported: 'FLOAT', 'W8A8_DYNAMIC', 'W8A16', 'W4A8_DYNAMIC'",
        ),
        (
            {EXPERT: "W4A8_DYNAMIC"},
            WeightsError,
            "tensors are missing: model.layers.1.mlp.experts.3.up_proj.scale_bias",
        ),
        (
            {DOWN: "W8A8_DYNAMIC"},
            WeightsError,
            f"{DOWN} has shape [32, 32], config.json asks for [64, 32]",
        ),
        ({EXPERT: "W8A16"}, UnsupportedError, "is stored as INT8 (w8a8-channel), "),
        ({EXPERT: "FLOAT"}, WeightsError, f"{EXPERT} is int8, expected float32 or float16 or bfloat16"),
        ({EXPERT: None}, ConfigError, f"quant_model_description.json does not say how {EXPERT} is stored"),
        ({"model.norm.weight": "W8A8_DYNAMIC"}, UnsupportedError, "model.norm.weight of shape [64] cannot be stored"),
        ({"lm_head.weight": "W8A8_DYNAMIC"}, WeightsError, "tensors are missing: lm_head.weight_offset"),
        ({"group_size": -1}, ConfigError, "group_size = -1 is not a whole number of at least 0"),
    ],
)
def test_a_description_that_does_not_fit(
    tmp_path: Path, changes: dict[str, Any], kind: type[JaxMoeError], message: str
) -> None:
    assert message in refused(described(folder_of("ascend"), tmp_path / "x", **changes), kind)


def test_a_description_with_groups(tmp_path: Path) -> None:
    """The one number is for all tensors; one with a single scale an output has no groups."""
    found = read_side_files(described(folder_of("ascend"), tmp_path / "x", group_size=32))
    assert isinstance(found, ForeignFormat)
    tensors = dict(open_checkpoint(folder_of("ascend")).tensors)
    channel = found.encoding_of(EXPERT, tensors)
    assert isinstance(channel, Integers) and channel.scheme.group is None
    tensors[f"{EXPERT}_scale"] = dataclasses.replace(tensors[f"{EXPERT}_scale"], shape=(32, 2))
    grouped = found.encoding_of(EXPERT, tensors)
    assert isinstance(grouped, Integers) and grouped.scheme.group == 32 and grouped.offset


def test_two_descriptions_are_refused(tmp_path: Path) -> None:
    folder = described(folder_of("ascend"), tmp_path / "x")

    def name(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config["quantization_config"] = encoders.CONFIGS["fp8"]

    both = rewritten(folder, tmp_path / "y", name)
    assert "names quantisation method 'fp8', a file beside it describes 'ascend'" in refused(both, ConfigError)
    (folder / "hf_quant_config.json").write_text("{}", encoding="utf-8")
    assert "has both quant_model_description.json and hf_quant_config.json" in refused(folder, ConfigError)


def test_one_unsplit_file_of_ascend_opens(tmp_path: Path) -> None:
    folder = described(folder_of("ascend"), tmp_path / "x")
    (folder / "model.safetensors.index.json").unlink()
    (shard,) = folder.glob("*.safetensors")
    shard.rename(folder / "quant_model_weights.safetensors")
    assert open_model(folder).schemes["moe.ffn.up"] == Scheme(group=None)


def test_jax_takes_the_bytes_of_packed_values() -> None:
    """A leaf of four-bit pairs is uint8: half an element's place for each value."""
    files = open_model(own_folder())
    entry = files.manifest["moe.ffn.up"]
    array = load(files)["moe.ffn.up"]
    assert array.dtype == jnp.uint8 and array.shape == (*entry.shape[:-1], entry.shape[-1] // 2)
