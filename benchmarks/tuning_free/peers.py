"""Optimizers of the reparametrised ELBO, all targets of a dimension and all learning rates in one batch.

x holds the mean and the Cholesky root of q, its diagonal as a logarithm; the gradient is the one without the score
term (Roeder, Wu and Duvenaud 2017), which vanishes draw by draw where q is the posterior.  The rules, from q = N(0, I):

    Adam, RMSProp    their learning rate falls to 0 as a cosine
    Adagrad          a constant one
    DoG              distance over gradients, average of polynomial decay 8 (Ivgi, Hinder and Carmon 2023)
    DoWG             distance over weighted gradients, average weighted likewise (Khaled, Mishchenko and Jin 2023)

The q of a run is the better one of its last iterate and its average, for Adam, RMSProp and Adagrad that of the second
half of the run.  A gradient that is not finite is left out, member by member.  Above ten dimensions only the settings
that solved most up to there are run.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .targets import WIDEST, Stack, gap

CONFIGURATIONS = (
    *(("Adam", rate) for rate in (0.001, 0.01, 0.1, 1.0)),
    *(("RMSProp", rate) for rate in (0.001, 0.01, 0.1)),
    *(("Adagrad", rate) for rate in (0.01, 0.1, 1.0)),
    ("DoG", 0.0),
    ("DoWG", 0.0),
)
BEST = (("Adam", 0.01), ("Adam", 0.1), ("RMSProp", 0.01), ("RMSProp", 0.1), ("Adagrad", 1.0), ("DoG", 0.0))
FEW = 10  # dimensions up to which all are run
STEPS, DRAWS = 10_000, 5
FIRST = 1e-4  # of the distance that DoG and DoWG begin with, relative
DECAY = 8.0  # of DoG's average
TINY = 1e-12


def label(rule: str, rate: float) -> str:
    """A configuration in words."""
    return f"{rule}, {rate:g}" if rate else rule


class Variational:
    """The packing of mean and root in x (..., P), and its gradient of the ELBO."""

    def __init__(self, dim: int) -> None:
        self.dim, self.full = dim, dim <= WIDEST
        self.size = dim + dim * dim if self.full else 2 * dim

    def unpacked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., D) and root (..., D, D), or (..., D) of a mean field."""
        mean, rest = x.split([self.dim, self.size - self.dim], -1)
        if not self.full:
            return mean, rest.exp()
        matrix = rest.unflatten(-1, (self.dim, self.dim))
        return mean, matrix.tril(-1) + torch.diag_embed(matrix.diagonal(0, -2, -1).exp())

    def gradient(self, x: Tensor, stacks: list[Stack], z: Tensor) -> Tensor:
        """Of the ELBO at x (K, T, P) by draws z (S, 1, T, D); 0 where it is not finite."""
        mean, root = self.unpacked(x)
        turned = torch.einsum("ktij,sutj->skti", root, z) if self.full else root * z
        theta = (mean + turned).requires_grad_()
        parts = theta.split([len(stack.settings) for stack in stacks], -2)
        value = sum(stack.all(part).sum() for stack, part in zip(stacks, parts, strict=True))
        (force,) = torch.autograd.grad(value, theta)
        if self.full:
            inverse = torch.linalg.solve_triangular(root, torch.eye(self.dim, dtype=x.dtype), upper=False)
            force = force + torch.einsum("ktij,suti->sktj", inverse, z)
            by_root = torch.einsum("skti,sutj->ktij", force, z).tril() / len(z)
            on = by_root.diagonal(0, -2, -1) * root.diagonal(0, -2, -1)
            by_root = (by_root.tril(-1) + torch.diag_embed(on)).flatten(-2)
        else:
            force = force + z / root
            by_root = (force * z).mean(0) * root
        gradient = torch.cat([force.mean(0), by_root], -1)
        return torch.where(gradient.isfinite().all(-1, keepdim=True), gradient, 0.0)


class Rule:
    """The moments and the average of one rule, for its rates (R, T, P)."""

    def __init__(self, name: str, rates: list[float], x: Tensor) -> None:
        self.name, self.rates = name, torch.tensor(rates, dtype=x.dtype)[:, None, None]
        self.start, self.average = x.clone(), x.clone()
        self.first, self.second = torch.zeros_like(x), torch.zeros_like(x)
        self.far = FIRST * (1 + x.norm(dim=-1, keepdim=True))
        self.sum, self.weight = torch.zeros_like(self.far), torch.zeros_like(self.far)

    def step(self, x: Tensor, g: Tensor, t: int) -> Tensor:
        """The next x, after t steps."""
        falling = 0.5 * (1 + math.cos(math.pi * t / STEPS))
        if self.name == "Adam":
            self.first.lerp_(g, 0.1)
            self.second.lerp_(g * g, 0.001)
            scale = (self.second / (1 - 0.999 ** (t + 1))).sqrt_().add_(1e-8)
            x = x + self.rates * falling / (1 - 0.9 ** (t + 1)) * self.first / scale
        elif self.name == "RMSProp":
            self.second.lerp_(g * g, 0.01)
            x = x + self.rates * falling * g / (self.second.sqrt() + 1e-8)
        elif self.name == "Adagrad":
            self.second.add_(g * g)
            x = x + self.rates * g / (self.second.sqrt() + 1e-10)
        else:
            self.far = torch.maximum(self.far, (x - self.start).norm(dim=-1, keepdim=True))
            weight = self.far.square() if self.name == "DoWG" else torch.ones_like(self.far)
            self.sum = self.sum + weight * g.square().sum(-1, keepdim=True)
            top = self.far.square() if self.name == "DoWG" else self.far
            x = x + top / (self.sum + TINY).sqrt() * g
        self._average(x, t)
        return x

    def _average(self, x: Tensor, t: int) -> None:
        if self.name == "DoG":
            self.average.lerp_(x, (1 + DECAY) / (t + 1 + DECAY))
        elif self.name == "DoWG":
            weight = self.far.square()
            self.weight = self.weight + weight
            self.average = self.average + weight / self.weight * (x - self.average)
        elif t >= STEPS // 2:
            self.average.lerp_(x, 1 / (t - STEPS // 2 + 1))


def run(stacks: list[Stack], seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The gap in nats of each configuration on each target (T,), infinite where it is not finite."""
    dim = stacks[0].mean.shape[-1]
    configurations = CONFIGURATIONS if dim <= FEW else BEST
    family, targets = Variational(dim), sum(len(stack.settings) for stack in stacks)
    x = torch.zeros(len(configurations), targets, family.size, dtype=torch.float64)
    names = list(dict.fromkeys(rule for rule, _ in configurations))
    rates = [[rate for rule, rate in configurations if rule == name] for name in names]
    sizes = [len(of) for of in rates]
    rules = [Rule(name, of, part) for name, of, part in zip(names, rates, x.split(sizes), strict=True)]
    generator = torch.Generator().manual_seed(seed)
    for t in range(STEPS):
        z = torch.randn(DRAWS, 1, targets, dim, generator=generator, dtype=torch.float64)
        g = family.gradient(x, stacks, z)
        parts = zip(rules, x.split(sizes), g.split(sizes), strict=True)
        x = torch.cat([rule.step(part, slope, t) for rule, part, slope in parts])
    averages = torch.cat([rule.average for rule in rules])
    for (rule, rate), last, average in zip(configurations, x, averages, strict=True):
        gaps = torch.stack([gaps_of(family, stacks, each) for each in (last, average)])
        yield label(rule, rate), torch.where(gaps.isfinite(), gaps, math.inf).amin(0)


def gaps_of(family: Variational, stacks: list[Stack], x: Tensor) -> Tensor:
    """The gaps of x (T, P)."""
    mean, root = family.unpacked(x)
    sizes, found = [len(stack.settings) for stack in stacks], []
    for stack, centre, factor in zip(stacks, mean.split(sizes), root.split(sizes), strict=True):
        found.append(gap(stack.all, centre, factor, (stack.mean, stack.root))[0])
    return torch.cat(found)
