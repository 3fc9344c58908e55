"""What a family is: how its config.json is read and how its tensors are named on the hub."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.nn.config import DecoderConfig

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """One parameter and the hub tensors that fill it.

    `{layer}` and `{expert}` in the template run over the parameter's leading axes; the rest of the parameter's axes
    are the tensor's own, in the same order.
    """

    path: str
    """Parameter, such as 'moe.ffn.gate'."""
    hub: str
    """Template, such as 'model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of checkpoints that share a config.json dialect and tensor names."""

    name: str
    """`model_type` in config.json."""
    read_config: Callable[["ConfigReader"], DecoderConfig]
    tensors: tuple[TensorRule, ...]


class ConfigReader:
    """Reads a config.json key by key and refuses what nobody asked for."""

    def __init__(self, data: Mapping[str, Any], where: str):
        """Args: data: the parsed object; where: the file, for messages."""
        self._data = dict(data)
        self._seen: set[str] = {"quantization_config"}
        self.where = where

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of a key; null counts as absent.

        Raises:
            ConfigError: the key is absent and has no default, or its value has another type.
        """
        self._seen.add(key)
        value = self._data.get(key)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.where}: missing key {key}")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a {' or '.join(k.__name__ for k in kinds)}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> int:
        """A whole number of at least 1.

        Raises:
            ConfigError: absent without a default, of another type, or below 1.
        """
        value = self.take(key, int, default)
        if value < 1:
            raise ConfigError(f"{self.where}: {key} = {value} is below 1")
        return value

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A whole number of at least 0.

        Raises:
            ConfigError: absent without a default, of another type, or negative.
        """
        value = self.take(key, int, default)
        if value < 0:
            raise ConfigError(f"{self.where}: {key} = {value} is negative")
        return value

    def positive_number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number above 0.

        Raises:
            ConfigError: absent without a default, of another type, or not positive and finite.
        """
        value = self.take(key, float, default)
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key} = {value} is not positive and finite")
        return value

    def uniform(self, key: str, default: Any = _MISSING, *, layers: int, least: int = 1) -> int:
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

    def expect(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, and must have one of the values that this version can do when present.

        Raises:
            UnsupportedError: it has another value.
        """
        self._seen.add(key)
        value = self._data.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise UnsupportedError(f"{self.where}: {key} = {value!r} is not supported, only {wanted}")

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
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of any config.json that do not change the forward pass (token ids are read by the tokenizer side)."""


def expand(template: str, layers: range, experts: int) -> Iterator[tuple[tuple[int, ...], str]]:
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
