"""Strict completeness: model and checkpoint have the same tensors, in shape and kind, in every format."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxmoe.errors import UnsupportedError, WeightsError
from jaxmoe.log import logger
from jaxmoe.models.family import Family, expand
from jaxmoe.models.leaves import Schemes
from jaxmoe.models.manifest import Manifest
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Stored
from jaxmoe.weights.decoded import Fp8Blocks, Fp8Scales, Int4Groups, MxFp4
from jaxmoe.weights.encodings import (
    FLOAT_DTYPES,
    Encoding,
    Integers,
    Part,
    Plain,
    Tensors,
)
from jaxmoe.weights.foreign import ForeignFormat
from jaxmoe.weights.formats import FLOAT_ROLES, Quantization, method_name
from jaxmoe.weights.safetensors import Checkpoint

_MOST_LISTED = 10
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq\Z")
_ALL_SUFFIXES = {
    suffix: main
    for encoding in (Fp8Blocks, MxFp4, Int4Groups, Integers, Fp8Scales)
    for suffix, main in encoding.suffixes.items()
}
"""Endings of the names of parts in any format."""


def logical_names(tensors: Collection[str], quantization: Quantization) -> set[str]:
    """Names of the logical tensors that a checkpoint has any part of, among the names of its files."""
    if quantization is None:
        suffixes: Mapping[str, str] = {}
    elif isinstance(quantization, ForeignFormat):
        suffixes = {suffix: main for e in quantization.encodings for suffix, main in e.suffixes.items()}
    else:
        suffixes = Integers.suffixes
    stems = {
        name.removesuffix(suffix) + main
        for suffix, main in suffixes.items()
        for name in tensors
        if name.endswith(suffix)
    }
    return stems.union(tensors)


def resolve(
    manifest: Manifest, quantization: Quantization, schemes: Schemes, checkpoint: Checkpoint
) -> dict[str, Stored]:
    """How each logical tensor of a model is stored.

    Args:
        manifest: the model.
        quantization: what the checkpoint says of itself.
        schemes: parameters that our own format keeps as integers.
        checkpoint: decides, tensor by tensor, in other formats.

    Raises:
        ConfigError: a description leaves a tensor out.
        UnsupportedError: a tensor is stored in a way that this version cannot read.
    """
    stored: dict[str, Stored] = {}
    for entry in manifest.entries:
        scheme = schemes.get(entry.path)
        shape = entry.tensor_shape
        for _, name in entry.tensors():
            encoding: Encoding = Plain()
            if scheme is not None:
                encoding = Integers(scheme=scheme)
            elif isinstance(quantization, ForeignFormat):
                encoding = quantization.encoding_of(name, checkpoint.tensors)
            if isinstance(encoding, Integers) and entry.view.transposed:
                raise UnsupportedError(f"{name}: {encoding.label()} of a transposed tensor is not supported")
            stored[name] = Stored(shape=shape, encoding=encoding)
    return stored


def schemes_of_stored(manifest: Manifest, stored: Mapping[str, Stored]) -> dict[str, Scheme | None]:
    """Parameter path -> scheme of the integers that its tensors keep; roles that have no quantised operator are float.

    Raises:
        UnsupportedError: some layers or experts of a parameter keep integers and others do not, or other ones.
    """
    schemes: dict[str, Scheme | None] = {}
    decoded = 0
    for entry in manifest.entries:
        names = [name for _, name in entry.tensors()]
        kinds = {name: _scheme(stored[name]) for name in names}
        if entry.role in FLOAT_ROLES:
            decoded += sum(kind is not None for kind in kinds.values())
            continue
        other = next((name for name in names if kinds[name] != kinds[names[0]]), None)
        if other is not None:
            raise UnsupportedError(
                f"{names[0]} is stored as {stored[names[0]].encoding.label()}, {other} as "
                f"{stored[other].encoding.label()}: all layers and experts of a parameter need the same kind"
            )
        schemes[entry.path] = kinds[names[0]]
    if decoded:
        logger.info("%d tensors of integers are decoded to floats: their roles have no integer operator", decoded)
    return schemes


def _scheme(stored: Stored) -> Scheme | None:
    return stored.encoding.scheme if isinstance(stored.encoding, Integers) else None


def listed(names: Sequence[str]) -> str:
    """At most ten names, then how many more."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def check_complete(
    checkpoint: Checkpoint,
    family: Family,
    manifest: Manifest,
    stored: Mapping[str, Stored],
    quantization: Quantization,
) -> tuple[str, ...]:
    """Compares names, shapes and kinds before any tensor is read.

    Returns:
        Tensors of the checkpoint that no parameter needs: of parts that this project does not run, rotary frequencies,
        a tied head given again.

    Raises:
        WeightsError: tensors are missing or left over, have another shape or dtype, or none is stored as the
            configuration says; they are named.
    """
    expected = {
        part.name: part for name, tensor in stored.items() for part in tensor.encoding.parts(name, tensor.shape)
    }
    folder, tensors = checkpoint.folder, checkpoint.tensors
    missing = sorted(set(expected) - set(tensors))
    if missing:
        hint = _missing_hint(missing, manifest, expected, tensors)
        raise WeightsError(f"{folder}: {len(missing)} tensors are missing: {listed(missing)}{hint}")
    problems = list(_kind_problems(tensors, expected.values(), quantization))
    if problems:
        raise WeightsError(f"{folder}: {listed(problems)}")
    rest = sorted(set(tensors) - set(expected))
    extra = _check_rest(rest, checkpoint, family, manifest)
    plain = all(isinstance(tensor.encoding, Plain) for tensor in stored.values())
    if isinstance(quantization, ForeignFormat) and plain:
        raise WeightsError(
            f"{folder}: its configuration says quantisation method {quantization.method!r}, but no tensor is stored "
            "so; remove what says it if the weights are plain floats"
        )
    return extra


def _missing_hint(missing: Sequence[str], manifest: Manifest, expected: Mapping[str, Part], tensors: Tensors) -> str:
    if missing == [entry.hub for entry in manifest.entries if entry.path == "head.weight"]:
        return " (config.json says tie_word_embeddings = false; if the head is the embedding, set it to true)"
    name = missing[0]
    stem = next((name.removesuffix(s) + main for s, main in _ALL_SUFFIXES.items() if name.endswith(s)), name)
    others = (stem.removesuffix(main) + suffix for suffix, main in _ALL_SUFFIXES.items() if stem.endswith(main))
    found = [other for other in others if other in tensors and other not in expected]
    if not found:
        return ""
    return f" (the checkpoint has {', '.join(found)}: is it stored in another way than its configuration says?)"


def _kind_problems(tensors: Tensors, expected: Iterable[Part], quantization: Quantization) -> Iterator[str]:
    for part in expected:
        meta = tensors[part.name]
        if meta.dtype not in part.dtypes:
            wanted = " or ".join(str(dtype) for dtype in part.dtypes)
            # A float that is expected and not there is stored in a way that nothing told us of.
            unnamed = part.dtypes == FLOAT_DTYPES and meta.dtype != np.dtype(np.float64)
            hint = f" (quantisation: {method_name(quantization)})" if unnamed else ""
            yield f"{part.name} is {meta.dtype}, expected {wanted}{hint}"
        elif meta.shape not in part.shapes:
            wanted = " or ".join(str(list(shape)) for shape in part.shapes)
            yield f"{part.name} has shape {list(meta.shape)}, config.json asks for {wanted}"


def _check_rest(rest: Sequence[str], checkpoint: Checkpoint, family: Family, manifest: Manifest) -> tuple[str, ...]:
    """Tensors that no parameter needs: harmless, or refused by name."""
    ignored = re.compile(family.ignored) if family.ignored is not None else None
    heads = _names_of(family, "head.weight") if manifest.config.tied_head else ()
    leftover, count = [], 0
    for name in rest:
        if ignored is not None and ignored.match(name):
            count += 1
        elif name in heads:
            _check_tied(checkpoint, name, manifest["embed.weight"].hub)
        elif not _HARMLESS.match(name):
            leftover.append(name)
    if leftover:
        named = listed([_with_main(name, checkpoint.tensors) for name in leftover])
        raise WeightsError(f"{checkpoint.folder}: {len(leftover)} tensors belong to nothing in this model: {named}")
    if count:
        logger.info(
            "%s: %d tensors belong to parts that are not run (%s); they are not loaded",
            checkpoint.folder,
            count,
            family.ignored,
        )
    return tuple(rest)


def _with_main(name: str, tensors: Tensors) -> str:
    """A tensor, and what it is a part of if that is not there."""
    for suffix, main in _ALL_SUFFIXES.items():
        stem = name.removesuffix(suffix) + main
        if name.endswith(suffix) and stem.endswith((".weight", "_proj", "_blocks")) and stem not in tensors:
            return f"{name} (there is no {stem})"
    return name


def _names_of(family: Family, path: str) -> set[str]:
    """All names that a parameter without layers may have."""
    return {
        name for rule in family.tensors if rule.path == path for hub in rule.hubs for _, name in expand(hub.name, (), 0)
    }


def _check_tied(checkpoint: Checkpoint, head: str, embedding: str) -> None:
    """A tied model may carry its head again (mlx-lm, vLLM issues): then it must be the embedding, byte for byte."""
    first, second = checkpoint.tensors[head], checkpoint.tensors.get(embedding)
    same = second is not None and (first.shape, first.dtype) == (second.shape, second.dtype)
    for start in range(0, first.shape[0] if same else 0, 4096):
        part = (slice(start, min(start + 4096, first.shape[0])),)
        if not np.array_equal(checkpoint.read(head, part), checkpoint.read(embedding, part)):
            same = False
            break
    if not same:
        raise WeightsError(
            f"{checkpoint.folder}: config.json says tie_word_embeddings = true, but {head} differs from "
            f"{embedding}; set tie_word_embeddings to false if the head is its own"
        )
