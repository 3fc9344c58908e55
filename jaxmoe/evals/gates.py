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

GateKind = Literal["float", "kv_int8", "w8a16", "w8a8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Limits for one kind of model."""

    max_perplexity_increase: float
    """Relative to the baseline, over all tokens and for every position range."""
    range_standard_errors: float = 0.0
    """Standard errors of a range's own increase that its limit is widened by: a limit below the sampling noise of a
    range would pass or fail by chance. The limit over all tokens is never widened."""


def load_gates(path: Path | None = None) -> Mapping[str, Gate]:
    """All gates.

    Raises:
        ConfigError: the file is wrong.
    """
    path = asset("configs", "gates.toml") if path is None else path
    return {name: decode(Gate, entry, where=f"{path}.{name}") for name, entry in read_toml(path).items()}


def gate_kind(schemes: Schemes, kv_cache: str) -> GateKind:
    """Which gate a model is held to: the loosest of what it quantises."""
    bits = {scheme.activation_bits for scheme in schemes.values() if scheme is not None}
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
        noise = 0.0 if part is result.overall else gate.range_standard_errors * (part.standard_error or 0.0)
        if not part.increase <= gate.max_perplexity_increase + noise:
            where = "overall" if part is result.overall else f"positions {part.start}..{part.stop or ''}"
            failures.append(
                f"{where}: perplexity {part.perplexity:.3f} against {part.baseline_perplexity:.3f} is "
                f"{part.increase:+.2%}, the limit is {gate.max_perplexity_increase:+.2%}"
                + (f" and {noise:.2%} of noise" if noise else "")
            )
    return failures
