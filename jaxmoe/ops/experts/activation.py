"""What stands between the gate and up projections and the down projection of an expert."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxmoe.errors import ConfigError

ALPHA: Final = np.float32(1.702)
"""Factor inside the sigmoid of gpt_oss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The hidden row of gate and up.

    First the clamp, where there is a limit: `gate = min(gate, limit)`, `up = min(max(up, -limit), limit)`. Then
        swiglu:  silu(gate) * up
        gpt_oss: (up + 1) * gate * sigmoid(1.702 * gate)
    A NaN stays a NaN.

    Invariants (checked on construction): `limit` is None, or positive and finite.

    Source: Shazeer 2020 (arXiv 2002.05202), swiglu; transformers, modeling_gpt_oss.py, gpt_oss and the clamp.
    """

    kind: Literal["swiglu", "gpt_oss"] = "swiglu"
    limit: float | None = None
    """gate at most, up within plus or minus this; None: no clamp."""

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
            ConfigError: one does not hold.
        """
        if self.kind not in ("swiglu", "gpt_oss"):
            raise ConfigError(f"experts: no activation {self.kind!r}; there are swiglu and gpt_oss")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ConfigError(f"experts: an activation limit of {self.limit} is not a positive number; leave it out")

    def __call__(
        self, gate: Float32[Array, "rows width"], up: Float32[Array, "rows width"]
    ) -> Float32[Array, "rows width"]:
        """Applies it."""
        if self.limit is not None:
            limit = np.float32(self.limit)
            # lax.min and lax.max give NaN where either side is one.
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        if self.kind == "gpt_oss":
            return (up + 1) * (gate * jax.nn.sigmoid(ALPHA * gate))
        return jax.nn.silu(gate) * up


SWIGLU: Final = Activation()
