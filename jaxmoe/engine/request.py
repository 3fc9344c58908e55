"""Requests, their sampling parameters, and the state of a running sequence."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from jaxmoe.engine.config import EngineConfig
from jaxmoe.errors import RequestError
from jaxmoe.nn.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    seed: int = 0
    """The draw depends on seed and position only, not on other requests."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            RequestError: a value is out of range.
        """
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens = {self.max_tokens} is below 1")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise RequestError(f"temperature = {self.temperature} is not a finite number of at least 0")
        if self.top_k < 0:
            raise RequestError(f"top_k = {self.top_k} is below 0")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p = {self.top_p} is not in (0, 1]")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed = {self.seed} is not in 0..2**32-1")


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, without the end token."""
    finish_reason: FinishReason


@dataclass(slots=True, kw_only=True)
class Sequence:
    """A request inside the engine.

    Invariants: tokens[:computed] have their keys and values in `pages`, in order;
    len(pages) * page_size >= computed; `computed < len(tokens)` while it runs.
    """

    request_id: int
    tokens: list[int]
    """Prompt and generated tokens."""
    prompt_length: int
    params: SamplingParams
    shard: int = -1
    """Device whose pool holds its pages; -1 while waiting."""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that it may ever hold in the cache."""
        return self.prompt_length + self.params.max_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.tokens) - self.computed


def check_request(prompt_ids: Seq[int], params: SamplingParams, *, config: EngineConfig, model: DecoderConfig) -> None:
    """Refuses what can never run; needs no weights.

    Raises:
        RequestError: the prompt is empty, has tokens that do not exist, or does not fit context or pool.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty: it has no tokens")
    wrong = [token for token in prompt_ids if not 0 <= token < model.vocab]
    if wrong:
        raise RequestError(f"token id {wrong[0]} is not in 0..{model.vocab - 1}")
    usable = config.pages - 1
    limit = min(config.max_context_tokens, usable * config.page_size, model.max_positions)
    if len(prompt_ids) + params.max_tokens > limit:
        raise RequestError(
            f"prompt of {len(prompt_ids)} tokens + max_tokens {params.max_tokens} is more than the limit of {limit} "
            f"tokens ({usable} pages of {config.page_size}, context {config.max_context_tokens}); shorten it or start "
            "with more pages"
        )
