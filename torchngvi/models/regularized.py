"""A non-convex regulariser beside any model: r(θ) = λ Σ_i θ_i²/(1 + θ_i²), read in two ways.

Kumar et al. (2025), appendix H, add r of the *mean* to the objective, L + r(m): the gradient in m
gains r'(m), the curvature nothing.  As part of the model, ℓ + r, it is E_q[r(θ)] that L gains, with
gradient and curvature in m and in the variances (Bonnet, Price).

A neural network for regression whose inputs compete under an adaptive group lasso.

    y = η(x; w) + N(0, σ²)      w_j | τ_j ~ N(0, τ_j I)      τ_j | γ_j ~ Gamma((m + 1)/2, rate γ_j²/2)

w_j are the m weights that leave input j; all other weights have a flat prior, σ² an inverse gamma one
(Godichon-Baggioni, Nguyen and Tran 2023, Example 4, after Tran, Nguyen, Nott and Kohn 2020).  q(w) is fitted by any
optimizer of the library to the log joint below, expected over mean-field q(τ) and q(σ²) which are closed:

    E[1/τ_j] = γ_j/√(E|w_j|²)       E[τ_j] = 1/E[1/τ_j] + 1/γ_j²       γ_j ← √((m + 1)/E[τ_j])
    q(σ²) = IG(a₀ + n/2, b₀ + RSS/2), RSS at the mean weights
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from torchngvi.arguments import is_number, read_list, read_number, read_sizes, read_tensor, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import AdditiveTractable, Curved, Frame, Raw, Sites, Target
from torchngvi.models.log_joint import LogJoint
from torchngvi.numerics.arrays import settings_of, tensors_of
from torchngvi.numerics.gaussian_integrals import Moments, saturating_square


class Penalty(ABC):
    """The abstract base of the regulariser r(θ) = λ Σ_i θ_i²/(1 + θ_i²): see `MeanPenalty` and `ExpectedPenalty`."""

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = read_number("strength", strength, "multiplies the regulariser", above=0)

    @abstractmethod
    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Return r(θ), (*sample, *batch)."""

    @abstractmethod
    def expected(
        self,
        mean: Tensor,  # (*batch, D)
        variance: Tensor,  # (*batch, D)
    ) -> Moments:
        """Return what each coordinate adds to L, its derivative in m and twice that in the variance, (*batch, D)."""


@final
class MeanPenalty(Penalty):
    """The regulariser of the mean, r(m), as printed in the paper: r' = 2 m/(1 + m²)², and no curvature.

    Use it to reproduce the paper; `ExpectedPenalty` is the one that is part of a model.

    Args:
        strength: λ, positive and finite.

    Raises:
        InputError: if the strength is not positive and finite.

    >>> [round(float(x), 12) for x in MeanPenalty().expected(torch.ones(1), torch.ones(1))]
    [0.5, 0.5, 0.0]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """Refuse to evaluate, since r is no function of θ.

        Raises:
            PairError: always.
        """
        raise PairError(
            "MeanPenalty is a function of q's mean and no part of a log joint. "
            "Use Quadrature() or Autograd(), or ExpectedPenalty for a regulariser of theta."
        )

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """Return r(m), r'(m) and 0."""
        square = mean.square()
        value = self.strength * square / (1 + square)
        return Moments(value, 2 * self.strength * mean / (1 + square).square(), torch.zeros_like(mean))


@final
class ExpectedPenalty(Penalty):
    """The regulariser as part of the model, E_q[r(θ)], in closed form (`gaussian_integrals.saturating_square`).

    Its curvature is negative where |θ| > 1/√3, so that the objective is not convex.

    Args:
        strength: λ, positive and finite.

    Raises:
        InputError: if the strength is not positive and finite.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(x), 12) for x in ExpectedPenalty().expected(zero + 1, zero)]
    [0.5, 0.5, -0.5]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """Return λ Σ θ²/(1 + θ²), (*sample, *batch)."""
        square = theta.square()
        return self.strength * (square / (1 + square)).sum(-1)

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """Return E_q[r] and its derivatives in closed form, accurate for every variance."""
        return Moments(*(self.strength * part for part in saturating_square(mean, variance)))


@final
class Regularized(AdditiveTractable):
    """A model whose expectations are known, with a non-convex penalty beside its prior.

    L gains the penalty, and the packet its derivative; as the prior, the penalty is counted once, however many parts
    the data come in.  The objective has several minima in general: the start decides which is found.

    Args:
        model: a dense model such as `GeneralizedLinear` or `SoftmaxRegression`.
        penalty: a `MeanPenalty` or an `ExpectedPenalty`.

    Raises:
        InputError: if the model does not know its expectations, or the penalty is none.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> model = Regularized(GeneralizedLinear(torch.eye(2), [0.0, 1.0]), ExpectedPenalty(0.1))
    >>> loss = VN(CholeskyGaussian(2)).step(model)
    """

    prior_alone = False

    def __init__(self, model: AdditiveTractable, penalty: Penalty) -> None:
        if not isinstance(model, AdditiveTractable):
            raise InputError(
                "Regularized wraps a model that knows the expectations of its data; "
                f"got {type(model).__name__}. "
                "Add the regulariser to the log joint yourself."
            )
        if not isinstance(penalty, Penalty):
            raise InputError(
                f"penalty must be MeanPenalty(strength) or ExpectedPenalty(strength); got {type(penalty).__name__}."
            )
        self.model, self.penalty, self.prior = model, penalty, model.prior
        self.temperature, self.comparable, self.coding = model.temperature, model.comparable, model.coding

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the model and of the penalty."""
        return (*self.model.tensors(), *tensors_of(self.penalty))

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model and of the penalty."""
        return (*self.model.settings(), *settings_of(self.penalty))

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Return the log likelihood of the model, (*sample, *batch)."""
        return self.model.data_log_likelihood(theta)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log prior of the model minus r(θ), (*sample, *batch).

        Raises:
            PairError: with a `MeanPenalty`, which is no function of θ.
        """
        return self.model.log_prior(theta) - self.penalty.energy(theta)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Curved | Sites]:
        """Return the expected energy of the model's data, with its derivative."""
        return self.model.data_energy(frame)

    def with_prior(self, frame: Frame, value: Tensor, derivative: Raw | Curved | Sites) -> tuple[Tensor, Raw]:
        """Return value and derivative with the model's prior and the penalty added."""
        value, whole = self.model.with_prior(frame, value, derivative)
        g, H = whole.raw()
        gain, slope, curvature = self.penalty.expected(frame.mean, frame.variance)
        return value + gain.sum(-1), Raw(g + slope, H + torch.diag_embed(curvature))

    def pieces(self) -> Iterator["Regularized"]:
        """Yield the pieces of the model, each with the whole penalty."""
        for piece in self.model.pieces():
            assert isinstance(piece, AdditiveTractable)
            yield Regularized(piece, self.penalty)


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

    def start(self, generator: torch.Generator | None = None) -> Tensor:  # (d,)
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

    def predict(self, theta: Tensor, X: Tensor | None = None) -> Tensor:
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

    def groups(self, theta: Tensor) -> Tensor:
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
