"""What a quantisation takes of host memory and disk, before anything is read."""

import math
from dataclasses import dataclass

from jaxmoe.nn.config import DecoderConfig
from jaxmoe.ptq.expert_run import TILE_ROWS
from jaxmoe.ptq.job import FLOAT32, Job, Part, is_routed, is_run, needs_of
from jaxmoe.weights.cells import cell_shape

_TILES = 8
"""Of tokens, on the host and on the device."""
_GRAMS_AT_ONCE = 4
"""Of a size: the sum on the device, its copy in float64 (twice as large), and what is made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Upper bounds, beside the interpreter, JAX and compiled programs."""

    host_bytes: int
    disk_bytes: int
    """Of intermediate results; the result itself is apart."""


def memory_of(job: Job, *, workers: int, tokens: int | None = None, longest: int | None = None) -> Memory:
    """What a run takes in one process.

    Args:
        job: the quantisation.
        workers: devices that work at once.
        tokens: of all samples; None: as many as the recipe asks for, of mean length.
        longest: tokens of a sample at most; None: as the recipe says.
    """
    recipe, config = job.recipe.calibration, job.files.manifest.config
    write = max(part.peak_bytes(job) for part in job.parts if recipe is None or not is_routed(part.match.entry))
    copied = max((min(meta.nbytes, 1 << 25) for meta in job.not_loaded), default=0)
    if recipe is None:
        return Memory(host_bytes=workers * max(write, copied), disk_bytes=0)
    tokens = recipe.samples * (recipe.min_tokens + recipe.max_tokens) // 2 if tokens is None else tokens
    longest = recipe.max_tokens if longest is None else longest
    layers: dict[int, int] = {}
    for part in job.parts:
        if is_run(part.match.entry) and not is_routed(part.match.entry):
            layers[part.layer] = layers.get(part.layer, 0) + _elements(part) * FLOAT32.itemsize
    # A layer's weights are there twice while they go to a device.
    # A sample's arrays, as they are and padded, in and out.
    sample = 4 * longest * _token_bytes(config)
    busiest = max(write, copied, sample + _gram_bytes(job), _expert_bytes(job))
    return Memory(host_bytes=workers * (2 * max(layers.values()) + busiest), disk_bytes=_disk_bytes(config, tokens))


def _elements(part: Part) -> int:
    return len(part.cells) * math.prod(cell_shape(part.match.entry))


def _streams(config: DecoderConfig) -> int:
    return 1 if config.hyper is None else config.hyper.streams


def _token_bytes(config: DecoderConfig) -> int:
    """What a layer makes of a token between its halves and by its experts."""
    top_k = config.moe.router.top_k
    vectors = _streams(config) + 2 + top_k
    return FLOAT32.itemsize * (vectors * config.embed + 2 * top_k)


def _disk_bytes(config: DecoderConfig, tokens: int) -> int:
    """The residual stream before and after a layer, what is between its halves, and the order of the pairs."""
    stream = FLOAT32.itemsize * _streams(config) * config.embed
    return tokens * (2 * stream + _token_bytes(config) + 16 * config.moe.router.top_k)


def _expert_bytes(job: Job) -> int:
    """One routed expert: weights as read, as they are run and as they are rounded, and some tokens in and out."""
    routed = [part for part in job.parts if is_routed(part.match.entry)]
    if not routed:
        return 0
    config = job.files.manifest.config
    layer = routed[0].layer
    weights = sum(math.prod(cell_shape(part.match.entry)) for part in routed if part.layer == layer)
    largest = max(math.prod(cell_shape(part.match.entry)) for part in routed)
    grams = {cell_shape(part.match.entry)[-1] for part in routed if needs_of(part.match) == "hessian"}
    rows = 2 * _TILES * TILE_ROWS * config.embed
    return FLOAT32.itemsize * (2 * weights + 4 * largest + rows + _GRAMS_AT_ONCE * sum(size**2 for size in grams))


def _gram_bytes(job: Job) -> int:
    """Gram matrices of taps while samples run."""
    sizes = [cell_shape(part.match.entry)[-1] for part in job.parts if needs_of(part.match) == "hessian"]
    return FLOAT32.itemsize * _GRAMS_AT_ONCE * max((size**2 for size in sizes), default=0)
