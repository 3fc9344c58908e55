"""The report that a quantised checkpoint carries: recipe, source, versions, error per tensor."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import jax
import numpy as np

import jaxmoe
from jaxmoe.errors import WeightsError
from jaxmoe.ptq.recipe import Recipe
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.encodings import Plain
from jaxmoe.weights.formats import method_name
from jaxmoe.weights.load import ModelFiles

REPORT_NAME: Final = "jaxmoe_report.json"
"""File of the report, in the folder of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """Rounding error of one tensor."""

    name: str
    role: str
    scheme: str
    sqnr_db: float | None
    """10 log10(sum w^2 / sum error^2); None when there is no error or no signal."""
    zero_groups: int
    """Groups whose weights are all zero on the grid."""
    to_nearest: bool
    """Whether its method gave up, since no damping made the products of its inputs positive definite, and rounded to
    nearest."""

    @classmethod
    def checked(
        cls,
        *,
        name: str,
        source: str,
        role: str,
        scheme: Scheme,
        signal: float,
        noise: float,
        zero_groups: int,
        to_nearest: bool,
    ) -> "TensorReport":
        """From sums of squares.

        Args:
            name: of the tensor that is written; an expert of a tensor of several has its number in brackets.
            source: of the tensor that was read, for messages.
            role: what it does.
            scheme: how it is stored.
            signal: sum of squares of the weights.
            noise: sum of squares of their errors.
            zero_groups: groups that are all zero on the grid.
            to_nearest: whether its method gave up.

        Raises:
            WeightsError: the source tensor holds a NaN or an infinity.
        """
        if not (math.isfinite(signal) and math.isfinite(noise)):
            raise WeightsError(f"{source}: the source holds NaN or infinite values; it cannot be quantised")
        sqnr = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
        return cls(
            name=name, role=role, scheme=scheme.name, sqnr_db=sqnr, zero_groups=zero_groups, to_nearest=to_nearest
        )


def build_report(
    *,
    source: ModelFiles,
    recipe: Recipe,
    tensors: Sequence[TensorReport],
    source_bytes: int,
    result_bytes: int,
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The object of `REPORT_NAME`."""
    ratios = [t.sqnr_db for t in tensors if t.sqnr_db is not None]
    worst = sorted((t for t in tensors if t.sqnr_db is not None), key=lambda t: t.sqnr_db or 0)[:10]
    return {
        "jaxmoe": jaxmoe.__version__,
        "jax": jax.__version__,
        "recipe": asdict(recipe),
        "source": {
            "format": method_name(source.quantization),
            "config_sha256": _sha256(source),
            "bytes": source_bytes,
            "tensors": len(source.checkpoint.tensors),
        },
        "calibration": None if calibration is None else dict(calibration),
        "result_bytes": result_bytes,
        "sqnr_db": {
            "mean": float(np.mean(ratios)) if ratios else None,
            "min": float(np.min(ratios)) if ratios else None,
        },
        "zero_groups": sum(t.zero_groups for t in tensors),
        "worst": [asdict(t) for t in worst],
        "tensors": [asdict(t) for t in tensors],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """What a checkpoint keeps in one way."""

    stored: str
    """Scheme, or dtype of what is float."""
    tensors: int
    nbytes: int
    share: float
    """Of all bytes."""


def stored_bytes(files: ModelFiles) -> list[StoredBytes]:
    """How the bytes of a checkpoint are divided among schemes and dtypes, most first; nothing but headers is read.

    A part of the model that silently stayed float shows here.
    """
    tensors, counts = files.checkpoint.tensors, dict[str, list[int]]()
    names = {name: files.schemes.get(entry.path) for entry in files.manifest.entries for _, name in entry.tensors()}
    seen: set[str] = set()
    for name, scheme in names.items():
        stored = files.source.stored[name]
        parts = [part.name for part in stored.encoding.parts(name, stored.shape)]
        seen |= set(parts)
        plain = isinstance(stored.encoding, Plain)
        label = tensors[name].dtype.name if plain else stored.encoding.label() if scheme is None else scheme.name
        count = counts.setdefault(label, [0, 0])
        count[0] += 1
        count[1] += sum(tensors[part].nbytes for part in parts)
    rest = [tensors[name] for name in files.not_loaded if name not in seen]
    if rest:
        counts["not loaded, copied"] = [len(rest), sum(meta.nbytes for meta in rest)]
    total = max(1, sum(nbytes for _, nbytes in counts.values()))
    return [
        StoredBytes(stored=label, tensors=tensors, nbytes=nbytes, share=nbytes / total)
        for label, (tensors, nbytes) in sorted(counts.items(), key=lambda item: (-item[1][1], item[0]))
    ]


def _sha256(source: ModelFiles) -> str:
    return hashlib.sha256((source.folder / "config.json").read_bytes()).hexdigest()
