"""A published model: its log joint over unconstrained coordinates, their names, its source and its truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.truths.target import LogJoint, Truth, by_quadrature, exactly


@dataclass(frozen=True)
class Model:
    """A model with the names of its coordinates; `truth` is called when it is wanted."""

    name: str
    source: str  # where it was published
    names: tuple[str, ...]  # of the coordinates, D
    log_joint: LogJoint  # theta (*batch, D) -> (*batch,), up to a constant
    truth: Callable[[], Truth] | None = None  # by quadrature; None: the moments of NUTS beside the script

    @property
    def dim(self) -> int:
        """The number of coordinates."""
        return len(self.names)


def boxed(
    log_joint: LogJoint, low: Sequence[float], high: Sequence[float], nodes: int | None = None
) -> Callable[[], Truth]:
    """The truth of a density of one to three coordinates, by quadrature from this box on."""
    return lambda: by_quadrature(exactly(log_joint), low, high, nodes=nodes)


def of_modes(log_joint: LogJoint, *boxes: tuple[Sequence[float], Sequence[float]]) -> Callable[[], Truth]:
    """The truth of a density with one mode in each box, far from one another: the mixture of the modes' truths."""

    def truth() -> Truth:
        modes = [by_quadrature(exactly(log_joint), *box) for box in boxes]
        evidence = torch.tensor([mode.log_evidence for mode in modes], dtype=torch.float64)
        weight, mean = torch.softmax(evidence, 0), torch.stack([mode.mean for mode in modes])
        centre = weight @ mean
        variance = weight @ (torch.stack([mode.sd for mode in modes]).square() + (mean - centre).square())
        error = max(mode.error for mode in modes)
        return Truth(centre, variance.sqrt(), error, float(torch.logsumexp(evidence, 0)))

    return truth


def numbered(name: str, count: int, first: int = 0) -> tuple[str, ...]:
    """name[first], name[first + 1], ..."""
    return tuple(f"{name}[{k}]" for k in range(first, first + count))


def vectors(rows: str) -> Tensor:
    """Numbers written in lines, float64: (lines, numbers), or (numbers,) of one line."""
    return torch.tensor([[float(x) for x in line.split()] for line in rows.strip().split("\n")]).double().squeeze(0)
