"""Our own format, which `weights.formats` describes."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxmoe.errors import RecipeError
from jaxmoe.models.leaves import scale_name
from jaxmoe.models.manifest import Manifest
from jaxmoe.ptq.export.output import Integers, OutputFormat, Scales, example, quantised
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.encodings import values_name
from jaxmoe.weights.formats import OWN, describe, without_quantization
from jaxmoe.weights.layout import TensorSpec
from jaxmoe.weights.packing import int8_to_pairs

_FLOAT32 = np.dtype(np.float32)


@final
class Native(OutputFormat):
    """Every scheme, ragged groups too."""

    __slots__ = ()
    name = OWN
    int8_cache = True

    def check(self, matches: Sequence[Match]) -> None:
        """See `OutputFormat`; 4-bit values of an odd input axis have no form, nor have layers that differ."""
        for entry, scheme in quantised(matches):
            scheme.values_shape(entry.own_shape)
        _check_templates(matches)

    def specs(self, name: str, shape: tuple[int, ...], scheme: Scheme | None, kept: np.dtype) -> tuple[TensorSpec, ...]:
        """See `OutputFormat`."""
        if scheme is None:
            return (TensorSpec(name=name, dtype=kept, shape=shape),)
        return (
            TensorSpec(name=values_name(name, scheme), dtype=scheme.values_dtype, shape=scheme.values_shape(shape)),
            TensorSpec(name=scale_name(name), dtype=_FLOAT32, shape=scheme.scales_shape(shape)),
        )

    def tensors(self, name: str, integers: Integers, scales: Scales, scheme: Scheme) -> dict[str, np.ndarray]:
        """See `OutputFormat`."""
        group = scheme.group_size(integers.shape[-1])
        values = integers if scheme.weight_bits == 8 else int8_to_pairs(integers, group)
        return {values_name(name, scheme): values, scale_name(name): scales}

    def config(
        self,
        source: Mapping[str, Any],
        matches: Sequence[Match],
        manifest: Manifest,
        *,
        kv_cache: str,
        copied: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See `OutputFormat`."""
        schemes = {match.entry.path: match.scheme for match in matches}
        return {**without_quantization(source), "quantization_config": describe(schemes, manifest, kv_cache)}


def _check_templates(matches: Sequence[Match]) -> None:
    """Refuses two schemes under one name: config.json names a scheme for all layers that share it."""
    first: dict[str, Match] = {}
    for match in matches:
        other = first.setdefault(match.entry.own, match)
        if other.scheme != match.scheme:
            raise RecipeError(
                f"{example(other.entry)} is {_scheme_name(other)} and {example(match.entry)} {_scheme_name(match)}, "
                f"but output format {OWN} has one scheme for all layers of {match.entry.own}; choose patterns that "
                "take both, or --format compressed-tensors or ascendv1"
            )


def _scheme_name(match: Match) -> str:
    return "float" if match.scheme is None else match.scheme.name
