"""The engine with the real Runner on tiny checkpoints: batching, queueing, pages, refusals, determinism."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax.monitoring
import numpy as np
import pytest

from jaxmoe.engine.batch import build_batch
from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.engine import Engine
from jaxmoe.engine.llm import load_runner
from jaxmoe.engine.request import Completion, SamplingParams
from jaxmoe.engine.runner import Runner, SamplingBatch
from jaxmoe.errors import EngineError, RequestError
from jaxmoe.nn.step import Layout
from jaxmoe.weights.load import open_model
from tests.running import plan_for, tiny_quantized

PAGE = 4
MOST = 48
CONFIG = EngineConfig(
    page_size=PAGE,
    pages=1 + MOST // PAGE,
    max_context_tokens=MOST,
    decode_rows=(1, 2),
    prefill_tokens=(8,),
    kv_cache="int8",
)
"""The pool of a device holds exactly one longest request."""
VOCAB = 256


@cache
def runner_of(devices: int) -> Runner:
    """Several devices have one decode bucket only, so that the comparison with one device crosses buckets as well."""
    config = CONFIG if devices == 1 else replace(CONFIG, decode_rows=(2,))
    files = open_model(tiny_quantized("glm4_moe", "w8a8-g128"))
    return load_runner(files, plan_for("glm4_moe", devices), config)


def engine_of(devices: int = 1, **options: Any) -> Engine:
    """A fresh engine on a shared runner, whose programs are compiled once and whose pages hold what ran before."""
    engine = Engine(runner_of(devices), **options)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module", autouse=True)
def _drop_runners() -> Iterator[None]:
    yield
    runner_of.cache_clear()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(3, VOCAB, length).tolist()


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def check_over(engine: Engine) -> None:
    """What holds after every run."""
    assert engine.compilations_after_warm_up == 0
    assert engine.pages_in_use == 0
    engine.check_idle()


PROMPTS = [prompt(length) for length in (PAGE - 1, PAGE, PAGE + 1, 1, 8, 9, 23, 2, 13, 6, 17, 7)]
GREEDY = SamplingParams(max_tokens=7)


@cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of each prompt, one at a time on one device."""
    engine = engine_of()
    return tuple(engine.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS)


@pytest.mark.parametrize("devices", [1, 8])
def test_together_as_alone(devices: int) -> None:
    expected = list(alone())
    assert len(set(expected)) == len(PROMPTS), "a tiny model that says the same to everything proves nothing"
    engine = engine_of(devices)
    completions = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(completions) == expected
    assert [list(c.prompt_ids) for c in completions] == PROMPTS
    assert {c.finish_reason for c in completions} == {"length"}
    assert {len(c.token_ids) for c in completions} == {7}
    check_over(engine)


@dataclass
class Count:
    """Compilations, by a listener that is independent of the engine's."""

    compilations: int = 0

    def __call__(self, event: str, duration_secs: float, **_kwargs: object) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"


def test_nothing_compiles_after_warm_up() -> None:
    count = Count()
    jax.monitoring.register_event_duration_secs_listener(count)
    jax.jit(lambda x: x * 3 + 41)(np.float32(1)).block_until_ready()
    assert count.compilations > 0, "the listener hears compilations"
    for devices in (1, 8):
        engine = engine_of(devices)
        before = count.compilations
        engine.generate(PROMPTS, SamplingParams(max_tokens=5, temperature=0.7, top_k=5, top_p=0.9))
        assert count.compilations == before
        check_over(engine)


@pytest.mark.parametrize("devices", [1, 8])
def test_poisoned_free_pages_change_nothing(devices: int) -> None:
    engine = engine_of(devices, poison=True)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == list(alone())
    check_over(engine)
    # The pool is full of garbage and NaN scales now; an engine that does not poison starts on it.
    after = engine_of(devices)
    assert tokens_of(after.generate(PROMPTS, GREEDY)) == list(alone())
    check_over(after)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_poison_around_page_boundaries(length: int) -> None:
    params = SamplingParams(max_tokens=PAGE + 1)
    plain = engine_of().generate([prompt(length)], params)
    poisoned = engine_of(poison=True)
    assert tokens_of(poisoned.generate([prompt(length)], params)) == tokens_of(plain)
    check_over(poisoned)


@pytest.mark.parametrize("poison", [False, True])
def test_pool_that_is_just_large_enough(poison: bool) -> None:
    """29 tokens take chunks of 8, 8, 8 and 5, padded to 8; with the answer they fill every page of the pool."""
    ids, params = prompt(29), SamplingParams(max_tokens=MOST - 29)
    expected = engine_of(8).generate([prompt(6, 1), ids, prompt(7, 2)], params)[1]
    engine = engine_of(poison=poison)
    first, full, last = engine.generate([prompt(6, 1), ids, prompt(7, 2)], params)
    assert full.token_ids == expected.token_ids and len(full.token_ids) == MOST - 29
    assert len(first.token_ids) == len(last.token_ids) == MOST - 29
    check_over(engine)


def test_full_pool_is_full() -> None:
    engine = engine_of()
    engine.submit(prompt(29), SamplingParams(max_tokens=MOST - 29))
    most = 0
    while engine._running or engine._waiting:
        engine.step()
        most = max(most, engine.pages_in_use)
    assert most == CONFIG.pages - 1
    check_over(engine)


def test_more_requests_than_rows_queue() -> None:
    many = [prompt(3 + index % 5, 50 + index) for index in range(21)]
    params = SamplingParams(max_tokens=3)
    one = engine_of()
    ids = [one.submit(each, params) for each in many]
    assert ids == list(range(21))
    one.step()
    assert one.pages_in_use <= 2 * 2, "two rows of at most two pages each run, the others wait"
    answers = one.run()
    assert [c.request_id for c in answers] == ids
    check_over(one)
    eight = engine_of(8)
    assert tokens_of(eight.generate(many, params)) == tokens_of(answers)
    assert eight.steps < one.steps
    check_over(eight)


def test_requests_of_different_length_end_at_different_steps() -> None:
    engine = engine_of()
    lengths = (1, 9, 4)
    for index, most in enumerate(lengths):
        engine.submit(PROMPTS[index], SamplingParams(max_tokens=most))
    for completion, most, full in zip(engine.run(), lengths, alone(), strict=False):
        assert len(completion.token_ids) == most
        assert completion.token_ids[:7] == full[:most]
    check_over(engine)


def test_second_run_on_recycled_pages() -> None:
    engine = engine_of()
    first = engine.generate(PROMPTS, GREEDY)
    engine.generate([prompt(29, 9)], SamplingParams(max_tokens=MOST - 29))
    second = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(second) == tokens_of(first)
    assert second[0].request_id > first[-1].request_id
    check_over(engine)


def test_what_does_not_fit_is_refused_and_disturbs_nobody() -> None:
    engine = engine_of()
    engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match=f"prompt of {MOST} tokens .* max_tokens 7 .* limit of {MOST} tokens"):
        engine.submit(prompt(MOST), GREEDY)
    engine.submit(PROMPTS[6], GREEDY)
    answers = engine.run()
    assert tokens_of(answers) == [alone()[0], alone()[6]]
    check_over(engine)


def test_longest_request_is_exact() -> None:
    engine = engine_of()
    engine.check_request(prompt(MOST - 1), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=f"prompt of {MOST} tokens"):
        engine.check_request(prompt(MOST), SamplingParams(max_tokens=1))


def test_pool_smaller_than_context_is_no_config() -> None:
    with pytest.raises(Exception, match=f"{CONFIG.pages - 1} pages .* hold {MOST - PAGE} tokens.* is {MOST}"):
        replace(CONFIG, pages=CONFIG.pages - 1)


def test_empty_prompt_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.submit([], GREEDY)
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.generate([PROMPTS[0], []], GREEDY)
    assert engine.run() == [], "the good prompt beside the refused one was not queued"


@pytest.mark.parametrize("token", [VOCAB, -1, 2**40])
def test_token_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token} is not in 0..{VOCAB - 1}"):
        engine_of().submit([5, token, 6], GREEDY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**32}, "seed = 4294967296"),
    ],
)
def test_sampling_params_are_checked(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("devices", [1, 8])
def test_end_token_stops(devices: int) -> None:
    full = alone()
    stop = full[6][2]
    engine = engine_of(devices, eos_ids=frozenset({stop}))
    for completion, tokens in zip(engine.generate(PROMPTS, GREEDY), full, strict=True):
        cut = tokens.index(stop) if stop in tokens else None
        assert completion.token_ids == tokens[:cut]
        assert completion.finish_reason == ("length" if cut is None else "stop")
    check_over(engine)
    assert tokens_of(engine.generate(PROMPTS, replace(GREEDY, ignore_eos=True))) == list(full)


def test_draws_depend_on_the_seed_only() -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0)
    lonely = {seed: engine_of().generate([PROMPTS[4]], replace(params, seed=seed))[0].token_ids for seed in (11, 12)}
    assert lonely[11] != lonely[12]
    for devices in (1, 8):
        engine = engine_of(devices)
        engine.submit(PROMPTS[6], replace(params, seed=99))
        ids = [engine.submit(PROMPTS[4], replace(params, seed=seed)) for seed in (12, 11, 12)]
        engine.submit(PROMPTS[0], GREEDY)
        tokens = {completion.request_id: completion.token_ids for completion in engine.run()}
        assert [tokens[i] for i in ids] == [lonely[12], lonely[11], lonely[12]]
        assert tokens[ids[-1] + 1] == alone()[0], "a greedy neighbour stays greedy"


def test_generate_draws_with_seed_plus_index() -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=2**32 - 1)
    engine = engine_of()
    both = tokens_of(engine.generate([PROMPTS[4], PROMPTS[4]], params))
    wrapped = engine.generate([PROMPTS[4]], replace(params, seed=0))[0].token_ids
    assert both[0] == engine.generate([PROMPTS[4]], params)[0].token_ids
    assert both[1] == wrapped != both[0]


def test_layout_without_a_program_is_an_error_not_a_compilation() -> None:
    engine = engine_of()
    layout = Layout(rows=3, chunk=1)
    batch = build_batch(layout, [], [[]], config=CONFIG, shards=1, vocab=VOCAB)
    with pytest.raises(EngineError, match="no program for Layout\\(rows=3, chunk=1.*compiled are .*rows=1, chunk=8"):
        engine.runner.generate(layout, batch, SamplingBatch.greedy(3))
    with pytest.raises(EngineError, match="does not return logits of all tokens"):
        engine.runner.evaluate(CONFIG.layouts()[0], batch)
    check_over(engine)


def test_step_without_work_is_an_error() -> None:
    with pytest.raises(EngineError, match="none is running"):
        engine_of().step()
    assert engine_of().run() == []
