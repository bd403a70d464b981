"""A neural network for regression whose inputs compete under an adaptive group lasso.

    y = η(x; w) + N(0, σ²)      w_j | τ_j ~ N(0, τ_j I)      τ_j | γ_j ~ Gamma((m + 1)/2, rate γ_j²/2)

w_j are the m weights that leave input j; all other weights have a flat prior, σ² an inverse gamma one
(Godichon-Baggioni, Nguyen and Tran 2023, Example 4, after Tran, Nguyen, Nott and Kohn 2020).  q(w) is fitted by any
optimizer of the library to the log joint below, expected over mean-field q(τ) and q(σ²) which are closed:

    E[1/τ_j] = γ_j/√(E|w_j|²)       E[τ_j] = 1/E[1/τ_j] + 1/γ_j²       γ_j ← √((m + 1)/E[τ_j])
    q(σ²) = IG(a₀ + n/2, b₀ + RSS/2), RSS at the mean weights
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from torchngvi.arguments import is_number, read_list, read_number, read_sizes, read_tensor, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models import LogJoint


@final
class GroupLassoNetwork(nn.Module, Target):
    """Log joint log p(y, w) of a ReLU network under an adaptive group lasso, up to a constant.

    Use it to reproduce Example 4 of the paper.  The expectations of τ and σ² are buffers, which `update_groups`
    and `update_noise` move between steps in w.  The weights lie in one vector: for each layer its matrix row after row
    (outputs first), then its biases.

    Args:
        X: the inputs, (n, p).
        y: the responses, (n,).
        hidden: the widths of the hidden layers, at least one.
        gamma: the start of every γ_j, positive.
        prior: a₀ and b₀ of the inverse gamma prior of σ², positive; by default 10 and 9 sd(y).

    Raises:
        InputError: if shapes do not fit, there is no hidden layer, or a constant is not positive.

    >>> network = GroupLassoNetwork(torch.zeros(5, 11), torch.ones(5), (10, 10), prior=(10.0, 9.0))
    >>> network.dim
    241
    """

    temperature = 1.0
    X: Tensor
    y: Tensor
    gamma: Tensor
    inverse_tau: Tensor
    inverse_variance: Tensor

    def __init__(
        self,
        X: Tensor,  # (n, p)
        y: Tensor,  # (n,)
        hidden: Sequence[int] = (10,),
        *,
        gamma: float = 0.01,
        prior: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        X = read_tensor("X", X)
        y = read_tensor("y", y, like=X)
        if X.ndim != 2 or not X.numel() or y.shape != X.shape[:1]:
            raise InputError(f"X is (n, p) and y (n,); got {tuple(X.shape)} and {tuple(y.shape)}.")
        hidden = read_sizes("hidden", hidden, "lists the widths of one layer or more", none=False)
        what = "has two positive constants, a shape and a rate, or is None"
        pair = [10.0, 9.0 * float(y.std())] if prior is None else read_list("prior", prior, what)
        if len(pair) != 2 or not all(is_number(constant, above=0) for constant in pair):
            raise InputError(f"prior {what}; got {shown(pair)}.")
        shape, rate = map(float, pair)
        gamma = read_number("gamma", gamma, above=0)
        self.sizes = (X.shape[1], *hidden, 1)
        self.prior = shape, rate
        self.register_buffer("X", X)
        self.register_buffer("y", y)
        self.register_buffer("gamma", X.new_full((X.shape[1],), gamma))
        self.register_buffer("inverse_tau", X.new_ones(X.shape[1]))
        self.register_buffer("inverse_variance", X.new_tensor(shape / rate))

    @property
    def dim(self) -> int:
        """The number d of weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in zip(self.sizes, self.sizes[1:], strict=False))

    def start(
        self,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (d,)
        """Draw a start: weights uniform in ±√(6/(inputs + outputs)), and biases of 0.

        Args:
            generator: the generator of the draws; torch's own by default.

        Returns:
            The vector of all weights and biases, (d,).
        """
        pieces = []
        for inputs, outputs in zip(self.sizes, self.sizes[1:], strict=False):
            uniform = torch.rand(inputs * outputs, dtype=self.X.dtype, device=self.X.device, generator=generator)
            pieces += [(2 * uniform - 1) * (6 / (inputs + outputs)) ** 0.5, self.X.new_zeros(outputs)]
        return torch.cat(pieces)

    def predict(
        self,
        theta: Tensor,  # (*sample, d)
        X: Tensor | None = None,  # (n, p)
    ) -> Tensor:  # (*sample, n)
        """Evaluate the network η(x; w), at the inputs of the data by default.

        Args:
            theta: all weights and biases, (*sample, d).
            X: other inputs, (n, p).

        Returns:
            One prediction for each θ and each row, (*sample, n).
        """
        layer, start = self.X if X is None else X, 0
        for depth, (inputs, outputs) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            end = start + inputs * outputs
            W = theta[..., start:end].unflatten(-1, (outputs, inputs))
            bias = theta[..., end : end + outputs]
            layer = layer @ W.mT + bias[..., None, :]
            layer = layer if depth == len(self.sizes) - 2 else layer.relu()
            start = end + outputs
        return layer[..., 0]

    def groups(
        self,
        theta: Tensor,  # (*sample, d)
    ) -> Tensor:  # (*sample, m, p)
        """Read the first layer from θ.

        Args:
            theta: all weights and biases, (*sample, d).

        Returns:
            Its weights, (*sample, m, p): column j holds those that leave input j.
        """
        p, m = self.sizes[:2]
        return theta[..., : p * m].unflatten(-1, (m, p))

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return -½ E[1/σ²] Σ (y - η)² - ½ Σ_j E[1/τ_j] |w_j|², (*sample,)."""
        return self._log_joint(theta, self.X, self.y)

    def _log_joint(self, theta: Tensor, X: Tensor, y: Tensor) -> Tensor:
        residual = (y - self.predict(theta, X)).square().sum(-1) * (len(self.y) / len(y))
        penalty = (self.inverse_tau * self.groups(theta).square().sum(-2)).sum(-1)
        return -0.5 * (self.inverse_variance * residual + penalty)

    def minibatch(
        self,
        rows: Tensor,  # indices
    ) -> LogJoint:
        """The log joint with the likelihood of some rows, scaled to all of them.

        Args:
            rows: the row numbers of the mini-batch.

        Returns:
            A log joint whose gradients are unbiased; its values are not compared.
        """
        part = LogJoint(lambda theta: self._log_joint(theta, self.X[rows], self.y[rows]))
        part.comparable = False
        return part

    @torch.no_grad()
    def update_groups(
        self,
        mean: Tensor,  # (d,), of q(w)
        variance: Tensor,  # (d,)
    ) -> None:
        """Update q(τ) and γ, given the moments of q(w)."""
        m = self.sizes[1]
        square = self.groups(mean.square() + variance).sum(-2)
        self.inverse_tau = self.gamma / square.sqrt()
        tau = 1 / self.inverse_tau + 1 / self.gamma.square()
        self.gamma = ((m + 1) / tau).sqrt()

    @torch.no_grad()
    def update_noise(
        self,
        mean: Tensor,  # (d,), of q(w)
    ) -> None:
        """Update q(σ²), given the mean of q(w)."""
        rss = (self.y - self.predict(mean)).square().sum()
        self.inverse_variance = (self.prior[0] + len(self.y) / 2) / (self.prior[1] + rss / 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the log joint depends on."""
        return (self.X, self.y, self.inverse_tau, self.inverse_variance)
