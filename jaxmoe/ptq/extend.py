"""More samples until every expert has its minimum of tokens, or the data are used up.

The samples run through the float model once before the quantisation, only to see where their tokens go.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.ptq.actions import Context, Record
from jaxmoe.ptq.calib import Calibration, joined, next_windows
from jaxmoe.ptq.calib_documents import TokenizedDocument
from jaxmoe.ptq.graph import build_graph
from jaxmoe.ptq.job import Job, output_specs
from jaxmoe.ptq.tasks.run import run_tasks
from jaxmoe.ptq.tasks.task import Task
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.weights.layout import plan_shards
from jaxmoe.weights.shards import ShardFiles

_GROWTH = 2
"""A step adds 1 / _GROWTH of the samples there are."""


def extended(
    job: Job,
    calibration: Calibration,
    documents: Sequence[TokenizedDocument],
    *,
    folder: Path,
    devices: Sequence[Any],
) -> Calibration:
    """The samples, and as many of those that follow as the coldest expert needs.

    Args:
        job: whose recipe says how many tokens an expert should have.
        calibration: the first samples.
        documents: that they were cut from.
        folder: for intermediate results; made and removed.
        devices: that run the samples.

    Raises:
        WeightsError: a layer gives NaN on the samples, or the disk fails.
    """
    recipe = job.recipe.calibration
    assert recipe is not None, "only calibrated recipes have experts to reach"
    counts = tokens_per_expert(job, calibration, folder=folder, devices=devices)
    while counts.min() < recipe.expert_tokens:
        more = next_windows(calibration, documents, samples=-(-len(calibration.lengths) // _GROWTH))
        fresh = np.flatnonzero(more.repeated_tokens == 0)
        # What repeats tells an expert nothing new; only whole runs can be joined, so the first repetition ends it.
        if len(fresh) < len(more.lengths):
            ends = int(np.argmax(more.repeated_tokens > 0))
            if ends == 0:
                return calibration
            more = next_windows(calibration, documents, samples=ends)
        added = tokens_per_expert(job, replace(more, first=0), folder=folder, devices=devices)
        counts, calibration = counts + added, joined(calibration, more)
    return calibration


def tokens_per_expert(job: Job, calibration: Calibration, *, folder: Path, devices: Sequence[Any]) -> np.ndarray:
    """[moe_layers, experts] int64: where the float model routes the tokens of some samples.

    Args: see `extended`.
    """
    recipe = job.recipe.calibration
    assert recipe is not None
    # Nothing is smoothed or written: only routing counts.
    plain = replace(job, recipe=replace(job.recipe, calibration=replace(recipe, smooth=None, smooth_int4=None)))
    specs = output_specs(job)
    shutil.rmtree(folder, ignore_errors=True)
    context = Context(
        job=plain,
        shards=ShardFiles(folder, specs, plan_shards(specs), job.output.index_name),
        work=WorkFolder(folder),
        calibration=calibration,
        grams=frozenset(),
    )
    graph = build_graph(context, "routing", writes=False)
    actions = {planned.task.name: planned.action for planned in graph}
    records: dict[str, Record] = {}

    def execute(task: Task, device: Any) -> None:
        records[task.name] = actions[task.name].run(context, device)

    try:
        run_tasks([planned.task for planned in graph], execute, list(devices))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen = [records[planned.task.name] for planned in graph]
    return np.array([record["tokens_per_expert"] for record in seen if "tokens_per_expert" in record], np.int64)
