"""Every encoding: all of it and any slice of it equal what the writers say, from no other bytes than needed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.errors import UnsupportedError, WeightsError
from jaxmoe.ops.linear.reference import pack_pairs
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.decoded import Fp8Blocks, Fp8Scales, Int4Groups, MxFp4, MxFp8
from jaxmoe.weights.encodings import (
    FLOAT_DTYPES,
    Encoding,
    Integers,
    Plain,
    Storage,
    cover,
)
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint
from tests.weights import encoders

NAME = "model.layers.0.mlp.down_proj.weight"
FUSED = "model.layers.0.mlp.experts.down_proj_blocks"
Case = tuple[Encoding, str, tuple[int, ...]]


def integers(scheme: Scheme, *, offset: bool = False, storage: Storage = "own") -> Integers:
    return Integers(scheme=scheme, scale_dtypes=FLOAT_DTYPES, flat_scales=not offset, offset=offset, storage=storage)


CASES: dict[str, Case] = {
    "fp8": (Fp8Blocks(block=encoders.BLOCK), "fp8", (48, 80)),
    "fp8, ragged": (Fp8Blocks(block=encoders.BLOCK), "fp8", (50, 97)),
    "fp8, less than a block": (Fp8Blocks(block=encoders.BLOCK), "fp8", (5, 7)),
    "fp8, experts": (Fp8Blocks(block=encoders.BLOCK), "fp8", (3, 30, 64)),
    "mxfp8": (MxFp8(), "mxfp8", (6, 96)),
    "mxfp8, ragged": (MxFp8(), "mxfp8", (6, 71)),
    "mxfp8, experts": (MxFp8(), "mxfp8", (4, 5, 64)),
    "mxfp4": (MxFp4(), "mxfp4", (6, 96)),
    "mxfp4, experts": (MxFp4(), "mxfp4", (4, 5, 64)),
    "int4": (Int4Groups(group=encoders.GROUP), "int4", (6, 96)),
    "int4, ragged": (Int4Groups(group=encoders.GROUP), "int4", (6, 77)),
    "int4, less than a word": (Int4Groups(group=encoders.GROUP), "int4", (6, 3)),
    "int8, an output": (integers(parse_scheme("w8a8-channel")), "int8-channel", (6, 71)),
    "int8, experts": (integers(parse_scheme("w8a8-channel")), "int8-channel", (3, 6, 32)),
    "int8, groups": (integers(parse_scheme("w8a16-g32")), "int8-groups", (6, 71)),
    "ascend": (integers(parse_scheme("w8a8-channel"), offset=True), "ascend", (6, 71)),
    "ascend int4": (integers(parse_scheme("w4a8-channel"), offset=True, storage="rows"), "ascend-int4", (10, 96)),
    "ascend int4, narrow": (integers(parse_scheme("w4a8-channel"), offset=True, storage="rows"), "ascend-int4", (2, 2)),
    "int4 in bytes": (integers(parse_scheme("w4a8-g32"), storage="bytes"), "int4-bytes", (6, 96)),
    "int4 in bytes, ragged": (integers(parse_scheme("w4a8-g32"), storage="bytes"), "int4-bytes", (5, 70)),
    "int4 in bytes, experts": (integers(parse_scheme("w4a8-g32"), storage="bytes"), "int4-bytes", (3, 5, 40)),
    "int8 in words": (integers(parse_scheme("w8a16-channel"), storage="words"), "int8-words", (6, 64)),
    "int8 in words, ragged": (integers(parse_scheme("w8a16-channel"), storage="words"), "int8-words", (6, 71)),
    "fp8, an output": (Fp8Scales(block=(1, None)), "fp8-channel", (6, 71)),
    "fp8, an output, experts": (Fp8Scales(block=(1, None)), "fp8-channel", (3, 6, 32)),
    "fp8, a tensor": (Fp8Scales(block=(None, None), static_inputs=True), "fp8-tensor", (6, 71)),
    "fp8, compressed blocks": (Fp8Scales(block=encoders.BLOCK), "fp8-compressed-blocks", (50, 97)),
}


def stored(folder: Path, case: Case, seed: int = 0) -> tuple[Checkpoint, str, np.ndarray, dict[str, np.ndarray]]:
    """A checkpoint with one tensor, its logical name, its values and its parts."""
    _, kind, shape = case
    name = FUSED if kind == "mxfp4" else NAME
    parts, exact = encoders.FORMS[kind](name, shape, np.random.default_rng(seed))
    return open_checkpoint(encoders.write(folder, {}, parts)), name, exact, parts


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def random_index(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[slice, ...]:
    index = []
    for size in shape:
        start = int(rng.integers(size))
        index.append(slice(start, int(rng.integers(start + 1, size + 1)), int(rng.integers(1, 4))))
    return tuple(index)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_all_of_it_and_any_slice(tmp_path: Path, name: str, seed: int) -> None:
    """Exactly: a product of two float32 is rounded once, and so is the writer's in float64."""
    encoding, _, shape = CASES[name]
    checkpoint, tensor, exact, _ = stored(tmp_path / "x", CASES[name], seed)
    found = encoding.read(checkpoint, tensor, shape, whole(shape))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, exact.astype(np.float32))
    rng = np.random.default_rng(seed)
    for _ in range(60):
        index = random_index(shape, rng)
        np.testing.assert_array_equal(encoding.read(checkpoint, tensor, shape, index), found[index], err_msg=str(index))


@pytest.mark.parametrize("name", CASES)
def test_its_parts_are_the_tensors_of_the_files(tmp_path: Path, name: str) -> None:
    encoding, _, shape = CASES[name]
    checkpoint, tensor, _, parts = stored(tmp_path / "x", CASES[name])
    declared = {part.name: part for part in encoding.parts(tensor, shape)}
    assert set(declared) == set(parts)
    for part in declared.values():
        meta = checkpoint.tensors[part.name]
        assert meta.shape in part.shapes and meta.dtype in part.dtypes
        # Any one of them that no other tensor of a checkpoint has makes the others missing.
        if part.name != tensor or not isinstance(encoding, Int4Groups):
            assert encoding.claims(tensor, {part.name: meta}) or isinstance(encoding, MxFp4), part.name
    assert not any(encoding.claims("other.weight", checkpoint.tensors) for _ in declared)


@pytest.mark.parametrize("name", [name for name, (_, _, shape) in CASES.items() if len(shape) == 3])
def test_one_expert_is_read_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, _, shape = CASES[name]
    checkpoint, tensor, _, parts = stored(tmp_path / "x", CASES[name])
    read: list[int] = []
    original = Checkpoint.read

    def counted(self: Checkpoint, *args: Any) -> np.ndarray:
        array = original(self, *args)
        read.append(array.nbytes)
        return array

    monkeypatch.setattr(Checkpoint, "read", counted)
    encoding.read(checkpoint, tensor, shape, (slice(1, 2), *whole(shape[1:])))
    assert sum(read) == sum(part.nbytes for part in parts.values()) // shape[0]


def test_plain_floats_keep_their_dtype(tmp_path: Path) -> None:
    tensors = {str(kind): np.arange(12).reshape(3, 4).astype(kind) for kind in FLOAT_DTYPES}
    checkpoint = open_checkpoint(encoders.write(tmp_path / "x", {}, tensors))
    for name, array in tensors.items():
        found = Plain().read(checkpoint, name, (3, 4), (slice(1, 3), slice(0, 4, 2)))
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array[1:3, ::2])


@pytest.mark.parametrize(("shape", "scheme"), [((6, 96), "w4a8-g32"), ((3, 5, 70), "w4a8-g64"), ((4, 6), "w4a8-g128")])
def test_our_own_four_bits(tmp_path: Path, shape: tuple[int, ...], scheme: str) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    array = quantize_weight(jnp.asarray(weight), parse_scheme(scheme))
    parts = {f"{NAME}_packed": np.asarray(array.qvalue), f"{NAME}_scale": np.asarray(array.scale)}
    checkpoint = open_checkpoint(encoders.write(tmp_path / "x", {}, parts))
    encoding = Integers(scheme=parse_scheme(scheme))
    assert [part.name for part in encoding.parts(NAME, shape)] == list(parts)
    found = encoding.read(checkpoint, NAME, shape, whole(shape))
    np.testing.assert_array_equal(found, np.asarray(array.dequantize()))
    rng = np.random.default_rng(1)
    for _ in range(40):
        index = random_index(shape, rng)
        np.testing.assert_array_equal(encoding.read(checkpoint, NAME, shape, index), found[index], err_msg=str(index))


def test_integers_and_scales_as_they_are(tmp_path: Path) -> None:
    for name in ("int8, experts", "int8, groups", "ascend"):
        encoding, _, shape = CASES[name]
        assert isinstance(encoding, Integers)
        checkpoint, tensor, _, parts = stored(tmp_path / name, CASES[name])
        scales = parts[f"{tensor}_scale"].astype(np.float32).reshape(encoding.scheme.scales_shape(shape))
        rng = np.random.default_rng(2)
        for _ in range(20):
            index = random_index(shape, rng)
            np.testing.assert_array_equal(encoding.read_values(checkpoint, tensor, shape, index), parts[tensor][index])
            index = random_index(scales.shape, rng)
            np.testing.assert_array_equal(encoding.read_scales(checkpoint, tensor, index), scales[index])
            assert encoding.read_scales(checkpoint, tensor, index).dtype == np.float32


STORED = [
    name for name, (encoding, _, _) in CASES.items() if isinstance(encoding, Integers) and encoding.storage != "own"
]


@pytest.mark.parametrize("name", STORED)
def test_integers_of_any_form_become_those_of_a_q_array(tmp_path: Path, name: str) -> None:
    """Any rows and any bytes of them: by the operators' oracle, from the values that the writer had."""
    encoding, _, shape = CASES[name]
    assert isinstance(encoding, Integers)
    checkpoint, tensor, exact, parts = stored(tmp_path / "x", CASES[name])
    group = encoding.scheme.group_size(shape[-1])
    scales = np.repeat(parts[f"{tensor}_scale"].astype(np.float64), group, axis=-1)[..., : shape[-1]]
    values = np.rint(exact / scales).astype(np.int8)
    expected = values if encoding.scheme.weight_bits == 8 else pack_pairs(values, group)
    found = encoding.read_values(checkpoint, tensor, shape, whole(expected.shape))
    assert found.dtype == encoding.scheme.values_dtype
    np.testing.assert_array_equal(found, expected)
    rng = np.random.default_rng(3)
    for _ in range(60):
        index = random_index(expected.shape, rng)
        found = encoding.read_values(checkpoint, tensor, shape, index)
        np.testing.assert_array_equal(found, expected[index], err_msg=str(index))


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_cover(width: int) -> None:
    rng = np.random.default_rng(width)
    axis = np.arange(29)
    for _ in range(200):
        (part,) = random_index((29,), rng)
        groups, within = cover(part, 29, width)
        taken = axis[groups.start * width : groups.stop * width]
        np.testing.assert_array_equal(taken[within], axis[part])
        assert groups.stop - groups.start <= math.ceil(29 / width)


# Refusals.

Change = Callable[[dict[str, np.ndarray]], None]


def put(suffix: str, value: Any) -> Change:
    """Puts a value into the last element of a part."""

    def change(parts: dict[str, np.ndarray]) -> None:
        name = next(name for name in parts if name.endswith(suffix))
        parts[name].reshape(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", put("weight", np.nan), f"{NAME}: a decoded value is NaN or infinite"),
        ("fp8", put("_scale_inv", np.nan), f"{NAME}_scale_inv: a scale is negative, infinite or NaN"),
        ("fp8", put("_scale_inv", np.inf), f"{NAME}_scale_inv: a scale is negative, infinite or NaN"),
        ("fp8", put("_scale_inv", -1), f"{NAME}_scale_inv: a scale is negative, infinite or NaN"),
        ("mxfp8", put("_scale", 255), f"{NAME}_scale: a scale has exponent 255, which is NaN"),
        ("mxfp8", put("weight", -np.nan), f"{NAME}: a decoded value is NaN or infinite"),
        ("mxfp8, ragged", put("_scale", 255), f"{NAME}_scale: a scale has exponent 255, which is NaN"),
        ("mxfp4", put("_scales", 255), "down_proj_scales: a scale has exponent 255, which is NaN"),
        ("int4", put("_shape", 95), f"{NAME}_shape says [6, 95], config.json asks for [6, 96]"),
        ("int4", put("_scale", np.nan), f"{NAME}_scale: a scale is negative, infinite or NaN"),
        ("int8, groups", put("_scale", 0), f"{NAME}_scale: a scale is zero, negative, infinite or NaN"),
        ("ascend", put("_scale", np.inf), f"{NAME}_scale: a scale is zero, negative, infinite or NaN"),
        ("fp8, an output", put("weight", np.nan), f"{NAME}: a decoded value is NaN or infinite"),
        ("fp8, a tensor", put("weight_scale", -1), f"{NAME}_scale: a scale is negative, infinite or NaN"),
        ("int4 in bytes", put("weight", 8), f"{NAME}: a value is outside -8..7, which 4 bits hold"),
        ("int4 in bytes", put("weight", -9), f"{NAME}: a value is outside -8..7, which 4 bits hold"),
        ("int4 in bytes", put("_scale", 0), f"{NAME}_scale: a scale is zero, negative, infinite or NaN"),
        ("int8 in words", put("_shape", 63), f"{NAME}_shape says [6, 63], config.json asks for [6, 64]"),
        ("ascend int4", put("_offset", -1), f"{NAME}_offset is not zero: only symmetric quantisation is supported"),
        ("ascend", put("_offset", 1), f"{NAME}_offset is not zero: only symmetric quantisation is supported"),
    ],
)
def test_an_illegal_value_is_refused_by_name(tmp_path: Path, name: str, change: Change, message: str) -> None:
    encoding, kind, shape = CASES[name]
    parts, _ = encoders.FORMS[kind](FUSED if kind == "mxfp4" else NAME, shape, np.random.default_rng(0))
    change(parts)
    checkpoint = open_checkpoint(encoders.write(tmp_path / "x", {}, parts))
    with pytest.raises(WeightsError) as caught:
        encoding.read(checkpoint, FUSED if kind == "mxfp4" else NAME, shape, whole(shape))
    assert str(caught.value).endswith(message)


def test_a_product_that_overflows_is_refused(tmp_path: Path) -> None:
    weight = np.full((2, 32), 448, ml_dtypes.float8_e4m3fn)
    parts = {NAME: weight, f"{NAME}_scale": np.full((2, 1), 254, np.uint8)}
    checkpoint = open_checkpoint(encoders.write(tmp_path / "x", {}, parts))
    with pytest.raises(WeightsError, match=f"^{NAME}: a decoded value is NaN or infinite"):
        MxFp8().read(checkpoint, NAME, (2, 32), whole((2, 32)))


@pytest.mark.parametrize(
    "encoding", [Fp8Blocks(), Fp8Scales(block=(1, None)), MxFp8(), MxFp4(), Int4Groups(group=32), CASES["ascend"][0]]
)
def test_a_vector_cannot_be_stored_so(encoding: Encoding) -> None:
    with pytest.raises(UnsupportedError, match=r"^norm.weight of shape \[64\] cannot be stored as"):
        encoding.parts("norm.weight", (64,))


def test_mxfp4_needs_whole_blocks() -> None:
    with pytest.raises(UnsupportedError, match="^x_blocks: 48 inputs are no multiple of 32, which MXFP4 needs"):
        MxFp4().parts("x_blocks", (8, 48))


@pytest.mark.parametrize("storage", ["own", "bytes", "rows"])
def test_four_bits_need_an_even_width(storage: Storage) -> None:
    with pytest.raises(UnsupportedError, match=r"^x\.weight: .* its input axis of 33 is odd"):
        Integers(scheme=parse_scheme("w4a8-channel"), storage=storage).parts("x.weight", (8, 33))


def test_rows_in_pairs_are_even() -> None:
    with pytest.raises(UnsupportedError, match=r"^x\.weight of shape \[7, 32\]: 7 rows cannot be stored in pairs"):
        CASES["ascend int4"][0].parts("x.weight", (7, 32))


@pytest.mark.parametrize(("name", "part"), [("int4 in bytes", "weight"), ("int8 in words", "_shape")])
def test_values_that_contradict_are_refused_on_loading_too(tmp_path: Path, name: str, part: str) -> None:
    """Not only on decoding: a nibble would take the low bits of whatever is there."""
    encoding, kind, shape = CASES[name]
    assert isinstance(encoding, Integers)
    parts, _ = encoders.FORMS[kind](NAME, shape, np.random.default_rng(0))
    put(part, 100)(parts)
    checkpoint = open_checkpoint(encoders.write(tmp_path / "x", {}, parts))
    with pytest.raises(WeightsError, match=r"a value is outside -8..7|_shape says \[6, 100\]"):
        encoding.read_values(checkpoint, NAME, shape, whole(encoding.scheme.values_shape(shape)))
