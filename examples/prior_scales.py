"""Ten prior scales chosen by gradients of a held-out score, and what that does on rows that were kept out of both.

    python examples/prior_scales.py [--out prior_scales.png] [--split 0]

Breast cancer, 30 measurements in ten groups of three. The posterior at its optimum is a differentiable function of the
prior, so that L-BFGS finds the ten precisions with the largest score on validation rows in a few dozen solves, where a
grid of five values each would take ten million. More freedom fits the validation rows better; whether it predicts
better is in the last column.
"""

import argparse

import torch
from matplotlib.figure import Figure
from numpy.polynomial.hermite_e import hermegauss
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

import torchngvi as ngvi


def log_score(found, X, y):
    """The mean log predictive density of rows, by 32 nodes of the predictor of each."""
    nodes, weights = (torch.as_tensor(part) for part in hermegauss(32))
    weights = weights / weights.sum()
    mean, sd = X @ found.mean, (X @ found.scale_tril).norm(dim=-1)
    eta = mean[:, None] + sd[:, None] * nodes
    return (torch.nn.functional.logsigmoid((2 * y - 1)[:, None] * eta) + weights.log()).logsumexp(-1).mean()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="prior_scales.png")
    parser.add_argument("--split", type=int, default=0)
    options = parser.parse_args(arguments)
    data = load_breast_cancer()
    X, y = torch.tensor(StandardScaler().fit_transform(data.data)), torch.tensor(data.target, dtype=torch.float64)
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(options.split))
    train, validation, test = rows[:250], rows[250:400], rows[400:]
    q, solves = ngvi.CholeskyGaussian(30, dtype=torch.float64), [0]

    def solved(log_precision):
        solves[0] += 1
        precision = log_precision.exp().expand(10).repeat(3)  # means, errors and worst of ten characteristics
        return ngvi.solved.solve(q, ngvi.GeneralizedLinear(X[train], y[train], prior_precision=precision))

    def chosen(start, pull):  # by L-BFGS; pull is the precision of a normal prior of the logarithms around the start
        log_precision = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([log_precision], max_iter=15, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = -log_score(solved(log_precision), X[validation], y[validation])
            loss = loss + 0.5 * pull * (log_precision - start).square().sum() / len(validation)
            loss.backward()
            return loss

        optimizer.step(closure)
        return log_precision.detach()

    one = chosen(torch.zeros(1, dtype=torch.float64), 0.0)
    choices = {"precision 1": torch.zeros(1, dtype=torch.float64), "one, chosen": one}
    choices["ten, chosen"] = chosen(one.expand(10), 0.0)
    choices["ten, held to one"] = chosen(one.expand(10), 1.0)
    found = {}
    with torch.no_grad():
        for name, log_precision in choices.items():
            scores = [log_score(solved(log_precision), X[part], y[part]).item() for part in (validation, test)]
            found[name] = (*scores, log_precision)
            print(f"{name:18} validation {scores[0]:.4f}  test {scores[1]:.4f}")
    print(f"{solves[0]} solves")

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, (_, score, log_precision) in found.items():
        axes.plot(log_precision.expand(10).exp(), "o-", label=f"{name}: test {score:.3f}")
    axes.set(yscale="log", ylabel="prior precision", title="Precisions by the score of held-out rows")
    axes.set_xticks(range(10), [name.removeprefix("mean ") for name in data.feature_names[:10]], rotation=30)
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return found, solves[0]


if __name__ == "__main__":
    main()
