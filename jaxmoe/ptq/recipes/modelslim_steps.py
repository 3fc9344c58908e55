"""What the steps of msModelSlim beside linear_quant mean here: rotation, smoothing, keys and values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jaxmoe.errors import RecipeError, UnsupportedError
from jaxmoe.ptq.recipes.modelslim_file import (
    Awq,
    CacheQuant,
    CacheSmooth,
    File,
    FlexSmooth,
    IterSmooth,
    LinearQuant,
    Quantizer,
    QuaRot,
    Smoothing,
    SmoothQuant,
    Step,
)
from jaxmoe.ptq.recipes.modelslim_linear import linear_meaning
from jaxmoe.ptq.recipes.names import unmatched

_ORDER: Final = {QuaRot: 0, SmoothQuant: 1, IterSmooth: 1, FlexSmooth: 1, Awq: 1, LinearQuant: 2}
"""Rotation, smoothing, rounding: the order in which they are applied here."""
_WORDS: Final = ("rotation", "smoothing", "rounding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatments:
    """All steps beside linear_quant, together."""

    rotation: str | None
    """The step that rotates; None: there is none."""
    smooths: bool
    alpha: float | None
    """The one that the file gives or implies; None: it leaves it to a search."""
    searched: str
    """The steps that search for alpha, for a note."""
    int8_cache: bool
    notes: tuple[str, ...]


def treatments_of(file: File, modules: Sequence[str], path: Path) -> Treatments:
    """What the steps do together.

    Args:
        file: the steps.
        modules: names of all modules of the model, for patterns.
        path: of the file, for messages.

    Raises:
        UnsupportedError: a setting that does not exist here.
        RecipeError: a pattern that matches nothing, steps in another order, or two values of alpha.
    """
    _check_order(file, path)
    rotations = [label for label, step in file.steps if isinstance(step, QuaRot)]
    if len(rotations) > 1:
        raise RecipeError(f"{path}: {' and '.join(rotations)} rotate twice; keep one")
    notes: list[str] = []
    for label, step in file.steps:
        where = f"{path}: {label}"
        if not isinstance(step, LinearQuant):
            _check_patterns(step, modules, where)
        notes += [f"{label}: {note}" for note in _notes(step, where)]
    smoothing = [(label, step) for label, step in file.steps if isinstance(step, Smoothing)]
    alphas = {label: alpha for label, step in smoothing if (alpha := _alpha(step)) is not None}
    if len(set(alphas.values())) > 1:
        given = ", ".join(f"{label} {alpha}" for label, alpha in alphas.items())
        raise RecipeError(f"{path}: smoothing with several values of alpha ({given}); one is used for all, give one")
    alpha = next(iter(alphas.values()), None)
    if alpha is not None and not 0 < alpha <= 1:
        raise RecipeError(f"{path}: smoothing with alpha = {alpha}, which is not in (0, 1]")
    searching = [label for label, _ in smoothing if label not in alphas]
    if alpha is not None:
        notes += [f"{label}: no search for alpha: {alpha} of another step is used" for label in searching]
    return Treatments(
        rotation=next(iter(rotations), None),
        smooths=bool(smoothing),
        alpha=alpha,
        searched=", ".join(searching),
        int8_cache=any(isinstance(step, CacheQuant) for _, step in file.steps),
        notes=tuple(notes),
    )


def _check_order(file: File, path: Path) -> None:
    last, last_label = 0, ""
    for label, step in file.steps:
        place = _ORDER.get(type(step))
        if place is None:
            continue
        if place < last:
            raise RecipeError(
                f"{path}: {label} comes after {last_label}, but {_WORDS[place]} is always applied before "
                f"{_WORDS[last]} here; move it"
            )
        last, last_label = place, label


def _check_patterns(step: Step, modules: Sequence[str], where: str) -> None:
    for kind in ("include", "exclude"):
        missing = unmatched(getattr(step, kind, None) or (), modules)
        if missing:
            raise RecipeError(
                f"{where}: {kind} pattern {missing[0]!r} matches no module of this model; correct it or take it out"
            )


def _notes(step: Step, where: str) -> Iterator[str]:
    if isinstance(step, QuaRot):
        yield from _rotation_notes(step, where)
    elif isinstance(step, Smoothing):
        yield from _smoothing_notes(step, where)
    elif isinstance(step, CacheQuant):
        yield from _cache_notes(step, where)
    elif isinstance(step, CacheSmooth):
        yield (
            f"smooth_factor {step.smooth_factor} is not applied: keys have a scale for each token here, which needs "
            "no smoothing"
        )


def _rotation_notes(step: QuaRot, where: str) -> Iterator[str]:
    if step.online or step.down_proj_online_layers:
        raise UnsupportedError(
            f"{where}: rotations while serving (online, down_proj_online_layers) do not exist here; leave them out"
        )
    size = step.block_size
    if size != -1 and (size < 1 or size & (size - 1)):
        raise RecipeError(f"{where}: block_size {size} is neither -1 nor a power of two")
    block = "the whole width" if size == -1 else size
    yield (
        f"blocks of {block} (block_size {size}) become the largest power of two that divides the width; max_tp_size "
        f"{step.max_tp_size} has no effect"
    )
    if step.export_extra_info:
        yield "export_extra_info: the rotation is not exported"


def _smoothing_notes(step: Smoothing, where: str) -> Iterator[str]:
    if isinstance(step, SmoothQuant | IterSmooth) and not step.symmetric:
        raise UnsupportedError(f"{where}: asymmetric smoothing (a shift) does not exist here; set symmetric to true")
    if isinstance(step, FlexSmooth):
        _check_flex(step, where)
    if _alpha(step) is not None:
        yield "factors are rounded to powers of two, so that floats stay exact"
    if isinstance(step, IterSmooth) and step.scale_min is not None:
        yield f"scale_min {step.scale_min}: factors are between 2**-12 and 2**12"
    if isinstance(step, Awq):
        yield "factors come from largest magnitudes, not from means; weight_qconfig and n_grid have no effect"
    if isinstance(step, FlexSmooth) and step.qconfig is not None:
        yield "qconfig guides a search there and has no effect here; linear_quant says how weights are rounded"
    subgraphs = ("norm-linear",) if isinstance(step, SmoothQuant) else step.enable_subgraph_type
    patterns = (*(step.include or ()), *(step.exclude or ()))
    if len(set(subgraphs)) < 4 or any(pattern != "*" for pattern in patterns):
        yield (
            "include, exclude and enable_subgraph_type have no effect: every norm, value and up projection that "
            "feeds a quantised layer is smoothed, which changes nothing that stays float"
        )


def _check_flex(step: FlexSmooth, where: str) -> None:
    if step.beta is not None and (step.alpha is None or abs(step.alpha + step.beta - 1) > 1e-9):
        raise UnsupportedError(
            f"{where}: beta {step.beta} with alpha {step.alpha}: the exponent of weights is 1 - alpha; leave beta out"
        )
    if step.type == "flex_awq_ssz" and step.qconfig is None:
        raise RecipeError(f"{where}: missing key qconfig")
    if step.type == "flex_smooth_quant" and step.qconfig is not None:
        raise RecipeError(f"{where}: flex_smooth_quant has no qconfig; flex_awq_ssz has")
    if step.qconfig is not None:
        linear_meaning(step.qconfig, where)


def _alpha(step: Smoothing) -> float | None:
    return None if isinstance(step, Awq) else step.alpha


def _cache_notes(step: CacheQuant, where: str) -> Iterator[str]:
    quantizers: list[Quantizer] = [*(step.details or {}).values()]
    if step.qconfig is not None:
        quantizers.append(step.qconfig)
    if not quantizers:
        raise RecipeError(f"{where}: missing key qconfig")
    wrong = [quantizer.dtype for quantizer in quantizers if quantizer.dtype != "int8"]
    if wrong:
        raise UnsupportedError(f"{where}: keys and values as {wrong[0]} do not exist here; the nearest is int8")
    yield "keys and values are INT8 in every layer, with a scale for each token and head, which needs no calibration"
    if step.type == "fa3_quant":
        yield "queries and attention weights stay float"
