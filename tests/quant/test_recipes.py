"""The shipped recipes decide about every role there is, once, and by legal schemes."""

import tomllib
from collections import Counter
from typing import get_args

import pytest

from jaxmoe.assets import asset
from jaxmoe.nn.param import Role
from jaxmoe.quant.scheme import parse_scheme

RECIPES = sorted(path.stem for path in asset("configs", "quant").glob("*.toml"))
SENSITIVE = ("attention.q", "attention.k", "attention.kv_b", "indexer.q", "experts.bias", "router", "mtp.projection")


def schemes(name: str) -> dict[str, str]:
    """Role -> scheme, by the first rule that lists it."""
    rules = tomllib.loads(asset("configs", "quant", f"{name}.toml").read_text(encoding="utf-8"))["rule"]
    return {role: rule["scheme"] for rule in reversed(rules) for role in rule["roles"]}


@pytest.mark.parametrize("name", RECIPES)
def test_every_role_is_listed_once(name: str) -> None:
    rules = tomllib.loads(asset("configs", "quant", f"{name}.toml").read_text(encoding="utf-8"))["rule"]
    assert Counter(role for rule in rules for role in rule["roles"]) == Counter(get_args(Role))


@pytest.mark.parametrize("name", RECIPES)
def test_sensitive_roles_stay_float_and_all_schemes_are_legal(name: str) -> None:
    decided = schemes(name)
    # Engines that know no groups join q, k and v into one weight of one scheme.
    joined = {"attention.q", "attention.k", "attention.q_a", "attention.q_b", "attention.kv_a"}
    sensitive = set(SENSITIVE) - (joined if name == "w8a8-channel" else set())
    assert {decided[role] for role in sensitive} == {"float"}
    for scheme in set(decided.values()) - {"float"}:
        assert parse_scheme(scheme).name == scheme


def test_4_bits_are_for_routed_experts_alone() -> None:
    decided = schemes("w4a8-experts")
    roles = {role for role, scheme in decided.items() if scheme != "float" and parse_scheme(scheme).weight_bits == 4}
    assert roles == {"experts.gate", "experts.up", "experts.down"}
    assert decided["shared.gate"] == decided["attention.o"] == "w8a8-g128"
