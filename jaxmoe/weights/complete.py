"""Strict completeness: model and checkpoint have the same tensors, in shape and kind, in every format."""

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.log import logger
from jaxmoe.models.leaves import Schemes, scale_name
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.weights.safetensors import Checkpoint

FLOAT_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
_MOST_LISTED = 10
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq\Z")
TIED_HEAD = "lm_head.weight"
_MTP_MARK = "model.layers.{}.eh_proj.weight"
"""What a multi-token-prediction layer has and an ordinary block has not: a config.json that names too few layers must
not turn the rest of a model into something that is not loaded."""


def expected_tensors(manifest: Manifest, schemes: Schemes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Hub tensor -> (shape, 'float' | 'int8' | 'scale') that the model needs."""
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for entry in manifest.entries:
        scheme = schemes.get(entry.path)
        shape = entry.tensor_shape
        for _, name in entry.tensors():
            if scheme is None:
                expected[name] = (shape, "float")
            else:
                expected[name] = (shape, "int8")
                expected[scale_name(name)] = ((*shape[:-1], scheme.num_groups(shape[-1])), "scale")
    return expected


def listed(names: list[str]) -> str:
    """At most ten names, then how many more."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def check_complete(checkpoint: Checkpoint, manifest: Manifest, schemes: Schemes) -> tuple[str, ...]:
    """Compares names, shapes and kinds before any tensor is read.

    Returns:
        Tensors of the checkpoint that this version knows and does not load (multi-token-prediction layers).

    Raises:
        WeightsError: tensors are missing or left over, or have another shape or dtype; they are named.
    """
    expected = expected_tensors(manifest, schemes)
    present = set(checkpoint.tensors)
    folder = checkpoint.folder
    missing = sorted(set(expected) - present)
    if missing:
        hint = ""
        if missing == [TIED_HEAD]:
            hint = " (config.json says tie_word_embeddings = false; if the head is the embedding, set it to true)"
        raise WeightsError(f"{folder}: {len(missing)} tensors are missing: {listed(missing)}{hint}")
    _check_kinds(checkpoint, expected)
    unused, leftover = [], []
    for name in sorted(present - set(expected)):
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= manifest.config.layers and _MTP_MARK.format(layer[1]) in present:
            unused.append(name)
        elif name == TIED_HEAD and manifest.config.tied_head:
            _check_tied(checkpoint)
        elif not _HARMLESS.match(name):
            leftover.append(name)
    if leftover:
        raise WeightsError(f"{folder}: {len(leftover)} tensors belong to nothing in this model: {listed(leftover)}")
    if unused:
        logger.warning(
            "%s: %d tensors of multi-token-prediction layers are not loaded by this version", folder, len(unused)
        )
    return tuple(unused)


def _check_kinds(checkpoint: Checkpoint, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    problems = []
    for name, (shape, kind) in expected.items():
        meta = checkpoint.tensors[name]
        allowed = {
            "float": FLOAT_DTYPES,
            "int8": (np.dtype(np.int8),),
            "scale": (np.dtype(np.float32),),
        }[kind]
        if meta.shape != shape:
            problems.append(f"{name} has shape {list(meta.shape)}, config.json asks for {list(shape)}")
        elif meta.dtype not in allowed:
            wanted = " or ".join(str(dtype) for dtype in allowed)
            problems.append(f"{name} is {meta.dtype}, expected {wanted}")
    if problems:
        raise WeightsError(f"{checkpoint.folder}: {listed(problems)}")


def _check_tied(checkpoint: Checkpoint) -> None:
    """A tied model may carry its head again (mlx-lm, vLLM issues): then it must be the embedding, byte for byte."""
    embedding = "model.embed_tokens.weight"
    same = checkpoint.tensors[TIED_HEAD].shape == checkpoint.tensors[embedding].shape
    rows = checkpoint.tensors[embedding].shape[0]
    for start in range(0, rows if same else 0, 4096):
        part = (slice(start, min(start + 4096, rows)),)
        if not np.array_equal(checkpoint.read(TIED_HEAD, part), checkpoint.read(embedding, part)):
            same = False
            break
    if not same:
        raise WeightsError(
            f"{checkpoint.folder}: config.json says tie_word_embeddings = true, but {TIED_HEAD} differs from "
            f"{embedding}; set tie_word_embeddings to false if the head is its own"
        )


def check_entry_values(entry: Entry, name: str, array: np.ndarray, part: str) -> None:
    """Refuses scales that are not positive and finite: casts would hide them as plausible integers.

    Raises:
        WeightsError: the tensor is named.
    """
    if part == "scale" and not (np.isfinite(array).all() and (array > 0).all()):
        raise WeightsError(f"{name}: a scale is zero, negative, infinite or NaN ({entry.path})")
