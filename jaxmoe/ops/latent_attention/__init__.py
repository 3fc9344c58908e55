"""latent_attention: causal attention of new tokens over paged latents, from which keys and values follow (MLA).

Contract
    q_nope       [rows, chunk, heads, nope] float, q_rope [rows, chunk, heads, rope]: both parts of each query, the
                 second rotated; the new tokens' latents and rotated keys are already written.
    w_k          [heads, nope, lora] and w_v [heads, v, lora]: the two halves of kv_b_proj.
    latent       table of one head of `lora`, after its norm; rope: table of one head, after the rotation.
    Head h has keys [w_k[h] @ latent | rope] and values w_v[h] @ latent.
    selected     [rows, chunk, k] int32, ascending positions that the query may see, then -1; None: all up to its own.
    sinks        [heads] float: a logit that joins each softmax's denominator and has no value; in every form.
    result       [rows, chunk, heads, v] of q's dtype; padded queries (position -1) give zeros.
    Forms that are equal up to rounding: *absorbed* moves w_k into the query and w_v behind the softmax, so that a key
    is read once for all heads (decode, and every selection); *expanded* builds keys and values of a block (prefill).
"""

from typing import Literal

from jaxtyping import Array, Float, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.latent_attention import xla
from jaxmoe.ops.pages import Table

IMPLS = (xla.IMPL,)
Form = Literal["absorbed", "expanded"]


def choose_form(chunk: int, lora: int, nope: int, v: int) -> Form:
    """The form with fewer multiplications for long sequences: expanding a key costs once, absorbing saves a query."""
    return "expanded" if chunk * (2 * lora - nope - v) > lora * (nope + v) else "absorbed"


def latent_attention(
    q_nope: Float[Array, "rows chunk heads nope"],
    q_rope: Float[Array, "rows chunk heads rope"],
    w_k: Float[Array, "heads nope lora"],
    w_v: Float[Array, "heads v lora"],
    latent: Table,
    rope: Table,
    page_table: Int32[Array, "rows table_width"],
    positions: Int32[Array, "rows chunk"],
    *,
    layer: Int[Array, ""] | int,
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
    selected: Int32[Array, "rows chunk k"] | None = None,
    form: Form | None = None,
    impl: str | None = None,
) -> Float[Array, "rows chunk heads v"]:
    """Attends from each query to its sequence's latents.

    Args:
        q_nope: part of the queries that does not rotate.
        q_rope: part that does.
        w_k: from latents to keys.
        w_v: from latents to values.
        latent: latents of this device.
        rope: rotated keys of this device, shared by all heads.
        page_table: pages of each sequence.
        positions: position of each query, -1 for padding.
        layer: index into the cache.
        scale: factor on the scores; one value for all forms.
        sinks: logits in the denominators.
        selected: keys that an indexer chose.
        form: None takes `choose_form`; a selection is always absorbed.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: sizes do not fit, or an expanded form is asked for with a selection.
        UnsupportedError: no implementation accepts the arguments.
    """
    heads, nope, lora = w_k.shape
    if (
        q_nope.shape[-2:] != (heads, nope)
        or w_v.shape[::2] != (heads, lora)
        or latent.data.shape[-2:] != (1, lora)
        or rope.data.shape[-2:] != (1, q_rope.shape[-1])
    ):
        raise ValueError(
            f"latent_attention: q_nope {list(q_nope.shape)}, q_rope {list(q_rope.shape)}, w_k {list(w_k.shape)}, w_v "
            f"{list(w_v.shape)}, latent {list(latent.data.shape)} and rope {list(rope.data.shape)} do not fit"
        )
    if selected is not None and form == "expanded":
        raise ValueError("latent_attention: selected keys differ by query, so they are never expanded")
    if form is None:
        form = "absorbed" if selected is not None else choose_form(q_nope.shape[1], lora, nope, w_v.shape[1])
    arguments = (q_nope, q_rope, w_k, w_v, latent, rope, page_table, positions)
    options = {"layer": layer, "scale": scale, "sinks": sinks, "selected": selected, "form": form}
    choice = dispatch.choose("latent_attention", IMPLS, impl, *arguments, **options)
    return choice.impl.run(*arguments, **options)
