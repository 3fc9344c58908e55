"""Gates: limits from configs/gates.toml, applied to an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxmoe.assets import asset
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import ConfigError
from jaxmoe.evals.perplexity import EvalResult
from jaxmoe.models.leaves import Schemes

GateKind = Literal["float", "kv_int8", "w8a16", "w8a8", "w4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Limits for one kind of model."""

    max_perplexity_increase: float
    """Relative to the baseline, over all tokens."""
    max_range_increase: float
    """Relative to the baseline, for every position range."""


def load_gates(path: Path | None = None) -> Mapping[str, Gate]:
    """All gates.

    Raises:
        ConfigError: the file is wrong.
    """
    path = asset("configs", "gates.toml") if path is None else path
    return {name: decode(Gate, entry, where=f"{path}.{name}") for name, entry in read_toml(path).items()}


def gate_kind(schemes: Schemes, kv_cache: str) -> GateKind:
    """Which gate a model is held to: the loosest of what it quantises."""
    used = [scheme for scheme in schemes.values() if scheme is not None]
    bits = {scheme.activation_bits for scheme in used}
    if any(scheme.weight_bits == 4 for scheme in used):
        return "w4"
    if 8 in bits:
        return "w8a8"
    if bits:
        return "w8a16"
    return "kv_int8" if kv_cache == "int8" else "float"


def check_gate(result: EvalResult, gate: Gate) -> list[str]:
    """One sentence for each range beyond the limit; empty: passed.

    Raises:
        ConfigError: the result has no baseline.
    """
    failures = []
    for part in (*result.ranges, result.overall):
        if part.increase is None:
            raise ConfigError("a gate compares with a baseline; give --baseline")
        limit = gate.max_perplexity_increase if part is result.overall else gate.max_range_increase
        if not part.increase <= limit:
            where = "overall" if part is result.overall else f"positions {part.start}..{part.stop or ''}"
            failures.append(
                f"{where}: perplexity {part.perplexity:.3f} against {part.baseline_perplexity:.3f} is "
                f"{part.increase:+.2%}, the limit is {limit:+.2%}"
            )
    return failures
