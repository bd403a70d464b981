"""Abilities of ten players from their games, in two coordinate systems: what the verdict says, and what is true.

    python -m benchmarks.bradley_terry [--seeds 2]

Each pair plays once, twice or four times; the abilities are N(0, s²) with a half-normal or a half-Cauchy s, and
θ = (log s, abilities), centred, or (log s, abilities / s).  The truth is by a grid over log s, on which the abilities
are integrated out by importance sampling from a t distribution at their mode.  By how many times the sd of log s is too
small stands before the word of `fit` and that of `examine` with another seed.
"""

import argparse
import math

import torch
from torch.nn.functional import logsigmoid

from torchngvi import CholeskyGaussian, examine, fit

PLAYERS = 10
TOURNAMENTS = [(1, 1.0, 0), (1, 0.5, 0), (2, 0.5, 0), (2, 1.0, 3), (4, 0.5, 5)]  # games a pair, true sd, seed
DOF = 10.0  # of the t distribution
NODES, DRAWS, LOW, HIGH = 121, 2000, -14.0, 3.0  # of the grid over log s


def tournament(games, spread, seed):
    """Who won and who lost."""
    generator = torch.Generator().manual_seed(seed)
    ability = spread * torch.randn(PLAYERS, generator=generator, dtype=torch.float64)
    i, j = (k.repeat(games) for k in torch.triu_indices(PLAYERS, PLAYERS, 1))
    won = torch.rand(len(i), generator=generator, dtype=torch.float64) < torch.sigmoid(ability[i] - ability[j])
    return torch.where(won, i, j), torch.where(won, j, i)


def log_prior(log_s, kind):
    """Of log s."""
    square = (2 * log_s).exp()
    return log_s - (0.5 * square if kind == "half-normal" else torch.log1p(square))


def log_joint(winner, loser, kind, centred):
    """Of θ, up to a constant."""

    def of(theta):
        log_s, x = theta[..., :1], theta[..., 1:]
        ability, z = (x, x / log_s.exp()) if centred else (log_s.exp() * x, x)
        volume = x.shape[-1] * log_s[..., 0] if centred else 0.0
        games = logsigmoid(ability[..., winner] - ability[..., loser]).sum(-1)
        return log_prior(log_s, kind)[..., 0] - volume - 0.5 * z.square().sum(-1) + games

    return of


def sd_of_log_s(winner, loser, kind):
    """By quadrature."""
    generator = torch.Generator().manual_seed(0)
    scale = (torch._standard_gamma(torch.full((DRAWS, 1), DOF / 2, dtype=torch.float64), generator) / (DOF / 2)).rsqrt()
    t = scale * torch.randn(DRAWS, PLAYERS, generator=generator, dtype=torch.float64)
    log_t = -0.5 * (DOF + PLAYERS) * torch.log1p(t.square().sum(1) / DOF)
    B = torch.zeros(len(winner), PLAYERS, dtype=torch.float64)
    B[torch.arange(len(B)), winner], B[torch.arange(len(B)), loser] = 1.0, -1.0
    grid, evidence = torch.linspace(LOW, HIGH, NODES, dtype=torch.float64), []
    for log_s in grid:
        A, z = log_s.exp() * B, torch.zeros(PLAYERS, dtype=torch.float64)
        for _ in range(50):
            p = torch.sigmoid(A @ z)
            H = torch.eye(PLAYERS, dtype=torch.float64) + (A.mT * (p * (1 - p))) @ A
            z = z + torch.linalg.solve(H, A.mT @ (1 - p) - z)
        root = torch.linalg.cholesky(torch.linalg.inv(H))
        x = z + t @ root.mT
        weight = logsigmoid(x @ A.mT).sum(1) - 0.5 * x.square().sum(1) - log_t + root.diagonal().log().sum()
        evidence.append(weight.logsumexp(0) + log_prior(log_s, kind))
    share = torch.stack(evidence).softmax(0)
    mean = share @ grid
    return math.sqrt(float(share @ (grid - mean).square()))


def main():
    """Print a line a tournament and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="fits of each")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print(f"{'prior':12}{'games':>6}{'sd':>5}  {'form':12}{'too small':>10}  words of fit and of examine; the reason")
    for kind in ("half-normal", "half-Cauchy"):
        for games, spread, made in TOURNAMENTS:
            winner, loser = tournament(games, spread, made)
            sd = sd_of_log_s(winner, loser, kind)
            for centred in (True, False):
                density = log_joint(winner, loser, kind, centred)
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    q = CholeskyGaussian(PLAYERS + 1, dtype=torch.float64)
                    verdict = fit(q, density, progress=False).verdict
                    other = examine(q, density, seed=seed).word
                    form = "centred" if centred else "non-centred"
                    off = sd / float(q.stddev[0])
                    print(
                        f"{kind:12}{games:6}{spread:5.1f}  {form:12}{off:10.2f}  {verdict.word}; {other}; "
                        f"{'; '.join(verdict.reasons)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
