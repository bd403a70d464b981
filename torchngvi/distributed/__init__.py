"""Several processes: sums over a group of torch.distributed, and what all of them have to agree on."""

from torchngvi.distributed.processes import (
    Ended,
    Processes,
    average_over_ranks_,
    processes_of,
    rank,
    ranks,
    same_on_ranks_,
    sum_gradients,
    synchronize,
)

__all__ = [
    "Ended",
    "Processes",
    "average_over_ranks_",
    "processes_of",
    "rank",
    "ranks",
    "same_on_ranks_",
    "sum_gradients",
    "synchronize",
]
