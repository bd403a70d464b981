"""Hierarchical models written for one group: eight schools, thirty rats, and Gaussian processes of forty sites.

python examples/hierarchical.py [--out docs]
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from torchngvi import fit
from torchngvi.models import GroupedLogJoint

SCHOOLS = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
GRAMS = """\
151 145 147 155 135 159 141 159 177 134 160 143 154 171 163 160 142 156 157 152 154 139 146 157 132 160 169 157 137 153
199 199 214 200 188 210 189 201 236 182 208 188 200 221 216 207 187 203 212 203 205 190 191 211 185 207 216 205 180 200
246 249 263 237 230 252 231 248 285 220 261 220 244 270 242 248 234 243 259 246 253 225 229 250 237 257 261 248 219 244
283 293 312 272 280 298 275 297 350 260 313 273 289 326 281 288 280 283 307 286 298 267 272 285 286 303 295 289 258 286
320 354 328 297 323 331 305 338 376 296 352 314 325 358 312 324 316 317 336 321 334 302 302 323 331 345 333 316 291 324
"""


def fitted(target, scale=1.0):
    """A posterior of the target, its fit, and what the fit says."""
    q = target.posterior(scale=scale)
    result = fit(q, target, progress=False)
    print(result)
    return q, result


def schools(out):
    """Effects of coaching in eight schools with their standard errors (Rubin 1981)."""
    y, error = SCHOOLS

    def school(b, g, y, error):  # b (1,), g (2,), and two numbers
        effect = g[0] + g[1].exp() * b[0]
        return -0.5 * ((y - effect) / error) ** 2 - 0.5 * b[0] ** 2

    def shared(g):  # mean ~ N(0, 5²), τ ~ half-Cauchy(5); the last term is the Jacobian of τ = exp(g₁)
        return -0.5 * (g[0] / 5) ** 2 - torch.log1p((g[1].exp() / 5) ** 2) + g[1]

    target = GroupedLogJoint(school, shared, [y, error], local=1, globals=2)
    q, result = fitted(target)
    b, g = target.parts(q.sample((4000,)))
    effects = g[:, :1] + g[:, 1:].exp() * b[..., 0]  # (draws, schools)
    low, middle, high = torch.quantile(effects, torch.tensor([0.05, 0.5, 0.95]).double(), 0)

    figure, axes = plt.subplots(figsize=(6, 3))
    place = torch.arange(8)
    axes.errorbar(place - 0.1, y, error, fmt="o", color="grey", label="the school alone, one standard error")
    axes.errorbar(place + 0.1, middle, torch.stack([middle - low, high - middle]), fmt="o", label="posterior, 90 %")
    axes.set(xticks=place, xticklabels=list("ABCDEFGH"), xlabel="school", ylabel="effect")
    axes.legend(fontsize="small")
    figure.savefig(out / "hierarchical-schools.png", dpi=100, bbox_inches="tight")
    return result


def rats(out):
    """Weights of thirty young rats at five ages (Gelfand, Hills, Racine-Poon and Smith 1990), a line for each rat.

    Weights are measured from 250 g in units of 50 g, and ages in weeks from the third measurement, so that all
    parameters are of the order of one, which suits the start of q, N(0, I).
    """
    weights = torch.tensor([[float(gram) for gram in line.split()] for line in GRAMS.splitlines()]).double().T
    week = torch.arange(-2.0, 3.0).double()

    def rat(b, g, weight):  # b: level and slope of the rat; g: those of all rats, log sds of levels, slopes, weights
        levels = torch.distributions.Normal(g[:2], g[2:4].exp(), validate_args=False)
        weighed = torch.distributions.Normal(b[0] + b[1] * week, g[4].exp(), validate_args=False)
        return levels.log_prob(b).sum() + weighed.log_prob(weight).sum()

    def of_all_rats(g):
        return torch.distributions.Normal(0.0, 2.0).log_prob(g).sum()

    target = GroupedLogJoint(rat, of_all_rats, [(weights - 250) / 50], local=2, globals=5)
    q, result = fitted(target)
    lines, common = target.parts(q.mean)
    _, error = target.parts(q.stddev)
    names = ["level", "slope", "log sd of levels", "log sd of slopes", "log sd of a weight"]
    for name, mean, sd in zip(names, common, error, strict=True):
        print(f"{name:>20} {mean:8.3f} ± {sd:.3f}")

    figure, axes = plt.subplots(figsize=(6, 3.2))
    days = torch.tensor([8, 15, 22, 29, 36])
    axes.plot(days, 250 + 50 * (lines[:, :1] + lines[:, 1:] * week).T, color="C0", lw=0.6)
    axes.plot(days, 250 + 50 * (common[0] + common[1] * week), color="black", lw=2, label="all rats")
    axes.plot(days, weights.T, ".", color="grey", ms=3)
    axes.set(xlabel="age in days", ylabel="weight in g")
    axes.legend()
    figure.savefig(out / "hierarchical-rats.png", dpi=100, bbox_inches="tight")
    return result


def sites(out):
    """Simulated counts of forty sites in twelve months, whose log rates are Gaussian processes.

    The sites share the mean, the standard deviation and the length scale. The local parameters are independent
    standard normal numbers that a root of the covariance turns into the values of the process, so that they depend
    little on the shared scales.
    """
    months = torch.arange(12.0).double()
    gaps = (months[:, None] - months) ** 2

    def root(g):  # of the covariance with standard deviation exp(g₁) and length exp(g₂)
        kernel = torch.exp(2 * g[1] - 0.5 * gaps * torch.exp(-2 * g[2])) + 1e-6 * torch.eye(12).double()
        return torch.linalg.cholesky(kernel)

    truth = torch.tensor([1.0, -0.5, 1.0]).double()
    rates = torch.exp(truth[0] + torch.randn(40, 12).double() @ root(truth).T)
    counts = torch.poisson(rates)

    def site(b, g, y):
        log_rate = g[0] + root(g) @ b
        return (y * log_rate - log_rate.exp()).sum() - 0.5 * b.square().sum()

    def of_all_sites(g):
        return -0.5 * g.square().sum()

    target = GroupedLogJoint(site, of_all_sites, [counts], local=12, globals=3)
    q, result = fitted(target, scale=0.3)
    b, g = target.parts(q.sample((1000,)))
    log_rates = g[:, None, :1] + (torch.func.vmap(root)(g) @ b.mT).mT  # (draws, sites, months)
    print("mean, log sd and log length:", g.mean(0), "±", g.std(0))

    figure, panels = plt.subplots(1, 4, figsize=(9, 2.4), sharey=True)
    low, middle, high = torch.quantile(log_rates.exp(), torch.tensor([0.05, 0.5, 0.95]).double(), 0)
    for number, axes in enumerate(panels):
        axes.fill_between(months, low[number], high[number], alpha=0.3, label="90 %")
        axes.plot(months, middle[number], label="rate")
        axes.plot(months, rates[number], color="black", lw=1, ls="--", label="truth")
        axes.plot(months, counts[number], ".", color="grey", label="counts")
        axes.set(xlabel="month", title=f"site {number + 1}")
    panels[0].legend(fontsize="x-small")
    figure.savefig(out / "hierarchical-sites.png", dpi=100, bbox_inches="tight")
    return result


def main(arguments=None):
    """Fit the three models and draw their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder of the pictures")
    out = parser.parse_args(arguments).out
    plt.switch_backend("agg")
    torch.manual_seed(0)
    return [schools(out), rats(out), sites(out)]


if __name__ == "__main__":
    main()
