"""The files of a calibrated layer: their keys in the work folder, and what is in them.

`x-L/S` holds the residual stream before layer L of the virtual shard S of samples; `layer-L/*` is removed when the
layer is done.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from jaxmoe.ptq.layer_run import Sample
from jaxmoe.ptq.smooth import Treatment
from jaxmoe.ptq.statistics import InputStats
from jaxmoe.ptq.work import WorkFolder


def stats_key(layer: int, shard: int) -> str:
    """What a shard's samples fed the layer."""
    return f"layer-{layer:05}/stats-{shard:02}"


def attended_key(layer: int, shard: int) -> str:
    """A shard between the halves of a layer."""
    return f"layer-{layer:05}/attended-{shard:02}"


def scan_key(layer: int, first: int) -> str:
    """Column maxima of experts `first`.."""
    return f"layer-{layer:05}/scan-{first:05}"


def plan_key(layer: int) -> str:
    """Statistics, treatments and routing of a layer."""
    return f"layer-{layer:05}/plan"


def expert_key(layer: int, expert: int) -> str:
    """What an expert made of its tokens."""
    return f"layer-{layer:05}/expert-{expert:05}"


def sample_key(layer: int, shard: int) -> str:
    """The residual stream before a layer."""
    return f"x-{layer:05}/{shard:02}"


def stream_samples(work: WorkFolder, layer: int, shard: int, samples: Iterable[Sample], lengths: Sequence[int]) -> None:
    """Keeps a shard's samples before a layer as they come; one is in memory at a time."""
    rows = ({"x": sample.x, "selected": sample.selected} for sample in samples)
    stream_rows(work, sample_key(layer, shard), rows, lengths)


def load_samples(work: WorkFolder, layer: int, shard: int, lengths: Sequence[int]) -> list[Sample]:
    """What `stream_samples` kept."""
    arrays, samples, start = work.load(sample_key(layer, shard)), [], 0
    for index, length in enumerate(lengths):
        selected = np.asarray(arrays["selected"][index]) if "selected" in arrays else None
        samples.append(Sample(x=np.asarray(arrays["x"][start : start + length]), selected=selected))
        start += length
    return samples


def packed_stats(stats: Mapping[str, InputStats]) -> dict[str, np.ndarray]:
    """Statistics by tap as arrays for a file."""
    return {f"stats:{tap}:{name}": array for tap, each in stats.items() for name, array in each.arrays().items()}


def unpacked_stats(arrays: Mapping[str, np.ndarray]) -> dict[str, InputStats]:
    """What `packed_stats` packed, among other arrays."""
    by_tap: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        if key.startswith("stats:"):
            _, tap, name = key.split(":")
            by_tap.setdefault(tap, {})[name] = array
    return {tap: InputStats.from_arrays(fields) for tap, fields in by_tap.items()}


def treatment_of(plan: Mapping[str, np.ndarray], name: str) -> Treatment:
    """The treatment of a parameter; nothing if it has none."""
    rows, columns = (plan.get(f"treatment:{name}:{side}") for side in ("rows", "columns"))
    return Treatment(
        rows=None if rows is None else np.asarray(rows), columns=None if columns is None else np.asarray(columns)
    )


def stream_rows(
    work: WorkFolder, key: str, samples: Iterable[Mapping[str, np.ndarray | None]], lengths: Sequence[int]
) -> None:
    """Keeps arrays of samples, rows one after the other; 'selected', which has no rows, stacked."""
    with ExitStack() as stack:
        places: Mapping[str, np.ndarray] = {}
        start = 0
        for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            present = {name: array for name, array in sample.items() if array is not None}
            if not index:
                shapes = {name: (array.dtype, _whole_shape(name, array, lengths)) for name, array in present.items()}
                places = stack.enter_context(work.filling(key, shapes))
            for name, array in present.items():
                if name == "selected":
                    places[name][index] = array
                else:
                    places[name][start : start + length] = array
            start += length


def _whole_shape(name: str, array: np.ndarray, lengths: Sequence[int]) -> tuple[int, ...]:
    return (len(lengths), *array.shape) if name == "selected" else (sum(lengths), *array.shape[1:])
