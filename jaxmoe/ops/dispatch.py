"""Choice of an operator's implementation: the first of a closed, ordered table that does not refuse.

A refusal is a sentence. The choice is made while tracing, from shapes, dtypes and the platform, so it is a pure
function and can be asked for without running anything; `str` of a `Choice` explains it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.errors import UnsupportedError


def _never(*_args: Any, **_kwargs: Any) -> str | None:
    return None


def _identity(weight: Any) -> Any:
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation of an operator."""

    name: str
    """Short name, such as 'xla'; accepted by the operators' `impl` argument."""
    run: Callable[..., Any]
    """Same signature as the operator."""
    refuse: Callable[..., str | None] = _never
    """Called with the operator's arguments; None when it can do it, else the reason as a sentence."""
    pack: Callable[[Any], Any] = _identity
    """Turns a canonical weight [..., out, in] into the layout `run` wants, once, at load. Identity for XLA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `choose` decided and why."""

    operator: str
    impl: Impl
    refusals: tuple[tuple[str, str], ...]
    """(implementation, reason) of each more preferred implementation."""

    def __str__(self) -> str:
        """One line for `jaxmoe doctor`."""
        reasons = "".join(f"; {name} refused: {reason}" for name, reason in self.refusals)
        return f"{self.operator}: {self.impl.name}{reasons}"


def choose(operator: str, impls: Sequence[Impl], impl: str | None, *args: Any, **kwargs: Any) -> Choice:
    """The first implementation that does not refuse, or the one named `impl`.

    Raises:
        UnsupportedError: the name is unknown, the named implementation refuses, or all refuse; the reasons are given.
    """
    candidates = [entry for entry in impls if impl is None or entry.name == impl]
    if not candidates:
        raise UnsupportedError(f"{operator} has no implementation {impl!r}; it has {', '.join(i.name for i in impls)}")
    refusals = []
    for entry in candidates:
        reason = entry.refuse(*args, **kwargs)
        if reason is None:
            return Choice(operator=operator, impl=entry, refusals=tuple(refusals))
        refusals.append((entry.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"{operator}: no implementation accepts these arguments ({reasons})")
