"""The evaluator against log-probabilities computed by hand from the logits of one full step."""

import numpy as np
import pytest

from jaxmoe.engine.runner import Runner
from jaxmoe.errors import ConfigError, EngineError
from jaxmoe.evals.perplexity import EvalResult, Evaluator
from tests import tiny
from tests.running import runner_of, step, tiny_folder
from tests.tolerances import TOLERANCES

LENGTH, CHUNK, WINDOWS = 37, 16, 8
IDS = tiny.token_ids(WINDOWS, LENGTH + 1).astype(np.int32)
"""The last chunk is short."""
TOLERANCE = TOLERANCES["perplexity"].value


def runner(devices: int) -> Runner:
    return runner_of(tiny_folder("glm4_moe"), devices=devices, rows=WINDOWS // devices)


@pytest.fixture(scope="module")
def single() -> EvalResult:
    """One device, alone."""
    evaluator = Evaluator(runner(1), rows=WINDOWS, chunk=CHUNK)
    evaluator.warm_up()
    return evaluator.run(IDS)


@pytest.fixture(scope="module")
def twice() -> Evaluator:
    """Eight devices, the model against itself."""
    evaluator = Evaluator(runner(8), runner(8), rows=1, chunk=CHUNK)
    runner(8).compile([evaluator.layout])
    evaluator.warm_up()
    return evaluator


def test_as_computed_by_hand(single: EvalResult) -> None:
    logits = step(runner(1), IDS[:, :-1], 0, LENGTH, bucket=LENGTH).astype(np.float64)
    logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logp -= logits.max(-1, keepdims=True)
    nll = -np.take_along_axis(logp, IDS[:, 1:, None].astype(np.int64), -1)
    assert single.overall.perplexity == pytest.approx(np.exp(nll.mean()), rel=TOLERANCE)
    assert single.overall.tokens == WINDOWS * LENGTH
    assert (single.windows, single.window_tokens) == (WINDOWS, LENGTH)
    assert [(part.start, part.stop) for part in single.ranges] == [(0, 512)]
    assert single.ranges[0].perplexity == single.overall.perplexity
    assert single.overall.increase is None and single.overall.kl is None and single.router_agreement is None


def test_one_device_as_eight_and_a_model_as_itself(single: EvalResult, twice: Evaluator) -> None:
    calls: list[tuple[int, int]] = []
    result = twice.run(IDS, lambda done, total: calls.append((done, total)))
    assert result.overall.perplexity == pytest.approx(single.overall.perplexity, rel=TOLERANCE)
    assert result.overall.baseline_perplexity == result.overall.perplexity
    assert result.overall.increase == 0 and result.overall.standard_error == 0
    assert result.overall.kl == pytest.approx(0, abs=1e-12)
    assert result.router_agreement == result.router_agreement_worst_layer == 1
    assert calls == [(WINDOWS * done, WINDOWS * LENGTH) for done in (16, 32, 37)]


def test_fewer_windows_than_devices(twice: Evaluator) -> None:
    """Rows without a window are padding; a second run starts on used pages."""
    few = twice.run(IDS[:3])
    again = twice.run(np.concatenate([IDS[3:], IDS[:3], IDS[:3]]))
    whole = twice.run(IDS)
    assert few.overall.tokens == 3 * LENGTH and again.windows == WINDOWS + 3
    total = np.log(whole.overall.perplexity) * WINDOWS + np.log(few.overall.perplexity) * 3
    assert again.overall.perplexity == pytest.approx(np.exp(total / (WINDOWS + 3)), rel=TOLERANCE)


def test_warm_up_is_required() -> None:
    with pytest.raises(EngineError, match="call warm_up before run|no program for Layout"):
        Evaluator(runner(1), rows=1, chunk=5).run(IDS[:1])


def test_windows_that_do_not_fit(twice: Evaluator) -> None:
    with pytest.raises(ConfigError, match="windows of 79 tokens need 5 pages each, 1 a device; the pool has 4 .* 64"):
        twice.run(tiny.token_ids(8, 80).astype(np.int32))


def test_different_devices() -> None:
    with pytest.raises(ConfigError, match="model on 1 devices, baseline on 8"):
        Evaluator(runner(1), runner(8), rows=1, chunk=CHUNK)
