"""Settings of an engine, read from configs/serve/<profile>.toml and the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxmoe.assets import asset
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import ConfigError
from jaxmoe.nn.step import Layout
from jaxmoe.ops.pages import KVDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Shapes and storage of an engine; sizes are per device.

    Invariants: buckets ascend; pages hold at least one context: (pages - 1) * page_size >= max_context_tokens.
    """

    page_size: int = 16
    """Token slots of a page."""
    pages: int = 129
    """Pages of each device's pool, the null page included."""
    max_context_tokens: int = 2048
    """Longest prompt plus answer; fixes the width of page tables."""
    decode_rows: tuple[int, ...] = (1, 4)
    """Row buckets of decode steps."""
    prefill_tokens: tuple[int, ...] = (32, 256)
    """Chunk buckets of prefill steps, one sequence a device."""
    kv_cache: KVDtype = "int8"
    """Storage of keys and values."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of float weights in memory; router and correction bias stay float32."""

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
            ConfigError: one does not hold.
        """
        for name in ("decode_rows", "prefill_tokens"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ConfigError(f"{name} = {list(values)} must be ascending numbers of at least 1")
        if self.page_size < 1 or (self.pages - 1) * self.page_size < self.max_context_tokens:
            raise ConfigError(
                f"{self.pages} pages of {self.page_size} tokens (one is the null page) hold "
                f"{(self.pages - 1) * self.page_size} tokens, max_context_tokens is {self.max_context_tokens}"
            )

    @property
    def table_width(self) -> int:
        """Entries of a page table row."""
        return -(-self.max_context_tokens // self.page_size)

    def layouts(self) -> tuple[Layout, ...]:
        """Every shape of a generation step."""
        return (
            *(Layout(rows=rows, chunk=1) for rows in self.decode_rows),
            *(Layout(rows=1, chunk=chunk) for chunk in self.prefill_tokens),
        )

    def zeroed(self, layout: Layout) -> int:
        """Most pages that one step of this layout can have freshly allocated."""
        return layout.rows * -(-layout.chunk // self.page_size)


def load_profile(name: str | Path) -> EngineConfig:
    """The settings of a profile, by name or by path.

    Raises:
        ConfigError: no such profile, or it is wrong.
    """
    path = Path(name) if str(name).endswith(".toml") else asset("configs", "serve", f"{name}.toml")
    return decode(EngineConfig, read_toml(path), where=str(path))
