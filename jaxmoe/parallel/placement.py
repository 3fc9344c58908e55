"""Which device holds which expert: contiguous runs, possibly uneven, in equal numbers of slots."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Logical experts on physical slots.

    Invariants: rank r holds experts r*E//W .. (r+1)*E//W - 1 in its first slots; every rank has ceil(E/W) slots; a slot
    without an expert is empty (zero weights) and no token is ever sent to it.
    """

    num_experts: int
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        """Expert slots of each device."""
        return -(-self.num_experts // self.num_ranks)

    @property
    def num_slots(self) -> int:
        """Slots of all devices."""
        return self.slots_per_rank * self.num_ranks

    def experts_of(self, rank: int) -> range:
        """Logical experts of one rank."""
        return range(rank * self.num_experts // self.num_ranks, (rank + 1) * self.num_experts // self.num_ranks)

    def slot_of_expert(self) -> np.ndarray:
        """[num_experts] int32: physical slot of each logical expert."""
        return np.array(
            [
                rank * self.slots_per_rank + index
                for rank in range(self.num_ranks)
                for index, _ in enumerate(self.experts_of(rank))
            ],
            np.int32,
        )

    def expert_of_slot(self) -> np.ndarray:
        """[num_slots] int32: logical expert of each physical slot, -1 for an empty slot."""
        out = np.full(self.num_slots, -1, np.int32)
        out[self.slot_of_expert()] = np.arange(self.num_experts, dtype=np.int32)
        return out
