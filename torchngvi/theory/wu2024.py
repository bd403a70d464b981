"""What is known of stochastic natural-gradient VI: its variance, its rate, and the constants (Wu and Gardner 2024).

    V_t = (1/γ_t) E⟨∇̂ℓ - ∇ℓ, ω*_{t+1} - ω_{t+1}⟩ = (1/γ_t²) E[KL(q_{t+1}‖q*_{t+1}) + KL(q*_{t+1}‖q_{t+1})]       (12)

q*_{t+1} is the step of the exact gradient from the same q_t.  No norm occurs.  For conjugate models and γ_t = 2/(2 + t)

    E KL(q̄_{T+1}‖q*) ≤ 4V/(T + 2)

with V ≥ V_t.  Theorem 1 is printed with V/(T + 2), from ½(t + 1)/(t + 2) in the place of 2(t + 1)/(t + 2) in its last
sum; and its Lemma 9 without the noise variance σ² of the natural parameter, b = max|y x|/σ² here.
"""

from typing import NamedTuple, TypeVar

from torch import Tensor

from torchngvi.arguments import read_count, read_instance, read_number, read_size
from torchngvi.errors import PairError
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise
from torchngvi.models.log_joint import read_gaussian
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.posteriors.gaussian import Gaussian

__all__ = [
    "SubSampling",
    "covariance_factor",
    "gradient_variance",
    "limiting_variance",
    "rate_bound",
    "sharp_rate_bound",
    "symmetric_kl",
]

Q = TypeVar("Q", Gaussian, ExponentialFamily)


def symmetric_kl(q: Q, other: Q) -> Tensor:
    """The symmetric divergence KL(q‖q') + KL(q'‖q) of two Gaussians, or two members of an exponential family.

    Args:
        q: a Gaussian, or a member of a family.
        other: another, q'.

    Returns:
        The divergence in nats, (*batch,).

    >>> from torchngvi import CholeskyGaussian
    >>> symmetric_kl(CholeskyGaussian(1), CholeskyGaussian(1, mean=2.0)).item()
    4.0
    """
    for name, member in (("q", q), ("other", other)):
        read_instance(name, member, (Gaussian, ExponentialFamily), "is a Gaussian or of an exponential family")
    return q.kl(other) + other.kl(q)


def gradient_variance(steps: Q, exact: Q, gamma: float) -> Tensor:
    """The variance V_t of (12), measured as the mean of the symmetric divergences over γ_t².

    Args:
        steps: q_{t+1} after R stochastic steps from one q_t, as a batch (R,).
        exact: q*_{t+1} after the exact step from the same q_t.
        gamma: the step size γ_t, in (0, 1].

    Returns:
        V_t, ().

    Raises:
        InputError: if γ lies outside (0, 1].

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> steps = CholeskyGaussian(1, batch_shape=(2,), mean=torch.tensor([[1.0], [-1.0]]))  # 1 nat from the exact one
    >>> gradient_variance(steps, CholeskyGaussian(1), 0.5).item()
    4.0
    """
    gamma = read_number("gamma", gamma, "is the step that was taken", above=0, at_most=1)
    return symmetric_kl(steps, exact).mean() / gamma**2


def rate_bound(V: float, T: int) -> float:
    """The bound 4V/(T + 2) of Theorem 1 on E KL(q̄_{T+1}‖q*), corrected.

    Args:
        V: a bound of V_t for every t ≤ T.
        T: the last step, counted from 0.

    Returns:
        The bound, in the units of V.

    Raises:
        InputError: if V or T is negative.

    >>> rate_bound(1.0, 2)
    1.0
    """
    _check_run(V, T)
    return 4 * V / (T + 2)


def sharp_rate_bound(V: float, T: int) -> float:
    """The sharper bound of the same proof, 4V/((T + 1)(T + 2)) Σ_{t ≤ T} (t + 1)/(t + 2), which is V at T = 0.

    Args:
        V: a bound of V_t for every t ≤ T.
        T: the last step, counted from 0.

    Returns:
        The bound, in the units of V.

    Raises:
        InputError: if V or T is negative.

    >>> sharp_rate_bound(3.0, 0)
    3.0
    """
    _check_run(V, T)
    return 4 * V / ((T + 1) * (T + 2)) * sum((t + 1) / (t + 2) for t in range(T + 1))


def covariance_factor(T: int) -> float:
    """The factor 2(2T + 3)/(3(T + 1)(T + 2)) of Cov η_{T+1} over that of one stochastic target, for γ_t = 2/(2 + t).

    η_{T+1} is then the mean of independent unbiased targets with weights 2(t + 1)/((T + 1)(T + 2)).

    Args:
        T: the last step, counted from 0.

    Returns:
        The factor, 1 at T = 0.

    Raises:
        InputError: if T is negative.

    >>> covariance_factor(0)
    1.0
    """
    _check_run(0.0, T)
    return 2 * (2 * T + 3) / (3 * (T + 1) * (T + 2))


class SubSampling(NamedTuple):
    """The constants of Lemmas 5 to 11, for a linear regression whose rows are drawn with replacement.

    ``batch`` is the number m of rows a step, 1 or more, otherwise an `InputError`.

    >>> import torch
    >>> model = GeneralizedLinear(torch.tensor([[1.0], [2.0]]), [1.0, 3.0], "gaussian")
    >>> SubSampling.of(model).gradient_variances(1)
    (25.0, 2.25)
    """

    s1: float  # Var(y_j x_j)
    s2: float  # Var(x_j x_jᵀ)
    b: float  # max |y_j x_j|/σ², so that |λ_t| ≤ bn
    nu: float  # max(1, ‖P‖), V_t ⪯ νI from q_0 = N(0, I)
    rows: int  # n
    noise: float  # σ

    @classmethod
    def of(cls, model: GeneralizedLinear) -> "SubSampling":
        """Compute the constants of a linear regression.

        Args:
            model: a linear regression with Gaussian noise.

        Returns:
            The constants.

        Raises:
            PairError: if the likelihood is another than Gaussian noise, or there are several data sets.
        """
        noise = _noise(model)
        X, y = model.X, model.y
        products = y[:, None] * X
        s1 = (products - products.mean(0)).square().sum(-1).mean()
        s2 = X.square().sum(-1).square().mean() - (X.mT @ X / len(X)).square().sum()
        precision = model.prior.precision
        lowest = eigh(precision)[0][0] if precision.ndim == 2 else precision.min()
        b = products.norm(dim=-1).max() / noise**2
        return cls(float(s1), float(s2), float(b), max(1.0, 1 / float(lowest)), len(X), noise)

    def gradient_variances(self, batch: int) -> tuple[float, float]:
        """Return E|∇̂_ξℓ - ∇_ξℓ|² = n²s₁/(mσ⁴) and E‖∇̂_Ξℓ - ∇_Ξℓ‖² = n²s₂/(4mσ⁴) (Lemmas 7 and 8, equalities)."""
        scale = self.rows**2 / (_batch(batch) * self.noise**4)
        return scale * self.s1, scale * self.s2 / 4

    def variance_bound(self, batch: int) -> float:
        """Return the bound V₂ ≥ V_t of Lemma 3: it holds, and is larger by many orders of magnitude.

        (νs₁ + ½ν²s₂ + 2ν²b√(s₁s₂)n + ν³b²s₂n²) n²/(σ⁴m)
        """
        s1, s2, b, nu, n, noise = self
        inside = nu * s1 + nu**2 * s2 / 2 + 2 * nu**2 * b * (s1 * s2) ** 0.5 * n + nu**3 * b**2 * s2 * n**2
        return inside * n**2 / (noise**4 * _batch(batch))


def limiting_variance(model: GeneralizedLinear, q: Gaussian, batch: int) -> float:
    """The limit V∞ = lim V_t = tr(F Cov η̂) of the variance of a linear regression at its posterior.

    With r the residuals and h_j = x_jᵀVx_j: the variance over rows of (r_j x_j, x_j x_jᵀ) in the Fisher norm,
    n²/(mσ⁴) [mean r²h - |mean r Cᵀx|² + ½ mean h² - ½‖mean Cᵀxxᵀ C‖²].  Then (T + 2) E KL tends to 2/3 V∞ for the last
    iterate of 2/(2 + t), 16/27 V∞ for the average of Theorem 1, and ½ V∞ for 1/(1 + t).

    Args:
        model: a linear regression with Gaussian noise.
        q: its exact posterior.
        batch: the number m of rows a step, drawn with replacement.

    Returns:
        V∞.

    Raises:
        PairError: if the likelihood is another than Gaussian noise, or there are several data sets.
        InputError: if the batch has no rows.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> model = GeneralizedLinear(torch.tensor([[1.0], [2.0]]), [1.0, 3.0], "gaussian")
    >>> q = CholeskyGaussian(1, mean=7 / 6, scale=6**-0.5)  # the posterior: S = 1 + 5
    >>> round(limiting_variance(model, q, 1), 4)
    0.5
    """
    read_instance("model", model, GeneralizedLinear, "is a linear regression", other=q)
    noise, frame = _noise(model), read_gaussian("limiting_variance", q).frame()
    model.check(q)
    projected = frame.rows(model.X)
    residual, h = model.y - model.predictor(frame.mean), projected.square().sum(-1)
    rows = len(projected)
    first = (residual.square() * h).mean() - (projected.mT @ residual / rows).square().sum()
    second = h.square().mean() - (projected.mT @ projected / rows).square().sum()
    return float((first + second / 2) * rows**2 / (_batch(batch) * noise**4))


def _noise(model: GeneralizedLinear) -> float:
    if not isinstance(model.likelihood, GaussianNoise) or model.X.ndim != 2:
        raise PairError(
            "these constants are of a linear regression with one data set; got "
            f"{type(model.likelihood).__name__} with X of shape {tuple(model.X.shape)}. "
            "Measure gradient_variance instead."
        )
    return model.likelihood.noise


def _batch(batch: int) -> int:
    return read_count("batch", batch, "is the number of rows of a step")


def _check_run(V: float, T: int) -> None:
    read_number("V", V, "is a variance", at_least=0)
    read_size("T", T, "counts steps", at_least=0)
