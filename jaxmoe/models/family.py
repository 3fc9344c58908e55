"""What a family is: how its config.json is read and how its tensors are named on the hub."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.nn.config import DecoderConfig

REQUIRED: Any = object()
"""As a default: the key must be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a hub tensor that is a parameter's own: `tensor[index]`, its last two axes swapped if `transposed`.

    `{layer}` and `{expert}` are not in the name of a fused tensor, so its leading axis is the parameter's experts.
    """

    start: int = 0
    """First row of the part, in units of the parameter's rows (its axis before the last)."""
    parts: int = 1
    """Parts of equal size that share the tensor's rows; 1: the whole tensor."""
    interleaved: bool = False
    """Whether the parts alternate row by row (gpt_oss) instead of following each other."""
    transposed: bool = False
    """Whether the hub stores [in, out]."""
    unit_axis: bool = False
    """Whether the hub has a leading axis of size one that the parameter has not (ernie4_5_moe)."""


WHOLE = View()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """One way in which checkpoints name a parameter's tensors."""

    name: str
    """Template, such as 'model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight'."""
    view: View = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """One parameter and the hub tensors that fill it.

    `{layer}` and `{expert}` in a template run over the parameter's leading axes; the rest of the parameter's axes are
    the tensor's own, in the same order.
    """

    path: str
    """Parameter, such as 'moe.ffn.gate'."""
    hubs: tuple[Hub, ...]
    """Known names, the released one first; a checkpoint uses the first that it has tensors of."""

    @property
    def own(self) -> Hub:
        """The way our own checkpoints name it: the first that gives each expert a tensor, else the first whole one."""
        whole = [hub for hub in self.hubs if hub.view == WHOLE]
        return next((hub for hub in whole if "{expert}" in hub.name), whole[0])


def rule(path: str, *names: str) -> TensorRule:
    """A rule of whole tensors, the released name first."""
    return TensorRule(path=path, hubs=tuple(Hub(name=name) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of checkpoints that share a config.json dialect and tensor names."""

    name: str
    """`model_type` in config.json."""
    read_config: Callable[["ConfigReader"], DecoderConfig]
    tensors: tuple[TensorRule, ...]
    ignored: str | None = None
    """Pattern of tensors that belong to parts this project does not run (a vision tower); copied, never loaded."""
    mtp_first: int | None = None
    """Hub number of the first multi-token-prediction block; None: it follows the last layer."""


class ConfigReader:
    """Reads a config.json key by key and refuses what nobody asked for."""

    def __init__(self, data: Mapping[str, Any], where: str):
        """Args: data: the parsed object; where: the file, for messages."""
        self._data = dict(data)
        self._seen: set[str] = {"quantization_config", "quantize"}
        self.where = where

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
        """The value of a key; null counts as absent.

        Raises:
            ConfigError: the key is absent and has no default, or its value has another type.
        """
        self._seen.add(key)
        value = self._data.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.where}: missing key {key}")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a {' or '.join(k.__name__ for k in kinds)}")
        return value

    def positive(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number of at least 1.

        Raises:
            ConfigError: absent without a default, of another type, or below 1.
        """
        value = self.take(key, int, default)
        if value < 1:
            raise ConfigError(f"{self.where}: {key} = {value} is below 1")
        return value

    def count(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number of at least 0.

        Raises:
            ConfigError: absent without a default, of another type, or negative.
        """
        value = self.take(key, int, default)
        if value < 0:
            raise ConfigError(f"{self.where}: {key} = {value} is negative")
        return value

    def positive_number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number above 0.

        Raises:
            ConfigError: absent without a default, of another type, or not positive and finite.
        """
        value = self.take(key, float, default)
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key} = {value} is not positive and finite")
        return value

    def uniform(self, key: str, default: Any = REQUIRED, *, layers: int, least: int = 1) -> int:
        """A whole number given once or as a list with one equal entry a layer (Hunyuan-A13B writes lists).

        Args:
            key: its name.
            default: when the key is absent.
            layers: entries of a list.
            least: smallest value allowed.

        Raises:
            ConfigError: no whole numbers, another number of entries than layers, or a value below `least`.
            UnsupportedError: the list's entries differ.
        """
        value = self.take(key, (int, list), default)
        entries = value if isinstance(value, list) else [value] * layers
        if any(not isinstance(entry, int) or isinstance(entry, bool) for entry in entries):
            raise ConfigError(f"{self.where}: {key} = {value} is not a list of whole numbers")
        if len(entries) != layers:
            raise ConfigError(f"{self.where}: {key} has {len(entries)} entries for {layers} layers")
        if len(set(entries)) > 1:
            raise UnsupportedError(f"{self.where}: {key} = {value} differs by layer; only equal entries are supported")
        if entries[0] < least:
            raise ConfigError(f"{self.where}: {key} = {entries[0]} is below {least}")
        return entries[0]

    def has(self, key: str) -> bool:
        """Whether the file has a key at all, null included."""
        self._seen.add(key)
        return key in self._data

    def spelling(self, *keys: str) -> str:
        """The key that the file uses for a setting with several names; the first when it has none of them.

        Raises:
            ConfigError: it uses several, with different values.
        """
        self._seen.update(keys)
        given = [key for key in keys if self._data.get(key) is not None]
        if any(self._data[key] != self._data[given[0]] for key in given):
            values = " and ".join(f"{key} = {self._data[key]!r}" for key in given)
            raise ConfigError(f"{self.where}: {values} are names of one setting, give one of them")
        return given[0] if given else keys[0]

    def child(self, key: str, default: Any = REQUIRED) -> "ConfigReader":
        """The reader of an object inside the file; whoever takes it calls its `finish`.

        Raises:
            ConfigError: absent without a default, or no object.
        """
        return ConfigReader(self.take(key, dict, default), f"{self.where}: {key}")

    def kinds(self, key: str, *known: str, layers: int) -> tuple[str, ...] | None:
        """One word a layer; None when the key is absent.

        Args:
            key: its name.
            known: words that this version knows.
            layers: entries of the list.

        Raises:
            ConfigError: no list, or another number of entries than layers.
            UnsupportedError: another word.
        """
        words = self.take(key, list, None)
        if words is None:
            return None
        if len(words) != layers:
            raise ConfigError(f"{self.where}: {key} has {len(words)} entries for {layers} layers")
        for layer, word in enumerate(words):
            if word not in known:
                raise UnsupportedError(
                    f"{self.where}: {key} has {word!r} for layer {layer}; supported: {', '.join(known)}"
                )
        return tuple(words)

    def expect(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, and must have one of the values that this version can do when present.

        Raises:
            UnsupportedError: it has another value.
        """
        self._seen.add(key)
        value = self._data.get(key)
        if value is not None and value not in allowed:
            wanted = f", only {' or '.join(map(repr, allowed))}" if allowed else ""
            raise UnsupportedError(f"{self.where}: {key} = {value!r} is not supported{wanted}")

    def ignore(self, *keys: str) -> None:
        """Keys that do not change the forward pass."""
        self._seen.update(keys)

    def finish(self) -> None:
        """Raises: ConfigError: the file has keys that nothing read; they are named."""
        unknown = sorted(set(self._data) - self._seen)
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown key {', '.join(unknown)}: this version does not know what it changes; remove "
                "it only if you are sure that it changes nothing"
            )


IGNORED_KEYS = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "initializer_range",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "use_cache",
)
"""Keys of any config.json that do not change the forward pass: tokens are read by the tokenizer side, losses and noise
act in training only."""


def expand(template: str, layers: Sequence[int], experts: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """((layer position, expert), tensor name) for each combination the template needs; positions start at 0."""
    if "{layer}" not in template:
        yield (), template
        return
    for position, layer in enumerate(layers):
        if "{expert}" not in template:
            yield (position,), template.replace("{layer}", str(layer))
            continue
        for expert in range(experts):
            yield (position, expert), template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
