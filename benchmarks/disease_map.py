"""A disease map: counts of cases in regions, with a spatial effect of each region; and long runs of NUTS for it.

    python -m benchmarks.disease_map nuts --out nuts.pt      # Pyro's NUTS over all coordinates, some minutes

y_i ~ Poisson(E_i exp(β + u_i)), u ~ N(0, σ² [(1 - ρ) I + ρ L]⁻¹) with L the Laplacian of the graph of neighbours
(Leroux, Lei and Breslow 2000).  θ = (β, log σ, logit ρ); β ~ N(0, 1), σ half-normal of scale 1, logit ρ ~ N(0, 1.5²).
"""

import argparse
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("beta", "log sigma", "logit rho")
TRUTH = (0.0, math.log(0.7), 3.0)


class Map(NamedTuple):
    """Regions, their neighbours and their counts."""

    where: Tensor  # cells of the regions on a grid, (D, 2)
    edges: Tensor  # pairs of neighbours, (E, 2)
    eigenvalues: Tensor  # of the Laplacian, (D,)
    expected: Tensor  # E, (D,)
    counts: Tensor  # y, (D,)
    effects: Tensor  # the true u, (D,)

    @property
    def dim(self) -> int:
        return len(self.where)

    def log_joint(
        self,
        theta: Tensor,  # (..., 3)
        u: Tensor,  # (..., D)
    ) -> Tensor:
        """log p(y, u, θ), (...)."""
        beta, log_sigma, logit = theta.unbind(-1)
        sigma, rho = log_sigma.exp(), logit.sigmoid()
        apart = (u[..., self.edges[:, 0]] - u[..., self.edges[:, 1]]).square().sum(-1)
        square = (1 - rho) * u.square().sum(-1) + rho * apart
        spectrum = 1 - rho[..., None] + rho[..., None] * self.eigenvalues
        prior = 0.5 * spectrum.log().sum(-1) - self.dim * (log_sigma + 0.5 * math.log(2 * math.pi))
        prior = prior - 0.5 * square / sigma.square()
        eta = self.expected.log() + beta[..., None] + u
        data = (self.counts * eta - eta.exp() - torch.lgamma(self.counts + 1)).sum(-1)
        hyper = -0.5 * beta.square() - 0.5 * sigma.square() + log_sigma - 0.5 * (logit / 1.5).square()
        return data + prior + hyper


def neighbours(inside: Tensor) -> tuple[Tensor, Tensor]:
    """The cells of a grid that are regions, and the pairs of them that share a side."""
    number = torch.full(inside.shape, -1)
    number[inside] = torch.arange(int(inside.sum()))
    pairs = [torch.stack([number[:-1].flatten(), number[1:].flatten()], -1)]
    pairs.append(torch.stack([number[:, :-1].flatten(), number[:, 1:].flatten()], -1))
    edges = torch.cat(pairs)
    return inside.nonzero(), edges[(edges >= 0).all(-1)]


def laplacian(dim: int, edges: Tensor) -> Tensor:
    """The Laplacian of a graph, (D, D)."""
    L = torch.zeros(dim, dim, dtype=torch.float64)
    L[edges[:, 0], edges[:, 1]] = L[edges[:, 1], edges[:, 0]] = -1.0
    return L - torch.diag(L.sum(0))


def island(seed: int = 0) -> Map:
    """An island of some 400 regions, whose effects are drawn at `TRUTH`."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.meshgrid(torch.linspace(-1.2, 1.2, 28), torch.linspace(-1.2, 1.2, 24), indexing="ij")
    angle = torch.atan2(y, x)
    inside = (x.square() + y.square()).sqrt() < 0.95 + 0.15 * torch.cos(3 * angle + 0.5) + 0.1 * torch.sin(5 * angle)
    where, edges = neighbours(inside)
    eigenvalues, vectors = torch.linalg.eigh(laplacian(len(where), edges))
    spectrum = 1 + torch.sigmoid(torch.tensor(TRUTH[2])) * (eigenvalues - 1)
    z = torch.randn(len(where), generator=generator, dtype=torch.float64)
    u = math.exp(TRUTH[1]) * (vectors @ (z / spectrum.sqrt()))
    return _observed(where, edges, eigenvalues.clamp_min(0.0), u, generator)


def square(side: int, seed: int = 0) -> Map:
    """A square of side² regions, whose Laplacian has known eigenvalues: of any size."""
    generator = torch.Generator().manual_seed(seed)
    where, edges = neighbours(torch.ones(side, side, dtype=torch.bool))
    k = torch.arange(side, dtype=torch.float64)
    one = 2 - 2 * torch.cos(math.pi * k / side)
    basis = torch.cos(math.pi * k * (torch.arange(side, dtype=torch.float64)[:, None] + 0.5) / side)
    basis = basis / basis.norm(dim=0)
    eigenvalues = one[:, None] + one
    spectrum = 1 + torch.sigmoid(torch.tensor(TRUTH[2])) * (eigenvalues - 1)
    z = torch.randn(side, side, generator=generator, dtype=torch.float64)
    u = math.exp(TRUTH[1]) * (basis @ (z / spectrum.sqrt()) @ basis.mT).flatten()
    return _observed(where, edges, eigenvalues.flatten(), u, generator)


def _observed(where: Tensor, edges: Tensor, eigenvalues: Tensor, u: Tensor, generator: torch.Generator) -> Map:
    expected = (3 * torch.rand(len(u), generator=generator, dtype=torch.float64)).exp()
    counts = torch.poisson(expected * (TRUTH[0] + u).exp(), generator=generator)
    return Map(where, edges, eigenvalues, expected, counts, u)


def nuts(data: Map, warmup: int, draws: int, chains: int, seed: int) -> dict[str, Tensor | float]:
    """Pyro's NUTS over (θ, u): draws of θ (chains, draws, 3) and of u (chains, draws, D), and seconds."""
    import pyro
    from pyro.infer import MCMC, NUTS

    def potential(parameters: dict[str, Tensor]) -> Tensor:
        return -data.log_joint(parameters["theta"], parameters["u"])

    began, theta, u = time.perf_counter(), [], []
    for chain in range(chains):
        pyro.set_rng_seed(seed + chain)
        start = {
            "theta": 0.1 * torch.randn(3, dtype=torch.float64),
            "u": 0.1 * torch.randn(data.dim, dtype=torch.float64),
        }
        run = MCMC(
            NUTS(potential_fn=potential, max_tree_depth=9),
            num_samples=draws,
            warmup_steps=warmup,
            initial_params=start,
            disable_progbar=True,
        )
        run.run()
        found = run.get_samples()
        theta.append(found["theta"])
        u.append(found["u"])
        print(
            f"chain {chain}: {time.perf_counter() - began:.0f} s, theta {found['theta'].mean(0).tolist()}", flush=True
        )
    return {"theta": torch.stack(theta), "u": torch.stack(u), "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["nuts"])
    parser.add_argument("--out", default="nuts.pt")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--chains", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.save(nuts(island(), options.warmup, options.draws, options.chains, seed=1), options.out)


if __name__ == "__main__":
    main()
