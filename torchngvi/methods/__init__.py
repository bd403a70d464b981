"""The published methods by name: each is a choice of parts."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.arguments import read_instance, read_number
from torchngvi.averaging import Averaging
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Independent, PathDerivative, Reparametrized, StatisticRegression
from torchngvi.expectations.flat import ControlVariate, GradientEstimator, Pathwise
from torchngvi.interfaces import Bent, Estimator, Local, Metric, Momentum, Posterior, Rule, StepSize
from torchngvi.metrics import Preconditioner, Recursive
from torchngvi.optim import Evaluation, NaturalGradientVI, Watch
from torchngvi.optim.evaluating import check_kinds, posteriors_of
from torchngvi.posteriors import NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.flat import ExponentialFamily, FlatPosterior
from torchngvi.rules import (
    SVGD,
    BuresWasserstein,
    CovarianceGradient,
    NaturalGradient,
    NormalizedMomentum,
    ProjectedRootGradient,
    ProximalRootGradient,
    Retraction,
    RootGradient,
    RootNewton,
    SymmetricRoot,
    VariationalNewton,
)
from torchngvi.stepsizes import Backtracking, Constant, Convex, KLRadius

__all__ = [
    "AIFVB",
    "BBVI",
    "BWGD",
    "IBLR",
    "IFVB",
    "NGVI",
    "SRVN",
    "VN",
    "CovarianceGD",
    "Method",
    "NewtonCG",
    "PreconditionedVI",
    "ProximalBBVI",
    "RootGD",
    "SVGDDensity",
    "Snngm",
    "SymmetricSRVN",
]


def _always(rule: type[Rule]) -> Any:
    """The `Method.rule_for` of a method with the same rule on every posterior."""

    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        return rule()

    return staticmethod(rule_for)


class Method(NaturalGradientVI):
    """The abstract base of the published methods: `NaturalGradientVI` with the rule filled in.

    Args:
        posterior, lr, step_size, estimator, metric, momentum, loss_scale: see `NaturalGradientVI`.

    Raises:
        PairError: a posterior that the rule cannot move.

    >>> from torchngvi import CholeskyGaussian
    >>> isinstance(VN(CholeskyGaussian(2)), Method), type(VN.rule_for(CholeskyGaussian(2))).__name__
    (True, 'VariationalNewton')
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        metric: Metric | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(
            posterior,
            self.rule_for(posterior),
            lr,
            step_size=step_size,
            estimator=estimator,
            metric=metric,
            momentum=momentum,
            loss_scale=loss_scale,
        )

    @staticmethod
    @abstractmethod
    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        """The rule of the method on this posterior, which may depend on the coordinates that q holds."""


class VN(Method):
    """Variational Newton: S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g (Khan and Rue 2023; Kumar et al. 2025, Eq 7).

    The first method to try; for conjugate models one step of ρ = 1, unbounded, is exact.  The arguments are those of
    `Method`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import GeneralizedLinear
    >>> from torchngvi.stepsizes import Constant
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> model = GeneralizedLinear(torch.ones(3, 1, dtype=torch.float64), [1.0, 2.0, 3.0], "gaussian")
    >>> _ = VN(q, lr=1.0, step_size=Constant()).step(model)
    >>> round(q.mean.item(), 12), round(q.precision.item(), 12)  # 6/4, 3 + 1
    (1.5, 4.0)
    """

    @staticmethod
    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        """The rule is `VariationalNewton`; on a `NaturalGaussian` the natural gradient, which needs no factor of V."""
        return NaturalGradient() if isinstance(posterior, NaturalGaussian) else VariationalNewton()


class SRVN(Method):
    """Square-root variational Newton: C' = C - ρ C tril½[CᵀHC - γI], m' = m - ρ C Cᵀg.

    The method is Algorithm 1 and Eq 17 of Kumar et al. (2025), and the update of Tan (2025), Theorem 2.  With
    ``step_size=Constant()``, the printed update, lr must satisfy lr (W_ii - γ) < 2 (the diagonal changes sign
    otherwise, and the step is not taken), so that start and lr have to fit each other; the default `KLRadius` sees to
    it.  With ``estimator=PathDerivative()`` it is Algorithm 1b of
    Tan on a `CholeskyGaussian`, 1c with blocks of one on a `DiagonalGaussian`, and 2b on a
    `PrecisionCholeskyGaussian`: T' = T + ρ T tril½[P], m' = m - ρ T⁻ᵀa.  The arguments are those of `Method`.

    Raises:
        PairError: a posterior that holds no root, of the covariance or the precision.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1)
    >>> (0.5 * 3.0 * q.rsample((2,)).square().mean() - q.entropy()).backward()
    >>> SRVN(q, lr=0.1).step()
    """

    rule_for = _always(NaturalGradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a posterior that holds a root of the covariance or of the precision.

        Raises:
            PairError: a `NaturalGaussian`, which holds no root.
        """
        if isinstance(param_group.get("posterior"), NaturalGaussian):
            raise PairError(
                "SRVN updates a root of the covariance, and NaturalGaussian holds (S m, S), where the same natural "
                "gradient is VN. Use VN(q), or SRVN with a CholeskyGaussian."
            )
        super().add_param_group(param_group)


class SymmetricSRVN(Method):
    """Square-root variational Newton in the symmetric half: V' = C (I - ½ρP)² Cᵀ, m' = m - ρ C Cᵀg, P = CᵀHC - γI.

    It is the remark on other square roots in Kumar et al. (2025).  Unlike `SRVN` it does not depend on the order of the
    coordinates of θ.  The arguments are those of `Method`.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = SymmetricSRVN(CholeskyGaussian(3), lr=0.1)
    """

    rule_for = _always(SymmetricRoot)


class IBLR(Method):
    """The improved Bayesian learning rule: S' = (1 - γρ) S + ρH + ½ρ² G S⁻¹ G, m' = m - ρ S⁻¹ g, G = H - γS.

    It is `VN` with a second-order term (Lin, Schmidt and Khan 2020), by which S stays positive definite for every ρ and
    every H: the choice for log joints that are not concave.  The arguments are those of `Method`.

    >>> from torchngvi import NaturalGaussian
    >>> opt = IBLR(NaturalGaussian(3), lr=0.1)
    """

    rule_for = _always(Retraction)


class BWGD(Method):
    """Bures-Wasserstein gradient descent: m' = m - α g, V' = M V M, M = I - α(H - γS).

    It is Algorithm 1 of Lambert et al. (2022).  Its step depends on the scale of the problem: it is stable below
    about 1/λ_max(H), with a rate that follows the conditioning.  The arguments are those of `Method`.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = BWGD(CholeskyGaussian(3), lr=1e-2)
    """

    rule_for = _always(BuresWasserstein)


class SVGDDensity(Method):
    """Gaussian SVGD with full expectations: θ' = θ + ε(Bθ - g), B = γI - HV - g mᵀ.

    It is Algorithm 1 of Liu et al. (2024) with the kernel xᵀy + 1, as Kumar et al. (2025), Appendix G, run it.  For the
    kernel centred at m use ``NaturalGradientVI(q, CenteredSVGD(), lr)``.  The arguments are those of `Method`.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = SVGDDensity(CholeskyGaussian(3), lr=1e-2)
    """

    rule_for = _always(SVGD)


class CovarianceGD(Method):
    """Gradient descent in (m, V): m' = m - ρ g, V' = V - ½ρ (H - γS).

    It is Eq 4 ("GD") of Kumar et al. (2025), a baseline.  It is stable below 4γ/λ_max(H)² near the optimum; steps that
    leave the positive definite cone are not taken.  The arguments are those of `Method`.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = CovarianceGD(CholeskyGaussian(3), lr=1e-3)
    """

    rule_for = _always(CovarianceGradient)


class RootGD(Method):
    """Gradient descent in (m, C): m' = m - ρ g, C' = C - ρ tril[(H - γS) C].

    It is the update of Titsias and Lázaro-Gredilla (2014), "doubly stochastic" with `Stein` and a batch of
    rows; with exact expectations it is the gradient descent whose convexity Domke (2020) has shown.  With
    ``estimator=PathDerivative()`` it is Algorithm 1a of Tan (2025); on a `PrecisionCholeskyGaussian` it is 2a,
    T' = T + ρ tril[V (H - γS) T⁻ᵀ].  The arguments are those of `Method`.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = RootGD(CholeskyGaussian(3), lr=1e-2)
    """

    rule_for = _always(RootGradient)


class Snngm(Method):
    """Stochastic normalised natural gradient with momentum: λ' = λ - α m_t/(1 - βᵗ).

    m_t = β m_{t-1} + (1 - β) g̃_t/‖g̃_t‖ with g̃ the natural gradient in (m, C) or (m, T); Tan (2025), section 4.
    Its steps have the length α whatever the gradient: it needs no careful start, and ends in a ball about the
    optimum.  Published with one draw a step: ``estimator=PathDerivative()``.

    Args:
        posterior: see `NaturalGradientVI`; all of one kind of coordinates, unless a momentum is given.  With a root:
            the natural coordinates of a narrow q are large, and steps of length α in them nothing.
        lr: α, by default 0.001 √ℓ for the ℓ coordinates of q.
        momentum: the average, with its β, its norm and whether its bias is corrected; by default with β = 0.9, in the
            Riemannian norm on a `PrecisionCholeskyGaussian` and the Euclidean one otherwise.
        step_size, estimator, loss_scale: see `NaturalGradientVI`.

    Raises:
        PairError: posteriors of several kinds without a momentum, steps found by trial.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = Snngm(CholeskyGaussian(49))
    >>> round(opt.param_groups[0]["lr"], 4)  # ℓ = 49 + 49·50/2
    0.0357
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        momentum: NormalizedMomentum | None = None,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        items = posteriors_of(posterior)
        groups: list[dict[str, Any]] = [dict(item) if isinstance(item, dict) else {"posterior": item} for item in items]
        known = [group for group in groups if isinstance(group.get("posterior"), Posterior)]
        for group in known:
            q = group["posterior"]
            small = lr if lr is not None else 0.001 * math.sqrt(q.mean_probe.shape[-1] + q.structure.parameters)
            group.setdefault("lr", small)
        held = [isinstance(group["posterior"], PrecisionCholeskyGaussian) for group in known]
        norms = {"riemannian" if precision else "euclidean" for precision in held}
        if momentum is None and len(norms) > 1:
            raise PairError(
                "Snngm has one norm, Riemannian on a PrecisionCholeskyGaussian and Euclidean otherwise; got posteriors "
                "of both kinds. Say momentum=NormalizedMomentum(norm), or use one optimizer each."
            )
        super().__init__(
            groups,
            known[0]["lr"] if known else 1.0,  # of groups added later
            step_size=step_size,
            estimator=estimator,
            momentum=NormalizedMomentum(*norms) if momentum is None else momentum,
            loss_scale=loss_scale,
        )

    rule_for = _always(NaturalGradient)


class NewtonCG(Method):
    """Newton's method in the mean and the root, (m, C), by conjugate gradients, with backtracking.

    In these coordinates the bound of a log-concave model is convex, and its Hessian products need no expectation beside
    those of an evaluation.  It is the default of `torchngvi.fit` for generalised linear models of moderate size; one
    wants it wherever expectations are exact, and evaluations, not products of matrices, are dear.  The arguments are
    those of `Method`; without lr and step_size, steps are found by `Backtracking`.

    Raises:
        PairError: a posterior over a structure without all products, such as an arrow.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import GeneralizedLinear
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> model = GeneralizedLinear(torch.ones(3, 1, dtype=torch.float64), [0.0, 1.0, 1.0])
    >>> opt = NewtonCG(q)
    >>> losses = [opt.step(model).item() for _ in range(4)]
    >>> bool(opt.evaluate(model).norm2 < 1e-10)
    True
    """

    def __init__(self, posterior: Posterior | Iterable[Any], lr: float | Tensor | None = None, **parts: Any) -> None:
        if lr is None and parts.get("step_size") is None:
            parts["step_size"] = Backtracking()
        super().__init__(posterior, lr, **parts)

    rule_for = _always(RootNewton)


class NGVI(Method):
    """Stochastic natural-gradient VI: η' = (1 - γ)η + γ(∇_ω E_q[log p(y|z)] + η_prior), 0 ≤ γ ≤ 1.

    It is `VN` whose steps are convex combinations (Wu and Gardner 2024, section 3), which stay in the cone with any
    curvature estimate that is positive semi-definite (mini-batches of a linear regression, `BonnetPrice`, `Hessian`).
    ``LambdaLR(opt, theorem_schedule)`` gives γ_t = 2/(2 + t), `ExpectationAverage` the output of Theorem 1.

    The posterior may also be one of `torchngvi.posteriors.flat` that is an `ExponentialFamily`, such as `Gamma` or
    `Dirichlet`, over any log joint: the target of a step is then found by `StatisticRegression`, without noise where
    the log joint is conjugate.

    Args:
        posterior, loss_scale: see `NaturalGradientVI`.
        estimator: see `NaturalGradientVI`; by default `StatisticRegression()` for exponential families.
        lr: γ, at most 1, which erases q: for conjugate models, or the start of a schedule on one.  For other models
            0.1, or 0.5 with a schedule.

    Raises:
        InputError: an lr that is not positive; in a step, one above 1.
        PairError: in a step, a target that the estimator cannot evaluate.

    >>> import torch
    >>> from torchngvi import GeneralizedLinear, NaturalGaussian
    >>> from torchngvi.stepsizes import theorem_schedule
    >>> X, y = torch.arange(8.0).reshape(8, 1) - 3, torch.arange(8.0)
    >>> model, q = GeneralizedLinear(X, y, "gaussian"), NaturalGaussian(1)
    >>> opt = NGVI(q, lr=1.0)
    >>> schedule = torch.optim.lr_scheduler.LambdaLR(opt, theorem_schedule)
    >>> for _ in range(20):
    ...     loss = opt.step(model.minibatch(torch.randint(8, (4,))))
    ...     schedule.step()
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        if estimator is None and isinstance(posterior, ExponentialFamily):
            estimator = StatisticRegression()
        super().__init__(posterior, lr, step_size=Convex(), estimator=estimator, loss_scale=loss_scale)

    @staticmethod
    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        """The rule is that of `VN` on the same posterior, and the natural gradient in η of an exponential family."""
        return NaturalGradient() if isinstance(posterior, ExponentialFamily) else VN.rule_for(posterior)


# ------------------------------------------------------------------------------------ black-box VI


class BBVI(NaturalGradientVI):
    """Black-box VI by projected stochastic gradients in (m, C): the diagonal of C stays at or above 1/√L.

    m' = m - ρ g,  C' = C - ρ tril[∂L/∂C],  C'_ii = max(C'_ii, 1/√L) (Kim, Ma and Gardner 2024).  The default
    estimator is one draw that sticks the landing, `PathDerivative`; the closed-form entropy is
    ``estimator=Reparametrized(Independent(1))``.  Where the posterior is Gaussian, ρ = μ/(8L²(D + 3)) converges
    linearly in spite of the noise; `torchngvi.theory.kim2024` has the steps for other cases.  The method is
    Euclidean: the worse the conditioning, the more steps it needs.  For natural gradients of the same objective use
    `VN` or `SRVN`.

    Args:
        posterior, step_size, estimator, loss_scale: see `NaturalGradientVI`; a `CholeskyGaussian` or a
            `DiagonalGaussian`.
        lr: ρ, or 1 with a scheduler that sets it.
        smoothness: L, the largest curvature of the negative log joint.

    Raises:
        InputError: a smoothness that is not positive.
        PairError: a posterior that holds no root of the covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1, mean=1.0, dtype=torch.float64)
    >>> opt = BBVI(q, lr=1 / 32, smoothness=1.0)
    >>> for _ in range(1000):
    ...     loss = opt.step(lambda theta: -0.5 * theta.square().sum(-1))
    >>> bool(q.mean.abs() < 1e-6), bool((q.stddev - 1).abs() < 1e-6)
    (True, True)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor,
        smoothness: float,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        what = "is L, the largest curvature of the negative log joint,"
        smoothness = read_number("smoothness", smoothness, what, above=0)
        rule = ProjectedRootGradient(smoothness**-0.5)
        super().__init__(
            posterior,
            rule,
            lr,
            step_size=step_size,
            estimator=PathDerivative() if estimator is None else estimator,
            loss_scale=loss_scale,
        )


class ProximalBBVI(NaturalGradientVI):
    """Black-box VI by proximal stochastic gradients in (m, C): the entropy enters by its proximal map.

    C'_ii = ½(c + √(c² + 4ργ)), c = C_ii - ρ (HC)_ii (Domke 2020).  It needs neither a smoothness constant nor a
    projection; the default estimator is one draw without the entropy, `Reparametrized`.

    Args:
        posterior, lr, step_size, estimator, loss_scale: see `NaturalGradientVI`; a `CholeskyGaussian` or a
            `DiagonalGaussian`.

    Raises:
        PairError: a posterior that holds no root of the covariance.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = ProximalBBVI(CholeskyGaussian(3), lr=1e-2)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        estimator = Reparametrized(Independent(1)) if estimator is None else estimator
        super().__init__(
            posterior, ProximalRootGradient(), lr, step_size=step_size, estimator=estimator, loss_scale=loss_scale
        )


# ------------------------------------------------------------------------------------ IFVB and AIFVB
#     1. ∇L at λ⁽ˢ⁾, from B draws, or from ``loss.backward()``
#     2. S fresh draws θ ~ q, at λ⁽ˢ⁾ or at the average, and the inverse P of εI + Σ φφᵀ + Σ β_j ZZᵀ takes them in
#     3. λ⁽ˢ⁺¹⁾ = λ⁽ˢ⁾ - α_{s+1} t P ∇L,      α_k = c/(c' + k)^α by ``LambdaLR(opt, PowerSchedule(α, c'))``
#     4. AIFVB: the average moves towards λ⁽ˢ⁺¹⁾
#
# (Godichon-Baggioni, Nguyen and Tran 2023, Algorithms 1 and 2.)  Draws of 1 and 2 are independent; those of 2 need no
# data.


class PreconditionedVI(NaturalGradientVI):
    """Steps λ ← λ - ρ d of a flat posterior, where the direction d is what a metric makes of ∇L.

    The metric stands in the place of the inverse Fisher matrix; `IFVB` and `AIFVB` are this class with the metric of
    their paper.  A step whose result is not finite or leaves the domain of the posterior is not taken, member by
    member; it is counted in ``rejections`` and, on the CPU, warned of once.

    Args:
        posterior: q, flat, or several, as in `NaturalGradientVI`.
        metric: the inverse Fisher matrix or what takes its place, from `torchngvi.metrics`.
        lr: the step size ρ; a torch scheduler may change it.
        estimator: the estimator of ∇L, where ``step`` is given a log joint; by default `Pathwise(10)` where the
            posterior allows it, else `ControlVariate(100)`.
        step_size: by default `KLRadius(0.1)`, so that no step is longer than 0.1 nats in the estimated metric, and
            `Constant` for `Identity` and `Adam`, which have no such metric; `Clip` and `Shortest` are others.
        momentum: `ExponentialAverage`, or none.
        loss_scale: see `NaturalGradientVI`.

    Raises:
        InputError: a posterior that is not flat, a value out of range, more memory than there is.
        PairError: parts that cannot work together.

    >>> import torch
    >>> from torchngvi.ifvb import Beta, ClosedForm, Exact
    >>> q, target = Beta(torch.tensor([5.0, 45.0]).double()), Beta(torch.tensor([58.0, 144.0]).double())
    >>> opt = PreconditionedVI(q, Exact(), 1.0, estimator=ClosedForm(), step_size=Constant())
    >>> _ = opt.step(lambda lam: -torch.distributions.kl_divergence(
    ...     torch.distributions.Beta(*lam), torch.distributions.Beta(*target.vector)))
    >>> q.vector.round(decimals=6).tolist()  # a full natural step is exact
    [58.0, 144.0]
    """

    # a preconditioner that is still an average of few draws sends the loss up a thousandfold, and brings it back
    watch = Watch(climb=1e4)

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        metric: Metric,
        lr: float | Tensor = 1.0,
        *,
        estimator: Estimator | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        check_kinds(metric=metric, step_size=step_size)
        super().__init__(
            posterior,
            RootGradient(),
            lr,
            step_size=step_size or (KLRadius(0.1) if metric.natural else Constant()),
            estimator=estimator,
            metric=metric,
            momentum=momentum,
            loss_scale=loss_scale,
        )
        if self.estimator is None:
            self.estimator = usual_estimator(self.posteriors)
        for index in range(len(self.posteriors)):
            self._state(index)  # what a metric cannot serve is refused here

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a flat posterior to the optimizer.

        Raises:
            InputError: a posterior that is not flat, such as a `CholeskyGaussian`.
        """
        q = param_group.get("posterior")
        if not isinstance(q, FlatPosterior):
            raise InputError(
                f"{type(self).__name__} updates a flat posterior of torchngvi.ifvb, such as Beta; "
                f"got {type(q).__name__}. For a Gaussian posterior use torchngvi.fit, VN or SRVN."
            )
        super().add_param_group(param_group)

    @property
    def posterior(self) -> FlatPosterior:
        """The flat posterior q, of an optimizer that holds one.

        Raises:
            PairError: an optimizer of several posteriors.
        """
        q = self._only_posterior("this")
        assert isinstance(q, FlatPosterior)
        return q

    @property
    def memory(self) -> dict[str, Any]:
        """The state between two steps: rejections, and a dict for each part, "metric" and "averaging" among them."""
        return self._state(0)

    def inverse_fisher(self) -> Tensor:
        """Return the estimate t P of the inverse Fisher matrix I_F⁻¹ after t steps, (*batch, D, D).

        Raises:
            PairError: a metric that keeps no inverse.
        """
        rule: Any = self.metric
        if not hasattr(rule, "inverse"):
            raise PairError(f"{type(rule).__name__} keeps no inverse Fisher matrix. Use Recursive or MatrixFree.")
        return rule.inverse(self.memory["metric"])


def usual_estimator(posteriors: Iterable[Posterior]) -> GradientEstimator:
    """The default estimator of ∇L for flat posteriors.

    >>> import torch
    >>> from torchngvi.ifvb import Beta, MeanFieldGaussian
    >>> [type(usual_estimator([q])).__name__ for q in (Beta(torch.ones(2)), MeanFieldGaussian(torch.ones(2)))]
    ['ControlVariate', 'Pathwise']
    """
    if all(isinstance(q, FlatPosterior) and q.reparametrised for q in posteriors):
        return Pathwise(10)
    return ControlVariate(100)


class IFVB(PreconditionedVI):
    """Inversion-free variational Bayes (Godichon-Baggioni, Nguyen and Tran 2023, Algorithm 1).

    It is for a posterior without a known Fisher matrix: a flow, or a family of your own.  For a Gaussian the exact
    natural gradient is cheaper and free of noise: `torchngvi.fit`, or the metric `Exact`.

    Args:
        posterior: q, flat.
        lr: c of α_k = c/(c' + k)^α under ``LambdaLR(opt, PowerSchedule(α, c'))``.  With an accurate metric a natural
            step of 1 is a full one: keep lr/c'^α well below it.
        metric: `Recursive` with its number of scores, ε, c_β and β, or another.
        estimator, step_size, momentum, loss_scale: see `PreconditionedVI`.

    Raises:
        InputError: a value out of range, or more memory than there is.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> import torch
    >>> from torchngvi.ifvb import Beta, ControlVariate
    >>> from torchngvi.stepsizes import PowerSchedule
    >>> draws = torch.Generator().manual_seed(0)
    >>> q = Beta(torch.tensor([50.0, 100.0]).double())
    >>> opt = IFVB(q, metric=Recursive(generator=draws), estimator=ControlVariate(200, draws))
    >>> schedule = LambdaLR(opt, PowerSchedule(0.75, 100.0))
    >>> for _ in range(300):
    ...     loss = opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
    ...     schedule.step()
    >>> round((q.vector[0] / q.vector.sum()).item(), 2)  # the posterior is Beta(58, 144)
    0.29
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        metric: Metric | None = None,
        estimator: Estimator | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(
            posterior,
            Recursive(beta=0.125) if metric is None else metric,  # (α - ½)/2 of the usual α = ¾
            lr,
            estimator=estimator,
            step_size=step_size,
            momentum=momentum,
            loss_scale=loss_scale,
        )


class AIFVB(IFVB):
    """IFVB with a weighted average of its iterates (Godichon-Baggioni, Nguyen and Tran 2023, Algorithm 2).

    The average, in the attribute `average`, is the estimate; the posterior itself holds the last iterate.  Use it where
    the noise of the last iterate matters; `IFVB` where the iterates lie on a manifold, which an average would leave.

    Args:
        posterior, lr, metric, estimator, step_size, momentum, loss_scale: see `IFVB`.
        averaging: the weights, when the average begins, and whether the metric takes its scores at the average.

    Raises:
        InputError: a value out of range, or more memory than there is.
        PairError: a posterior on a manifold.

    >>> import torch
    >>> from torchngvi.ifvb import Beta
    >>> q = Beta(torch.tensor([5.0, 9.0]).double())
    >>> opt = AIFVB(q, 0.01)
    >>> for _ in range(3):
    ...     loss = opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
    >>> opt.average.shape
    torch.Size([2])
    """

    averaging: Averaging

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        metric: Metric | None = None,
        estimator: Estimator | None = None,
        averaging: Averaging | None = None,
        step_size: StepSize | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        if averaging is not None:
            read_instance(
                "averaging", averaging, Averaging, "is one of torchngvi.ifvb.Averaging, or None", error=PairError
            )
        self.averaging = averaging or Averaging()
        super().__init__(
            posterior,
            lr,
            metric=metric,
            estimator=estimator,
            step_size=step_size,
            momentum=momentum,
            loss_scale=loss_scale,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a flat posterior that lies on no manifold.

        Raises:
            InputError: a posterior that is not flat.
            PairError: a posterior on a manifold, where an average of points is no point of it.
        """
        q = param_group.get("posterior")
        if isinstance(q, FlatPosterior) and not q.flat:
            raise PairError(f"the average of points of the manifold of {type(q).__name__} is no point of it. Use IFVB.")
        super().add_param_group(param_group)

    def _fresh(self, q: Posterior) -> dict[str, Any]:
        return super()._fresh(q) | {"averaging": {"average": q.coordinates.vector.clone(), "weight": 0.0, "steps": 0}}

    def _bent(self, index: int, gradient: Local) -> tuple[Bent, dict[str, Any]]:
        """With scores at the average, where the metric takes any and the averaging says so."""
        q, state = self.posteriors[index], self._state(index)
        if not (self.averaging.metric_at_average and isinstance(self.metric, Preconditioner)):
            return super()._bent(index, gradient)
        assert isinstance(q, FlatPosterior)
        return self.metric.bent(q, gradient, state["metric"], state["averaging"]["average"])

    def _advance(self, index: int, *how: Any, **options: Any) -> Evaluation | None:
        """Take the step, and let the average take in one more iterate."""
        result = super()._advance(index, *how, **options)
        state = self._state(index)["averaging"]
        self.averaging.update(state, self.posteriors[index].coordinates.vector, state["steps"])
        state["steps"] += 1
        return result

    @property
    def average(self) -> Tensor:  # (*batch, D)
        """The weighted average of the iterates, which is the estimate of λ, (*batch, D)."""
        return self.memory["averaging"]["average"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "averaging": self.averaging}
