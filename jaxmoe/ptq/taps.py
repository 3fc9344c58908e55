"""Runs a function and returns its named activations (`nn.tap`) beside its result."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def with_taps(function: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """The function with its taps as a second result; call it under jit.

    Only names at the function's own level are seen: what a loop or a scan computes has no single value.

    Raises (when called):
        ValueError: a name stands for two activations.
    """

    def run(*arguments: Any) -> tuple[Any, dict[str, jax.Array]]:
        flat, tree = jax.tree.flatten(arguments)
        out_tree: list[Any] = []

        def flattened(*values: jax.Array) -> list[jax.Array]:
            results, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, values)))
            out_tree.append(structure)
            return results

        closed = jax.make_jaxpr(flattened)(*flat)
        named = [
            (equation.params["name"], equation.outvars[0])
            for equation in closed.jaxpr.eqns
            if equation.primitive.name == "name"
        ]
        names = [name for name, _ in named]
        if len(set(names)) != len(names):
            raise ValueError(f"taps {sorted(names)} are not distinct")
        extended = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *(variable for _, variable in named)])
        results = core.jaxpr_as_fun(core.ClosedJaxpr(extended, closed.consts))(*flat)
        count = len(closed.jaxpr.outvars)
        return jax.tree.unflatten(out_tree[0], results[:count]), dict(zip(names, results[count:], strict=True))

    return run
