"""Fine-tuning with few labels: pretrained weights, or their posterior, as the prior.

    python examples/network_finetuning.py [--seeds 2] [--steps 300] [--out network_finetuning.png]

A network learns from 900 noisy images of digits, and is then trained on 60 clean ones.  Plain fine-tuning has its
learning rate, and L2-SP (Li, Grandvalet and Davoine 2018), which pulls towards the pretrained weights, its strength
chosen on 200 other images, each from four.  The posterior has nothing to choose.
"""

import argparse
import copy

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import torchngvi as ngvi


def images(seed):
    """Noisy images with their labels, and clean ones in three parts: to learn from, to choose by, to predict."""
    draws = torch.Generator().manual_seed(seed)
    X, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=draws)
    X, y = X[order].float() / 16, y[order]
    noisy = X[:900] + 0.5 * torch.randn(900, 64, generator=draws), y[:900]
    return noisy, *((X[part], y[part]) for part in (slice(900, 960), slice(960, 1160), slice(1160, None)))


def train(model, optimizer, data, steps, penalty=lambda: 0.0):
    X, y = data
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(y), (30,))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(X[rows]), y[rows]) + penalty()).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def posterior(model, data, steps, **options):
    """Train a posterior in a copy of a network, by steps that want no learning rate."""
    q = ngvi.network(copy.deepcopy(model), num_data=len(data[1]), **options)
    optimizer = torch.optim.AdamW(q.model.parameters(), weight_decay=0.0)
    ngvi.attach(optimizer, q, steps=steps, curvature=ngvi.networks.SampledLabels(every=5))
    train(q.model, optimizer, data, steps)
    return q


def tuned(model, data, steps, lr=3e-3, strength=0.0):
    """Train a copy of a network by AdamW, with the penalty of L2-SP."""
    model = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]

    def penalty():
        return 0.5 * strength * sum((p - m).square().sum() for p, m in zip(model.parameters(), start, strict=True))

    train(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0), data, steps, penalty)
    return lambda X: model(X).detach().softmax(-1)


def score(predict, data):
    """The NLL of predictions, and their accuracy."""
    p = predict(data[0])
    return nn.functional.nll_loss(p.log(), data[1]).item(), (p.argmax(1) == data[1]).float().mean().item()


def run(seed, steps):
    """The NLL and the accuracy of every method on the same images."""
    torch.manual_seed(seed)
    noisy, few, validation, test = images(seed)
    layers = nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    fresh = nn.Sequential(*layers)
    old = posterior(fresh, noisy, steps)
    old.release()
    rates, strengths = (3e-4, 1e-3, 3e-3, 1e-2), (1e-3, 1e-2, 1e-1, 1.0)

    def best(trained):
        return min(trained, key=lambda predict: score(predict, validation)[0])

    found = {
        "pretrained, as it is": lambda X: old.model(X).detach().softmax(-1),
        "AdamW, from scratch": best([tuned(fresh, few, steps, lr) for lr in rates]),
        "AdamW, fine-tuning": best([tuned(old.model, few, steps, lr) for lr in rates]),
        "L2-SP": best([tuned(old.model, few, steps, strength=s) for s in strengths]),
        "posterior, prior N(0, 1)": posterior(old.model, few, steps).predict,
        "posterior, prior=state_dict": posterior(old.model, few, steps, prior=old.model.state_dict()).predict,
        "posterior, prior=q": posterior(old.model, few, steps, prior=old).predict,
    }
    return {name: score(predict, test) for name, predict in found.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="network_finetuning.png")
    options = parser.parse_args(arguments)
    runs = [run(seed, options.steps) for seed in range(options.seeds)]
    found = {name: torch.tensor([each[name] for each in runs]) for name in runs[0]}
    for name, values in found.items():
        (nll, accuracy), errors = values.mean(0), values.std(0, correction=int(len(runs) > 1)) / len(runs) ** 0.5
        print(f"{name:28s} NLL {nll:.3f} ± {errors[0]:.3f}, accuracy {accuracy:.3f} ± {errors[1]:.3f}")
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="test NLL, a point for each split")
    for place, values in enumerate(found.values()):
        axes.plot(values[:, 0], [place] * len(values), "o", alpha=0.7)
    axes.set_yticks(range(len(found)), found)
    figure.savefig(options.out, dpi=120)
    return {name: values[:, 0].mean().item() for name, values in found.items()}


if __name__ == "__main__":
    main()
