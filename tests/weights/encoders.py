"""Writers of each format and what they mean, in float64 loops that share nothing with the readers.

Each writer draws legal codes and scales for a tensor [.., out, in] and returns its parts by name and its values.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxmoe.models.manifest import Manifest
from jaxmoe.weights.formats import FLOAT_ROLES
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec
from tests import tiny

Parts = dict[str, np.ndarray]
Writer = Callable[[str, tuple[int, ...], np.random.Generator], tuple[Parts, np.ndarray]]
BLOCK = (24, 40)
GROUP = 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp8(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    return codes.view(ml_dtypes.float8_e4m3fn)


def _scales(shape: tuple[int, ...], rng: np.random.Generator, dtype: Any) -> np.ndarray:
    return (0.01 + rng.random(shape)).astype(dtype)


def _spread(scales: np.ndarray, group: int, size: int) -> np.ndarray:
    """Float64 scales of each input."""
    return np.stack([scales[..., column // group].astype(np.float64) for column in range(size)], axis=-1)


def fp8_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    weight = _fp8(shape, rng)
    rows, columns = (-(-size // width) for size, width in zip(shape[-2:], BLOCK, strict=True))
    dtype = ml_dtypes.bfloat16 if rng.integers(2) else np.float32
    scales = _scales((*shape[:-2], rows, columns), rng, dtype)
    exact = weight.astype(np.float64)
    for row in range(shape[-2]):
        for column in range(shape[-1]):
            exact[..., row, column] *= scales[..., row // BLOCK[0], column // BLOCK[1]].astype(np.float64)
    return {name: weight, f"{name}_scale_inv": scales}, exact


def mxfp8(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    weight = _fp8(shape, rng)
    exponents = rng.integers(90, 160, (*shape[:-1], -(-shape[-1] // 32)), np.uint8)
    exact = weight.astype(np.float64) * _spread(2.0 ** (exponents.astype(np.float64) - 127), 32, shape[-1])
    return {name: weight, f"{name}_scale": exponents}, exact


def mxfp4(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    codes = rng.integers(0, 16, shape)
    exponents = rng.integers(90, 160, (*shape[:-1], shape[-1] // 32), np.uint8)
    values = np.array([*FP4, *(-value for value in FP4)])[codes]
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    exact = values * _spread(2.0 ** (exponents.astype(np.float64) - 127), 32, shape[-1])
    scales = f"{name.removesuffix('_blocks')}_scales"
    return {name: packed.reshape(*shape[:-1], shape[-1] // 32, 16), scales: exponents}, exact


def int4_packed(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    values = rng.integers(-8, 8, shape)
    words = np.zeros((*shape[:-1], -(-shape[-1] // 8)), np.int64)
    for column in range(shape[-1]):
        words[..., column // 8] += (values[..., column] + 8) << 4 * (column % 8)
    scales = _scales((*shape[:-1], -(-shape[-1] // GROUP)), rng, ml_dtypes.bfloat16)
    parts = {
        f"{name}_packed": words.astype(np.uint32).view(np.int32),
        f"{name}_scale": scales,
        f"{name}_shape": np.array(shape, np.int32 if rng.integers(2) else np.int64),
    }
    return parts, values * _spread(scales, GROUP, shape[-1])


def int8_channel(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """compressed-tensors, one scale an output, with and without an axis for it."""
    values = rng.integers(-128, 128, shape, np.int8)
    scales = _scales((*shape[:-1], 1), rng, ml_dtypes.bfloat16)
    stored = scales[..., 0] if rng.integers(2) else scales
    return {name: values, f"{name}_scale": stored}, values * _spread(scales, shape[-1], shape[-1])


def int8_groups(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    values = rng.integers(-128, 128, shape, np.int8)
    scales = _scales((*shape[:-1], -(-shape[-1] // GROUP)), rng, np.float16)
    return {name: values, f"{name}_scale": scales}, values * _spread(scales, GROUP, shape[-1])


def ascend(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    values = rng.integers(-128, 128, shape, np.int8)
    scales = _scales((*shape[:-1], 1), rng, np.float32)
    parts = {name: values, f"{name}_scale": scales, f"{name}_offset": np.zeros(scales.shape, np.float32)}
    return parts, values * _spread(scales, shape[-1], shape[-1])


def ascend_int4(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """Two rows in each row of bytes, and sums that nobody needs: for parts of the inputs where those are split."""
    values = rng.integers(-8, 8, shape)
    packed = np.zeros((*shape[:-2], shape[-2] // 2, shape[-1]), np.int64)
    for row in range(shape[-2]):
        packed[..., row // 2, :] += values[..., row, :] % 16 << 4 * (row % 2)
    scales = _scales((*shape[:-1], 1), rng, np.float32)
    sums = 16 if name.endswith("down_proj.weight") else 1
    parts = {
        name: packed.astype(np.uint8).view(np.int8),
        f"{name}_scale": scales,
        f"{name}_offset": np.zeros(scales.shape, np.float32),
        f"{name.removesuffix('.weight')}.scale_bias": np.ones((*shape[:-1], sums), np.float32),
    }
    return parts, values * _spread(scales, shape[-1], shape[-1])


def int4_bytes(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """compressed-tensors, four bits in a byte each."""
    values = rng.integers(-8, 8, shape, np.int8)
    scales = _scales((*shape[:-1], -(-shape[-1] // GROUP)), rng, ml_dtypes.bfloat16)
    return {name: values, f"{name}_scale": scales}, values * _spread(scales, GROUP, shape[-1])


def int8_words(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """compressed-tensors, weight only: four values plus 128 in a word."""
    values = rng.integers(-128, 128, shape)
    words = np.zeros((*shape[:-1], -(-shape[-1] // 4)), np.int64)
    for column in range(shape[-1]):
        words[..., column // 4] += (values[..., column] + 128) << 8 * (column % 4)
    scales = _scales((*shape[:-1], 1), rng, np.float32)
    parts = {
        f"{name}_packed": words.astype(np.uint32).view(np.int32),
        f"{name}_scale": scales,
        f"{name}_shape": np.array(shape, np.int64),
    }
    return parts, values * _spread(scales, shape[-1], shape[-1])


def fp8_channel(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """compressed-tensors, one scale an output, with and without an axis for it."""
    weight, scales = _fp8(shape, rng), _scales((*shape[:-1], 1), rng, ml_dtypes.bfloat16)
    stored = scales[..., 0] if rng.integers(2) else scales
    return {name: weight, f"{name}_scale": stored}, weight.astype(np.float64) * scales.astype(np.float64)


def fp8_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """One scale for a matrix, with and without axes for it, and the step of activations beside it."""
    weight, scales = _fp8(shape, rng), _scales((*shape[:-2], 1, 1), rng, np.float32)
    parts = {
        name: weight,
        f"{name}_scale": scales.reshape(scales.shape[: len(shape) - int(rng.integers(3))]),
        f"{name.removesuffix('.weight')}.input_scale": np.ones(1 if rng.integers(2) else (), np.float32),
    }
    return parts, weight.astype(np.float64) * scales.astype(np.float64)


def fp8_compressed_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """What `fp8_blocks` writes, under compressed-tensors' name."""
    parts, exact = fp8_blocks(name, shape, rng)
    return {name: parts[name], f"{name}_scale": parts[f"{name}_scale_inv"]}, exact


def compressed(weights: Mapping[str, Any], storage: str, inputs: Any = None) -> dict[str, Any]:
    """The quantization_config that compressed-tensors writes."""
    numbers = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, **weights},
        "input_activations": inputs and {**numbers, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


PER_TOKEN = {"strategy": "token", "dynamic": True, "observer": None}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    },
    "mxfp8": {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "int4": compressed({"num_bits": 4, "strategy": "group", "group_size": GROUP}, "pack-quantized"),
    "int8-channel": compressed({}, "int-quantized", PER_TOKEN),
    "int8-groups": compressed({"strategy": "group", "group_size": GROUP}, "int-quantized"),
    "int4-bytes": compressed({"num_bits": 4, "strategy": "group", "group_size": GROUP}, "int-quantized", PER_TOKEN),
    "int8-words": compressed({}, "pack-quantized"),
    "fp8-tensor": compressed(
        {"type": "float", "strategy": "tensor"}, "float-quantized", {"type": "float", "strategy": "tensor"}
    ),
    "ascend": None,
}
"""Format -> its quantization_config; AscendV1 has a file of its own."""
WRITERS: dict[str, Writer] = {
    "fp8": fp8_blocks,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "int4": int4_packed,
    "int8-channel": int8_channel,
    "int8-groups": int8_groups,
    "int4-bytes": int4_bytes,
    "int8-words": int8_words,
    "ascend": ascend,
}
FORMS: dict[str, Writer] = {
    **WRITERS,
    "ascend-int4": ascend_int4,
    "fp8-channel": fp8_channel,
    "fp8-tensor": fp8_tensor,
    "fp8-compressed-blocks": fp8_compressed_blocks,
}
"""Those, and other forms of one tensor in the same formats."""
SCHEMES = {
    "int8-channel": "w8a8-channel",
    "int8-groups": "w8a16-g32",
    "int4-bytes": "w4a8-g32",
    "int8-words": "w8a16-channel",
    "ascend": "w8a8-channel",
}
"""Formats whose integers stay as they are, and the scheme that they then have in most roles."""
_ASCEND = {"experts.down": ("w4a8-channel", "W4A8_DYNAMIC"), "shared.up": ("w8a16-channel", "W8A16")}
"""Roles that the AscendV1 checkpoint has in other types."""


def scheme_of(kind: str, role: str) -> str | None:
    """Name of the scheme that a role has in a format; None: it is float."""
    if role in FLOAT_ROLES or kind not in SCHEMES:
        return None
    return _ASCEND[role][0] if kind == "ascend" and role in _ASCEND else SCHEMES[kind]


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, max_shard_bytes: int = 1 << 20
) -> Path:
    """A checkpoint folder."""
    specs = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in tensors.items()]
    with CheckpointWriter(folder, specs, max_shard_bytes=max_shard_bytes) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder


def encoded_tensors(kind: str, manifest: Manifest) -> tuple[Parts, dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a model in a format, the float64 values of each logical one, and their AscendV1 types.

    Roles without a quantised operator are plain, and so is the first layer's part of every other one where the format
    is decoded: a checkpoint mixes.
    """
    parts: Parts = {}
    exact: dict[str, np.ndarray] = {}
    types: dict[str, str] = {}
    for entry in manifest.entries:
        for position, name in entry.tensors():
            if name in exact:
                continue
            rng = np.random.default_rng(len(exact))
            plain = entry.role in FLOAT_ROLES or (kind == "mxfp4" and not name.endswith("_blocks"))
            if plain or (kind not in SCHEMES and position[:1] == (0,) and entry.role.startswith(("attention", "ffn"))):
                parts[name] = tiny.draw(name, entry.tensor_shape)
                exact[name] = parts[name].astype(np.float64)
                types[name] = "FLOAT"
                continue
            four_bits = kind == "ascend" and scheme_of(kind, entry.role) == "w4a8-channel"
            writer = ascend_int4 if four_bits else FORMS[kind]
            more, exact[name] = writer(name, entry.tensor_shape, rng)
            parts.update(more)
            types.update(dict.fromkeys(more, _ASCEND.get(entry.role, ("", "W8A8_DYNAMIC"))[1]))
    return parts, exact, types


def write_encoded(
    folder: Path, kind: str, config: Mapping[str, Any], manifest: Manifest
) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint in a format and the values of its logical tensors."""
    parts, exact, types = encoded_tensors(kind, manifest)
    named = CONFIGS[kind]
    write(folder, config if named is None else {**config, "quantization_config": named}, parts)
    if kind == "ascend":
        described = {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "group_size": 0, "metadata": {}, **types}
        (folder / "quant_model_description.json").write_text(json.dumps(described), encoding="utf-8")
    return folder, exact
