"""Gates: which one a model is held to, and what passes."""

import math
from pathlib import Path
from typing import get_args

import pytest

from jaxmoe.errors import ConfigError
from jaxmoe.evals.gates import Gate, GateKind, check_gate, gate_kind, load_gates
from jaxmoe.evals.perplexity import EvalResult, RangeResult
from jaxmoe.quant.scheme import Scheme


def part(perplexity: float, baseline: float | None = 8.0, start: int = 0, stop: int | None = None) -> RangeResult:
    return RangeResult(
        start=start,
        stop=stop,
        tokens=10,
        perplexity=perplexity,
        baseline_perplexity=baseline,
        standard_error=0.0,
        kl=0.0,
    )


def result(overall: RangeResult, *ranges: RangeResult) -> EvalResult:
    return EvalResult(
        overall=overall,
        ranges=ranges,
        router_agreement=1.0,
        router_agreement_worst_layer=1.0,
        windows=1,
        window_tokens=10,
    )


GATE = Gate(max_perplexity_increase=0.125, max_range_increase=0.125)


def test_every_kind_has_a_shipped_gate() -> None:
    gates = load_gates()
    assert set(gates) == set(get_args(GateKind))
    assert all(0 < gate.max_perplexity_increase <= gate.max_range_increase < 0.2 for gate in gates.values())


def test_kinds() -> None:
    weight_only, full = Scheme(activation_bits=16), Scheme()
    assert gate_kind({}, "float32") == gate_kind({"a": None}, "bfloat16") == "float"
    assert gate_kind({"a": None}, "int8") == "kv_int8"
    assert gate_kind({"a": None, "b": weight_only}, "int8") == gate_kind({"b": weight_only}, "float32") == "w8a16"
    assert gate_kind({"a": weight_only, "b": full}, "float32") == gate_kind({"b": full}, "int8") == "w8a8"
    narrow = Scheme(weight_bits=4)
    assert gate_kind({"a": full, "b": narrow, "c": weight_only}, "int8") == gate_kind({"b": narrow}, "float32") == "w4"


def test_limit_itself_passes() -> None:
    assert check_gate(result(part(9.0), part(9.0)), GATE) == []
    assert check_gate(result(part(7.0)), GATE) == [], "better than the baseline"
    assert len(check_gate(result(part(math.nextafter(9.0, 10))), GATE)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(value: float) -> None:
    assert len(check_gate(result(part(value)), GATE)) == 1
    assert len(check_gate(result(part(8.0), part(value)), GATE)) == 1
    assert len(check_gate(result(part(8.0, baseline=math.nan)), GATE)) == 1


def test_every_range_counts_and_is_named() -> None:
    failures = check_gate(result(part(8.0), part(8.0, stop=512), part(10.0, start=512), part(10.0, stop=9)), GATE)
    assert failures == [
        "positions 512..: perplexity 10.000 against 8.000 is +25.00%, the limit is +12.50%",
        "positions 0..9: perplexity 10.000 against 8.000 is +25.00%, the limit is +12.50%",
    ]
    assert check_gate(result(part(16.0), part(8.0)), GATE)[0].startswith("overall: perplexity 16.000")


def test_no_baseline_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give --baseline"):
        check_gate(result(part(8.0, baseline=None)), GATE)


def test_file_is_decoded_strictly(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text("[w8a8]\nmax_perplexity_increase = 1\nmax_range_increase = 2\n", encoding="utf-8")
    assert load_gates(path) == {"w8a8": Gate(max_perplexity_increase=1.0, max_range_increase=2.0)}
    path.write_text("[w8a8]\nmax_increase = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path}.w8a8: unknown key max_increase"):
        load_gates(path)


def test_ranges_have_a_limit_of_their_own() -> None:
    gate = Gate(max_perplexity_increase=0.125, max_range_increase=0.25)
    assert check_gate(result(part(8.0), part(10.0, stop=512)), gate) == []
    assert len(check_gate(result(part(8.0), part(10.1, stop=512)), gate)) == 1
    assert check_gate(result(part(10.0), part(8.0)), gate)[0].startswith("overall: ")
