"""compressed-tensors, the format of llm-compressor that vLLM and SGLang read.

    W8A8  int-quantized    weight int8 [out, in], weight_scale float32 [out, groups]
    W4A8  int-quantized    the same: a value of -7..7 in each byte
    W4A16 pack-quantized   weight_packed int32 [out, ceil(in / 8)], weight_scale, weight_shape int64 [2]
    W8A16 pack-quantized   the same with four values a word

Source: vllm-project/compressed-tensors, `quant_args.py` and `compressors/`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from jaxmoe.errors import RecipeError
from jaxmoe.models.leaves import scale_name
from jaxmoe.models.manifest import Manifest
from jaxmoe.ptq.export.output import (
    Integers,
    OutputFormat,
    Scales,
    check_whole_groups,
    module_name,
    quantised,
)
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.formats import without_quantization
from jaxmoe.weights.layout import TensorSpec

_INT8, _INT32, _INT64, _FLOAT32 = (np.dtype(kind) for kind in (np.int8, "<i4", "<i8", np.float32))
_EXPERT_ROLES: Final = ("experts.gate", "experts.up", "experts.down")
_NO_MODULES: Final = ("embed", "hyper")
"""Roles whose matrices are no linear modules."""


@final
class CompressedTensors(OutputFormat):
    """One configuration group for each scheme."""

    __slots__ = ()
    name = "compressed-tensors"

    def check(self, matches: Sequence[Match]) -> None:
        """See `OutputFormat`."""
        for entry, scheme in quantised(matches):
            check_whole_groups(entry, scheme, self.name)
        if not any(True for _ in quantised(matches)):
            raise RecipeError(f"output format {self.name}: the recipe leaves every tensor float; nothing to describe")

    def specs(self, name: str, shape: tuple[int, ...], scheme: Scheme | None, kept: np.dtype) -> tuple[TensorSpec, ...]:
        """See `OutputFormat`."""
        if scheme is None:
            return (TensorSpec(name=name, dtype=kept, shape=shape),)
        scales = TensorSpec(name=scale_name(name), dtype=_FLOAT32, shape=scheme.scales_shape(shape))
        if not _is_packed(scheme):
            return TensorSpec(name=name, dtype=_INT8, shape=shape), scales
        words = (*shape[:-1], -(-shape[-1] // (32 // scheme.weight_bits)))
        return (
            TensorSpec(name=f"{name}_packed", dtype=_INT32, shape=words),
            scales,
            TensorSpec(name=f"{name}_shape", dtype=_INT64, shape=(len(shape),)),
        )

    def tensors(self, name: str, integers: Integers, scales: Scales, scheme: Scheme) -> dict[str, np.ndarray]:
        """See `OutputFormat`."""
        if not _is_packed(scheme):
            return {name: integers, scale_name(name): scales}
        return {
            f"{name}_packed": _words_of_int8(integers) if scheme.weight_bits == 8 else _words_of_int4(integers),
            scale_name(name): scales,
            f"{name}_shape": np.array(integers.shape, _INT64),
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
        """See `OutputFormat`; the cache of keys and values is left to the engine, the format has no INT8 one."""
        return {
            **without_quantization(source),
            "quantization_config": {
                "quant_method": self.name,
                "format": _model_format(matches),
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "kv_cache_scheme": None,
                "config_groups": _groups(matches),
                "ignore": _ignored(matches, manifest, copied),
            },
        }


def _is_packed(scheme: Scheme) -> bool:
    """The format packs where activations stay float."""
    return scheme.activation_bits == 16


def _words_of_int8(integers: Integers) -> np.ndarray:
    """Four values plus 128 in each little-endian word, the first one lowest; the last word is filled with zero bits."""
    width = integers.shape[-1]
    codes = np.zeros((*integers.shape[:-1], -(-width // 4) * 4), np.uint8)
    np.bitwise_xor(integers.view(np.uint8), np.uint8(128), out=codes[..., :width])
    return codes.view(_INT32)


def _words_of_int4(integers: Integers) -> np.ndarray:
    """Eight values plus 8 in each little-endian word, the first one lowest; the last word is filled with zero bits."""
    width = integers.shape[-1]
    nibbles = np.zeros((*integers.shape[:-1], -(-width // 8) * 8), np.uint8)
    np.add(integers, np.int8(8), out=nibbles[..., :width].view(np.int8))
    return np.ascontiguousarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(_INT32)


def _model_format(matches: Sequence[Match]) -> str:
    formats = {_format(scheme) for _, scheme in quantised(matches)}
    return formats.pop() if len(formats) == 1 else "mixed-precision"


def _format(scheme: Scheme) -> str:
    return "pack-quantized" if _is_packed(scheme) else "int-quantized"


def _groups(matches: Sequence[Match]) -> dict[str, Any]:
    """A group for each scheme. The one that has most bytes, the experts', takes every linear module: engines look
    experts up under names of their own. The others name their modules, which goes before a class."""
    schemes: dict[Scheme, list[Match]] = {}
    for match in matches:
        if match.scheme is not None:
            schemes.setdefault(match.scheme, []).append(match)
    main = max(schemes, key=lambda scheme: any(m.entry.role in _EXPERT_ROLES for m in schemes[scheme]))
    ordered = [main, *(scheme for scheme in schemes if scheme != main)]
    return {
        f"group_{index}": _group(scheme, ["Linear"] if scheme == main else _patterns(schemes[scheme], matches))
        for index, scheme in enumerate(ordered)
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    grouped = scheme.group is not None
    weights = {"strategy": "group" if grouped else "channel", "group_size": scheme.group, "dynamic": False}
    inputs = {"strategy": "token", "group_size": None, "dynamic": True}
    return {
        "targets": targets,
        "format": _format(scheme),
        "weights": _numbers(scheme.weight_bits, weights, "minmax"),
        "input_activations": None if _is_packed(scheme) else _numbers(8, inputs, None),
        "output_activations": None,
    }


def _numbers(bits: int, how: Mapping[str, Any], observer: str | None) -> dict[str, Any]:
    """The object that the format calls QuantizationArgs; it knows no other keys."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "block_structure": None,
        "actorder": None,
        "observer": observer,
        "observer_kwargs": {},
        **how,
    }


def _patterns(chosen: Iterable[Match], matches: Sequence[Match]) -> list[str]:
    """Patterns of the modules of some matches; they name layers where others share the template."""
    shared: dict[str, set[Scheme | None]] = {}
    for match in matches:
        shared.setdefault(match.entry.own, set()).add(match.scheme)
    patterns = []
    for match in chosen:
        entry = match.entry
        layers = f"(?:{'|'.join(map(str, entry.layers))})" if len(shared[entry.own]) > 1 else r"\d+"
        pattern = re.escape(module_name(entry.own))
        if pattern == module_name(entry.own):
            patterns.append(pattern)
            continue
        pattern = pattern.replace(r"\{layer\}", layers).replace(r"\{expert\}", r"\d+")
        patterns.append(f"re:^{pattern}$")
    return sorted(set(patterns))


def _ignored(matches: Sequence[Match], manifest: Manifest, copied: Sequence[str]) -> list[str]:
    """Linear modules that stay float, a tied head and those of copied parts among them."""
    kept = [
        match
        for match in matches
        if match.scheme is None
        and match.entry.own.endswith(".weight")
        and len(match.entry.own_shape) == 2
        and match.entry.role not in _NO_MODULES
    ]
    names = _patterns(kept, matches)
    if manifest.config.tied_head:
        names.append(r"re:^(?:.*\.)?lm_head$")
    numbered = {
        "re:^" + re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(module_name(name))) + "$"
        for name in copied
        if name.endswith(".weight")
    }
    return sorted({*names, *numbered})
