"""Tasks in turn without the data of those before: the posterior of a task is the prior of the next.

    python examples/network_continual.py [--seeds 1] [--steps 200] [--out network_continual.png]

Split digits: five tasks of two classes, each with a head, which is known at the test (task-incremental, as in Zenke,
Poole and Ganguli 2017).  Permuted digits: five orders of the pixels, one head.  The strength of EWC (Kirkpatrick et al.
2017), and how often the posterior counts earlier data, are tried at four values, of which the best is drawn.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import torchngvi as ngvi


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.heads = nn.ModuleList()

    def begin(self, head, classes):
        if head == len(self.heads):
            self.heads.append(nn.Linear(100, classes))
        self.head = head
        return self

    def forward(self, x):
        return self.heads[self.head](self.body(x))


def tasks_of(setting, seed):
    """Of each task its head with the number of its classes, and images and labels to learn from and to predict."""
    draws = torch.Generator().manual_seed(seed)
    X, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=draws)
    X, y = X[order].float() / 16, y[order]
    for task in range(5):
        rows, pixels = y // 2 == task, torch.randperm(64, generator=draws)
        A, b, head = (X[rows], y[rows] % 2, (task, 2)) if setting == "split" else (X[:, pixels], y, (0, 10))
        n = int(0.6 * len(b))
        yield head, (A[:n], b[:n]), (A[n:], b[n:])


def train(model, optimizer, tasks, steps, anchors=(), strength=0.0):
    own, schedule = dict(model.named_parameters()), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        head, (X, y), _ = tasks[step % len(tasks)]
        rows = torch.randint(len(y), (32,))
        optimizer.zero_grad()
        penalty = sum((F * (own[name] - at).square()).sum() for name, F, at in anchors)
        loss = nn.functional.cross_entropy(model.train().begin(*head)(X[rows]), y[rows])
        (loss + 0.5 * strength / len(y) * penalty).backward()
        optimizer.step()
        schedule.step()


def posterior(model, groups, steps, weight, lr):
    prior = {}
    for tasks in groups:
        model.begin(*tasks[0][0])
        q = ngvi.network(model, num_data=len(tasks[0][1][1]), **prior)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)  # any rate
        ngvi.attach(optimizer, q, steps=steps)
        train(model, optimizer, tasks, steps)
        q.release()  # q stays as it is, and the network is free for the next one
        prior = {"prior": q, "prior_weight": weight}


def ewc(model, groups, steps, strength, lr):
    """Train with a penalty for each task before, of the Fisher information by a label drawn for each image."""

    def loss(given, x, label):
        return nn.functional.cross_entropy(torch.func.functional_call(model, given, x[None]), label[None])

    anchors = []
    for tasks in groups:
        for head, *_ in tasks:
            model.begin(*head)
        train(model, torch.optim.Adam(model.parameters(), lr=lr), tasks, steps * len(tasks), anchors, strength)
        held, X = {name: p.detach().clone() for name, p in model.named_parameters()}, tasks[0][1][0]
        drawn = torch.distributions.Categorical(logits=model(X).detach()).sample()
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(held, X, drawn)
        anchors += [(name, g.square().sum(0), held[name]) for name, g in gradients.items() if strength]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"--seeds": 1, "--steps": 200, "--out": "network_continual.png"}.items():
        parser.add_argument(name, type=type(value), default=value)
    options = parser.parse_args(arguments)
    best, each, figure = {}, (10, 30, 100, 1000), Figure(figsize=(8, 3), layout="constrained")
    for axes, (setting, lr) in zip(figure.subplots(1, 2), {"split": 3e-3, "permuted": 1e-2}.items(), strict=True):
        tried = {"joint": (ewc, [0]), "fine-tuning": (ewc, [0]), "EWC": (ewc, each), "posterior": (posterior, each)}
        for name, (method, numbers) in tried.items():
            found = {}
            for number in numbers:
                torch.manual_seed(0)
                for seed in range(options.seeds):
                    model, tasks = Network(), list(tasks_of(setting, seed))
                    groups = [tasks] if name == "joint" else [[task] for task in tasks]
                    method(model, groups, options.steps, number, lr)
                    right = [(model.eval().begin(*h)(X).argmax(1) == y).float().mean() for h, _, (X, y) in tasks]
                    found[number] = found.get(number, 0.0) + torch.stack(right) / options.seeds
            chosen = max(found.values(), key=torch.mean)
            best[setting, name] = chosen.mean().item()
            print(f"{setting:9s}{name:12s}", ", ".join(f"{number}: {a.mean():.3f}" for number, a in found.items()))
            axes.plot(range(1, 6), chosen, "o-", label=name)
        axes.set(title=f"{setting} digits", xlabel="task", ylabel="accuracy after five tasks")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return best


if __name__ == "__main__":
    main()
