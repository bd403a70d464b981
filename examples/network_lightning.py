"""Lightning's loop with a posterior: two lines in a LightningModule, and the likelihood of both compared.

    python examples/network_lightning.py [--epochs 40] [--out network_lightning.png]    # needs pip install lightning

Handwritten digits.  The point estimate's learning rate is the best of three on validation data; the posterior has none
to choose, and its temperature is chosen on the same data.  q is a part of the module, so that Lightning's checkpoints
hold it.
"""

import argparse

import lightning
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchngvi as ngvi


class Classifier(lightning.LightningModule):
    """A network for images of digits; with num_data its weights have a posterior."""

    def __init__(self, lr, num_data=None):
        super().__init__()
        self.lr, self.decay = lr, 0.01 if num_data is None else 0.0
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.q = None if num_data is None else ngvi.network(self.net, num_data)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=self.decay)
        if self.q is not None:
            ngvi.attach(optimizer, self.q, steps=steps)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(epochs, data, lr, num_data=None):
    """Train one module; the order of the batches is the same for all."""
    torch.manual_seed(0)
    module = Classifier(lr, num_data)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(data, batch_size=50, shuffle=True))
    return module.eval()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", default="network_lightning.png")
    options = parser.parse_args(arguments)

    digits = load_digits()
    X, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).split([1000, 300, 497])
    train, validation, (inputs, labels) = ((X[rows], y[rows]) for rows in order)
    data = TensorDataset(*train)

    points = {}  # the learning rate of the point estimate is chosen on the validation part
    for lr in (1e-3, 3e-3, 1e-2):
        net = trained(options.epochs, data, lr).net
        with torch.no_grad():
            loss = nn.functional.cross_entropy(net(validation[0]), validation[1]).item()
            points[loss] = nn.functional.cross_entropy(net(inputs), labels).item()
    q = trained(options.epochs, data, 1e-3, num_data=len(data)).q
    found = ngvi.calibrate(q, [validation])
    nll = {"point estimate": points[min(points)], "posterior": -q.log_prob(inputs, labels, samples=32).mean().item()}
    print(", ".join(f"{name}: test NLL {value:.4f}" for name, value in nll.items()))

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="temperature of q", ylabel="validation NLL", xscale="log", yscale="log")
    axes.plot(list(found.tried), list(found.tried.values()), "o-", label="posterior")
    axes.axhline(min(points), color="0.5", linestyle="--", label="point estimate")
    axes.axvline(found.temperature, color="C1", label="chosen")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return nll


if __name__ == "__main__":
    main()
