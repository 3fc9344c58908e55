"""Runs checkpoints through the real loader and Runner; runners and their programs are shared by all tests."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence as Seq
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.engine.batch import RowInput, build_batch
from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.llm import choose_plan
from jaxmoe.engine.runner import Runner
from jaxmoe.nn.step import Layout
from jaxmoe.parallel import mesh
from jaxmoe.parallel.plan import Plan
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.weights.load import load_leaves, open_model
from tests import tiny

BUCKET_TOKENS = 37
"""Default chunk of prefill programs: the length of `tiny.token_ids`."""
_PAGE = 16
_CONTEXT = 4 * _PAGE


@cache
def scratch() -> Path:
    """A folder that is gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="jaxmoe-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def tiny_folder(family: str) -> Path:
    """The tiny checkpoint of a family."""
    return tiny.write_checkpoint(scratch() / family, tiny.CONFIGS[family])


@cache
def tiny_quantized(family: str, recipe: str) -> Path:
    """The tiny checkpoint of a family, quantised."""
    folder = scratch() / f"{family}-{recipe}"
    quantize(prepare(tiny_folder(family), load_recipe(recipe)), folder)
    return folder


def plan_for(family: str, devices: int) -> Plan:
    """The family's CPU plan on a number of devices."""
    return choose_plan(family, devices)


def runner_of(
    folder: Path,
    *,
    devices: int = 1,
    kv_cache: Any = "float32",
    dtype: Any = "float32",
    rows: int = 2,
    plan: Plan | None = None,
    context: int = _CONTEXT,
) -> Runner:
    """A loaded runner; the same arguments give the same object, with whatever programs it has by then.

    Args:
        folder: checkpoint.
        devices: CPU devices.
        kv_cache: storage of keys and values.
        dtype: dtype of activations and float weights.
        rows: sequences of one pool of pages; sizes it.
        plan: instead of the family's plan on `devices`.
        context: tokens of a sequence, a multiple of the page size.
    """
    key = None if plan is None else plan.source + str(plan.num_devices)
    if key is not None:
        _PLANS[key] = plan
    return _runner(folder, devices, kv_cache, dtype, rows, key, context)


_PLANS: dict[str | None, Plan | None] = {None: None}
"""Plans by what tells them apart: a plan itself cannot be a key of the cache."""


# Not all for ever: each program keeps memory mappings, of which a process may have 65,530.
@lru_cache(maxsize=48)
def _runner(folder: Path, devices: int, kv_cache: Any, dtype: Any, rows: int, key: str | None, context: int) -> Runner:
    files = open_model(folder)
    plan = _PLANS[key] or plan_for(files.manifest.config.family, devices)
    grid = mesh.make(plan.mesh)
    leaves, arrays = load_leaves(files, plan, grid, dtype)
    config = EngineConfig(
        page_size=_PAGE, max_context_tokens=context, pages=1 + rows * context // _PAGE, kv_cache=kv_cache, dtype=dtype
    )
    return Runner(manifest=files.manifest, leaves=leaves, arrays=arrays, plan=plan, mesh=grid, config=config)


def step(
    runner: Runner, ids: np.ndarray, start: int, count: int, *, bucket: int, only_rows: Seq[int] | None = None
) -> np.ndarray:
    """Logits [rows, count, vocab] of tokens start .. start + count - 1 of every row; see `step_with_experts`."""
    return step_with_experts(runner, ids, start, count, bucket=bucket, only_rows=only_rows)[0]


def step_with_experts(
    runner: Runner, ids: np.ndarray, start: int, count: int, *, bucket: int, only_rows: Seq[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, count, vocab] and chosen experts [moe_layers, rows, count, top_k] of new tokens of every row.

    Row r lives on device r % devices, in the same pages at every call.

    Args:
        runner: holds the cache of the tokens before `start`.
        ids: [rows, length] token ids.
        start: position of the first new token.
        count: new tokens of a row.
        bucket: chunk of the program, at least `count`.
        only_rows: rows that take part; the others are padding and their logits mean nothing.
    """
    shards, page = runner.shards, runner.config.page_size
    here = -(-len(ids) // shards)
    layout = Layout(rows=here, chunk=bucket, all_logits=True)
    runner.compile([layout])
    rows, fresh = [], [[] for _ in range(shards)]
    for row in range(len(ids)) if only_rows is None else only_rows:
        shard, slot = row % shards, row // shards
        pages = [1 + slot * runner.config.table_width + i for i in range(-(-(start + count) // page))]
        fresh[shard] += pages[-(-start // page) :]
        tokens = ids[row, start : start + count].tolist()
        rows.append(RowInput(shard=shard, row=slot, token_ids=tokens, start=start, pages=pages))
    vocab = runner.manifest.config.vocab
    batch = build_batch(layout, rows, fresh, config=runner.config, shards=shards, vocab=vocab)
    result = runner.evaluate(layout, batch)
    logits = np.asarray(result.logits).reshape(shards, here, bucket, vocab)
    experts = np.asarray(result.expert_ids)
    experts = experts.reshape(len(experts), shards, here, bucket, -1)
    places = [(row % shards, row // shards) for row in range(len(ids))]
    return (
        np.stack([logits[shard, slot, :count] for shard, slot in places]),
        np.stack([experts[:, shard, slot, :count] for shard, slot in places], axis=1),
    )


def chunked(runner: Runner, ids: np.ndarray, chunks: Seq[int], bucket: int = BUCKET_TOKENS) -> np.ndarray:
    """Logits [rows, sum(chunks), vocab], in steps of the given sizes; single tokens take the decode program."""
    starts = np.cumsum([0, *chunks])
    parts = [
        step(runner, ids, int(start), count, bucket=1 if count == 1 else bucket)
        for start, count in zip(starts, chunks, strict=False)
    ]
    return np.concatenate(parts, axis=1)


def run_logits(
    folder: Path,
    ids: np.ndarray,
    *,
    devices: int = 1,
    chunks: Seq[int] = (37,),
    kv_cache: str = "float32",
    dtype: str = "float32",
) -> np.ndarray:
    """Logits [rows, length, vocab] float32 of a checkpoint.

    Args:
        folder: checkpoint.
        ids: [rows, length] token ids; rows are spread over the devices.
        devices: CPU devices.
        chunks: sizes of the steps; their sum is the length.
        kv_cache: storage of keys and values.
        dtype: dtype of activations and float weights.
    """
    assert sum(chunks) == ids.shape[1], (chunks, ids.shape)
    rows = -(-len(ids) // devices)
    runner = runner_of(folder, devices=devices, kv_cache=kv_cache, dtype=dtype, rows=rows)
    return chunked(runner, ids, chunks, bucket=max(BUCKET_TOKENS, *chunks))


def greedy_tokens(runner: Runner, prompts: np.ndarray, count: int) -> np.ndarray:
    """[rows, count] greedy continuation, one token a step, the prompt included."""
    ids = prompts
    for position in range(prompts.shape[1] + count - 1):
        logits = step(runner, ids, position, 1, bucket=1)
        if position + 1 >= prompts.shape[1]:
            ids = np.concatenate([ids, logits[:, 0].argmax(-1)[:, None]], axis=1)
    return ids[:, prompts.shape[1] :]
