"""Engines that a result is meant for: what they cannot load, said before hours of work instead of after.

What is known of each engine was read from its source: vLLM `compressed_tensors_moe*.py` and `compressed_tensors.py`,
vLLM-Ascend `quantization/methods/`, SGLang `compressed_tensors.py` and `w8a8_int8.py`, of August to November 2026.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from jaxmoe.errors import RecipeError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.nn.config import AttentionConfig
from jaxmoe.ptq.export.ascend import INPUT_SHARDS
from jaxmoe.ptq.export.output import OutputFormat, example
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.scheme import GROUPS, Scheme

Target = Literal["jaxmoe", "vllm", "vllm-ascend", "sglang"]
Refusal = Callable[[Entry, Scheme], str | None]
"""Why an engine cannot run a scheme for a parameter, and what would do; None: it can."""

_SPLIT_INPUTS: Final = ("attention.o", "experts.down", "shared.down", "ffn.down")
"""Roles whose input axis tensor parallelism splits."""
_SPLIT_OUTPUTS: Final = (
    "attention.q",
    "attention.q_b",
    "experts.gate",
    "experts.up",
    "shared.gate",
    "shared.up",
    "ffn.gate",
    "ffn.up",
)
"""Roles whose output axis it splits; keys and values are repeated where there are too few heads."""
_JOINED: Final = (
    ("attention.q", "attention.k", "attention.v"),
    ("attention.q_a", "attention.kv_a"),
    ("experts.gate", "experts.up", "experts.down"),
    ("shared.gate", "shared.up"),
    ("ffn.gate", "ffn.up"),
)
"""Roles that other engines join into one matrix or one kernel, which has one scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What an engine loads."""

    title: str
    formats: Mapping[str, Refusal]
    """Output format -> what it refuses in it."""


def _is_expert(entry: Entry) -> bool:
    return entry.role.startswith("experts.")


def _own(entry: Entry, scheme: Scheme) -> str | None:
    """Whatever an output format can say is read back."""
    return None


def _vllm(entry: Entry, scheme: Scheme) -> str | None:
    if scheme.activation_bits == 16:
        return None
    if scheme.weight_bits == 4:
        return "it runs 4-bit weights with INT8 activations on Arm CPUs only; choose w8a8-channel or w4a16"
    if scheme.group is not None:
        return "its INT8 kernels have one scale a channel and one a token; choose w8a8-channel"
    return None


def _sglang(entry: Entry, scheme: Scheme) -> str | None:
    if scheme.weight_bits == 4 and scheme.activation_bits == 8:
        return "it runs 4-bit weights with INT8 activations on NPUs only; choose w8a8-channel or w4a16"
    return _vllm(entry, scheme)


def _vllm_ascend(entry: Entry, scheme: Scheme) -> str | None:
    if scheme.num_groups(entry.own_shape[-1]) > 1:
        fits = "w4a8-channel" if scheme.weight_bits == 4 and _is_expert(entry) else "w8a8-channel"
        return f"it expects scales [out, 1], one a channel; choose {fits}"
    if scheme.activation_bits == 16 and _is_expert(entry):
        return "it has no experts with float activations; choose w8a8-channel"
    if scheme.weight_bits == 4 and not _is_expert(entry):
        return "it has W4A8_DYNAMIC for routed experts only; choose w8a8-channel for this role"
    return None


def _vllm_ascend_compressed(entry: Entry, scheme: Scheme) -> str | None:
    if scheme.activation_bits == 16:
        return "it reads W8A8 of this format; choose w8a8-channel"
    if scheme.weight_bits == 4 and scheme.group is not None:
        return "it refuses 4-bit weights in groups; choose w4a8-channel"
    return _vllm_ascend(entry, scheme)


ENGINES: Final[Mapping[Target, _Engine]] = {
    "jaxmoe": _Engine(
        title="jaxmoe",
        formats={"jaxmoe": _own, "compressed-tensors": _own, "ascendv1": _own},
    ),
    "vllm": _Engine(title="vLLM", formats={"compressed-tensors": _vllm}),
    "vllm-ascend": _Engine(
        title="vLLM-Ascend", formats={"ascendv1": _vllm_ascend, "compressed-tensors": _vllm_ascend_compressed}
    ),
    "sglang": _Engine(title="SGLang", formats={"compressed-tensors": _sglang}),
}
"""Target -> engine."""


def check_target(
    target: Target, degrees: Sequence[int], matches: Sequence[Match], manifest: Manifest, output: OutputFormat
) -> None:
    """Refuses a result that its engine could not load.

    Args:
        target: the engine.
        degrees: degrees of tensor parallelism that it must load at, experts split like all else (no expert
            parallelism); none: only what holds at any degree is checked.
        matches: what will be done.
        manifest: the model.
        output: the format.

    Raises:
        RecipeError: a tensor, its scheme or its sizes, why the engine cannot load it, and what would do.
    """
    engine = ENGINES[target]
    if output.name not in engine.formats:
        wanted = " or ".join(engine.formats)
        raise RecipeError(f"{engine.title} does not read output format {output.name}; choose {wanted}")
    refuse = engine.formats[output.name]
    for match in matches:
        reason = None if match.scheme is None else refuse(match.entry, match.scheme)
        if reason is not None and match.scheme is not None:
            raise RecipeError(f"{example(match.entry)}: {engine.title} cannot run {match.scheme.name} here: {reason}")
    if target != "jaxmoe":
        _check_names(engine, matches)
        _check_joined(engine, matches)
    for degree in degrees:
        if degree < 1:
            raise RecipeError(f"a degree of tensor parallelism of {degree} is below 1")
        _check_heads(engine, manifest, degree)
        if target != "jaxmoe":
            for match in matches:
                _check_split(engine, match, degree, output)


def _check_names(engine: _Engine, matches: Sequence[Match]) -> None:
    """Engines look tensors up by their released names."""
    for match in matches:
        entry = match.entry
        if entry.role == "experts.bias":
            raise RecipeError(
                f"{example(entry)}: experts with biases have no quantised form that {engine.title} loads; "
                "choose target jaxmoe"
            )
        if entry.own != entry.hub and not _is_expert(entry):
            raise RecipeError(
                f"{engine.title} looks for {entry.hub}, the result would have {entry.own}; choose target jaxmoe"
            )


def _check_joined(engine: _Engine, matches: Sequence[Match]) -> None:
    places: dict[tuple[str, tuple[int, ...]], dict[str, Match]] = {}
    for match in matches:
        place = (match.entry.path.rpartition(".")[0], match.entry.layers)
        places.setdefault(place, {})[match.entry.role] = match
    for by_role in places.values():
        for joined in _JOINED:
            parts = [by_role[role] for role in joined if role in by_role]
            if len({part.scheme for part in parts}) > 1:
                said = ", ".join(f"{example(part.entry)} {_scheme_name(part.scheme)}" for part in parts)
                raise RecipeError(f"{engine.title} joins these and needs one scheme for them: {said}")


def _check_heads(engine: _Engine, manifest: Manifest, degree: int) -> None:
    """Attention heads are split; key-value heads are too, or each is repeated alike where there are too few."""
    attention = manifest.config.attention
    heads, kv_heads = attention.heads, attention.kv_heads if isinstance(attention, AttentionConfig) else 1
    fits = [n for n in _divisors(heads) if _is_shared_evenly(kv_heads, n)]
    if degree in fits:
        return
    if heads % degree:
        reason = f"{heads} attention heads cannot be split over {degree} devices"
    else:
        how = "split" if kv_heads > degree else "repeated evenly"
        reason = f"{kv_heads} key-value heads cannot be {how} over {degree} devices"
    raise RecipeError(f"{engine.title}: {reason}; degrees that fit: {', '.join(map(str, fits))}")


def _is_shared_evenly(kv_heads: int, degree: int) -> bool:
    return not kv_heads % degree or not degree % kv_heads


def _check_split(engine: _Engine, match: Match, degree: int, output: OutputFormat) -> None:
    entry, scheme = match.entry, match.scheme
    if degree == 1 or entry.role not in (*_SPLIT_INPUTS, *_SPLIT_OUTPUTS):
        return
    on_inputs = entry.role in _SPLIT_INPUTS
    size = entry.own_shape[-1 if on_inputs else -2]
    axis = "inputs" if on_inputs else "outputs"
    if size % degree:
        raise RecipeError(
            f"{example(entry)}: {engine.title} would split its {size} {axis} over {degree} devices, which does not "
            f"come out even; choose a degree that divides {size}"
        )
    if scheme is None:
        return
    if output.name == "ascendv1" and scheme.weight_bits == 4:
        _check_int4_split(engine, entry, size, degree)
    if on_inputs and scheme.group is not None and scheme.num_groups(size) > 1 and (size // degree) % scheme.group:
        raise RecipeError(
            f"{example(entry)}: {scheme.name} with tensor parallelism of {degree} leaves {size // degree} of {size} "
            f"inputs on a device, which is no multiple of {scheme.group}; {_what_fits(size, scheme, degree)}"
        )


def _check_int4_split(engine: _Engine, entry: Entry, size: int, degree: int) -> None:
    if entry.role in _SPLIT_OUTPUTS and (size // degree) % 2:
        raise RecipeError(
            f"{example(entry)}: {size} outputs over {degree} devices are {size // degree} each, but ascendv1 stores "
            "4-bit rows in pairs; choose a smaller degree"
        )
    if INPUT_SHARDS % degree:
        raise RecipeError(
            f"{example(entry)}: {engine.title} splits the {INPUT_SHARDS} parts of a 4-bit weight's bias over the "
            f"devices, and {degree} does not divide {INPUT_SHARDS}; choose 1, 2, 4, 8 or 16"
        )


def _what_fits(size: int, scheme: Scheme, degree: int) -> str:
    groups = [group for group in GROUPS if not (size // degree) % group]
    degrees = [n for n in _divisors(size) if not (size // n) % scheme.group_size(size)]
    by_group = f"groups of {' or '.join(map(str, groups))}, or " if groups else ""
    by_degree = f"; with {scheme.group} degrees of {', '.join(map(str, degrees))} would" if degrees else ""
    return f"{by_group}one scale a channel would fit{by_degree}"


def _divisors(size: int) -> Iterator[int]:
    return (n for n in range(1, size + 1) if not size % n)


def _scheme_name(scheme: Scheme | None) -> str:
    return "float" if scheme is None else scheme.name
