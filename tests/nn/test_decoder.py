"""The decoder as a whole: every leaf matters, dtypes are kept, and neither padding nor devices change a result."""

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.engine.runner import Runner
from jaxmoe.models.bind import bind
from jaxmoe.models.leaves import assemble, model_leaves
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import abstract_pages
from jaxmoe.parallel import mesh
from jaxmoe.parallel.exchange import ParallelContext
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.formats import FLOAT_ROLES
from tests import tiny
from tests.running import (
    BUCKET_TOKENS,
    greedy_tokens,
    plan_for,
    run_logits,
    runner_of,
    scratch,
    step,
    tiny_folder,
    tiny_quantized,
)
from tests.tolerances import TOLERANCES

FAMILIES = tuple(tiny.CONFIGS)
LEAVES = [
    (family, entry.path)
    for family in FAMILIES
    for entry in tiny.manifest_of(tiny.CONFIGS[family]).entries
    if not entry.path.startswith("mtp.")
]


def evaluate(runner: Runner, ids: np.ndarray, start: int = 0, count: int = BUCKET_TOKENS, **rows: Any) -> np.ndarray:
    return step(runner, ids, start, count, bucket=BUCKET_TOKENS, **rows)


@cache
def original(family: str) -> np.ndarray:
    return evaluate(runner_of(tiny_folder(family)), tiny.token_ids())


@pytest.mark.parametrize(("family", "path"), LEAVES)
def test_every_layer_of_every_leaf_matters(family: str, path: str) -> None:
    """Changes the sign of one layer at a time in a compiled runner; a leaf read from another layer would show."""
    runner, unchanged = runner_of(tiny_folder(family)), original(family)
    index = next(i for i, leaf in enumerate(runner._leaves) if leaf.entry.path == path)
    array = runner._arrays[index]
    layers = range(array.shape[0]) if "layers" in runner._leaves[index].axes else [slice(None)]
    try:
        for layer in layers:
            changed = np.array(array)
            changed[layer] *= -1
            runner._arrays[index] = jax.device_put(changed, array.sharding)
            logits = evaluate(runner, tiny.token_ids())
            assert np.isfinite(logits).all()
            assert np.abs(logits - unchanged).max() > TOLERANCES["leaf_matters"].value, layer
    finally:
        runner._arrays[index] = array
    np.testing.assert_array_equal(evaluate(runner, tiny.token_ids()), unchanged)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_the_cache_scales_matters(family: str) -> None:
    """Of every table: keys and values, or latents, rotated keys and index keys."""
    runner, ids = runner_of(tiny_folder(family), kv_cache="int8"), tiny.token_ids()

    def continued(name: str | None, layer: int = 0) -> np.ndarray:
        evaluate(runner, ids, 0, 20)
        if name is not None:
            table = runner._pages[name]
            changed = np.array(table.scale)
            # Half the slots of each page: a factor on all scores of an indexer would not change its choice.
            changed[layer, :, ::2] *= 3
            table = dataclasses.replace(table, scale=jax.device_put(changed, table.scale.sharding))
            runner._pages = {**runner._pages, name: table}
        return evaluate(runner, ids, 20, 17)

    unchanged = continued(None)
    for name, table in runner._pages.items():
        for layer in range(table.data.shape[0]):
            assert np.abs(continued(name, layer) - unchanged).max() > TOLERANCES["leaf_matters"].value, (name, layer)


@pytest.mark.parametrize(("kv_cache", "scheme"), [("int8", "w8a8-g128"), ("bfloat16", None), ("float32", "w8a16-g128")])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_13_dtypes(family: str, kv_cache: Any, scheme: str | None) -> None:
    """bfloat16 activations stay bfloat16 through all blocks, pages keep their dtypes, logits are float32."""
    manifest, plan = tiny.manifest_of(tiny.CONFIGS[family]), plan_for(family, 1)
    config = manifest.config
    schemes = {
        entry.path: parse_scheme(scheme)
        for entry in manifest.entries
        if scheme is not None
        and entry.role.startswith(("experts", "shared", "ffn", "attention.o"))
        and entry.role not in FLOAT_ROLES
    }
    leaves = model_leaves(manifest, schemes, plan, jnp.bfloat16)
    arrays = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    pages = abstract_pages(cache_tables(config), pages=5, page_size=16, dtype=kv_cache)
    layout, parallel = Layout(rows=2, chunk=3), ParallelContext.from_plan(plan)
    sizes = {"page_table": (2, 4), "zero_pages": (2,), "last_token": (2,)}
    batch = StepBatch(
        **{
            field.name: jax.ShapeDtypeStruct(sizes.get(field.name, (6,)), jnp.int32)
            for field in dataclasses.fields(StepBatch)
        }
    )

    def run(arrays: list[Any], pages: Any, batch: StepBatch) -> Any:
        model = bind(manifest, assemble(leaves, arrays))
        hidden, pages, ids = model(batch, pages, layout=layout, parallel=parallel, dtype=jnp.dtype(jnp.bfloat16))
        return hidden, pages, ids, model.logits(hidden, parallel)

    grid, whole = mesh.make(plan.mesh), PartitionSpec()
    sharded = jax.shard_map(run, mesh=grid, in_specs=whole, out_specs=whole, check_vma=False)
    hidden, after, ids, logits = jax.eval_shape(sharded, arrays, pages, batch)
    assert (hidden.shape, hidden.dtype) == ((6, config.embed), jnp.bfloat16)
    assert (ids.shape, ids.dtype) == ((config.moe_layers, 6, config.moe.router.top_k), jnp.int32)
    assert (logits.shape, logits.dtype) == ((6, config.vocab), jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), pages)


@pytest.mark.parametrize("kv_cache", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_change_real_rows(family: str, kv_cache: str) -> None:
    """In one program: bit for bit, whether the other row and the rest of the chunk hold tokens or padding."""
    runner, ids = runner_of(tiny_folder(family), kv_cache=kv_cache), tiny.token_ids()
    whole = evaluate(runner, ids)
    for row in range(len(ids)):
        np.testing.assert_array_equal(evaluate(runner, ids, only_rows=[row])[row], whole[row])
    np.testing.assert_array_equal(evaluate(runner, ids, 0, 20), whole[:, :20])
    np.testing.assert_array_equal(evaluate(runner, ids, 0, 20, only_rows=[1])[1], whole[1, :20])


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("glm4_moe", None),
        ("glm4_moe", "w8a8-g128"),
        ("hunyuan_v1_moe", None),
        pytest.param("hunyuan_v1_moe", "w8a8-g128", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_choose_the_same_tokens(family: str, recipe: str | None) -> None:
    folder = tiny_folder(family) if recipe is None else tiny_quantized(family, recipe)
    prompts = tiny.token_ids()[:, :8]
    one, eight = (
        greedy_tokens(runner_of(folder, devices=devices, rows=rows), prompts, 24) for devices, rows in ((1, 2), (8, 1))
    )
    np.testing.assert_array_equal(one, eight)
    assert len(np.unique(one)) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_leaves_are_int8(family: str) -> None:
    runner = runner_of(tiny_quantized(family, "w8a8-g128"))
    kinds = ("attention.v", "attention.o", "attention.gate", "experts", "shared", "ffn")
    for leaf, array in zip(runner._leaves, runner._arrays, strict=True):
        role = leaf.entry.role
        expected = role.startswith(kinds) and role != "experts.bias" and leaf.part == "weight"
        assert (array.dtype == jnp.int8) == expected, leaf.entry.path


@cache
def uneven_folder() -> Path:
    config = {**tiny.CONFIGS["glm4_moe"], "n_routed_experts": 10, "num_experts_per_tok": 3}
    return tiny.write_checkpoint(scratch() / "uneven", config)


def test_uneven_experts_on_four_devices() -> None:
    """Ten experts on four devices: parts of 2 and 3, padded to 3."""
    logits = partial(run_logits, uneven_folder(), tiny.token_ids())
    np.testing.assert_allclose(logits(devices=4), logits(devices=1), rtol=0, atol=TOLERANCES["same_logits"].value)
