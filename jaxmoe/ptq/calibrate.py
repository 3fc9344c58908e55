"""A calibrated quantisation from a job and its samples: first pass, coverage, second pass."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.calib_coverage import Coverage, measure_coverage
from jaxmoe.ptq.observe import TreatmentStore, observe
from jaxmoe.ptq.recipe import schemes_of_matches
from jaxmoe.ptq.stream import Job, check_output, quantize

Progress = Callable[[int, int], None]


def quantize_calibrated(
    job: Job,
    calibration: Calibration,
    out: Path,
    *,
    devices: Sequence[Any],
    observing: Progress | None = None,
    rounding: Progress | None = None,
) -> Coverage:
    """Runs the samples through the float model, then rounds with what was learned.

    The first pass keeps its files in `<out>.observed`, which is removed at the end.

    Args:
        job: a checked quantisation whose recipe has a calibration table.
        calibration: the samples.
        out: folder to write.
        devices: that run samples; any number gives the same bytes.
        observing: called after each layer of the first pass.
        rounding: called after each stage of the second.

    Returns:
        How well the samples reached the experts.

    Raises:
        ConfigError: `out` exists and is not an empty folder.
        WeightsError: a source tensor, or what a layer makes of the samples, is not finite.
    """
    check_output(out)
    recipe, manifest = job.recipe.calibration, job.files.manifest
    assert recipe is not None, "a job without calibration needs no samples"
    folder = out.with_name(f"{out.name}.observed")
    if folder.exists():
        shutil.rmtree(folder)
    seen = observe(
        job.files.source,
        manifest,
        schemes_of_matches(job.matches),
        token_ids=calibration.tokens,
        lengths=calibration.lengths.tolist(),
        alpha=recipe.smooth,
        folder=folder,
        devices=devices,
        progress=observing,
    )
    config = manifest.config
    layers = range(config.dense_layers, config.layers)
    coverage = measure_coverage(seen.counts, layers=layers, threshold_tokens=recipe.expert_tokens)
    data = {
        "data_sha256": calibration.data_sha256,
        "samples": asdict(calibration.report),
        "coverage": asdict(coverage),
        "tokens_per_expert": seen.counts.tolist(),
    }
    quantize(job, out, rounding, treatments=TreatmentStore(folder, manifest), calibration=data)
    shutil.rmtree(folder)
    return coverage
