"""Several processes: who sums what the ranks contribute."""

import torch


def ranks() -> int:
    """Processes in the default group of torch.distributed; 1 where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the number of this process in the default group; 0 where there is none."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def average_over_ranks_(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their means over all processes, in place and in one sum; one process leaves them as they are.

    Args:
        tensors: the same shapes in every process.

    >>> average_over_ranks_([torch.ones(2)])
    """
    if ranks() > 1:
        for dtype in {tensor.dtype: None for tensor in tensors}:  # in the order that all processes have
            some = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in some])
            torch.distributed.all_reduce(flat)
            flat /= ranks()
            for tensor, mean in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(mean.view_as(tensor))


def same_on_ranks_(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by those of the first process, in place; one process leaves them as they are.

    Args:
        tensors: the same shapes in every process.

    >>> same_on_ranks_([torch.ones(2)])
    """
    if ranks() > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)
