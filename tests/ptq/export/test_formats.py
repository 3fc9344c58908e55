"""Output formats: what they write is what they declare, field by field, and our reader finds the same integers."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.ptq.export import FORMATS, output_format
from jaxmoe.ptq.export.ascend import description, scale_bias
from jaxmoe.ptq.recipe import Recipe, Rule, match_recipe
from jaxmoe.quant.int4 import pack_pairs
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.cells import cell_shape, hub_cells
from jaxmoe.weights.decoded import Int4Groups
from jaxmoe.weights.load import open_model
from jaxmoe.weights.packing import pairs_to_int8
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.export import folders
from tests.ptq.export.folders import EXPERTS, INT4_EXPERTS, tiny_matches
from tests.running import run_logits

NATIVE, COMPRESSED, ASCEND = (FORMATS[name] for name in ("jaxmoe", "compressed-tensors", "ascendv1"))
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
FLOAT = np.dtype(np.float32)
CHANNEL = {"": "w8a8-channel"}
G32 = {"": "w8a8-g32"}


def integers(shape: tuple[int, ...], bits: int, seed: int = 0) -> np.ndarray:
    limit = 2 ** (bits - 1) - 1
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape, np.int8)


def scales(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    return (0.01 + np.random.default_rng(seed).random(shape)).astype(np.float32)


def test_the_table() -> None:
    assert list(FORMATS) == ["jaxmoe", "compressed-tensors", "ascendv1"]
    assert output_format("ascendv1") is ASCEND
    with pytest.raises(ConfigError, match="no output format 'gguf'; there are jaxmoe, compressed-tensors, ascendv1"):
        output_format("gguf")


def test_file_names() -> None:
    assert ASCEND.shard_name(2, 13) == "quant_model_weights-00002-of-00013.safetensors"
    assert ASCEND.index_name == "quant_model_weights.safetensors.index.json"
    for output in (NATIVE, COMPRESSED):
        assert output.shard_name(2, 13) == "model-00002-of-00013.safetensors"
        assert output.index_name == "model.safetensors.index.json"


@given(
    st.sampled_from(["w8a8-g32", "w8a8-channel", "w4a8-g32", "w4a16-g64", "w8a16-g32", "w4a8-channel"]),
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(0, 2**31),
)
def test_native_tensors_invert(name: str, rows: int, pairs: int, seed: int) -> None:
    scheme = parse_scheme(name)
    values = integers((rows, 2 * pairs), scheme.weight_bits, seed)
    steps = scales(scheme.scales_shape(values.shape))
    found = NATIVE.tensors("x.weight", values, steps, scheme)
    specs = NATIVE.specs("x.weight", values.shape, scheme, FLOAT)
    assert {s.name: (s.dtype, s.shape) for s in specs} == {n: (a.dtype, a.shape) for n, a in found.items()}
    np.testing.assert_array_equal(found["x.weight_scale"], steps)
    if scheme.weight_bits == 8:
        np.testing.assert_array_equal(found["x.weight"], values)
    else:
        group = scheme.group_size(values.shape[-1])
        np.testing.assert_array_equal(found["x.weight_packed"], np.asarray(pack_pairs(jnp.asarray(values), group)))
        np.testing.assert_array_equal(pairs_to_int8(found["x.weight_packed"], group), values)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**31))
def test_packed_words(rows: int, width: int, seed: int) -> None:
    """Eight values plus 8 a word, the first in the lowest bits: by arithmetic on Python's integers."""
    values = integers((rows, width), 4, seed)
    scheme = Scheme(weight_bits=4, activation_bits=16, group=32)
    found = COMPRESSED.tensors("x.weight", values, scales(scheme.scales_shape(values.shape)), scheme)
    words = found["x.weight_packed"]
    assert words.shape == (rows, -(-width // 8)) and found["x.weight_shape"].tolist() == [rows, width]
    for row in range(rows):
        for word in range(words.shape[1]):
            part = values[row, 8 * word : 8 * word + 8]
            expected = sum((int(value) + 8) << (4 * place) for place, value in enumerate(part))
            assert int(words[row, word]) % 2**32 == expected


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**31))
def test_packed_words_of_int8(rows: int, width: int, seed: int) -> None:
    """Four values plus 128 a word, likewise."""
    values = integers((rows, width), 8, seed)
    scheme = Scheme(activation_bits=16, group=None)
    found = COMPRESSED.tensors("x.weight", values, scales((rows, 1)), scheme)
    words = found["x.weight_packed"]
    specs = COMPRESSED.specs("x.weight", values.shape, scheme, FLOAT)
    assert {s.name: (s.dtype, s.shape) for s in specs} == {n: (a.dtype, a.shape) for n, a in found.items()}
    for row in range(rows):
        for word in range(words.shape[1]):
            part = values[row, 4 * word : 4 * word + 4]
            expected = sum((int(value) + 128) << (8 * place) for place, value in enumerate(part))
            assert int(words[row, word]) % 2**32 == expected


def test_compressed_int8_and_int4_in_bytes() -> None:
    for name in ("w8a8-channel", "w8a8-g32", "w4a8-g32", "w4a8-channel"):
        scheme = parse_scheme(name)
        values = integers((6, 64), scheme.weight_bits)
        steps = scales(scheme.scales_shape(values.shape))
        found = COMPRESSED.tensors("x.weight", values, steps, scheme)
        assert set(found) == {"x.weight", "x.weight_scale"}
        assert found["x.weight"].dtype == np.int8
        np.testing.assert_array_equal(found["x.weight"], values)
        specs = COMPRESSED.specs("x.weight", (6, 64), scheme, FLOAT)
        assert {s.name: (s.dtype, s.shape) for s in specs} == {n: (a.dtype, a.shape) for n, a in found.items()}


@given(st.sampled_from(["up_proj", "down_proj"]), st.integers(1, 5), st.integers(0, 2**31))
def test_ascend_int4(last: str, pairs: int, seed: int) -> None:
    """Rows in pairs, and the biases against float64 sums of weights that were dequantised in float64."""
    rows, width = 2 * pairs, 32
    values = integers((rows, width), 4, seed)
    steps = scales((rows, 1), seed)
    scheme = Scheme(weight_bits=4, group=None)
    name = f"model.layers.0.mlp.experts.0.{last}.weight"
    found = ASCEND.tensors(name, values, steps, scheme)
    specs = ASCEND.specs(name, values.shape, scheme, FLOAT)
    assert {s.name: (s.dtype, s.shape) for s in specs} == {n: (a.dtype, a.shape) for n, a in found.items()}
    packed = found[name].view(np.uint8).astype(int)
    for row in range(rows):
        nibbles = (packed[row // 2] >> (4 * (row % 2))) & 15
        np.testing.assert_array_equal(np.where(nibbles > 7, nibbles - 16, nibbles), values[row])
    shards = 16 if last == "down_proj" else 1
    weights = values.astype(np.float64) * steps.astype(np.float64)
    oracle = np.stack([8 * part.sum(axis=1) for part in np.split(weights, shards, axis=1)], axis=1)
    bias = found[f"model.layers.0.mlp.experts.0.{last}.scale_bias"]
    np.testing.assert_array_equal(bias, oracle.astype(np.float32))
    assert not found[f"{name}_offset"].any() and found[f"{name}_offset"].shape == (rows, 1)


def test_scale_bias_is_what_the_kernel_takes_off() -> None:
    """A product of unsigned nibbles (each 8 too large) minus the bias is the product of the weights."""
    values, steps, x = integers((4, 32), 4), np.float32([[0.5], [0.25], [2], [1]]), integers((32,), 8)
    bias = scale_bias(values, steps, 16).astype(np.float64).sum(axis=1)
    np.testing.assert_array_equal(bias, 8 * values.sum(axis=1, dtype=np.int64) * steps[:, 0])
    # The kernel splits activations x = 16 h + l and adds 8 to l: what is added is 8 sum W.
    high, low = x.astype(int) >> 4, x.astype(int) & 15
    products = (16 * high + (low - 8)) @ values.T.astype(int) * steps[:, 0]
    np.testing.assert_array_equal(products + bias, x.astype(int) @ values.T.astype(int) * steps[:, 0])


SOURCES: dict[str, tuple[str, str, dict[str, str]]] = {
    "ours": ("jaxmoe", "glm4_moe", G32),
    "ours, int4 rows": ("jaxmoe", "glm4_moe", INT4_EXPERTS),
    "ours, fused source": ("jaxmoe", "gpt_oss", {"": "w8a8-g32", **dict.fromkeys(EXPERTS, "w4a8-g32")}),
    "compressed channel": ("compressed-tensors", "glm4_moe", CHANNEL),
    "compressed groups": ("compressed-tensors", "glm4_moe", G32),
    "compressed channel, fused source": ("compressed-tensors", "hy_v4", CHANNEL),
    "compressed, nested config": ("compressed-tensors", "kimi_k25", CHANNEL),
    "compressed, other names": ("compressed-tensors", "minimax_m2", CHANNEL),
    "compressed, int4 in bytes": ("compressed-tensors", "qwen3_moe", {**G32, **dict.fromkeys(EXPERTS, "w4a8-g32")}),
    "compressed, int4 rows": ("compressed-tensors", "glm4_moe", INT4_EXPERTS),
    "compressed, weight only": ("compressed-tensors", "glm4_moe", {"": "w8a16-g32"}),
    "compressed, weight only, fused source": ("compressed-tensors", "gpt_oss", {"": "w8a16-channel"}),
    "compressed, every group": (
        "compressed-tensors",
        "glm4_moe",
        {
            "": "w8a8-g32",
            "attention.q": "w8a8-channel",
            "attention.k": "w8a8-channel",
            "attention.v": "w8a16-channel",
            "experts.gate": "w4a8-channel",
            "experts.up": "w4a8-g32",
            "shared.up": "w8a16-g32",
        },
    ),
    "ascend channel": ("ascendv1", "deepseek_v2", CHANNEL),
    "ascend, int4 experts": ("ascendv1", "glm4_moe", INT4_EXPERTS),
    "ascend, int4 experts, fused source": ("ascendv1", "hy_v4", INT4_EXPERTS),
    "ascend, weight only": ("ascendv1", "qwen3_moe", {"": "w8a16-channel"}),
    "ascend, every type": (
        "ascendv1",
        "glm4_moe",
        {**G32, **dict.fromkeys(EXPERTS, "w4a8-channel"), "attention.o": "w8a16-g32", "ffn.up": "w8a16-channel"},
    ),
    "ascend groups": ("ascendv1", "glm4_moe", G32),
    "ascend channel, fused source": ("ascendv1", "hy_v4", CHANNEL),
    "ascend, nested config": ("ascendv1", "kimi_k25", CHANNEL),
}


@pytest.mark.parametrize("case", SOURCES)
def test_our_reader_finds_the_same_integers(tmp_path: Path, case: str) -> None:
    name, family, schemes = SOURCES[case]
    rounded = folders.write(
        tmp_path / "out", tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS[family]), FORMATS[name], schemes
    )
    files = open_model(tmp_path / "out")
    assert files.not_loaded == () and len({meta.file for meta in files.checkpoint.tensors.values()}) > 1
    count = 0
    for entry in files.manifest.entries:
        scheme = files.schemes.get(entry.path)
        shape = cell_shape(entry)
        for cell in hub_cells(entry):
            assert (cell.tensor in rounded) == (scheme is not None)
            if scheme is None:
                continue
            values, steps = rounded[cell.tensor]
            wanted = parse_scheme(schemes.get(entry.role, schemes[""]))
            same = (scheme.weight_bits, scheme.activation_bits) == (wanted.weight_bits, wanted.activation_bits)
            # One group for a whole row may be called one scale a channel.
            assert same and scheme.group_size(shape[-1]) == wanted.group_size(shape[-1])
            stored = slice(0, scheme.values_shape(shape)[-1])
            read = files.source.read(entry, cell, (slice(0, shape[0]), stored), "values")
            read = read if scheme.weight_bits == 8 else pairs_to_int8(read, scheme.group_size(shape[-1]))
            np.testing.assert_array_equal(read, values)
            groups = slice(0, steps.shape[-1])
            np.testing.assert_array_equal(files.source.read(entry, cell, (slice(0, shape[0]), groups), "scale"), steps)
            count += 1
    assert count == len(rounded) > 10


@pytest.mark.parametrize("name", ["compressed-tensors", "ascendv1"])
def test_a_foreign_result_is_served_as_our_own(tmp_path: Path, name: str) -> None:
    """INT4 experts of other layouts beside INT8 in channels and in groups: the same logits, bit for bit."""
    schemes = {**INT4_EXPERTS, "attention.o": "w8a8-g32"}
    source = tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS["qwen3_moe"])
    for output in (NATIVE, FORMATS[name]):
        folders.write(tmp_path / output.name, source, output, schemes)
    found, own = (run_logits(tmp_path / output, tiny.token_ids(), kv_cache="int8") for output in (name, NATIVE.name))
    np.testing.assert_array_equal(found, own)
    assert np.isfinite(own).all() and own.std() > 0


def test_our_reader_decodes_packed_words(tmp_path: Path) -> None:
    """W4A16 in experts beside W8A8: floats that equal integers times scales."""
    schemes = {"": "w8a8-channel", **dict.fromkeys(EXPERTS, "w4a16-g32")}
    rounded = folders.write(
        tmp_path / "out", tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS["glm4_moe"]), COMPRESSED, schemes
    )
    files = open_model(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == ["pack-quantized", "int-quantized"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    for entry in files.manifest.entries:
        if entry.role not in EXPERTS:
            continue
        for cell in hub_cells(entry):
            assert isinstance(files.source.stored[cell.tensor].encoding, Int4Groups)
            whole = tuple(slice(0, size) for size in cell_shape(entry))
            values, steps = rounded[cell.tensor]
            expected = values.astype(np.float32) * np.repeat(steps, 32, axis=-1)
            np.testing.assert_array_equal(files.source.read(entry, cell, whole), expected)


def test_compressed_configuration() -> None:
    matches, manifest = tiny_matches("glm4_moe", {**CHANNEL, "attention.q": "float", "attention.k": "float"})
    source = {"model_type": "glm4_moe", "quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}
    config = COMPRESSED.config(source, matches, manifest, kv_cache="int8", copied=["vision.blocks.7.fc.weight"])
    quantization = config.pop("quantization_config")
    assert config == {"model_type": "glm4_moe", "dtype": "bfloat16"}
    numbers = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
    weights = {"strategy": "channel", "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    inputs = {"strategy": "token", "dynamic": True, "actorder": None, "observer": None, "observer_kwargs": {}}
    assert quantization == {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "int-quantized",
                "weights": {**numbers, **weights},
                "input_activations": {**numbers, **inputs},
                "output_activations": None,
            }
        },
        "ignore": [
            "lm_head",
            r"re:^model\.layers\.\d+\.mlp\.gate$",
            r"re:^model\.layers\.\d+\.self_attn\.k_proj$",
            r"re:^model\.layers\.\d+\.self_attn\.q_proj$",
            r"re:^vision\.blocks\.\d+\.fc$",
        ],
    }


def test_layers_are_named_where_they_differ() -> None:
    """Attention of the dense layer in another scheme than that of expert layers, under one template."""
    matches, manifest = tiny_matches("glm4_moe", CHANNEL)
    changed = tuple(
        type(m)(entry=m.entry, rule=m.rule, scheme=None) if m.entry.path == "dense.attention.v" else m for m in matches
    )
    ignore = COMPRESSED.config({}, changed, manifest, kv_cache="int8")["quantization_config"]["ignore"]
    pattern = next(name for name in ignore if "v_proj" in name)
    assert pattern == r"re:^model\.layers\.(?:0)\.self_attn\.v_proj$"
    assert re.match(pattern[3:], "model.layers.0.self_attn.v_proj")
    assert not re.match(pattern[3:], "model.layers.1.self_attn.v_proj")


def test_a_tied_head_is_left_out() -> None:
    """It is a linear module without a tensor of its own (D10)."""
    matches, manifest = tiny_matches("glm4_moe", CHANNEL, tie_word_embeddings=True)
    ignore = COMPRESSED.config({}, matches, manifest, kv_cache="int8")["quantization_config"]["ignore"]
    assert [name for name in ignore if "lm_head" in name] == [r"re:^(?:.*\.)?lm_head$"]


def test_description_field_by_field() -> None:
    schemes = {"": "w8a8-g32", "experts.gate": "w8a8-channel", "shared.up": "w8a16-g32", **INT4_EXPERTS}
    schemes[""] = "w8a8-g32"
    matches, _ = tiny_matches("glm4_moe", {**schemes, "experts.down": "w4a8-channel", "experts.gate": "w8a8-channel"})
    found = description(matches, copied=["vision.fc.weight"])
    head = {key: found.pop(key) for key in ("version", "model_quant_type", "metadata", "group_size", "optional")}
    assert head == {
        "version": "1.0.0",
        "model_quant_type": "W8A8_DYNAMIC",
        "metadata": {},
        "group_size": 32,
        "optional": {},
    }
    expected = {"vision.fc.weight": "FLOAT"}
    kinds = {None: "FLOAT", (8, 8): "W8A8_DYNAMIC", (8, 16): "W8A16", (4, 8): "W4A8_DYNAMIC"}
    for match in matches:
        scheme = match.scheme
        kind = kinds[None if scheme is None else (scheme.weight_bits, scheme.activation_bits)]
        for _, name in match.entry.own_tensors():
            for spec in ASCEND.specs(name, match.entry.own_shape, scheme, FLOAT):
                expected[spec.name] = kind
    assert found == expected
    assert set(expected.values()) == {"FLOAT", "W8A8_DYNAMIC", "W8A16", "W4A8_DYNAMIC"}
    assert found[DOWN.replace("weight", "scale_bias")] == found[f"{DOWN}_offset"] == "W4A8_DYNAMIC"


@pytest.mark.parametrize(
    ("schemes", "label", "group"),
    [
        (CHANNEL, "W8A8_DYNAMIC", 0),
        (G32, "W8A8_DYNAMIC", 32),
        ({"": "w8a16-g32"}, "W8A16", 32),
        ({"experts.up": "w4a8-g64"}, "W4A8_DYNAMIC", 0),
        ({"experts.up": "w4a8-g64", "ffn.up": "w8a16-channel"}, "W8A16", 0),
        ({}, "FLOAT", 0),
    ],
)
def test_model_type(schemes: dict[str, str], label: str, group: int) -> None:
    matches, manifest = tiny_matches("glm4_moe", schemes)
    found = description(matches)
    assert (found["model_quant_type"], found["group_size"]) == (label, group)
    source = {"model_type": "x", "quantize": "old", "text_config": {"quantization_config": {}}}
    config = ASCEND.config(source, matches, manifest, kv_cache="int8")
    expected: dict[str, Any] = {"model_type": "x", "text_config": {}}
    assert config == (expected if label == "FLOAT" else {**expected, "quantize": label.lower()})
    assert json.loads(ASCEND.side_files(matches)["quant_model_description.json"]) == found


def test_released_names_of_experts() -> None:
    """A source that fuses its experts becomes one matrix each, under the names that engines look for."""
    for family in ("hy_v4", "gpt_oss"):
        matches, _ = tiny_matches(family, CHANNEL)
        names = {name for match in matches if match.entry.role in EXPERTS for _, name in match.entry.own_tensors()}
        assert EXPERT in names and DOWN in names
        assert all(re.fullmatch(r"model\.(mtp_)?layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight", n) for n in names)


REFUSED: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "ct: ragged": (
        "compressed-tensors",
        {"": "w8a8-g64"},
        {},
        r"model\.layers\.0\.mlp\.down_proj\.weight: w8a8-g64 leaves a last group of 32 of 96 inputs, which "
        r"compressed-tensors cannot say; choose a group that divides 96 \(g32\), one scale a channel, or output "
        "format jaxmoe",
    ),
    "ct: short": ("compressed-tensors", {"experts.down": "w8a8-g128"}, {}, "a last group of 32 of 32 inputs"),
    "ct: nothing": ("compressed-tensors", {}, {}, "leaves every tensor float"),
    "ascend: ragged": ("ascendv1", {"": "w8a8-g64"}, {}, "a last group of 32 of 96 inputs, which ascendv1 cannot say"),
    "ascend: two sizes": (
        "ascendv1",
        {"shared.up": "w8a8-g32", "ffn.up": "w8a16-g64", "experts.up": "w8a8-g32"},
        {"hidden_size": 128},
        "has one group_size for all tensors; choose one group size",
    ),
    "ascend: int4 groups": (
        "ascendv1",
        {"experts.up": "w4a8-g32"},
        {},
        r"experts\.0\.up_proj\.weight: ascendv1 has 4-bit weights with one scale a row only, w4a8-g32 has 2 for 64 "
        "inputs; choose w4a8-channel, w8a8 for this role, or",
    ),
    "ascend: int4 weight-only": (
        "ascendv1",
        {"experts.down": "w4a16-g32"},
        {},
        "has no w4a16-g32; choose w4a8-channel",
    ),
    "ascend: odd rows": (
        "ascendv1",
        {"experts.up": "w4a8-channel"},
        {"moe_intermediate_size": 33},
        "stores 4-bit rows in pairs, and 33 rows are odd",
    ),
    "ascend: sixteenths": (
        "ascendv1",
        {"experts.down": "w4a8-channel"},
        {"moe_intermediate_size": 24},
        "16 parts of the inputs, which do not divide 24",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_say(case: str) -> None:
    name, schemes, changes, message = REFUSED[case]
    matches, _ = tiny_matches("glm4_moe", schemes, **changes)
    with pytest.raises(RecipeError, match=message):
        FORMATS[name].check(matches)


def test_layers_that_share_a_name_have_one_scheme_in_our_own_format() -> None:
    """A rule with names quantises a stack apart: config.json of ours could not say it, and others can."""
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    attention = tuple(f"attention.{part}" for part in "qkvo")
    rest = tuple({entry.role for entry in manifest.entries} - set(attention))
    rules = (
        Rule(roles=attention, names=("model.layers.0.*",), scheme="w8a8-g64"),
        Rule(roles=attention, scheme="w8a8-channel"),
        Rule(roles=rest, scheme="float"),
    )
    matches = match_recipe(Recipe(name="apart", rule=rules), manifest)
    message = (
        r"model\.layers\.0\.self_attn\.k_proj\.weight is w8a8-g64 and model\.layers\.1\.self_attn\.k_proj\.weight "
        r"w8a8-channel, but output format jaxmoe has one scheme for all layers of "
        r"model\.layers\.\{layer\}\.self_attn\.k_proj\.weight; choose patterns that take both"
    )
    with pytest.raises(RecipeError, match=message):
        NATIVE.check(matches)
    with pytest.raises(AssertionError, match="self_attn"):
        NATIVE.config({}, matches, manifest, kv_cache="int8")
    for output in (COMPRESSED, ASCEND):
        output.check(matches)
    both = tuple(rule for rule in rules if not rule.names)
    NATIVE.check(match_recipe(Recipe(name="together", rule=both), manifest))


def test_which_formats_say_that_the_cache_is_int8() -> None:
    """Those whose configuration changes with it."""
    matches, manifest = tiny_matches("glm4_moe", CHANNEL)
    for output in FORMATS.values():
        int8, floats = (output.config({}, matches, manifest, kv_cache=kind) for kind in ("int8", "bfloat16"))
        assert (int8 != floats) == output.int8_cache == (output is NATIVE)


def test_ascend_int4_of_other_names() -> None:
    matches, _ = tiny_matches("deepseek_v3", {"attention.q_b": "w4a8-g64"})
    with pytest.raises(
        RecipeError, match=r"q_b_proj\.weight: ascendv1 has 4-bit weights of up_proj, .* not of q_b_proj"
    ):
        ASCEND.check(matches)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_family_in_every_format(family: str) -> None:
    """Names are unique, and what is declared is described."""
    matches, _ = tiny_matches(family, CHANNEL)
    for output in FORMATS.values():
        output.check(matches)
        names = [
            spec.name
            for match in matches
            for _, name in match.entry.own_tensors()
            for spec in output.specs(name, match.entry.own_shape, match.scheme, FLOAT)
        ]
        assert len(names) == len(set(names))
        if output is ASCEND:
            assert set(names) <= set(description(matches))


def test_ascend_folder_of_int4_experts(tmp_path: Path) -> None:
    """Files, names and contents of a whole folder, read back by hand."""
    schemes = {"": "w8a8-channel", "experts.down": "w4a8-channel"}
    rounded = folders.write(
        tmp_path / "out", tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS["glm4_moe"]), ASCEND, schemes
    )
    out = tmp_path / "out"
    names = sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors")
    assert names[0] == f"quant_model_weights-00001-of-{len(names):05d}.safetensors" and len(names) > 1
    checkpoint = open_checkpoint(out)
    described = json.loads((out / "quant_model_description.json").read_text(encoding="utf-8"))
    assert set(checkpoint.tensors) == set(described) - {
        "version",
        "model_quant_type",
        "metadata",
        "group_size",
        "optional",
    }
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["quantize"] == "w8a8_dynamic"
    packed, (values, steps) = checkpoint.read(DOWN), rounded[DOWN]
    assert packed.shape == (32, 32)
    np.testing.assert_array_equal((packed << 4) >> 4, values[0::2])
    np.testing.assert_array_equal(packed >> 4, values[1::2])
    np.testing.assert_array_equal(checkpoint.read(f"{DOWN}_scale"), steps)
