"""Rounding of weights: from floats [*lead, out, in] to the integers and scales of a scheme.

Contract of a method `run(weight, statistic, group, bits, options) -> Rounded`
    weight      [*lead, out, in] in any float; all is computed in float32. `lead` are experts, layers or nothing.
    statistic   what the method needs to know about the inputs: importance [*lead, in] (sum or mean of x**2), hessian
                [*lead, in, in] (of x x^T), or None. Its size does not matter, only its proportions; all zero (an
                expert without tokens) rounds to nearest.
    result      on the grid of quant.int8, with the groups of Scheme.group_size, the last of which may be short. A
                group of zeros gives zeros and scale 1 (but GPTQ may put errors of others there). Weights or statistics
                that are not finite give scale NaN, never a number.
    Pure, for jit and vmap; no host decision depends on data. A weight comes out alike whatever else is in `lead`.
    Rows of a weight are independent, so that projections with one input may be rounded as one taller weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.ptq.rounding.clip import ClipOptions, round_clip
from jaxmoe.ptq.rounding.gptq import GptqOptions, round_gptq
from jaxmoe.ptq.rounding.learned import LearnedOptions, round_learned
from jaxmoe.ptq.rounding.slices import Rounded
from jaxmoe.ptq.rounding.ssz import SszOptions, round_ssz
from jaxmoe.quant.int4 import pack_pairs
from jaxmoe.quant.int8 import quantize_groups
from jaxmoe.quant.qarray import QArray
from jaxmoe.quant.scheme import Bits, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestOptions:
    """Nothing to choose."""


def round_nearest(
    weight: Float[Array, "*lead out in"], statistic: None, group: int, bits: Bits, options: NearestOptions
) -> Rounded:
    """Rounds to nearest with min/max scales, as `quant.qarray.quantize_weight` does."""
    q, scale = quantize_groups(weight, group, bits)
    return Rounded(qvalue=q, scale=scale, status=jnp.zeros(weight.shape[:-2], jnp.int32))


MethodName = Literal["nearest", "ssz", "clip", "gptq", "learned"]
Needs = Literal["nothing", "importance", "hessian"]
Options = NearestOptions | SszOptions | ClipOptions | GptqOptions | LearnedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of the table."""

    options: type
    """Its options; also what tells methods apart."""
    needs: Needs
    """Which statistic it takes. Without importance (None) all input channels count alike."""
    run: Callable[..., Rounded]
    """See the contract."""


METHODS: Final[dict[MethodName, Method]] = {
    "nearest": Method(options=NearestOptions, needs="nothing", run=round_nearest),
    "ssz": Method(options=SszOptions, needs="importance", run=round_ssz),
    "clip": Method(options=ClipOptions, needs="importance", run=round_clip),
    "gptq": Method(options=GptqOptions, needs="hessian", run=round_gptq),
    "learned": Method(options=LearnedOptions, needs="hessian", run=round_learned),
}


def method_of(options: Options) -> Method:
    """The method that takes these options."""
    return next(method for method in METHODS.values() if method.options is type(options))


def round_weight(
    weight: Float[Array, "*lead out in"],
    statistic: Float32[Array, "*statistic"] | None,
    scheme: Scheme,
    options: Options,
) -> tuple[QArray, Int32[Array, "*lead"]]:
    """Rounds a weight with the method of `options`; the second result is its status, see `Rounded`.

    Args:
        weight: any float.
        statistic: what `method_of(options).needs`.
        scheme: how the result is stored.
        options: the method and its settings.

    Raises:
        RecipeError: the scheme cannot store this shape.
        ValueError: the statistic is missing, not wanted, or of another shape; both shapes are named.
    """
    scheme.values_shape(weight.shape)
    method = method_of(options)
    _check_statistic(weight, statistic, method)
    group, bits = scheme.group_size(weight.shape[-1]), scheme.weight_bits
    rounded = method.run(weight, statistic, group, bits, options)
    q = rounded.qvalue if bits == 8 else pack_pairs(rounded.qvalue, group)
    return QArray(qvalue=q, scale=rounded.scale, scheme=scheme), rounded.status


def _check_statistic(weight: jax.Array, statistic: Any, method: Method) -> None:
    *lead, _, size = weight.shape
    expected = {"nothing": None, "importance": (*lead, size), "hessian": (*lead, size, size)}[method.needs]
    given = None if statistic is None else tuple(statistic.shape)
    if given != expected and not (given is None and method.needs == "importance"):
        raise ValueError(
            f"{method.run.__name__} of a weight {list(weight.shape)} needs {method.needs} of shape {expected}, got "
            f"{given}"
        )
