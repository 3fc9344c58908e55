"""Jobs on tiny checkpoints for the tests of the quantisation, and what they compare."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np

from jaxmoe.ptq.calib import Calibration, sample_windows
from jaxmoe.ptq.calib_documents import TokenizedDocument
from jaxmoe.ptq.calib_windows import Sampling
from jaxmoe.ptq.job import Job, prepare
from jaxmoe.ptq.quantize import Result, quantize
from jaxmoe.ptq.recipe import CalibrationRecipe, Recipe, load_recipe
from jaxmoe.ptq.rounding import MethodName
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.running import scratch, tiny_folder

WIDTH = 40
LENGTHS = (37, 20, 1, 37, 9)
"""Of `samples`: two that are equally long, one token alone, none that fills the width."""
ALPHA = 0.4
"""Of smoothing, in recipes that are made here."""
EXPERTS = ("experts.gate", "experts.up", "experts.down")


def documents() -> tuple[TokenizedDocument, ...]:
    generator = np.random.default_rng(5)
    return tuple(
        TokenizedDocument(domain=name, where=name, ids=generator.integers(3, 256, 400).astype(np.int32))
        for name in ("a", "b")
    )


@cache
def windows(samples: int = 18, seed: int = 0) -> Calibration:
    """Samples as a command takes them: more than there are virtual shards."""
    return sample_windows(documents(), separator=2, samples=samples, min_tokens=4, max_tokens=WIDTH, seed=seed)


def samples(rows: np.ndarray, lengths: Sequence[int], *, width: int = WIDTH) -> Calibration:
    """Calibration on given tokens.

    Args:
        rows: [samples, any] token ids.
        lengths: how many of each row count.
        width: of the padded samples.
    """
    ids = np.full((len(lengths), width), -1, np.int32)
    for row, length in enumerate(lengths):
        ids[row, :length] = rows[row, :length]
    count = np.array(lengths, np.int32)
    return Calibration(
        tokens=ids,
        lengths=count,
        domains=("a",) * len(lengths),
        fresh_tokens=count,
        repeated_tokens=np.zeros_like(count),
        first=0,
        sampling=Sampling(min_tokens=1, max_tokens=width, separator=2, seed=0),
        available_tokens={"a": int(count.sum())},
        data_sha256="0" * 64,
    )


def some_samples(*, width: int = WIDTH) -> Calibration:
    """The goldens' tokens, cut to `LENGTHS`."""
    return samples(tiny.token_ids(rows=len(LENGTHS)), LENGTHS, width=width)


def with_calibration(recipe: Recipe, **changes: object) -> Recipe:
    """A calibrated recipe with other settings."""
    settings = recipe.calibration or CalibrationRecipe()
    return replace(recipe, calibration=replace(settings, **changes))  # type: ignore[arg-type]


def experts_rounded(rounding: MethodName, **changes: object) -> Recipe:
    """4-bit experts in groups of 32, as narrow as those of the tiny models, by one method; the rest as it was."""
    base = load_recipe("w4a8-experts-ssz")
    rules = tuple(
        replace(rule, scheme="w4a8-g32", rounding=rounding, options=None) if rule.roles == EXPERTS else rule
        for rule in base.rule
    )
    assert rules != base.rule
    settings = {"smooth": ALPHA, "smooth_int4": None, "search_hidden": False, **changes}
    return with_calibration(replace(base, name=f"experts-{rounding}", rule=rules), **settings)


def all_rounded(rounding: MethodName, **changes: object) -> Recipe:
    """All that is not kept by one method."""
    base = experts_rounded(rounding, **changes)
    rules = tuple(rule if rule.scheme == "float" else replace(rule, rounding=rounding) for rule in base.rule)
    return replace(base, name=f"all-{rounding}", rule=rules)


def run(
    job: Job, out: Path, calibration: Calibration | None = None, devices: int = 1, *, resume: bool = False
) -> Result:
    return quantize(job, out, calibration=calibration, devices=jax.devices()[:devices], resume=resume)


@cache
def finished(family: str, recipe: str) -> Path:
    """A tiny model, quantised on one device in one go; of a calibrated recipe with `windows()`. Not to be changed."""
    loaded = load_recipe(recipe)
    out = scratch() / "finished" / f"{family}-{recipe}"
    out.parent.mkdir(exist_ok=True)
    run(prepare(tiny_folder(family), loaded), out, None if loaded.calibration is None else windows())
    return out


def digest(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a folder, and that there is nothing else in it."""
    assert all(path.is_file() for path in folder.iterdir()), sorted(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def change(folder: Path, tensor: str, values: np.ndarray) -> None:
    """Overwrites a tensor of a checkpoint in place."""
    meta = open_checkpoint(folder).tensors[tensor]
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        if tensor in header:
            start, stop = (8 + size + offset for offset in header[tensor]["data_offsets"])
            data = np.ascontiguousarray(values, meta.dtype).tobytes()
            assert len(data) == stop - start
            path.write_bytes(raw[:start] + data + raw[stop:])
            return
    raise AssertionError(tensor)


def round_to_nearest(weight: np.ndarray, group: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: symmetric, half to even, one scale per group of inputs, all in float32."""
    q, scales = [], []
    for start in range(0, weight.shape[-1], group):
        part = weight[..., start : start + group].astype(np.float32)
        amax = np.abs(part).max(-1, keepdims=True)
        inverse = np.float32(127) / np.where(amax == 0, np.float32(127), amax)
        q.append(np.clip(np.rint(part * inverse), -127, 127).astype(np.int8))
        scales.append(np.where(amax == 0, np.float32(1), amax * np.float32(1 / 127)))
    return np.concatenate(q, -1), np.concatenate(scales, -1)
