"""Which side of every parameter turns by what, and what cannot turn: decided from the manifest, nothing read.

A rotation R of a stream s (s' = s R) leaves a model as it is when every parameter that writes the stream writes it
turned (W' = R^T W, b' = b R), every one that reads it turns it back (W' = W R), and nothing between acts on single
channels. A root mean square does not change under R, but a norm's gain acts on channels: it moves into the columns of
all that read the norm, and becomes one. Streams:

    residual    embed, o_proj, down projections -> norms -> attention, router, experts, indexer, head; with
                hyper-connections each residual stream turns alike
    values      v_proj (or the value halves of kv_b_proj) -> o_proj, head by head: attention only mixes tokens
    latents     q_a_proj -> norm -> q_b_proj and the indexer; kv_a_proj -> norm -> (cache) -> kv_b_proj
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxmoe.errors import RecipeError, UnsupportedError
from jaxmoe.models.manifest import Entry, Manifest, stack_of_layer
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, LatentAttentionConfig
from jaxmoe.ptq.rotation.hadamard import Rotation, make_rotation

_RESIDUAL_AXES = frozenset({"embed", "embed_pair", "attention_out"})
"""Axes that only parameters beside the residual stream have."""

_ATTENTION_IN = frozenset(
    f"attention.{part}" for part in ("q", "k", "v", "q_a", "kv_a", "gate")
) | {"indexer.k", "indexer.weights"}  # fmt: skip
_FFN_IN = frozenset({"router", *(f"{part}.{side}" for part in ("experts", "shared", "ffn") for side in ("gate", "up"))})
_WRITERS = frozenset({"attention.o", "experts.down", "shared.down", "ffn.down", "mtp.projection"})
_BIASES = frozenset({"attention.bias", "experts.bias"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationRecipe:
    """What a recipe asks for."""

    seed: int = 1
    residual: bool = True
    block: int | None = None
    """Channels of the residual stream that are mixed; absent: the largest power of two that divides its width."""
    values: bool = False
    """Whether each head's values turn, which also spreads what the value cache rounds."""
    latents: bool = False
    """Whether the latents of latent attention turn, which also spreads what the latent cache rounds."""
    tied: Literal["refuse", "untie"] = "refuse"
    """What to do with an embedding that is also the head: the final norm's gain must move into one of the two uses, so
    a rotated model needs both."""
    mtp: Literal["refuse", "drop", "residual"] = "refuse"
    """What to do with multi-token-prediction blocks: they normalise the final norm's output again, and its gain cannot
    leave that. 'residual' says that the block is fed the residual stream before the final norm."""
    not_run: Literal["refuse", "drop"] = "refuse"
    """What to do with tensors of parts that this project does not run, such as a vision tower that writes the residual
    stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An axis cut into equal periods; in each, `rotation.size` channels turn, from `start` on."""

    rotation: Rotation
    period: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A norm's gain that multiplies a parameter's columns."""

    places: tuple[tuple[str, tuple[int, ...]], ...]
    """Path of the norm and its position, for each layer of the parameter; one of them if it has no layers."""

    def at(self, position: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The norm of a cell."""
        return self.places[position[0] if position else 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to a parameter: w' = R_rows^T (w * gains[None, :]) R_columns, or all ones."""

    gains: tuple[Gain, ...] = ()
    """Side by side along the columns."""
    columns: Side | None = None
    """Of the last axis, of a vector's only one too."""
    rows: Side | None = None
    """Of the axis before the last."""
    ones: bool = False
    """The gain of a norm, which moved into its readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationPlan:
    """The changes of a model's parameters; those that are not named stay as they are."""

    changes: Mapping[str, Change]
    """By path."""


def plan_rotation(manifest: Manifest, recipe: RotationRecipe) -> RotationPlan:
    """Plans a rotation; every refusal comes from here.

    Args:
        manifest: the model as it will be: with a head of its own, and without what the recipe drops (see
            `source.rotate_files`).
        recipe: what to turn.

    Raises:
        RecipeError: the recipe turns nothing, or what this model does not have, or needs a decision that it lacks.
        UnsupportedError: a parameter that nobody has said how to turn.
    """
    config = manifest.config
    if not (recipe.residual or recipe.values or recipe.latents):
        raise RecipeError("rotation: residual, values and latents are all false; turn one of them on or leave it out")
    if recipe.seed < 0:
        raise RecipeError(f"rotation: seed {recipe.seed} is negative; give a whole number of at least 0")
    if recipe.residual:
        _refuse_residual(config, recipe)
    else:
        _refuse_without_residual(recipe)
    if recipe.values and gated_values(config):
        raise RecipeError(
            f"rotation: values of {config.family} cannot turn: a gate multiplies each of their channels between "
            "attention and o_proj; set values = false"
        )
    if recipe.latents and isinstance(config.attention, AttentionConfig):
        raise RecipeError(f"rotation: {config.family} has no latents (attention.q_a, kv_a); set latents = false")
    planner = _Planner(manifest=manifest, recipe=recipe)
    changes = {entry.path: change for entry in manifest.entries if (change := planner.change(entry)) is not None}
    return RotationPlan(changes=changes)


def gated_values(config: DecoderConfig) -> bool:
    """Whether a gate multiplies each channel of the values between attention and o_proj: then they cannot turn."""
    return isinstance(config.attention, LatentAttentionConfig) and config.attention.gate


def _refuse_without_residual(recipe: RotationRecipe) -> None:
    plain = RotationRecipe()
    idle = [key for key in ("block", "tied", "mtp", "not_run") if getattr(recipe, key) != getattr(plain, key)]
    if idle:
        given = ", ".join(f"{key} = {getattr(recipe, key)!r}" for key in idle)
        raise RecipeError(
            f"rotation: {given}: of no effect with residual = false, because only the residual stream needs it; leave "
            f"out {', '.join(idle)}, or set residual = true"
        )


def _refuse_residual(config: DecoderConfig, recipe: RotationRecipe) -> None:
    if config.tied_head:
        raise RecipeError(
            f"rotation: the head of {config.family} is its embedding ({config.vocab} x {config.embed}): the final "
            "norm's gain must move into the head alone; set tied = 'untie' to store a head of its own, or residual = "
            "false"
        )
    if not config.mtp_layers:
        return
    if recipe.mtp == "refuse":
        raise RecipeError(
            f"rotation: {config.mtp_layers} multi-token-prediction layers normalise what the final norm made, whose "
            "gain a rotation moves away; set mtp = 'drop' to leave them out, mtp = 'residual' if they are fed the "
            "residual stream before the final norm, or residual = false"
        )
    if recipe.mtp == "residual" and not config.mtp_copies:
        raise RecipeError(
            f"rotation: the multi-token-prediction layers of {config.family} share the head, which takes the gain of "
            "one norm and not of theirs too; set mtp = 'drop' or residual = false"
        )


class _Planner:
    """The rules, by role, axes and stack."""

    def __init__(self, *, manifest: Manifest, recipe: RotationRecipe):
        self._config = config = manifest.config
        attention, seed = config.attention, recipe.seed
        self._latent = latent = attention if isinstance(attention, LatentAttentionConfig) else None
        self._own_query_latent = latent is not None and latent.q_lora > 0
        head = attention.v_dim if isinstance(attention, LatentAttentionConfig) else attention.head_dim
        self.residual = make_rotation(config.embed, (seed, 0), recipe.block) if recipe.residual else None
        self.values = make_rotation(head, (seed, 1)) if recipe.values else None
        self.q_latent = self.kv_latent = None
        if recipe.latents and latent is not None:
            self.q_latent = make_rotation(latent.q_lora, (seed, 2)) if latent.q_lora else None
            self.kv_latent = make_rotation(latent.kv_lora, (seed, 3))

    def change(self, entry: Entry) -> Change | None:
        """What happens to a parameter; None: nothing."""
        gains = tuple(self._gain(entry, norm) for norm in self._norms_read(entry))
        columns, rows = self._columns(entry), self._rows(entry)
        change = Change(gains=gains, columns=columns, rows=rows, ones=self._loses_gain(entry))
        if self.residual is not None and not change.ones:
            for axis, side in zip(entry.axes[-2:], (rows, columns)[-len(entry.axes) :], strict=True):
                if axis in _RESIDUAL_AXES and (side is None or side.rotation != self.residual):
                    raise UnsupportedError(
                        f"rotation: axis {axis} of {entry.path} (role {entry.role}) lies beside the residual stream, "
                        "but no rule says how it turns; set residual = false"
                    )
        return None if change == Change() else change

    def _reads_query(self, entry: Entry) -> bool:
        return entry.role in ("attention.q_b", "indexer.q")

    def _norms_read(self, entry: Entry) -> Iterator[str]:
        """Norms between a turned stream and a parameter's columns, as paths inside their block (or of the model)."""
        role, mtp = entry.role, entry.path.startswith("mtp.")
        if self.residual is not None:
            if role in _ATTENTION_IN or (role == "indexer.q" and not self._own_query_latent):
                yield "attention_norm.weight"
            elif role in _FFN_IN:
                yield "ffn_norm.weight"
            elif role == "head":
                yield "mtp.norm.weight" if mtp else "norm.weight"
            elif role == "mtp.projection":
                yield from ("mtp.embed_norm.weight", "mtp.hidden_norm.weight")
        if self.q_latent is not None and self._reads_query(entry):
            yield "attention.q_a_norm.weight"
        if self.kv_latent is not None and role == "attention.kv_b":
            yield "attention.kv_a_norm.weight"

    def _columns(self, entry: Entry) -> Side | None:
        role, residual = entry.role, self.residual
        if residual is not None:
            vector = role in _BIASES and entry.axes[-1] in _RESIDUAL_AXES
            matrix = role in _ATTENTION_IN | _FFN_IN | {"embed", "head", "mtp.projection"}
            streams = role == "hyper" and entry.shape[-1] == self._streams_width
            if vector or matrix or streams or (role == "indexer.q" and not self._own_query_latent):
                return Side(rotation=residual, period=residual.size)
        if self.values is not None and (role == "attention.o" or _is_value_bias(entry)):
            return Side(rotation=self.values, period=self.values.size)
        if self.q_latent is not None and self._reads_query(entry):
            return Side(rotation=self.q_latent, period=self.q_latent.size)
        if self.kv_latent is not None and role == "attention.kv_b":
            return Side(rotation=self.kv_latent, period=self.kv_latent.size)
        return None

    def _rows(self, entry: Entry) -> Side | None:
        role, values = entry.role, self.values
        if self.residual is not None and role in _WRITERS:
            return Side(rotation=self.residual, period=self.residual.size)
        if values is not None and role == "attention.v":
            return Side(rotation=values, period=values.size)
        if values is not None and role == "attention.kv_b":
            assert self._latent is not None
            return Side(rotation=values, period=self._latent.nope_dim + values.size, start=self._latent.nope_dim)
        if self.q_latent is not None and role == "attention.q_a":
            return Side(rotation=self.q_latent, period=self.q_latent.size)
        if self.kv_latent is not None and role == "attention.kv_a":
            # The rotary key follows the latent.
            return Side(rotation=self.kv_latent, period=entry.shape[-2])
        return None

    def _loses_gain(self, entry: Entry) -> bool:
        if entry.role == "norm":
            return self.residual is not None
        if entry.role != "attention.norm":
            return False
        of_query, of_keys = (entry.path.endswith(f".{part}_a_norm.weight") for part in ("q", "kv"))
        return (of_query and self.q_latent is not None) or (of_keys and self.kv_latent is not None)

    @property
    def _streams_width(self) -> int:
        hyper = self._config.hyper
        return 0 if hyper is None else hyper.streams * self._config.embed

    def _gain(self, entry: Entry, norm: str) -> Gain:
        """Where the norms of an entry's layers are."""
        if norm.partition(".")[0] in ("norm", "mtp"):
            count = entry.shape[0] if entry.axes[0] == "layers" else 0
            return Gain(places=tuple((norm, (at,)) for at in range(count)) or ((norm, ()),))
        stack = entry.path.partition(".")[0]
        if stack == "indexer":
            places = (stack_of_layer(self._config, layer) for layer in entry.layers)
        else:
            places = (("mtp.block" if stack == "mtp" else stack, at) for at in range(entry.shape[0]))
        return Gain(places=tuple((f"{where}.{norm}", (at,)) for where, at in places))


def _is_value_bias(entry: Entry) -> bool:
    """A key bias has the same role and the same axes."""
    return entry.role == "attention.bias" and entry.path.endswith(".v_bias")
