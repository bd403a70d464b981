"""Tasks in turn without the data of those before: the posterior of a task is the prior of the next.

    python examples/network_continual.py [--seeds 1] [--steps 200] [--out network_continual.png]

Split digits are five tasks of two classes, with a head for each task, which is known at the test (task-incremental, as
in Zenke, Poole and Ganguli 2017); permuted digits are five orders of the pixels with one head (domain-incremental).
The strength of EWC (Kirkpatrick et al. 2017), and how often the posterior counts earlier data, are the best of four
each; so is the learning rate of EWC, of two, which fine-tuning and joint training have too.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import torchngvi as ngvi


class Network(nn.Module):
    """Two hidden layers, and heads that join with their tasks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.heads = nn.ModuleList()

    def begin(self, head, classes):
        if head == len(self.heads):
            self.heads.append(nn.Linear(100, classes))
        self.head = head

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


def train(model, optimizer, tasks, steps, penalty=lambda: 0.0):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for step in range(steps):
        head, (X, y), _ = tasks[step % len(tasks)]
        model.begin(*head)
        rows = torch.randint(len(y), (32,))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(X[rows]), y[rows]) + penalty()).backward()
        optimizer.step()
        schedule.step()


def posterior(model, groups, steps, weight):
    """Train a posterior on one task after the other, which needs no learning rate."""
    prior = {}
    for tasks in groups:
        model.begin(*tasks[0][0])
        q = ngvi.network(model, num_data=len(tasks[0][1][1]), **prior)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        ngvi.attach(optimizer, q, steps=steps)
        train(model, optimizer, tasks, steps)
        q.release()  # q stays as it is, and the network is free for the next one
        prior = {"prior": q, "prior_weight": weight}


def ewc(model, groups, steps, strength, lr):
    """Train with a penalty for each task before, of the Fisher information by a label drawn for each image."""
    anchors = []
    for tasks in groups:
        for head, *_ in tasks:
            model.begin(*head)
        own, (X, y) = dict(model.named_parameters()), tasks[0][1]

        def penalty(own=own, scale=0.5 * strength / len(y)):
            return scale * sum((F * (own[name] - at).square()).sum() for name, F, at in anchors)

        train(model, torch.optim.AdamW(own.values(), lr=lr, weight_decay=0.0), tasks, steps * len(tasks), penalty)
        squares = {name: torch.zeros_like(p) for name, p in own.items()}
        for x in X if strength else ():
            model.zero_grad()
            log_p = model(x[None])[0].log_softmax(-1)
            log_p[torch.multinomial(log_p.detach().exp(), 1)].backward()
            for name, p in own.items():
                squares[name] += 0.0 if p.grad is None else p.grad.square()
        anchors += [(name, square, own[name].detach().clone()) for name, square in squares.items() if strength]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"--seeds": 1, "--steps": 200, "--out": "network_continual.png"}.items():
        parser.add_argument(name, type=type(value), default=value)
    options = parser.parse_args(arguments)
    best, each, figure = {}, (10, 30, 100, 1000), Figure(figsize=(8, 3), layout="constrained")
    for axes, (setting, lr) in zip(figure.subplots(1, 2), {"split": 3e-3, "permuted": 1e-2}.items(), strict=True):
        methods = {"joint training": [(ewc, 0, lr)], "fine-tuning": [(ewc, 0, lr)], "EWC": [(ewc, s, lr) for s in each]}
        for name, settings in (methods | {"posterior as the prior": [(posterior, s) for s in each]}).items():
            found = {}
            for method, *numbers in settings:
                torch.manual_seed(0)
                for seed in range(options.seeds):
                    model, tasks = Network(), list(tasks_of(setting, seed))
                    method(
                        model, [tasks] if name == "joint training" else [[t] for t in tasks], options.steps, *numbers
                    )
                    right = []
                    for head, _, (X, y) in tasks:
                        model.eval().begin(*head)
                        right.append((model(X).argmax(1) == y).float().mean())
                    found[numbers[0]] = found.get(numbers[0], 0.0) + torch.stack(right) / options.seeds
            chosen = max(found.values(), key=torch.mean)
            best[setting, name] = chosen.mean().item()
            print(
                f"{setting:9s}{name:23s}{best[setting, name]:.3f} ",
                {s: round(a.mean().item(), 3) for s, a in found.items()},
            )
            axes.plot(range(1, 6), chosen, "o-", label=name)
        axes.set(title=f"{setting} digits", xlabel="task", ylabel="accuracy after five tasks")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return best


if __name__ == "__main__":
    main()
