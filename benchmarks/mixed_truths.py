"""`MixedModel.fit` with its defaults against long runs, on two data sets of the literature.

    TORCHNGVI_DATA=... python benchmarks/mixed_truths.py [epilepsy] [toenail] [--sweeps 20000]

Two truths, which share no code: draws of all coordinates by Metropolis' algorithm within Gibbs' (random effects of all
groups at once, fixed effects, covariances, and moves along the two directions in which these are coupled: a shift of
the effects against a coefficient, and their scale), sixteen chains; and importance sampling of the globals from a
t distribution, with quadrature of 61 nodes, or 17 x 17.  For each fixed effect, standard deviation and correlation the
table has the mean and sd by the first, the error of the fit's mean in these sds, and the ratio of its sd; and the same
of the second truth.
"""

import argparse
import csv
import gzip
import math
import os
import pathlib
import time

import torch

from torchngvi import MixedModel
from torchngvi.diagnostics.psis import smoothed
from torchngvi.mixed_models.table import Marginals
from torchngvi.models import MarginalMixed, MixedPrior
from torchngvi.models.mixed_prior import root_of, scales_of

CHAINS, DOF = 16, 5.0


def table(name):
    with gzip.open(pathlib.Path(os.environ["TORCHNGVI_DATA"]) / "glmm" / f"{name}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))

    def column(key, success=None):
        values = [float(row[key] if success is None else row[key] == success) for row in rows]
        return torch.tensor(values, dtype=torch.float64)

    return column


def codes(labels):
    return torch.unique(labels, return_inverse=True)[1]


def epilepsy():
    column = table("epil")
    base, treated, age = (column("base") / 4).log(), column("trt", "progabide"), column("age").log()
    visit = torch.tensor([-0.3, -0.1, 0.1, 0.3], dtype=torch.float64)[column("period").long() - 1]
    one = torch.ones_like(base)
    X = torch.stack([one, base, treated, base * treated, age - age.mean(), visit], -1)
    model = MixedModel(
        X,
        column("y"),
        (torch.stack([one, visit], -1), codes(column("subject"))),
        "poisson_log",
        prior=MixedPrior(10.0, "kass-natarajan"),
    )
    return model, ["intercept", "log base", "treated", "base x treated", "log age", "visit"], ["intercept", "visit"]


def toenail():
    column = table("toenail")
    treated, months = column("treatment", "terbinafine"), column("time")
    months = (months - months.mean()) / months.std()
    one = torch.ones_like(months)
    X = torch.stack([one, treated, months, treated * months], -1)
    model = MixedModel(
        X,
        column("outcome", "moderate or severe"),
        (one[:, None], codes(column("patientID"))),
        prior=MixedPrior(10.0, "kass-natarajan"),
    )
    return model, ["intercept", "treated", "time", "time x treated"], ["intercept"]


class Chains:
    """Metropolis within Gibbs on b, β and ω; sixteen chains at once."""

    def __init__(self, result, seed):
        self.model, self.rows = result.model, result.model.rows
        rows = self.rows
        self.generator = torch.Generator().manual_seed(seed)
        draws = result.draws(CHAINS, seed)
        self.b, self.beta, self.omega = draws.effects.clone(), draws.fixed.clone(), draws.omega.clone()
        self.local = result.effects()
        self.scale = torch.stack([of.sd for of in self.local], -1) * (1.6 / math.sqrt(rows.r))  # (n, r)
        curvature = torch.ones(len(rows.y), dtype=torch.float64)
        eta = self.predictor(self.b, self.beta).mean(0)
        if hasattr(rows.likelihood, "expected"):
            curvature = rows.likelihood.expected(eta, torch.full_like(eta, 1e-6), rows.y).curvature
        H = (rows.X * curvature[:, None]).mT @ rows.X + torch.diag(self.model.fixed.prior.precision)
        self.beta_root = torch.linalg.cholesky(torch.linalg.inv(H)) * (2.0 / math.sqrt(rows.p))
        self.shifts = self.constant_in_groups()
        self.accepted, self.tried = {}, {}

    def normal(self, *shape):
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def constant_in_groups(self):
        """Pairs of a column of X and one of Z, with the number f_i by which x_ij = f_i z_ij in group i."""
        rows, found = self.rows, []
        for k in range(rows.p):
            for j in range(rows.r):
                z, x = rows.Z[:, j], rows.X[:, k]
                square = torch.zeros(rows.n, dtype=torch.float64).index_add(0, rows.groups, z * z)
                f = torch.zeros(rows.n, dtype=torch.float64).index_add(0, rows.groups, z * x) / square
                if torch.allclose(f[rows.groups] * z, x):
                    found.append((k, j, f))
        return found

    def predictor(self, b, beta):
        return beta @ self.rows.X.mT + self.rows.offset + (b[:, self.rows.groups] * self.rows.Z).sum(-1)

    def data(self, eta):
        return -self.rows.likelihood.energy(eta, self.rows.y)

    def effects(self, b, omega):
        """log p(b_i | ω), (C, n)."""
        level = omega[:, self.model.covariance_prior.diagonal].sum(-1)[:, None]
        return level - 0.5 * (b @ root_of(omega, self.rows.r)).square().sum(-1)

    def chosen(self, name, log_ratio, new, old):
        accept = torch.rand(log_ratio.shape, generator=self.generator, dtype=torch.float64).log() < log_ratio
        self.accepted[name] = self.accepted.get(name, 0.0) + float(accept.double().mean())
        self.tried[name] = self.tried.get(name, 0) + 1
        return [
            torch.where(accept.reshape(*accept.shape, *(1,) * (x.ndim - accept.ndim)), x, y)
            for x, y in zip(new, old, strict=True)
        ]

    def sweep(self):
        rows, C = self.rows, CHAINS
        prior, precision = self.model.fixed.prior, self.model.covariance_prior
        # the effects of each group
        new = self.b + self.scale * self.normal(C, rows.n, rows.r)
        ratio = self.effects(new, self.omega) - self.effects(self.b, self.omega)
        gain = self.data(self.predictor(new, self.beta)) - self.data(self.predictor(self.b, self.beta))
        ratio = ratio.index_add(1, rows.groups, gain)
        (self.b,) = self.chosen("effects", ratio, [new], [self.b])
        # fixed effects
        new = self.beta + self.normal(C, rows.p) @ self.beta_root.mT
        ratio = (self.data(self.predictor(self.b, new)) - self.data(self.predictor(self.b, self.beta))).sum(-1)
        ratio = ratio - prior.energy(new) + prior.energy(self.beta)
        (self.beta,) = self.chosen("fixed", ratio, [new], [self.beta])
        # shifts that leave every predictor as it is
        for k, j, f in self.shifts:
            delta = self.normal(C) * (3.0 / rows.n**0.5) * self.local[j].mean.std()
            beta, b = self.beta.clone(), self.b.clone()
            beta[:, k] += delta
            b[..., j] -= delta[:, None] * f
            ratio = (self.effects(b, self.omega) - self.effects(self.b, self.omega)).sum(-1)
            ratio = ratio - prior.energy(beta) + prior.energy(self.beta)
            self.beta, self.b = self.chosen("shift", ratio, [beta, b], [self.beta, self.b])
        # the covariance given the effects
        for _ in range(3):
            new = self.omega + self.normal(*self.omega.shape) * (1.2 / rows.n**0.5)
            ratio = (self.effects(self.b, new) - self.effects(self.b, self.omega)).sum(-1)
            ratio = ratio - precision.energy(new) + precision.energy(self.omega)
            (self.omega,) = self.chosen("covariance", ratio, [new], [self.omega])
        # the scale of all effects
        delta = 0.1 * self.normal(C)
        off = torch.ones(self.omega.shape[1], dtype=torch.bool)
        off[precision.diagonal] = False
        omega = torch.where(off, self.omega * torch.exp(-delta)[:, None], self.omega - delta[:, None])
        b = self.b * torch.exp(delta)[:, None, None]
        ratio = (self.effects(b, omega) - self.effects(self.b, self.omega)).sum(-1)
        ratio = ratio - precision.energy(omega) + precision.energy(self.omega)
        ratio = ratio + (self.data(self.predictor(b, self.beta)) - self.data(self.predictor(self.b, self.beta))).sum(-1)
        ratio = ratio + delta * (rows.n * rows.r - int(off.sum()))
        self.omega, self.b = self.chosen("scale", ratio, [omega, b], [self.omega, self.b])

    def run(self, sweeps):
        """Fixed effects, sds and correlations, (chains, sweeps, K), the first tenth left out."""
        kept = []
        for k in range(sweeps + sweeps // 10):
            self.sweep()
            if k >= sweeps // 10:
                kept.append(quantities(torch.cat([self.beta, self.omega], -1), self.rows))
        return torch.stack(kept, 1)


def quantities(theta, rows):
    """Fixed effects, sds and correlations of globals (S, P)."""
    sd, correlation = scales_of(theta[..., rows.p :], rows.r)
    pairs = [correlation[..., i, k, None] for i in range(rows.r) for k in range(i)]
    return torch.cat([theta[..., : rows.p], sd, *pairs], -1)


def effective(x):
    """The effective number of draws of (chains, sweeps, K), from the means of batches of 100th parts."""
    C, S, K = x.shape
    batches = x[:, : S // 100 * 100].reshape(C, 100, -1, K)
    size = batches.shape[2]
    return C * S * x.reshape(-1, K).var(0) / (size * batches.mean(2).reshape(-1, K).var(0))


def by_importance(result, draws, seed=1):
    """Means and sds from a t distribution around the fitted Gaussian, half as wide again, and the effective number."""
    rows, q = result.model.rows, result.posterior
    target = MarginalMixed(result.model, 61 if rows.r == 1 else 17)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(draws, q.dim, dtype=torch.float64, generator=generator)
    stretch = (
        0.5 * DOF / torch._standard_gamma(torch.full((draws, 1), 0.5 * DOF).double(), generator=generator)
    ).sqrt()
    x = 1.3 * z * stretch
    frame = q.frame()
    theta = frame.mean + frame.push(x)
    log_t = -0.5 * (DOF + q.dim) * torch.log1p((x / 1.3).square().sum(-1) / DOF)
    with torch.no_grad():
        smooth = smoothed(target.log_joint(theta) - log_t)
    of = quantities(theta, rows)
    found = Marginals.of([""] * of.shape[1], of, smooth.log_weights.exp(), 0.95)
    return found, float(smooth.effective), float(smooth.k_hat)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["epilepsy", "toenail"])
    parser.add_argument("--sweeps", type=int, default=20000)
    parser.add_argument("--draws", type=int, default=10000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names:
        model, fixed, random = {"epilepsy": epilepsy, "toenail": toenail}[name]()
        clock = time.process_time()
        result = model.fit(progress=False).named(fixed, random)
        seconds = time.process_time() - clock
        print(result, f"\n{result.reason}\n{seconds:.1f} s of one core", flush=True)
        t = result.summary()
        blocks = (t.fixed, t.sd, t.correlation)
        ours = torch.cat([of.mean for of in blocks]), torch.cat([of.sd for of in blocks])
        names = [*t.fixed.names, *(f"sd {x}" for x in t.sd.names), *(f"cor {x}" for x in t.correlation.names)]
        second, worth, k_hat = by_importance(result, options.draws)
        chains = Chains(result, 3)
        run = chains.run(options.sweeps)
        mean, sd, worth_of = run.mean((0, 1)), run.reshape(-1, run.shape[-1]).std(0), effective(run)
        print({key: round(chains.accepted[key] / chains.tried[key], 2) for key in chains.tried})
        print(f"importance sampling: {worth:.0f} effective of {options.draws}, k-hat {k_hat:.2f}")
        print(f"{'':24}{'mean':>9}{'sd':>9}{'draws':>9}{'error':>9}{'ratio':>9}{'error IS':>10}{'ratio IS':>10}")
        for k, word in enumerate(names):
            row = [mean[k], sd[k], worth_of[k], (ours[0][k] - mean[k]) / sd[k], ours[1][k] / sd[k]]
            row += [(second.mean[k] - mean[k]) / sd[k], second.sd[k] / sd[k]]
            print(f"{word:24}" + "".join(f"{float(x):>{9 + (j > 4)}.4g}" for j, x in enumerate(row)), flush=True)


if __name__ == "__main__":
    main()
