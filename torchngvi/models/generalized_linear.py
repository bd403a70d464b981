"""Generalised linear models with a Gaussian prior: ℓ(θ) = Σ_n w_n f(x_nᵀθ + o_n, y_n) - γ log p(θ).

Under q every predictor is one-dimensional, η_n ~ N(e_n, v_n) with e = X m + o and v_n = ‖Cᵀx_n‖²,
so E_q[ℓ], its gradient and its curvature are sums of scalar expectations (Bonnet, Price):

    g = Xᵀα + γΛ(m - m₀),   H = Xᵀ diag(β) X + γΛ,   α = ∂F/∂e,  β = 2 ∂F/∂v

(Kumar et al. 2025, section 3.6, with XᵀDX for the printed XDXᵀ.)
"""

import math
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, LinearTarget, Posterior, Prior, Sites
from torchngvi.models.likelihoods import FAMILIES, Likelihood


class GeneralizedLinear(LinearTarget):
    """Log joint of a generalised linear model, for one posterior or a batch of them.

    Args:
        X: design, (N, D), or (*batch, N, D) with one data set a member. Add a column of ones for
            an intercept.
        y: targets, (N,) or (*batch, N). Two classes in any coding for the Bernoulli families: the
            larger value is the success.
        family: "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), or a
            `Likelihood` such as ``GaussianNoise(0.1)``.
        prior_precision: β of the prior N(prior_mean, β⁻¹), a scalar or one a coefficient, (D,).
        prior_mean: a scalar or (D,).
        weights: multiply the log likelihood of each row, (N,) or (*batch, N), not negative.
        offset: added to the linear predictor, (N,) or (*batch, N).
        temperature: γ, the weight of KL(q‖prior); 1 is the posterior.

    Raises:
        InputError: shapes that do not fit, values that are not finite, targets the family cannot
            produce, a prior precision or temperature that is not positive.

    >>> model = GeneralizedLinear(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 1.0]), prior_precision=1.0)
    >>> model.dim
    1
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior_precision: Any = 1.0,
        prior_mean: Any = 0.0,
        weights: Any = None,
        offset: Any = None,
        temperature: float = 1.0,
    ) -> None:
        self.X = _tensor("X", X, None)
        like = self.X
        if like.ndim < 2:
            raise InputError(f"X must be a matrix, one row an observation; got shape {tuple(like.shape)}.")
        if like.shape[-2] == 0 or like.shape[-1] == 0:
            raise InputError(f"X must have at least one row and one column; got shape {tuple(like.shape)}.")
        self.likelihood = _likelihood(family)
        y = _tensor("y", y, like)
        _same_rows("y", y, like)
        self.y = self.likelihood.checked(y)
        self.weights = torch.ones_like(self.y) if weights is None else _tensor("weights", weights, like)
        self.offset = torch.zeros_like(self.y) if offset is None else _tensor("offset", offset, like)
        _same_rows("weights", self.weights, like)
        _same_rows("offset", self.offset, like)
        if bool((self.weights < 0).any()):
            raise InputError(f"weights must not be negative; got {float(self.weights.min()):g}.")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is the weight of KL(q‖prior), positive and finite; got {temperature}.")
        self.temperature = float(temperature)
        precision = _tensor("prior_precision", prior_precision, like)
        mean = _tensor("prior_mean", prior_mean, like)
        for name, value in (("prior_precision", precision), ("prior_mean", mean)):
            if value.ndim and value.shape[-1] not in (1, self.dim):
                raise InputError(f"{name} must be a scalar or ({self.dim},); got shape {tuple(value.shape)}.")
        if bool((precision <= 0).any()):
            raise InputError(f"prior_precision must be positive; got {float(precision.min()):g}.")
        self.prior = Prior(*(value if value.ndim else value.expand(self.dim) for value in (mean, precision)))
        self._temper()

    def _temper(self) -> None:
        self._tempered = Prior(self.prior.mean, self.prior.precision * self.temperature)

    @property
    def dim(self) -> int:
        """D, the number of coefficients."""
        return self.X.shape[-1]

    @property
    def num_data(self) -> int:
        """N, the number of rows."""
        return self.X.shape[-2]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and convert every tensor, as ``torch.nn.Module.to``; returns a new model."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        for name in ("X", "y", "weights", "offset"):
            setattr(new, name, getattr(self, name).to(*args, **kwargs))
        new.prior = Prior(*(tensor.to(*args, **kwargs) for tensor in self.prior))
        new._temper()
        return new

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything a value depends on."""
        return (self.X, self.y, self.weights, self.offset, *self.prior)

    def predictor(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """η = Xθ + o, (*sample, *batch, N)."""
        if self.X.ndim == 2:
            return theta @ self.X.mT + self.offset
        return (self.X @ theta[..., None])[..., 0] + self.offset

    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Σ w log p(y | θ) + γ log p(θ), (*sample, *batch)."""
        data = (self.weights * self.likelihood.energy(self.predictor(theta), self.y)).sum(-1)
        return -data - self.temperature * self.prior.energy(theta, torch.zeros_like(theta))

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Sites]:
        """E_q[ℓ] (*batch,) and its derivative, from the marginals of the predictors."""
        projected = frame.rows(self.X)
        moments = self.likelihood.expected(self.predictor(frame.mean), projected.square().sum(-1), self.y)
        value = (self.weights * moments.value).sum(-1)
        value = value + self.temperature * self.prior.energy(frame.mean, frame.variance)
        alpha, beta = self.weights * moments.slope, self.weights * moments.curvature
        return value, Sites(self.X, projected, alpha, beta, self._tempered, frame.mean)

    def negative_elbo(self, q: Posterior) -> Tensor:
        """L(q) = E_q[ℓ] - γ entropy(q), (*batch,), differentiable in the probes of q.

        For γ = 1 the negative evidence lower bound, all constants included.
        """
        return self.expected_energy(q.probed())[0] - self.temperature * q.entropy()


def _likelihood(family: str | Likelihood) -> Likelihood:
    if isinstance(family, Likelihood):
        return family
    if family not in FAMILIES:
        raise InputError(f"family must be one of {', '.join(FAMILIES)}, or a Likelihood; got {family!r}.")
    return FAMILIES[family]()


def _tensor(name: str, value: Any, like: Tensor | None) -> Tensor:
    """A finite floating-point tensor; the design decides dtype and device."""
    try:
        # straight to the dtype of the design: 0.1 must not pass through float32
        tensor = value if isinstance(value, Tensor) or like is None else torch.as_tensor(value, dtype=like.dtype)
        tensor = torch.as_tensor(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error
    if tensor.is_complex():
        raise InputError(f"{name} must be real; got {tensor.dtype}.")
    if like is not None:
        tensor = tensor.to(dtype=like.dtype, device=like.device)
    elif not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        raise InputError(
            f"{name} must be finite; got {int((~finite).sum())} NaN or infinite of {tensor.numel()} entries. "
            "Drop or impute those rows."
        )
    return tensor.detach()


def _same_rows(name: str, value: Tensor, X: Tensor) -> None:
    if value.ndim == 0 or value.shape[-1] != X.shape[-2]:
        raise InputError(
            f"{name} must have one entry for each of the {X.shape[-2]} rows of X; got shape {tuple(value.shape)}."
        )
