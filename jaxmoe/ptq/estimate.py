"""How long a quantisation will take, roughly: operations of its tasks over what a device here does in a second."""

import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.ptq.actions import Context
from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.calib_windows import Sampling
from jaxmoe.ptq.graph import build_graph
from jaxmoe.ptq.job import Job, gram_taps
from jaxmoe.ptq.tasks.task import waves
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.weights.shards import ShardFiles

_PROBE_SIZE = 1024
_PROBE_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of the time; reading and writing are apart."""

    tasks: int
    waves: int
    """Steps that must follow each other, however many devices there are."""
    operations: float
    rate: float
    """Operations a second of one device, measured just now with a float32 product."""
    seconds: float
    """With all devices busy."""


def estimate(job: Job, *, workers: int) -> Estimate:
    """The tasks that a run with the recipe's own number of samples would have; nothing is read.

    Args:
        job: the quantisation.
        workers: devices.
    """
    folder = Path("nowhere")
    # Tasks do not depend on where their results go: for a large model the layout would cost half of the time.
    shards = ShardFiles(folder, (), (), "index")
    context = Context(job=job, shards=shards, work=WorkFolder(folder), calibration=_typical(job), grams=gram_taps(job))
    tasks = [planned.task for planned in build_graph(context, "estimate")]
    operations, rate = sum(task.cost for task in tasks), _rate()
    # A wave takes at least as long as its longest task.
    seconds = sum(
        max(max(task.cost for task in wave), sum(task.cost for task in wave) / workers) for wave in waves(tasks)
    )
    return Estimate(tasks=len(tasks), waves=len(waves(tasks)), operations=operations, rate=rate, seconds=seconds / rate)


def _typical(job: Job) -> Calibration | None:
    recipe = job.recipe.calibration
    if recipe is None:
        return None
    length = (recipe.min_tokens + recipe.max_tokens) // 2
    return Calibration(
        tokens=np.broadcast_to(np.int32(0), (recipe.samples, recipe.max_tokens)),
        lengths=np.full(recipe.samples, length, np.int32),
        domains=("",) * recipe.samples,
        fresh_tokens=np.full(recipe.samples, length, np.int32),
        repeated_tokens=np.zeros(recipe.samples, np.int32),
        first=0,
        sampling=Sampling(min_tokens=recipe.min_tokens, max_tokens=recipe.max_tokens, separator=0, seed=0),
        available_tokens={"": length * recipe.samples},
        data_sha256="",
    )


def _rate() -> float:
    product = jax.jit(jnp.matmul)
    matrix = jnp.ones((_PROBE_SIZE, _PROBE_SIZE), jnp.float32)
    product(matrix, matrix).block_until_ready()
    start = time.perf_counter()
    for _ in range(_PROBE_RUNS):
        product(matrix, matrix).block_until_ready()
    return _PROBE_RUNS * 2.0 * _PROBE_SIZE**3 / (time.perf_counter() - start)
