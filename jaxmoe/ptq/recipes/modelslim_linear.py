"""What a linear_quant step of msModelSlim means here: a scheme, a way to round, and notes on what differs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxmoe.errors import RecipeError, UnsupportedError
from jaxmoe.ptq.recipe import FLOAT, Rounding
from jaxmoe.ptq.recipes.modelslim_file import LinearConfig, Quantizer
from jaxmoe.ptq.rounding import Options
from jaxmoe.ptq.rounding.gptq import GptqOptions
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.quant.scheme import GROUPS

_EXT: Final = {"minmax": (), "ssz": ("step",), "gptq": ("percdamp",)}
"""Method -> settings that are understood beside group_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMeaning:
    """How the linear layers of a step are stored and rounded."""

    scheme: str
    rounding: Rounding = "nearest"
    options: Options | None = None
    notes: tuple[str, ...] = ()


def linear_meaning(config: LinearConfig, where: str) -> LinearMeaning:
    """What a qconfig means.

    Args:
        config: of linear_quant.
        where: file and step, for messages.

    Raises:
        UnsupportedError: a dtype, scope or method that does not exist here; the nearest that does is named.
        RecipeError: settings that contradict each other or cannot be.
    """
    weight = config.weight
    if weight.dtype == "float":
        if config.act is not None and config.act.dtype != "float":
            raise UnsupportedError(f"{where}: {config.act.dtype} activations with float weights do not exist here")
        return LinearMeaning(scheme=FLOAT)
    bits, act_notes = _activations(config.act, where)
    if weight.dtype not in ("int8", "int4"):
        raise UnsupportedError(
            f"{where}: weights as {weight.dtype} do not exist here; the nearest are int8 and int4, per_group or "
            "per_channel"
        )
    if not weight.symmetric:
        raise UnsupportedError(f"{where}: asymmetric weights do not exist here; set weight.symmetric to true")
    weight_bits = 8 if weight.dtype == "int8" else 4
    suffix = _groups(weight, where)
    rounding, options, method_notes = _rounding(weight, where)
    return LinearMeaning(
        scheme=f"w{weight_bits}a{bits}-{suffix}",
        rounding=rounding,
        options=options,
        notes=(*act_notes, *method_notes),
    )


def _activations(act: Quantizer | None, where: str) -> tuple[int, tuple[str, ...]]:
    if act is None or act.dtype == "float":
        return 16, ()
    if act.dtype != "int8":
        raise UnsupportedError(f"{where}: activations as {act.dtype} do not exist here; the nearest is int8 per_token")
    if act.ext:
        raise UnsupportedError(
            f"{where}: act.ext {', '.join(map(str, act.ext))}: activations are quantised per token as they come and "
            "have no settings here"
        )
    if act.scope == "per_token":
        if act.method != "minmax":
            raise UnsupportedError(f"{where}: act.method {act.method!r} does not exist per token here; use minmax")
        return 8, () if act.symmetric else ("asymmetric activations become symmetric",)
    if act.scope in ("per_tensor", "pd_mix"):
        return 8, (f"{act.scope} activations become per_token, which is finer and needs no range from calibration",)
    raise UnsupportedError(f"{where}: activations {act.scope} do not exist here; use per_token")


def _groups(weight: Quantizer, where: str) -> str:
    group = weight.ext.get("group_size")
    if group is not None and (not isinstance(group, int) or group not in GROUPS):
        raise UnsupportedError(
            f"{where}: group_size {group!r} is not one of {', '.join(map(str, GROUPS))}, which exist here"
        )
    if weight.scope == "per_group":
        if group is None:
            raise RecipeError(f"{where}: weights per_group need ext.group_size")
        return f"g{group}"
    if weight.scope != "per_channel":
        raise UnsupportedError(f"{where}: weights {weight.scope} do not exist here; use per_channel or per_group")
    if group is not None:
        raise RecipeError(f"{where}: weights per_channel contradict ext.group_size {group}; use per_group")
    return "channel"


def _rounding(weight: Quantizer, where: str) -> tuple[Rounding, Options | None, tuple[str, ...]]:
    if weight.method not in _EXT:
        raise UnsupportedError(f"{where}: weight.method {weight.method!r} does not exist here; use {', '.join(_EXT)}")
    unknown = sorted(set(weight.ext) - {"group_size", *_EXT[weight.method]})
    if unknown:
        raise UnsupportedError(
            f"{where}: weight.ext {', '.join(unknown)} of method {weight.method} is not known here; known: "
            f"{', '.join(('group_size', *_EXT[weight.method]))}"
        )
    if weight.method == "minmax":
        return "nearest", None, ()
    try:
        return _searched(weight)
    except RecipeError as error:
        raise RecipeError(f"{where}: weight.ext: {error}") from error


def _searched(weight: Quantizer) -> tuple[Rounding, Options | None, tuple[str, ...]]:
    if weight.method == "ssz":
        note = "ssz weighs errors by the mean square of each input channel, which msModelSlim does not"
        step = _number(weight.ext, "step", int)
        return "ssz", None if step is None else SszOptions(steps=step), (note,)
    note = "gptq keeps input channels that calibration never reached, which msModelSlim sets to zero"
    damping = _number(weight.ext, "percdamp", float)
    # Their scales and the order of their channels.
    options = GptqOptions(scale="minmax", order="natural")
    return "gptq", options if damping is None else replace(options, damping=damping), (note,)


def _number(ext: Mapping[str, Any], key: str, kind: type) -> Any:
    value = ext.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise RecipeError(f"{key} = {value!r} is not a {kind.__name__}")
    return kind(value)
