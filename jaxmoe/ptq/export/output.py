"""What an output format is: which tensors a weight becomes, what describes them, and what it cannot say."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int8

from jaxmoe.errors import RecipeError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.scheme import GROUPS, Scheme
from jaxmoe.weights.layout import MODEL_INDEX, TensorSpec, model_shard

Integers = Int8[np.ndarray, "*lead out in"]
Scales = Float32[np.ndarray, "*lead out groups"]


class OutputFormat(ABC):
    """One way to write a quantised checkpoint.

    Names are those of our own checkpoints (`Entry.own`): the released ones, with a matrix [out, in] for each expert.
    What stays float has its name, shape and dtype in every format.
    """

    __slots__ = ()

    name: ClassVar[str]
    index_name: ClassVar[str] = MODEL_INDEX
    """Name of the index file."""
    int8_cache: ClassVar[bool] = False
    """Whether it can say that keys and values are stored as INT8."""

    def shard_name(self, number: int, of: int) -> str:
        """File name of shard `number`, counted from 1, of `of`."""
        return model_shard(number, of)

    @abstractmethod
    def check(self, matches: Sequence[Match]) -> None:
        """Refuses what the format cannot say, before any work.

        Raises:
            RecipeError: a tensor and its scheme, why, and what would do.
        """

    @abstractmethod
    def specs(self, name: str, shape: tuple[int, ...], scheme: Scheme | None, kept: np.dtype) -> tuple[TensorSpec, ...]:
        """The tensors that stand for one of our own.

        Args:
            name: its own name.
            shape: [.., out, in], or any shape of what stays float.
            scheme: None: it stays float.
            kept: dtype of what stays float.
        """

    @abstractmethod
    def tensors(self, name: str, integers: Integers, scales: Scales, scheme: Scheme) -> dict[str, np.ndarray]:
        """The contents of `specs` of a quantised weight.

        Args:
            name: its own name.
            integers: one a byte, also of 4 bits.
            scales: one a group of inputs.
            scheme: how it was rounded.
        """

    @abstractmethod
    def config(
        self,
        source: Mapping[str, Any],
        matches: Sequence[Match],
        manifest: Manifest,
        *,
        kv_cache: str,
        copied: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The result's config.json.

        Args:
            source: the source's.
            matches: what was done.
            manifest: the model.
            kv_cache: storage of keys and values that the recipe asks for; see `int8_cache`.
            copied: tensors that belong to no parameter and are copied.
        """

    def side_files(self, matches: Sequence[Match], *, copied: Sequence[str] = ()) -> dict[str, str]:
        """Other files that describe the weights: name -> text."""
        return {}


def quantised(matches: Sequence[Match]) -> Iterator[tuple[Entry, Scheme]]:
    """The parameters that do not stay float."""
    for match in matches:
        if match.scheme is not None:
            yield match.entry, match.scheme


def example(entry: Entry) -> str:
    """The own name of a parameter's first tensor."""
    return next(name for _, name in entry.own_tensors())


def fitting_groups(width: int) -> str:
    """Which groups divide an input axis, for a message."""
    groups = [f"g{group}" for group in GROUPS if not width % group]
    return " or ".join(groups) if groups else f"no group of {', '.join(map(str, GROUPS))} does"


def check_whole_groups(entry: Entry, scheme: Scheme, format_name: str) -> None:
    """Refuses a short last group.

    Raises:
        RecipeError: the group does not divide the input axis.
    """
    width = entry.own_shape[-1]
    if scheme.group is not None and width % scheme.group:
        raise RecipeError(
            f"{example(entry)}: {scheme.name} leaves a last group of {width % scheme.group} of {width} inputs, which "
            f"{format_name} cannot say; choose a group that divides {width} ({fitting_groups(width)}), one scale a "
            "channel, or output format jaxmoe"
        )


def module_name(tensor: str) -> str:
    """The module of a weight: 'x.q_proj.weight' -> 'x.q_proj'."""
    assert tensor.endswith(".weight"), tensor
    return tensor.removesuffix(".weight")
