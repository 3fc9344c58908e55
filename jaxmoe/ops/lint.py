"""Proof from the traced program that integer products are INT8 x INT8 -> INT32.

`jnp.matmul` of two INT8 arrays returns INT8 and wraps, and a product of widened operands is right but slow: neither
changes a shape or raises, so the jaxpr is where to look. Source: jax-ml/jax issue 4465.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmoe.errors import EngineError

_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})


def products(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[tuple[str, JaxprEqn]]:
    """(where, equation) of each product, those inside calls, loops, branches and shard_map included.

    `where` is the path of enclosing primitives, such as 'jit/while'.
    """
    yield from _products(jaxpr, ())


def _products(jaxpr: ClosedJaxpr | Jaxpr, path: tuple[str, ...]) -> Iterator[tuple[str, JaxprEqn]]:
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        name = equation.primitive.name
        if name in _PRODUCTS:
            yield "/".join(path) or "top level", equation
        for value in equation.params.values():
            for nested in _jaxprs(value):
                yield from _products(nested, (*path, name))


def _jaxprs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Jaxprs in a parameter of an equation: alone, or the branches of a cond."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _jaxprs(entry)


def operand_dtypes(equation: JaxprEqn) -> tuple[Any, Any]:
    """Dtypes of the two factors of a product."""
    left, right = equation.invars[:2]
    return _dtype(left), _dtype(right)


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def check_integer_dots(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Number of integer products of a program, all of them of operands of at most 8 bits with an INT32 result.

    Args:
        jaxpr: a traced program, such as `jax.make_jaxpr(f)(x)` or `jax.jit(f).trace(x).jaxpr`.

    Raises:
        EngineError: an integer product wraps (its result is not INT32) or multiplies widened operands; the equation
            and where it stands are named.
    """
    count = 0
    for where, equation in products(jaxpr):
        dtypes = operand_dtypes(equation)
        if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
            continue
        result = _dtype(equation.outvars[0])
        described = (
            f"{equation.primitive.name} of {dtypes[0]} and {dtypes[1]} with {result} result ({where}): {equation}"
        )
        if result != jnp.int32:
            raise EngineError(f"integer product wraps: {described}; it needs preferred_element_type=int32")
        if any(jnp.iinfo(dtype).bits > 8 for dtype in dtypes):
            raise EngineError(f"integer product of widened operands: {described}; multiply the INT8 arrays themselves")
        count += 1
    return count
