"""Quantises a checkpoint layer by layer: read, round, write, free. Peak host memory is one layer."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError
from jaxmoe.models.leaves import scale_name
from jaxmoe.ptq.recipe import Match, Recipe, match_recipe, schemes_of_matches
from jaxmoe.ptq.report import TensorReport, build_report
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.formats import describe
from jaxmoe.weights.load import ModelFiles, open_model
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec, write_text_atomic

_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)
Progress = Callable[[int, int], None]
"""Called with (stages done, stages in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked quantisation, nothing read yet but headers."""

    files: ModelFiles
    recipe: Recipe
    matches: tuple[Match, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return self.files.tensor_bytes

    @property
    def result_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(spec.nbytes for spec in output_specs(self))

    @property
    def peak_bytes(self) -> int:
        """Host memory of the largest stage: its parameter in float32, the integers, and the source's copy of it."""
        checkpoint = self.files.checkpoint
        peak = 0
        for match in self.matches:
            for names in _by_layer(match).values():
                elements = sum(int(np.prod(checkpoint.tensors[name].shape)) for name in names)
                source = sum(checkpoint.tensors[name].nbytes for name in names)
                peak = max(peak, source if match.scheme is None else source + 4 * elements + 2 * elements)
        return peak


def prepare(folder: Path, recipe: Recipe) -> Job:
    """Opens the source and matches the recipe; every refusal comes from here, before any work.

    Raises:
        ConfigError, UnsupportedError, WeightsError: see `open_model`.
        RecipeError: the recipe does not fit, or the source is quantised already.
    """
    files = open_model(folder)
    if files.quantization is not None:
        raise ConfigError(
            f"{folder} is quantised already ({files.quantization.quant_method}); give the float checkpoint"
        )
    return Job(files=files, recipe=recipe, matches=match_recipe(recipe, files.manifest))


def output_specs(job: Job) -> list[TensorSpec]:
    """Every tensor of the result in the order of writing."""
    return [spec for stage in _stages(job) for spec in stage.specs(job)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRow:
    """One role of the matched table."""

    role: str
    rule: int
    scheme: str
    tensors: int
    source_bytes: int
    result_bytes: int


def matched_table(job: Job) -> list[MatchedRow]:
    """What the recipe does with every role, and to how many bytes."""
    rows: dict[tuple[str, int, str], list[int]] = {}
    for stage in _stages(job):
        match = stage.match
        if match is None:
            key = ("(not loaded, copied)", -1, "float")
        else:
            key = (match.entry.role, match.rule, "float" if match.scheme is None else match.scheme.name)
        counts = rows.setdefault(key, [0, 0, 0])
        counts[0] += len(stage.names)
        counts[1] += sum(job.files.checkpoint.tensors[name].nbytes for name in stage.names)
        counts[2] += sum(spec.nbytes for spec in stage.specs(job))
    return [
        MatchedRow(role=role, rule=rule, scheme=scheme, tensors=tensors, source_bytes=before, result_bytes=after)
        for (role, rule, scheme), (tensors, before, after) in sorted(
            rows.items(), key=lambda item: (item[0][1], item[0][0])
        )
    ]


def quantize(job: Job, out: Path, progress: Progress | None = None) -> None:
    """Writes the quantised checkpoint folder.

    All is written into `<out>.partial`, each shard fsynced and renamed, and the folder renamed at the end: what has the
    final name is complete.

    Raises:
        ConfigError: `out` exists and is not an empty folder.
        WeightsError: a source tensor is not finite or changed under our hands.
    """
    check_output(out)
    partial_folder = out.with_name(f"{out.name}.partial")
    if partial_folder.exists():
        shutil.rmtree(partial_folder)
    partial_folder.mkdir(parents=True)
    stages = list(_stages(job))
    reports: list[TensorReport] = []
    with CheckpointWriter(partial_folder, output_specs(job), metadata={"format": "pt"}) as writer:
        for done, stage in enumerate(stages):
            reports.extend(stage.run(job, writer))
            if progress is not None:
                progress(done + 1, len(stages))
    _copy_side_files(job.files.folder, partial_folder)
    config = read_json(job.files.folder / "config.json")
    schemes = schemes_of_matches(job.matches)
    config["quantization_config"] = describe(schemes, job.files.manifest, job.recipe.kv_cache)
    report = build_report(
        source=job.files,
        recipe=job.recipe,
        tensors=reports,
        source_bytes=job.source_bytes,
        result_bytes=job.result_bytes,
    )
    write_text_atomic(partial_folder / "jaxmoe_report.json", json.dumps(report, indent=2) + "\n")
    write_text_atomic(partial_folder / "config.json", json.dumps(config, indent=2) + "\n")
    if out.exists():
        out.rmdir()
    partial_folder.rename(out)


def check_output(out: Path) -> None:
    """Refuses to write over something.

    Raises:
        ConfigError: `out` is a file or a folder with something in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not an empty folder; remove it or choose another name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One parameter of one layer: all its experts at once."""

    names: tuple[str, ...]
    match: Match | None
    """None: tensors that this version does not load; copied."""

    def specs(self, job: Job) -> Iterator[TensorSpec]:
        for name in self.names:
            meta = job.files.checkpoint.tensors[name]
            scheme = None if self.match is None else self.match.scheme
            if scheme is None:
                yield TensorSpec(name=name, dtype=meta.dtype, shape=meta.shape)
            else:
                yield TensorSpec(name=name, dtype=_INT8, shape=meta.shape)
                shape = (*meta.shape[:-1], scheme.num_groups(meta.shape[-1]))
                yield TensorSpec(name=scale_name(name), dtype=_FLOAT32, shape=shape)

    def run(self, job: Job, writer: CheckpointWriter) -> list[TensorReport]:
        checkpoint = job.files.checkpoint
        if self.match is None or self.match.scheme is None:
            for name in self.names:
                writer.write(name, checkpoint.read(name))
            return []
        weights = np.stack([checkpoint.read(name) for name in self.names])
        q, scale, signal, noise, zero_groups = map(np.asarray, _round(weights, self.match.scheme))
        reports = []
        for index, name in enumerate(self.names):
            reports.append(
                TensorReport.checked(
                    name=name,
                    role=self.match.entry.role,
                    scheme=self.match.scheme,
                    signal=float(signal[index]),
                    noise=float(noise[index]),
                    zero_groups=int(zero_groups[index]),
                )
            )
            writer.write(name, np.ascontiguousarray(q[index]))
            writer.write(scale_name(name), np.ascontiguousarray(scale[index]))
        return reports


@partial(jax.jit, static_argnums=1)
def _round(weights: jax.Array, scheme: Scheme) -> tuple[jax.Array, ...]:
    """[count, out, in] -> integers, scales, and per tensor: sum of squares, of errors, number of all-zero groups."""
    weights = weights.astype(jnp.float32)
    array = quantize_weight(weights, scheme)
    error = array.dequantize() - weights
    size, group = weights.shape[-1], array.group
    pad = [(0, 0)] * (weights.ndim - 1) + [(0, -size % group)]
    groups = jnp.pad(array.qvalue, pad).reshape(*weights.shape[:-1], -1, group)
    zero_groups = jnp.sum(~jnp.any(groups != 0, axis=-1), axis=(1, 2))
    return (
        array.qvalue,
        array.scale,
        jnp.sum(jnp.square(weights), axis=(1, 2)),
        jnp.sum(jnp.square(error), axis=(1, 2)),
        zero_groups,
    )


def _by_layer(match: Match) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = {}
    for position, name in match.entry.tensors():
        layers.setdefault(match.entry.layers[position[0]] if position else -1, []).append(name)
    return layers


def _stages(job: Job) -> Iterator[_Stage]:
    """Layer by layer: what has no layer, then each layer's parameters, then tensors that are only copied."""
    by_layer: dict[int, list[_Stage]] = {}
    known: set[str] = set()
    for match in job.matches:
        for layer, names in _by_layer(match).items():
            by_layer.setdefault(layer, []).append(_Stage(names=tuple(names), match=match))
            known.update(names)
    for layer in sorted(by_layer):
        yield from by_layer[layer]
    rest = sorted(set(job.files.checkpoint.tensors) - known)
    for name in rest:
        yield _Stage(names=(name,), match=None)


def _copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config, licence: everything but weights, their index and config.json."""
    for path in sorted(source.iterdir()):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".gguf"))
        if path.is_file() and not weights and path.name not in ("config.json", "jaxmoe_report.json"):
            shutil.copyfile(path, target / path.name)
