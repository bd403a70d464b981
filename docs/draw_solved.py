"""Draw the pictures of the pages on the solved posterior, all of breast cancer, 569 tumours and 30 measurements.

    python docs/draw_solved.py

certificate.png has the bound beside the true gap along a run, leave_one_out.png log densities of rows beside fits
without them, comparison.png four models beside each other, solved.png coefficients with and without three rows,
derivatives.png coefficients along the scale of the prior and the score of ten scales while they are chosen. It takes
about a minute.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from numpy.polynomial.hermite_e import hermegauss
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

import torchngvi as ngvi

OUT = Path(__file__).parent
BLUE, ORANGE, GREY = "#1f5fa8", "#d1672b", "0.6"
DATA = load_breast_cancer()
NAMES = [str(name) for name in DATA.feature_names]
X, Y = torch.tensor(StandardScaler().fit_transform(DATA.data)), torch.tensor(DATA.target, dtype=torch.float64)


def gaussian(**options):
    """A dense Gaussian over the 30 coefficients."""
    return ngvi.CholeskyGaussian(30, dtype=torch.float64, **options)


def regression(**options):
    """The logistic regression of all rows."""
    return ngvi.GeneralizedLinear(X, Y, **{"prior_precision": 0.1, **options})


def draw_certificate():
    """Bound, estimate and true gap of every q of a run of VN from a narrow start."""
    model, best = regression(), gaussian()
    ngvi.fit(best, model, tolerance=1e-10, progress=False)
    least, q = model.negative_elbo(best).item(), gaussian(scale=0.3)
    optimizer, gaps, found = ngvi.VN(q), [], []
    while not gaps or gaps[-1] > 1e-9:  # where the gap itself is of few digits
        gaps.append(model.negative_elbo(q).item() - least)
        found.append(ngvi.certificate(q, model))
        optimizer.step(model)
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(len(gaps))
    axes.plot(steps, gaps, color="black", label="true gap")
    axes.plot(steps, [told.about for told in found], ":", color=GREY, label="about: half the squared Newton decrement")
    for kind, color, words in (("prior", ORANGE, "the prior alone"), ("local", BLUE, "the data's curvature")):
        at = [step for step in steps if found[step].kind == kind]
        axes.plot(at, [found[step].bound for step in at], ".", color=color, label=f"bound, by {words}")
    axes.set(yscale="log", xlabel="steps of VN", ylabel="nats above the best Gaussian")
    axes.legend(frameon=False)
    figure.savefig(OUT / "certificate.png", dpi=100)
    ratios = [told.bound / gap for told, gap in zip(found, gaps, strict=True)]
    local = [ratio for told, ratio in zip(found, ratios, strict=True) if told.kind == "local"]
    print(f"certificate: {len(gaps)} steps, least ratio {min(ratios):.4f}, local {min(local):.3f} to {max(local):.3f}, "
          f"by the prior at most {max(ratios):.3g}")  # fmt: skip


def draw_leave_one_out(result, model):
    """Log densities beside those of fits without the row; and what the flag sees."""
    q = result.posterior
    truth, divided, found = (ngvi.leave_one_out(q, model, flag=flag) for flag in (0.0, float("inf"), 1e-3))
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    low = truth.density.min().item() * 1.1
    left.plot([low, 0], [low, 0], color=GREY, linewidth=1)
    left.plot(truth.density, found.in_sample, "x", markersize=4, color=ORANGE, label="with the row itself in the fit")
    left.plot(truth.density, found.density, ".", markersize=4, color=BLUE, label="leave_one_out")
    left.set(xlabel="log density by a fit without the row", ylabel="log density, nats")
    left.legend(frameon=False)
    error = (divided.density - truth.density).abs().clamp_min(1e-12)
    flagged = found.resolved
    right.loglog(divided.response[flagged], error[flagged], ".", markersize=4, color=ORANGE, label="then fitted again")
    right.loglog(divided.response[~flagged], error[~flagged], ".", markersize=4, color=BLUE, label="kept")
    right.axvline(1e-3, color=GREY, linewidth=1)
    right.set(xlim=(1e-9, 10), ylim=(1e-12, 3))  # errors below are those of the fits
    right.set(xlabel="ν², the response of the other rows", ylabel="error of the log density without new fits, nats")
    right.legend(frameon=False)
    figure.savefig(OUT / "leave_one_out.png", dpi=100)
    print(f"leave_one_out: elpd {found.total:.2f}, in fits {truth.total:.2f}, in sample {found.in_sample.sum():.2f}; "
          f"{int(flagged.sum())} fitted again, largest error kept {error[~flagged].max():.1e}, "
          f"of the others before {error[flagged].max():.2f}")  # fmt: skip


def draw_comparison():
    """Four choices of columns: elpd with what is less than the first, and two of them row by row."""
    parts = {"means": X[:, :10], "errors": X[:, 10:20], "worst": X[:, 20:], "all": X}
    fits = {}
    for name, columns in parts.items():
        design = torch.cat([torch.ones(len(Y), 1, dtype=torch.float64), columns], 1)
        model = ngvi.GeneralizedLinear(design, Y, prior_precision=0.1)
        fits[name] = ngvi.fit(ngvi.CholeskyGaussian(model.dim, dtype=torch.float64), model, progress=False)
    found = ngvi.compare_models(fits)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at = torch.arange(len(found.names) - 1, -1, -1)
    left.errorbar(found.elpd, at + 0.1, xerr=found.se, fmt="o", color=BLUE, label="elpd, with its standard error")
    left.errorbar(found.elpd[1:], at[1:] - 0.1, xerr=found.dse[1:], fmt="^", color=ORANGE,
                  label="standard error of the difference to the first")  # fmt: skip
    left.axvline(found.elpd[0].item(), color=GREY, linewidth=1)
    words = [f"{name}\nweight {weight:.2f}" for name, weight in zip(found.names, found.weight.tolist(), strict=True)]
    left.set_yticks(at, words)
    left.set(xlabel="elpd, nats", ylim=(-0.5, len(found.names) - 0.2))
    left.legend(frameon=False, loc="upper left")
    first, second = found.loo[0].density, found.loo[1].density
    low = min(first.min().item(), second.min().item()) * 1.1
    right.plot([low, 0], [low, 0], color=GREY, linewidth=1)
    right.plot(first, second, ".", markersize=4, color=BLUE)
    right.set(xlabel=f"log density of a row, {found.names[0]}", ylabel=f"the same, {found.names[1]}")
    figure.savefig(OUT / "comparison.png", dpi=100)
    print(found)


def draw_forgotten(result):
    """The ten coefficients that three rows move most, with and without them."""
    less = ngvi.forget(result, [297, 73, 40])
    pairs = ((result.posterior, BLUE, "all 569 rows"), (less.posterior, ORANGE, "without three"))
    moved = ((less.posterior.mean - result.posterior.mean) / result.posterior.stddev).abs()
    order = moved.argsort(descending=True)[:10]
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    for shift, (q, color, words) in zip((0.15, -0.15), pairs, strict=True):
        at = torch.arange(9, -1, -1) + shift
        axes.errorbar(q.mean[order], at, xerr=2 * q.stddev[order], fmt="o", markersize=4, color=color, label=words)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(9, -1, -1), [NAMES[k] for k in order])
    axes.set(xlabel="coefficient, ± 2 standard deviations")
    axes.legend(frameon=False)
    figure.savefig(OUT / "solved.png", dpi=100)
    print(f"solved: the ten move by {moved[order[-1]]:.2f} to {moved[order[0]]:.2f} standard deviations")


def draw_derivatives():
    """Coefficients along the precision of the prior with their derivatives; scores while ten precisions are chosen."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid, q = torch.linspace(-3, 3, 25, dtype=torch.float64), gaussian()
    paths = torch.stack([ngvi.solved.solve(q, regression(prior_precision=2.0**k)).mean for k in grid.tolist()])
    log2 = torch.zeros((), dtype=torch.float64, requires_grad=True)
    mean = ngvi.solved.solve(q, regression(prior_precision=2**log2)).mean
    near = torch.tensor([-1.0, 1.0])
    for k, color in zip((NAMES.index(n) for n in ("worst concavity", "radius error", "compactness error")),
                        (BLUE, ORANGE, "black"), strict=True):  # fmt: skip
        (slope,) = torch.autograd.grad(mean[k], log2, retain_graph=True)
        left.plot(2**grid, paths[:, k], color=color, label=NAMES[k])
        left.plot(2**near, mean[k].item() + slope.item() * near, "--", color=color, linewidth=3, alpha=0.5)
    left.axvline(1, color=GREY, linewidth=1)
    left.set_xscale("log", base=2)
    left.set(xlabel="precision of the prior", ylabel="mean of the coefficient")
    left.legend(frameon=False)
    scores = chosen_scales()
    for part, color, words in (
        (0, BLUE, "150 rows by which they are chosen"),
        (1, ORANGE, "169 rows kept out of both"),
    ):
        right.plot([score[part] for score in scores], ".-", color=color, label=words)
    right.set(xlabel="solves of L-BFGS over ten precisions", ylabel="mean log density of a row, nats")
    right.set(xticks=range(0, len(scores), 4), ylim=(-0.093, -0.035))
    right.legend(frameon=False, loc="upper left")
    figure.savefig(OUT / "derivatives.png", dpi=100)
    print("derivatives: scores " + " -> ".join(f"{a:.3f}, {b:.3f}" for a, b in (scores[0], scores[-1])))


def chosen_scales():
    """Validation and test score at each solve of L-BFGS over ten precisions, as `examples/prior_scales.py` has it."""
    rows = torch.randperm(len(Y), generator=torch.Generator().manual_seed(0))
    train, validation, test = rows[:250], rows[250:400], rows[400:]
    log_precision = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_precision], max_iter=15, line_search_fn="strong_wolfe")
    nodes, weights = (torch.as_tensor(part) for part in hermegauss(32))
    q, scores = gaussian(), []

    def score(found, part):
        predictor, sd = X[part] @ found.mean, (X[part] @ found.scale_tril).norm(dim=-1)
        eta = (2 * Y[part] - 1)[:, None] * (predictor[:, None] + sd[:, None] * nodes)
        return (torch.nn.functional.logsigmoid(eta) + (weights / weights.sum()).log()).logsumexp(-1).mean()

    def closure():
        optimizer.zero_grad()
        model = ngvi.GeneralizedLinear(X[train], Y[train], prior_precision=log_precision.exp().repeat(3))
        found = ngvi.solved.solve(q, model)
        loss = -score(found, validation)
        loss.backward()
        scores.append((-loss.item(), score(found, test).item()))
        return loss

    optimizer.step(closure)
    return scores


def main():
    """Draw the five pictures."""
    model = regression()
    result = ngvi.fit(gaussian(), model, tolerance=1e-8, progress=False)
    draw_certificate()
    draw_comparison()
    draw_forgotten(result)
    draw_derivatives()
    draw_leave_one_out(result, model)


if __name__ == "__main__":
    main()
