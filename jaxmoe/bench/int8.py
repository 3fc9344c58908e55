"""Is INT8 faster than float here? The question `doctor` asks of every backend."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.ops.linear import linear
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import Scheme

_SIZE = 2048
_ROUNDS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Medians of interleaved runs of one linear layer."""

    tokens: int
    float_ms: float
    int8_ms: float
    error: float
    """Relative error of the INT8 result: no speed without its quality."""

    @property
    def speedup(self) -> float:
        """Float time over INT8 time."""
        return self.float_ms / self.int8_ms


def compare_int8(token_counts: tuple[int, ...] = (1, 8, 64, 512)) -> Iterator[Comparison]:
    """Times float32 and W8A8-g128 in turn (A B A B) for each number of rows."""
    generator = np.random.default_rng(0)
    weight = jnp.asarray(generator.standard_normal((_SIZE, _SIZE), np.float32))
    quantized = quantize_weight(weight, Scheme())
    step = jax.jit(linear)
    for tokens in token_counts:
        x = jnp.asarray(generator.standard_normal((tokens, _SIZE), np.float32))
        exact, rounded = step(x, weight), step(x, quantized)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for index, w in enumerate((weight, quantized)):
                times[index].append(_milliseconds(partial(step, x, w)))
        yield Comparison(
            tokens=tokens,
            float_ms=float(np.median(times[0])),
            int8_ms=float(np.median(times[1])),
            error=float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)),
        )


def _milliseconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return (time.perf_counter() - start) * 1e3
