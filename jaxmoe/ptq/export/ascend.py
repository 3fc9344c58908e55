"""AscendV1, the format of msModelSlim that vLLM-Ascend and MindIE read.

    W8A8_DYNAMIC, W8A16   weight int8 [out, in]; weight_scale, weight_offset (zero) float32 [out, groups]
    W4A8_DYNAMIC          weight int8 [out / 2, in]: row 2j in the low nibbles of row j, row 2j + 1 in the high ones;
                          weight_scale, weight_offset [out, 1];
                          scale_bias [out, 1] = 8 sum_in W, or [out, 16], a sum for each sixteenth of the inputs, where
                          engines split the inputs

`quant_model_description.json` gives the type of every tensor. Source: msModelSlim, `save/ascendv1.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
from jaxtyping import Float32

from jaxmoe.errors import RecipeError
from jaxmoe.models.leaves import scale_name
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.ptq.export.output import (
    Integers,
    OutputFormat,
    Scales,
    check_whole_groups,
    example,
    module_name,
    quantised,
)
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.foreign import ASCEND_FILE
from jaxmoe.weights.formats import without_quantization
from jaxmoe.weights.layout import TensorSpec

_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)
INPUT_SHARDS: Final = 16
"""Parts of an input axis that have a bias of their own: an engine of n devices adds 16 / n of them on each."""
_WHOLE_INPUTS: Final = ("up_proj", "gate_proj", "q_proj", "k_proj", "v_proj", "w1", "w3")
_SPLIT_INPUTS: Final = ("down_proj", "o_proj", "w2")
_LABELS: Final = ("FLOAT", "W8A16", "W8A8_DYNAMIC")
"""Types in the order in which msModelSlim names a model after one of them; it does not list W4A8_DYNAMIC."""


@final
class AscendV1(OutputFormat):
    """INT8 in channels or groups, INT4 in channels."""

    __slots__ = ()
    name = "ascendv1"
    index_name = "quant_model_weights.safetensors.index.json"

    def shard_name(self, number: int, of: int) -> str:
        """See `OutputFormat`."""
        return f"quant_model_weights-{number:05d}-of-{of:05d}.safetensors"

    def check(self, matches: Sequence[Match]) -> None:
        """See `OutputFormat`."""
        groups: dict[int, str] = {}
        for entry, scheme in quantised(matches):
            if scheme.weight_bits == 4:
                _check_int4(entry, scheme)
            elif scheme.num_groups(entry.own_shape[-1]) > 1:
                check_whole_groups(entry, scheme, self.name)
                assert scheme.group is not None
                groups.setdefault(scheme.group, example(entry))
        if len(groups) > 1:
            (one, first), (other, second) = list(groups.items())[:2]
            raise RecipeError(
                f"{first} has groups of {one}, {second} groups of {other}, but {ASCEND_FILE} has one group_size for "
                "all tensors; choose one group size"
            )

    def specs(self, name: str, shape: tuple[int, ...], scheme: Scheme | None, kept: np.dtype) -> tuple[TensorSpec, ...]:
        """See `OutputFormat`."""
        if scheme is None:
            return (TensorSpec(name=name, dtype=kept, shape=shape),)
        groups = scheme.scales_shape(shape)
        rows = shape[-2] if scheme.weight_bits == 8 else shape[-2] // 2
        specs = [
            TensorSpec(name=name, dtype=_INT8, shape=(*shape[:-2], rows, shape[-1])),
            TensorSpec(name=scale_name(name), dtype=_FLOAT32, shape=groups),
            TensorSpec(name=f"{name}_offset", dtype=_FLOAT32, shape=groups),
        ]
        if scheme.weight_bits == 4:
            sums = (*shape[:-1], _bias_shards(name))
            specs.append(TensorSpec(name=_bias_name(name), dtype=_FLOAT32, shape=sums))
        return tuple(specs)

    def tensors(self, name: str, integers: Integers, scales: Scales, scheme: Scheme) -> dict[str, np.ndarray]:
        """See `OutputFormat`."""
        offsets = {scale_name(name): scales, f"{name}_offset": np.zeros_like(scales)}
        if scheme.weight_bits == 8:
            return {name: integers, **offsets}
        return {
            name: _rows_in_pairs(integers),
            **offsets,
            _bias_name(name): scale_bias(integers, scales, _bias_shards(name)),
        }

    def config(
        self,
        source: Mapping[str, Any],
        matches: Sequence[Match],
        manifest: Manifest,
        *,
        kv_cache: str,
        copied: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See `OutputFormat`; MindIE takes the type from a key of its own. The cache of keys and values is left to the
        engine: the format's INT8 one has scales from calibration, and ours has one for each token and head."""
        plain = {key: value for key, value in without_quantization(source).items() if key != "quantize"}
        label = _model_type(matches)
        return plain if label == "FLOAT" else {**plain, "quantize": label.lower()}

    def side_files(self, matches: Sequence[Match], *, copied: Sequence[str] = ()) -> dict[str, str]:
        """See `OutputFormat`: quant_model_description.json."""
        return {ASCEND_FILE: json.dumps(description(matches, copied), indent=2, ensure_ascii=False) + "\n"}


def description(matches: Sequence[Match], copied: Sequence[str] = ()) -> dict[str, Any]:
    """The object of quant_model_description.json."""
    types = dict(_types(matches))
    types.update((name, "FLOAT") for name in copied)
    return {
        "version": "1.0.0",
        "model_quant_type": _model_type(matches),
        "metadata": {},
        "group_size": _group_size(matches),
        "optional": {},
        **dict(sorted(types.items())),
    }


def scale_bias(integers: Integers, scales: Scales, shards: int) -> Float32[np.ndarray, "*lead out shards"]:
    """8 times the sum of the weights of each part of the input axis, rounded once.

    The kernel multiplies unsigned nibbles, each 8 too large; this is what it takes off again.

    Args:
        integers: values of 4 bits.
        scales: one a row.
        shards: parts of equal size.
    """
    assert scales.shape[-1] == 1, scales.shape
    parts = integers.reshape(*integers.shape[:-1], shards, -1).sum(axis=-1, dtype=np.int64)
    return (8 * parts * scales.astype(np.float64)).astype(np.float32)


def _types(matches: Sequence[Match]) -> Iterator[tuple[str, str]]:
    for match in matches:
        kind = _type(match.scheme)
        for _, name in match.entry.own_tensors():
            yield name, kind
            if match.scheme is not None:
                parts = [scale_name(name), f"{name}_offset"]
                parts += [_bias_name(name)] if match.scheme.weight_bits == 4 else []
                yield from ((part, kind) for part in parts)


def _type(scheme: Scheme | None) -> str:
    if scheme is None:
        return "FLOAT"
    if scheme.activation_bits == 16:
        return "W8A16"
    return "W8A8_DYNAMIC" if scheme.weight_bits == 8 else "W4A8_DYNAMIC"


def _model_type(matches: Sequence[Match]) -> str:
    """The highest listed type; W4A8_DYNAMIC only where there is no other."""
    types = {_type(scheme) for _, scheme in quantised(matches)}
    listed = [label for label in _LABELS if label in types]
    return listed[-1] if listed else (types.pop() if types else "FLOAT")


def _group_size(matches: Sequence[Match]) -> int:
    """The group size of all tensors that have several groups; 0: there are none."""
    sizes = (scheme.group for entry, scheme in quantised(matches) if scheme.num_groups(entry.own_shape[-1]) > 1)
    return next((size for size in sizes if size is not None), 0)


def _check_int4(entry: Entry, scheme: Scheme) -> None:
    """The packed form has two rows in a byte, one scale a row, and a bias by the module's name."""
    name, (rows, width) = example(entry), entry.own_shape[-2:]
    if scheme.activation_bits == 16:
        raise RecipeError(
            f"{name}: ascendv1 has no {scheme.name}; choose w4a8-channel, w8a16, or another output format"
        )
    groups = scheme.num_groups(width)
    if groups > 1:
        raise RecipeError(
            f"{name}: ascendv1 has 4-bit weights with one scale a row only, {scheme.name} has {groups} for {width} "
            "inputs; choose w4a8-channel, w8a8 for this role, or output format compressed-tensors or jaxmoe"
        )
    if rows % 2:
        raise RecipeError(f"{name}: ascendv1 stores 4-bit rows in pairs, and {rows} rows are odd; choose w8a8")
    last = _last(name)
    if last not in (*_WHOLE_INPUTS, *_SPLIT_INPUTS):
        known = ", ".join((*_WHOLE_INPUTS, *_SPLIT_INPUTS))
        raise RecipeError(f"{name}: ascendv1 has 4-bit weights of {known}, not of {last}; choose w8a8 for this role")
    if last in _SPLIT_INPUTS and width % INPUT_SHARDS:
        raise RecipeError(
            f"{name}: ascendv1 stores a bias for each of {INPUT_SHARDS} parts of the inputs, which do not divide "
            f"{width}; choose w8a8 for this role"
        )


def _last(name: str) -> str:
    return module_name(name).rsplit(".", 1)[-1]


def _bias_shards(name: str) -> int:
    return INPUT_SHARDS if _last(name) in _SPLIT_INPUTS else 1


def _bias_name(name: str) -> str:
    return f"{module_name(name)}.scale_bias"


def _rows_in_pairs(integers: Integers) -> np.ndarray:
    rows = integers.view(np.uint8)
    return ((rows[..., 0::2, :] & 15) | (rows[..., 1::2, :] << 4)).view(np.int8)
