"""A model without weights: what a config.json alone says about every tensor, for planning and dry runs."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxmoe.decode import read_json
from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import read_config
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Source
from jaxmoe.weights.complete import resolve
from jaxmoe.weights.encodings import Integers, Plain
from jaxmoe.weights.formats import ForeignFormat, read_quantization, schemes_of
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.load import ModelFiles
from jaxmoe.weights.safetensors import Checkpoint

_KEPT, _FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def open_config(path: Path) -> ModelFiles:
    """The model of a config.json, its tensors as a bfloat16 release would have them (our own quantised ones as such).

    Nothing can be read from the result: it has no files. Multi-token-prediction blocks are there if the config names
    them. A foreign quantisation that is decoded on reading plans as floats.

    Raises:
        ConfigError: the file is absent or wrong.
        UnsupportedError: the family, an option or a format is not supported.
    """
    data = read_json(path)
    family, config = read_config(data, str(path))
    quantization = read_quantization(data, str(path))
    manifest = build_manifest(family, config)
    decoded = isinstance(quantization, ForeignFormat) and not any(
        isinstance(encoding, Integers) for encoding in quantization.encodings
    )
    quantization = None if decoded else quantization
    schemes = schemes_of(quantization, manifest, str(path))
    tensors = _tensors(manifest, schemes, path)
    checkpoint = Checkpoint(folder=path.parent, tensors=tensors, unused_files=())
    stored = resolve(manifest, quantization, schemes, checkpoint)
    return ModelFiles(
        folder=path.parent,
        manifest=manifest,
        source=Source(checkpoint=checkpoint, stored=stored),
        quantization=quantization,
        schemes=schemes,
        not_loaded=(),
    )


def _tensors(manifest: Manifest, schemes: Mapping[str, Scheme | None], path: Path) -> dict[str, TensorMeta]:
    """What the headers of such a checkpoint would say."""
    tensors: dict[str, TensorMeta] = {}
    for entry in manifest.entries:
        scheme = schemes.get(entry.path)
        encoding = Plain() if scheme is None else Integers(scheme=scheme)
        kept = _FLOAT32 if entry.float32 else _KEPT
        for _, name in entry.tensors():
            for part in encoding.parts(name, entry.tensor_shape):
                dtype = kept if kept in part.dtypes and scheme is None else part.dtypes[0]
                tensors[part.name] = TensorMeta(
                    name=part.name, dtype=dtype, shape=part.shapes[0], file=path, offset_bytes=0
                )
    return dict(sorted(tensors.items()))
