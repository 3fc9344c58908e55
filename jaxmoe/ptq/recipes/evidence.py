"""What was measured with a recipe, carried by the recipe."""

import datetime
import math
import re
from dataclasses import dataclass

from jaxmoe.errors import RecipeError

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measurement.

    Invariants (checked on construction): `tokens >= 1`; figures are finite; `kl >= 0`; `0 <= router_agreement <= 1`;
    `date` is a day as YYYY-MM-DD; `data_sha256` has 64 hexadecimal digits.
    """

    model: str
    text: str
    """What it was measured on."""
    tokens: int
    perplexity_increase: float
    """Perplexity of the quantised model over that of the float model, minus one."""
    kl: float | None = None
    """Mean Kullback-Leibler divergence of the quantised model's next-token distributions, in nats."""
    router_agreement: float | None = None
    """Share of the float model's chosen experts that the quantised model chooses too."""
    date: str
    data_sha256: str
    """Of the evaluation text."""
    jaxmoe: str
    """Version that measured it."""

    def line(self) -> str:
        """For people."""
        parts = [f"perplexity {100 * self.perplexity_increase:+.2f} % on {self.tokens:,} tokens of {self.text}"]
        if self.kl is not None:
            parts.append(f"KL {self.kl:.3f}")
        if self.router_agreement is not None:
            parts.append(f"router agreement {100 * self.router_agreement:.1f} %")
        return f"{self.model}: {', '.join(parts)}; {self.date}, jaxmoe {self.jaxmoe}"

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
            RecipeError: one does not hold.
        """
        numbers = {
            "perplexity_increase": self.perplexity_increase,
            "kl": self.kl,
            "router_agreement": self.router_agreement,
        }
        wrong = [f"{key} = {value}" for key, value in numbers.items() if value is not None and not math.isfinite(value)]
        if self.tokens < 1:
            wrong.append(f"tokens = {self.tokens}")
        if self.perplexity_increase <= -1:
            wrong.append(f"perplexity_increase = {self.perplexity_increase}")
        if self.kl is not None and self.kl < 0:
            wrong.append(f"kl = {self.kl}")
        if self.router_agreement is not None and not 0 <= self.router_agreement <= 1:
            wrong.append(f"router_agreement = {self.router_agreement}")
        if not _is_day(self.date):
            wrong.append(f"date = {self.date!r}")
        if not _SHA256.match(self.data_sha256):
            wrong.append(f"data_sha256 = {self.data_sha256!r}")
        if wrong:
            raise RecipeError(
                f"evidence of {self.model}: {', '.join(wrong)} cannot be; tokens are one or more, an increase is a "
                "fraction above -1, kl is not negative, agreement is in [0, 1], a date is YYYY-MM-DD, a hash has 64 "
                "hexadecimal digits"
            )


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
