"""Our own format, which `weights.formats` describes."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxmoe.models.leaves import scale_name
from jaxmoe.models.manifest import Manifest
from jaxmoe.ptq.export.output import Integers, OutputFormat, Scales, quantised
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

    def check(self, matches: Sequence[Match], manifest: Manifest) -> None:
        """See `OutputFormat`; only 4-bit values of an odd input axis have no form."""
        for entry, scheme in quantised(matches):
            scheme.values_shape(entry.own_shape)

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
