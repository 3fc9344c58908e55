"""Laws of expert placement: every expert in exactly one slot, contiguous runs, counts as even as can be."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.parallel.plan import Plan

sizes = given(experts=st.integers(1, 300), ranks=st.integers(1, 64))


@sizes
@example(experts=10, ranks=4)
@example(experts=5, ranks=8)
@example(experts=1, ranks=64)
def test_every_expert_has_exactly_one_slot(experts: int, ranks: int) -> None:
    placement = ExpertPlacement(num_experts=experts, num_ranks=ranks)
    slots, back = placement.slot_of_expert(), placement.expert_of_slot()
    assert slots.dtype == back.dtype == np.int32
    assert slots.shape == (experts,) and back.shape == (placement.num_slots,)
    assert len(set(slots.tolist())) == experts
    np.testing.assert_array_equal(back[slots], np.arange(experts))
    assert (back >= 0).sum() == experts and (back[back < 0] == -1).all()


@sizes
@example(experts=10, ranks=4)
@example(experts=5, ranks=8)
def test_ranks_hold_contiguous_runs_in_their_first_slots(experts: int, ranks: int) -> None:
    placement = ExpertPlacement(num_experts=experts, num_ranks=ranks)
    by_rank = placement.expert_of_slot().reshape(ranks, placement.slots_per_rank)
    for rank, row in enumerate(by_rank):
        run = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        assert placement.experts_of(rank) == run
        assert row.tolist() == [*run] + [-1] * (placement.slots_per_rank - len(run))
    assert [expert for rank in range(ranks) for expert in placement.experts_of(rank)] == list(range(experts))


@sizes
def test_counts_differ_by_at_most_one_and_no_slot_is_spare_everywhere(experts: int, ranks: int) -> None:
    placement = ExpertPlacement(num_experts=experts, num_ranks=ranks)
    counts = [len(placement.experts_of(rank)) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1
    assert max(counts) == placement.slots_per_rank


def test_ten_experts_on_four_ranks() -> None:
    placement = ExpertPlacement(num_experts=10, num_ranks=4)
    assert [list(placement.experts_of(rank)) for rank in range(4)] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert placement.slot_of_expert().tolist() == [0, 1, 3, 4, 5, 6, 7, 9, 10, 11]
    assert placement.expert_of_slot().tolist() == [0, 1, -1, 2, 3, 4, 5, 6, -1, 7, 8, 9]


def test_five_experts_on_eight_ranks_leave_empty_ranks() -> None:
    placement = ExpertPlacement(num_experts=5, num_ranks=8)
    assert (placement.slots_per_rank, placement.num_slots) == (1, 8)
    assert [rank for rank in range(8) if not placement.experts_of(rank)] == [0, 2, 5]
    assert placement.expert_of_slot().tolist() == [-1, 0, -1, 1, 2, -1, 3, 4]


def test_one_rank_is_the_identity() -> None:
    placement = ExpertPlacement(num_experts=7, num_ranks=1)
    assert placement.slot_of_expert().tolist() == placement.expert_of_slot().tolist() == list(range(7))


@sizes
def test_slots_are_the_padded_axis_of_the_plan(experts: int, ranks: int) -> None:
    """Two modules know the size of the experts axis in memory; they must agree."""
    rule = ("expert",)
    plan = Plan(mesh={"expert": ranks}, rules={"tokens": rule, "pages": rule, "experts": rule, "vocab": ()})
    placement = ExpertPlacement(num_experts=experts, num_ranks=ranks)
    assert plan.physical_shape((experts,), ("experts",)) == (placement.num_slots,)
