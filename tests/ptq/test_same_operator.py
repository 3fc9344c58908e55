"""The quantiser and the server agree bit for bit: a quantised folder and leaves quantised in memory are one model."""

import jax
import numpy as np
import pytest

from jaxmoe.engine.runner import Runner
from jaxmoe.models.leaves import assemble, model_leaves
from jaxmoe.parallel import mesh
from jaxmoe.ptq.recipe import load_recipe, match_recipe, schemes_of_matches
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.weights.load import load_leaves, open_model
from tests import tiny
from tests.running import plan_for, runner_of, step, tiny_folder, tiny_quantized

FAMILY, RECIPE = "glm4_moe", "w8a8-g128"


@pytest.fixture(scope="module")
def in_memory() -> Runner:
    """The float checkpoint, loaded and then quantised by `quantize_weight`."""
    files = open_model(tiny_folder(FAMILY))
    schemes = schemes_of_matches(match_recipe(load_recipe(RECIPE), files.manifest))
    plan = plan_for(FAMILY, 1)
    grid = mesh.make(plan.mesh)
    arrays = []
    for path, weight in assemble(*load_leaves(files, plan, grid, "float32")).items():
        scheme = schemes[path]
        arrays += [weight] if scheme is None else jax.tree.leaves(quantize_weight(weight, scheme))
    leaves = model_leaves(files.manifest, schemes, plan, "float32")
    for leaf, array in zip(leaves, arrays, strict=True):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    arrays = [
        jax.device_put(array, jax.sharding.NamedSharding(grid, leaf.spec))
        for leaf, array in zip(leaves, arrays, strict=True)
    ]
    config = runner_of(tiny_quantized(FAMILY, RECIPE), kv_cache="int8").config
    return Runner(manifest=files.manifest, leaves=leaves, arrays=arrays, plan=plan, mesh=grid, config=config)


def test_logits_are_equal(in_memory: Runner) -> None:
    ids = tiny.token_ids()
    served = runner_of(tiny_quantized(FAMILY, RECIPE), kv_cache="int8")
    ours = step(in_memory, ids, 0, ids.shape[1], bucket=ids.shape[1])
    theirs = step(served, ids, 0, ids.shape[1], bucket=ids.shape[1])
    assert np.isfinite(ours).all() and ours.std() > 0.1
    np.testing.assert_array_equal(ours, theirs)
