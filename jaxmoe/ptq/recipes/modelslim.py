"""Reads msModelSlim's YAML as a recipe: each field is honoured, mapped with a note, or refused.

Order: steps are applied to each layer in theirs, and a linear layer is quantised by the first linear_quant that takes
it, as rules are here. What always stays float here (router, head, kv_b_proj, MTP projection) stays float, with a note,
where a pattern that also takes other layers would quantise it: such patterns ('*') are how files of the field are
written, and a quantised router ruins a model. A step that takes nothing else is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from jaxmoe.errors import RecipeError, UnsupportedError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.ptq.recipe import FLOAT, CalibrationRecipe, Recipe, Rule
from jaxmoe.ptq.recipes.modelslim_file import VERSION, File, LinearQuant, Save, read_file
from jaxmoe.ptq.recipes.modelslim_linear import LinearMeaning, linear_meaning
from jaxmoe.ptq.recipes.modelslim_steps import Treatments, treatments_of
from jaxmoe.ptq.recipes.names import matcher, matches_any, module_names, takes, unmatched
from jaxmoe.ptq.rotation.plan import RotationRecipe, gated_values
from jaxmoe.ptq.rounding import METHODS
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.formats import FLOAT_ROLES

Output = Literal["ascendv1", "compressed-tensors"]
_OUTPUTS: Final[dict[str, Output]] = {"ascendv1_saver": "ascendv1", "compressed_tensors": "compressed-tensors"}
_LINEAR: Final = frozenset(
    {
        *(f"attention.{part}" for part in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate")),
        *(f"indexer.{part}" for part in ("q", "k", "weights")),
        *(f"{place}.{part}" for place in ("experts", "shared", "ffn") for part in ("gate", "up", "down")),
        "head",
        "mtp.projection",
        "router",
    }
)
"""Roles of what is a linear layer elsewhere; linear_quant touches nothing else."""
_SMOOTH_8_BITS: Final = 0.8
_SMOOTH_4_BITS: Final = 0.4
"""Instead of a searched alpha, of inputs that 8-bit weights read, and of those that 4-bit weights read: more would move
the difficulty into four bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSlim:
    """A file, understood."""

    recipe: Recipe
    output: Output | None
    """The format that it asks for; None: it asks for none."""
    shard_gib: int | None
    """Largest size of a file of the result; 0: all in one; None: the file says nothing of an output."""
    notes: tuple[str, ...]
    """What differs from msModelSlim, one sentence each; with no notes, nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """A linear_quant step: the parameters that it is the first to take."""

    step: LinearQuant
    meaning: LinearMeaning
    entries: tuple[Entry, ...]


def read_modelslim(path: Path, manifest: Manifest) -> ModelSlim:
    """The recipe that a file describes for a model.

    Args:
        path: the YAML file.
        manifest: the model, whose tensors decide what patterns take.

    Raises:
        ConfigError: no YAML, an unknown or missing key.
        UnsupportedError: something that does not exist here; the nearest that does is named.
        RecipeError: a pattern that matches nothing, or that splits a stack of layers; steps in another order; a step
            that quantises nothing; a rotation of a model about which the file cannot say enough.
    """
    file = read_file(path)
    decisions, linear_notes = _decisions(file, manifest, path)
    treatments = treatments_of(file, _modules(manifest), path)
    rotation, rotation_notes = _rotation(treatments, manifest.config, path)
    calibration, calibration_notes = _calibration(treatments, decisions)
    output, shard_gib, save_notes = _output(file.save, path)
    recipe = Recipe(
        name=file.metadata.config_id or path.stem,
        rule=tuple(_rules(decisions, manifest)),
        kv_cache="int8" if treatments.int8_cache else "bfloat16",
        calibration=calibration,
        rotation=rotation,
    )
    notes = (
        *treatments.notes,
        *rotation_notes,
        *linear_notes,
        *calibration_notes,
        *save_notes,
        *_label_notes(file, recipe, path),
        *_other_notes(file, recipe),
    )
    return ModelSlim(recipe=recipe, output=output, shard_gib=shard_gib, notes=tuple(dict.fromkeys(notes)))


def _modules(manifest: Manifest) -> list[str]:
    """Names of all modules: of parameters, and of what holds them."""
    names = dict.fromkeys(name for entry in manifest.entries for name in module_names(entry))
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join(words[:end]) for words in parts for end in range(1, len(words) + 1)))


def _decisions(file: File, manifest: Manifest, path: Path) -> tuple[list[_Decision], list[str]]:
    decisions: list[_Decision] = []
    notes: list[str] = []
    every = [name for entry in manifest.entries for name in module_names(entry)]
    linear = [entry for entry in manifest.entries if entry.role in _LINEAR]
    open_entries = [entry for entry in linear if entry.role not in FLOAT_ROLES]
    for label, step in file.steps:
        if not isinstance(step, LinearQuant):
            continue
        where = f"{path}: {label}"
        for kind, patterns in (("include", step.include), ("exclude", step.exclude)):
            missing = unmatched(patterns, every)
            if missing:
                raise RecipeError(
                    f"{where}: {kind} pattern {missing[0]!r} matches no tensor of this model (such as {every[0]}); "
                    "correct it or take it out"
                )
        meaning = linear_meaning(step.qconfig, where)
        touched = [entry for entry in linear if _touches(entry, step)]
        kept = [entry for entry in touched if entry.role in FLOAT_ROLES]
        taken = [entry for entry in open_entries if takes(entry, step.include, step.exclude, where)]
        if not taken:
            reason = _idle_reason(touched, kept)
            raise RecipeError(f"{where}: it quantises nothing: {reason}; take the step out")
        if kept and meaning.scheme != FLOAT:
            names = ", ".join(dict.fromkeys(entry.hub.removesuffix(".weight") for entry in kept))
            notes.append(f"{label}: stay float, as they always do here: {names}")
        notes += [f"{label}: {note}" for note in meaning.notes]
        decisions.append(_Decision(step=step, meaning=meaning, entries=tuple(taken)))
        paths = {entry.path for entry in taken}
        open_entries = [entry for entry in open_entries if entry.path not in paths]
    if all(decision.meaning.scheme == FLOAT for decision in decisions):
        raise RecipeError(f"{path}: no linear_quant step quantises anything")
    return decisions, notes


def _idle_reason(touched: Sequence[Entry], kept: Sequence[Entry]) -> str:
    if not touched:
        return "it includes no linear layer"
    if len(kept) == len(touched):
        return "what it includes always stays float here"
    return "earlier steps took all that it includes"


def _touches(entry: Entry, step: LinearQuant) -> bool:
    included, excluded = matcher(step.include), matcher(step.exclude)
    return matches_any(entry, lambda name: included(name) and not excluded(name))


def _rules(decisions: Sequence[_Decision], manifest: Manifest) -> Iterator[Rule]:
    """A rule for each step, with as many of its patterns as it needs, and one for what stays float."""
    left = {entry.path: entry for entry in manifest.entries}
    for decision in decisions:
        for entry in decision.entries:
            del left[entry.path]
        roles = tuple(dict.fromkeys(entry.role for entry in decision.entries))
        rule = Rule(
            roles=roles,
            scheme=decision.meaning.scheme,
            rounding=decision.meaning.rounding,
            options=decision.meaning.options,
        )
        if any(entry.role in roles for entry in left.values()):
            names = [name for entry in manifest.entries if entry.role in roles for name in module_names(entry)]
            rule = replace(
                rule,
                names=_needed(decision.step.include, names),
                exclude=_needed(decision.step.exclude, names),
            )
        yield rule
    if left:
        yield Rule(roles=tuple(dict.fromkeys(entry.role for entry in left.values())), scheme=FLOAT)


def _needed(patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    missing = unmatched(patterns, names)
    return tuple(pattern for pattern in patterns if pattern not in missing)


def _calibration(treatments: Treatments, decisions: Sequence[_Decision]) -> tuple[CalibrationRecipe | None, list[str]]:
    weighted = any(METHODS[decision.meaning.rounding].needs != "nothing" for decision in decisions)
    if not (weighted or treatments.smooths):
        return None, []
    if not treatments.smooths or treatments.alpha is not None:
        return CalibrationRecipe(smooth=treatments.alpha), []
    note = f"{treatments.searched}: no search for alpha and beta: smoothing by powers of two with {_SMOOTH_8_BITS}"
    schemes = [decision.meaning.scheme for decision in decisions if decision.meaning.scheme != FLOAT]
    if not any(parse_scheme(scheme).weight_bits == 4 for scheme in schemes):
        return CalibrationRecipe(smooth=_SMOOTH_8_BITS), [note]
    note = f"{note}, and with {_SMOOTH_4_BITS} where 4-bit weights read"
    return CalibrationRecipe(smooth=_SMOOTH_8_BITS, smooth_int4=_SMOOTH_4_BITS), [note]


def _rotation(
    treatments: Treatments, config: DecoderConfig, path: Path
) -> tuple[RotationRecipe | None, tuple[str, ...]]:
    """What quarot means for a model; what only a recipe of ours can decide is refused here, where that can be said."""
    label = treatments.rotation
    if label is None:
        return None, ()
    undecided = {
        f"the head of {config.family} is its embedding": ("tied", config.tied_head),
        f"{config.family} has {config.mtp_layers} multi-token-prediction layers": ("mtp", config.mtp_layers > 0),
    }
    for what, (key, applies) in undecided.items():
        if applies:
            raise RecipeError(
                f"{path}: {label}: {what}, and the file cannot say what becomes of that when the residual stream "
                f"turns; a recipe of ours can ([rotation] {key}), or leave the step out"
            )
    if not gated_values(config):
        return RotationRecipe(values=True), ()
    note = f"{label}: values do not turn, because a gate of {config.family} multiplies each of their channels"
    return RotationRecipe(), (note,)


def _output(save: Sequence[Save], path: Path) -> tuple[Output | None, int | None, list[str]]:
    for entry in save:
        if entry.type not in _OUTPUTS:
            raise UnsupportedError(
                f"{path}: spec.save {entry.type!r} is not supported; supported: {', '.join(_OUTPUTS)}"
            )
        if entry.ext:
            raise UnsupportedError(f"{path}: spec.save {entry.type}: ext {', '.join(entry.ext)} is not supported")
        if entry.part_file_size < 0:
            raise RecipeError(f"{path}: spec.save {entry.type}: part_file_size {entry.part_file_size} is negative")
    if len(save) > 1:
        raise UnsupportedError(
            f"{path}: spec.save asks for {' and '.join(entry.type for entry in save)}; one output is written at a time"
        )
    if not save:
        return None, None, []
    return _OUTPUTS[save[0].type], save[0].part_file_size, []


def _label_notes(file: File, recipe: Recipe, path: Path) -> Iterator[str]:
    """Where the file's label and its steps differ; the steps decide."""
    label = file.metadata.label
    if label is None:
        return
    if label.is_sparse:
        raise UnsupportedError(f"{path}: metadata.label.is_sparse: sparse weights do not exist here")
    schemes = [parse_scheme(rule.scheme) for rule in recipe.rule if rule.scheme != FLOAT]
    bits = {
        "w_bit": (label.w_bit, min(scheme.weight_bits for scheme in schemes)),
        "a_bit": (label.a_bit, min(scheme.activation_bits for scheme in schemes)),
    }
    for key, (said, made) in bits.items():
        if said is not None and said != made:
            yield f"metadata.label.{key} is {said}, but the steps make {made}"
    if (label.kv_cache or label.fa_bit == 8) and recipe.kv_cache != "int8":
        yield "metadata.label says that keys and values are quantised, but no step does it: they stay float"


def _other_notes(file: File, recipe: Recipe) -> Iterator[str]:
    if file.version != VERSION:
        yield f"apiversion {file.version}: only the language model is quantised; the rest is copied as it is"
    if file.runner == "model_wise":
        yield "runner model_wise: layers are always read, rounded and freed one by one"
    if recipe.calibration is None:
        yield from (f"dataset {name}: not read, because nothing in the recipe needs data" for name in file.datasets)
    else:
        numbers = recipe.calibration
        yield from (
            f"dataset {name}: give the file with --calib; {numbers.samples} samples of {numbers.min_tokens} to "
            f"{numbers.max_tokens} tokens are taken from it, not its rows"
            for name in file.datasets
        )
    if file.prior:
        yield "prior stages: their steps are applied in the same pass as the others"
    if len(file.datasets) > 1:
        yield f"datasets {', '.join(file.datasets)}: all statistics come from one calibration run"
    ignored = [key for key in ("score", "verified_model_types", "verified_tags") if getattr(file.metadata, key)]
    if ignored:
        yield f"metadata.{', '.join(ignored)}: not used; the recipe is checked against the model itself"
    for key in file.unused:
        yield f"{key}: no step refers to it"
