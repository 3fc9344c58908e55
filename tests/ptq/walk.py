"""Runs the tasks of a calibrated quantisation one after the other, keeps all that they hand on, and rounds nothing.

What would be rounded is written as the float that it is by then: the result is the smoothed float model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe.ptq.actions import Clean, Context, Join, Record
from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.expert_action import RunExperts
from jaxmoe.ptq.graph import build_graph
from jaxmoe.ptq.job import Job, Part, gram_taps, output_specs, prepare
from jaxmoe.ptq.layer_files import load_samples, plan_key, unpacked_stats
from jaxmoe.ptq.recipe import Recipe
from jaxmoe.ptq.report import TensorReport
from jaxmoe.ptq.rounding import MethodName
from jaxmoe.ptq.statistics import InputStats
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.weights.cells import Cell
from jaxmoe.weights.layout import plan_shards
from jaxmoe.weights.shards import ShardFiles
from tests.ptq.jobs import all_rounded, some_samples
from tests.running import scratch, tiny_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """All that a run leaves behind."""

    job: Job
    context: Context
    folder: Path
    """The smoothed float checkpoint."""
    weights: dict[str, np.ndarray]
    """Own label -> what is rounded: treated weights [out, in]."""
    moments: dict[str, np.ndarray | None]
    """Own label -> what it is rounded by."""
    records: tuple[Record, ...]
    after: tuple[np.ndarray, ...]
    """The residual stream after the last layer, by sample."""

    def plan(self, layer: int) -> dict[str, np.ndarray]:
        return self.context.work.load(plan_key(layer))

    def stats(self, layer: int) -> dict[str, InputStats]:
        return unpacked_stats(self.plan(layer))

    def counts(self, layer: int) -> list[int]:
        """Tokens of each expert."""
        return next(record["tokens_per_expert"] for record in self.records if record.get("layer") == layer)


def walk(family: str, recipe: Recipe, calibration: Calibration, folder: Path) -> Walk:
    """Runs all tasks in their order on one device."""
    job = prepare(tiny_folder(family), recipe)
    plain = replace(job, matches=tuple(replace(match, scheme=None) for match in job.matches))
    specs = output_specs(plain)
    shards = ShardFiles(folder, specs, plan_shards(specs), "model.safetensors.index.json")
    shards.create()
    work = WorkFolder(folder.with_name(f"{folder.name}-work"))
    context = Context(job=job, shards=shards, work=work, calibration=calibration, grams=gram_taps(job))
    weights: dict[str, np.ndarray] = {}
    moments: dict[str, np.ndarray | None] = {}

    def keep(
        _job: Job,
        to: ShardFiles,
        _part: Part,
        cells: Sequence[tuple[Cell, Cell]],
        arrays: Any,
        moment: Any,
        _device: Any,
    ) -> Iterator[TensorReport]:
        for index, (_, own) in enumerate(cells):
            weights[own.label] = np.asarray(arrays[index])
            moments[own.label] = None if moment is None else np.asarray(moment[index])
            to.write(own.tensor, weights[own.label].astype(np.float32))
        yield from ()

    records, last = [], job.files.manifest.config.layers - 1
    with pytest.MonkeyPatch.context() as patch:
        for module in ("write_part", "expert_action"):
            patch.setattr(f"jaxmoe.ptq.{module}.round_cells", keep)
        patch.setattr(ShardFiles, "make_durable", lambda _self, _names: None)
        for planned in build_graph(context, "walk"):
            action = planned.action
            if isinstance(action, RunExperts):
                # The last layer's are joined below, which no quantisation does.
                action = replace(action, keeps=True)
            if not isinstance(action, Clean):
                records.append(action.run(context, jax.devices()[0]))
        for shard in context.used_shards:
            Join(layer=last, shard=shard).run(context, jax.devices()[0])
    shards.publish()
    config = (job.files.folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    after: dict[int, np.ndarray] = {}
    for shard in context.used_shards:
        found = load_samples(work, last + 1, shard, context.lengths_of(shard))
        after |= {index: sample.x for index, sample in zip(context.samples_of(shard), found, strict=True)}
    return Walk(
        job=job,
        context=context,
        folder=folder,
        weights=weights,
        moments=moments,
        records=tuple(records),
        after=tuple(after[index] for index in range(len(after))),
    )


def walked(family: str, rounding: MethodName = "ssz") -> Walk:
    """The walk of `some_samples`; not to be changed."""
    return _walked(family, rounding)


@cache
def _walked(family: str, rounding: MethodName) -> Walk:
    folder = scratch() / "walks" / f"{family}-{rounding}"
    return walk(family, all_rounded(rounding), some_samples(), folder)
