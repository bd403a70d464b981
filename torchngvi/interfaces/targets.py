"""The contracts of what q approximates, from a log joint to a regression whose expectations are one-dimensional.

A user rarely writes a subclass: a function of θ becomes a `torchngvi.models.LogJoint`, and regressions, guarded and
regularised models are in `torchngvi.models`.  The richer the kind of target, the more estimators it can be given to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces.packets import Curved, Frame, Framed, FullPrior, Prior, Raw, Sites
from torchngvi.interfaces.posterior import Posterior
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.structures import Pattern


def bends(
    expected: Callable[..., Moments],
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N)
    y: Tensor,  # (*batch, N)
) -> tuple[Tensor, Tensor]:
    """Compute ∂β/∂e and ∂β/∂v of the expectation F of an energy under N(e, v): F_ev = ½β_e and F_vv = ½β_v."""
    with torch.enable_grad():
        mean, variance = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        curvature = expected(mean, variance, y).curvature
        if not curvature.requires_grad:  # of a quadratic
            return torch.zeros_like(mean), torch.zeros_like(mean)
        slope, bend = torch.autograd.grad(curvature.sum(), (mean, variance), materialize_grads=True)
        return slope.detach(), bend.detach()


class Target(ABC):
    """What q approximates: ℓ(θ) = -log joint, with the temperature γ that weighs the entropy of q: abstract.

    A class of one's own says `log_joint` and `tensors`; `torchngvi.models.LogJoint` makes one of a function.

    Attributes:
        temperature: γ, which is 1 for Bayes' posterior.
        comparable: whether every evaluation sees one objective, which a mini-batch does not.
        coupled: whether the objective is no sum over the batch members of q, so that their steps are judged together.
        coding: the classes that the labels are, in their order; empty where there are none.
        draws_at_once: the number of draws in one differentiated call of `log_joint`, which bounds the memory.
        batches: what a pass over the data iterates over.
        in_passes: whether an evaluation is a pass over data in batches.
        processes: the processes that sum their values, so that every evaluation is a collective operation.
        engine: the word for its engine in `torchngvi.fitting.fit`, for a posterior that leaves it to the target.
        groups_at_once: ``batch_groups`` of a fit that does not give it.
        pattern: a pattern that the derivatives of all orders keep to, as those of a sum of terms over a forest do; None
            where none is known.

    >>> import torch
    >>> from torchngvi.models import LogJoint
    >>> target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1), 1.0)
    >>> target.log_joint(torch.ones(3, 2)).tolist()
    [-1.0, -1.0, -1.0]
    """

    temperature: float
    comparable: bool = True  # every evaluation sees one objective: False for a mini-batch
    coupled: bool = False  # the objective is no sum over the batch members of q: they are judged together
    coding: tuple[float, ...] = ()  # the classes that its labels are, in their order
    draws_at_once: int = 2048  # of a call of log_joint that is differentiated: bounds the memory
    batches: Iterable[Any] = ()  # what a pass over the data iterates over; its generators belong to the run
    in_passes: bool = False  # an evaluation is a pass over data in batches: no modes are searched for
    processes: Processes | None = None  # which sum its values, so that every evaluation is a collective
    engine: ClassVar[str] = "averages"  # of `torchngvi.fit`, for a posterior that leaves it to the target
    groups_at_once: int | None = None  # batch_groups of a fit, where it is not given
    pattern: Pattern | None = None  # that its derivatives of all orders keep to

    @abstractmethod
    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute -ℓ(θ) for every sample and member, (*sample, *batch), differentiable in θ."""

    def check(self, q: "Posterior") -> None:  # noqa: B027  nothing to check is a fair answer
        """Raise where this target cannot be approximated by this q; by default every q will do."""

    def admit(self, q: "Posterior") -> None:
        """Check that q fits, and that it was not evaluated on labels of other classes, which it remembers.

        Raises:
            InputError: as `check` raises it; parts of the data that are coded by what they happen to hold.
        """
        self.check(q)
        if self.coding and q.coding and self.coding != q.coding:
            first, other = (", ".join(f"{label:g}" for label in coding) for coding in (q.coding, self.coding))
            raise InputError(
                f"this posterior began on a model of the classes {first}; got one of the classes {other}, told from "
                "the labels that its part of the data happens to hold. Name all classes in classes= of every model; "
                "for another problem use a new posterior, or restart this one by initialize_()."
            )
        q.coding = q.coding or self.coding

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that a value depends on; when one of them changes, no old packet is used again."""

    def settings(self) -> tuple[object, ...]:
        """Return what else a value depends on, compared by ``==``: the settings of the parts of the target."""
        return ()

    def outward(self, theta: Tensor) -> Tensor:
        """Return the parameters that points stand for, whose moments are of interest: the points themselves."""
        return theta

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that tell this problem from another, as far as known; a checkpoint compares them."""
        return self.tensors()


class TractableTarget(Target):
    """A target that knows E_q[ℓ] in closed form, or to rounding, for every Gaussian q: abstract.

    The optimizer can then judge its steps by L itself, without draws.  `torchngvi.GeneralizedLinear` is of this kind.

    Attributes:
        exact: whether expectations are by rules that are right to many digits, which sums over Sobol points are not.
        convex: whether ℓ is convex, and known to second order by `second_order`, so that a fit begins at the mode.
        curved: whether packets tell how they change with q, as Newton's method on the bound needs.
        products: whether products with the Hessian of L cost less than evaluations under a full covariance too.
        beside: a Gaussian prior beside which the expectation of the rest is convex in (m, C); None where not known.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> import torch
    >>> model = GeneralizedLinear(torch.ones(1, 1), [0.0], "gaussian", prior_precision=1.0)
    >>> q = CholeskyGaussian(1, scale=0.5**0.5)  # the exact posterior
    >>> round(model.negative_elbo(q).item(), 4)  # minus the log evidence, ½ log(4π)
    1.2655
    """

    engine = "steps"
    convex: bool = False
    exact: bool = True
    curved: bool = False
    products: bool = False
    beside: Prior | FullPrior | None = None

    @abstractmethod
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Curved | Sites]:
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative as a packet."""

    def second_order(
        self,
        theta: Tensor,  # (*batch, D)
    ) -> tuple[Tensor, Raw | Sites | Framed]:
        """Compute ℓ(θ), (*batch,), of a target that is ``convex``, with ∇ℓ and ∇²ℓ as a `Raw` packet.

        Such as stay sparse are `Sites`, or over a forest `Framed` in the frame of N(θ, I).
        """
        raise NotImplementedError  # asked of no other

    def attached(self) -> "TractableTarget":
        """Return the target in the graph of what it was made of, where it keeps that aside from its fits."""
        return self

    def negative_elbo(self, q: "Posterior") -> Tensor:
        """Compute L(q) = E_q[ℓ] - γ entropy(q), (*batch,), in nats, differentiable in the probes of q.

        For γ = 1 this is the negative evidence lower bound, all constants included; a q that does not fit is refused.
        """
        self.admit(q)
        return self.expected_energy(q.probed())[0] - self.temperature * q.entropy()


class Additive(Target):
    """A sum over data and a prior that is counted once, ℓ(θ) = -Σ_parts log p(y_part | θ) - log prior(θ): abstract.

    Sums over rows, over the batches of a file and over processes are one thing: the parts of the data add up, the prior
    does not.  So a class says what its data add, and the joint is written here.  A Gaussian prior is weighed by γ, so
    that L = E_q[data] + γ KL(q‖prior); a prior that is itself a `Target` counts as it is.

    >>> import torch
    >>> from torchngvi import GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(2, 1), [0.0, 1.0], "gaussian", prior_precision=1.0)
    >>> theta = torch.zeros(1)
    >>> bool(model.log_joint(theta) == model.data_log_likelihood(theta) + model.log_prior(theta))
    True
    """

    prior: Prior | FullPrior | Target

    @abstractmethod
    def data_log_likelihood(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute Σ w log p(y | θ) without the prior, (*sample, *batch)."""

    def log_prior(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute what the prior adds to the log joint, (*sample, *batch)."""
        if isinstance(self.prior, Target):
            return self.prior.log_joint(theta)
        return -self.temperature * self.prior.energy(theta)

    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute the log likelihood of the data plus the log prior, (*sample, *batch)."""
        return self.data_log_likelihood(theta) + self.log_prior(theta)

    def pieces(self) -> Iterator["Additive"]:
        """Iterate over targets whose data make up those of this one, in the order of a pass, each with the prior."""
        yield self


class SeparableTarget(Additive):
    """An additive target that knows the term of each datum, as an estimate of the Fisher matrix needs them: abstract.

    It stands beside `Additive`, which knows sums only: data in batches add up without having their terms at once.
    `torchngvi.models.PerDatum` makes one of two functions.

    >>> import torch
    >>> from torchngvi.models import PerDatum
    >>> y = torch.tensor([0.0, 2.0])
    >>> model = PerDatum(lambda theta: -0.5 * (y - theta).square(), lambda theta: -0.5 * theta.square().sum(-1), 1.0)
    >>> model.terms(torch.zeros(1, 1)).tolist(), model.log_joint(torch.zeros(1, 1)).tolist()
    ([[-0.0, -2.0]], [-2.0])
    """

    prior: Target  # its log joint is log p(θ)

    @abstractmethod
    def terms(
        self,
        theta: Tensor,  # (S, D)
    ) -> Tensor:
        """Compute log p(y_n | θ) for every draw and every datum, (S, N)."""

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Sum the terms of all data, (S,)."""
        return self.terms(theta).sum(-1)


class AdditiveTractable(Additive, TractableTarget):
    """An additive target with a Gaussian prior, whose data know their expectation for a Gaussian q: abstract.

    Attributes:
        prior_alone: whether nothing but the prior is added to the data, so that `with_prior` is the one written here.

    >>> from torchngvi.models import SoftmaxRegression
    >>> issubclass(SoftmaxRegression, AdditiveTractable), issubclass(SoftmaxRegression, LinearTarget)
    (True, False)
    """

    prior: Prior | FullPrior
    prior_alone: bool = True  # nothing else is added to the data

    @abstractmethod
    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Curved | Sites]:
        """Compute E_q[-Σ w log p(y | θ)] (*batch,), differentiable in the frame, and its derivative, without the prior.

        The derivative belongs to the caller, who may add the prior to it in place.
        """

    def with_prior(
        self, frame: Frame, value: Tensor, derivative: Raw | Curved | Sites
    ) -> tuple[Tensor, Raw | Curved | Sites]:
        """Add the expectation of the prior, which is counted once, to an expectation of the data."""
        value = torch.add(value, self.prior.expected_energy(frame), alpha=self.temperature)
        return value, derivative.with_prior(self.prior.scaled(self.temperature), frame.mean)

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Curved | Sites]:
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative, for data and prior together."""
        return self.with_prior(frame, *self.data_energy(frame))


class ScalarLikelihood(Protocol):
    """What is asked of a likelihood -log p(y | η) of one linear predictor; see `torchngvi.models.Likelihood`.

    >>> import torch
    >>> from torchngvi.models import GaussianNoise
    >>> likelihood: ScalarLikelihood = GaussianNoise(1.0)
    >>> zero, two = torch.tensor(0.0), torch.tensor(2.0)
    >>> (likelihood.energy(two, zero) - likelihood.energy(zero, zero)).item()  # (η - y)²/2
    2.0
    """

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Compute -log p(y | η), elementwise."""

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Compute the expectation of the energy under η ~ N(mean, variance), with its derivatives α and β."""


class Marginals(NamedTuple):
    """The linear predictors of the rows under q, η_n = x_nᵀθ + o_n ~ N(e_n, v_n), with all that their energies need.

    An estimator may replace the exact moments of the likelihood under N(e_n, v_n) by a bound, or by draws.

    Attributes:
        rows: X, (N, D) or (*batch, N, D); or (N, D) in sparse CSR storage.
        projected: X C, (*batch, N, D); None for a sparse X.
        mean: e, (*batch, N), 0 in rows of weight 0.
        variance: v, (*batch, N), 1 in rows of weight 0.
        y: targets in the likelihood's coding, (*batch, N).
        weights: w, (*batch, N).
        likelihood: a `ScalarLikelihood`.
        theta: m, (*batch, D).

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.tensor([[2.0]]), [1.0], "gaussian", prior_precision=1.0)
    >>> rows = model.marginals(CholeskyGaussian(1, mean=3.0).frame())
    >>> rows.mean.tolist(), rows.variance.tolist()
    ([6.0], [4.0])
    """

    rows: Tensor  # X, (N, D) or (*batch, N, D); or (N, D) sparse CSR
    projected: Tensor | None  # X C, (*batch, N, D); a sparse X has none
    mean: Tensor  # e, (*batch, N); 0 in rows of weight 0
    variance: Tensor  # v, (*batch, N); 1 in rows of weight 0
    y: Tensor  # (*batch, N), in the likelihood's coding
    weights: Tensor  # w, (*batch, N)
    likelihood: Any  # a `ScalarLikelihood`
    theta: Tensor  # m, (*batch, D)

    def expected(self) -> Moments:
        """Compute F, α and β of each row, as the likelihood knows them."""
        moments: Moments = self.likelihood.expected(self.mean, self.variance, self.y)
        return moments

    def energy_from(
        self,
        moments: Moments,  # F, α and β of each row, (*batch, N)
    ) -> tuple[Tensor, Sites]:
        """Sum the rows: Σ_n w_n F_n, (*batch,), and its derivative as sites, both without a prior."""
        value, alpha, beta = (self.weights * part for part in moments)
        return value.sum(-1), Sites(self.rows, self.projected, alpha, beta, None, self.theta, self.weights)


def bends_of(likelihood: Any, y: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of β in e and v, of a likelihood that knows F."""
    own = getattr(likelihood, "_bends", None)  # where it knows them without autograd
    return bends(likelihood.expected, mean, variance, y) if own is None else own(mean, variance, y)


class LinearTarget(AdditiveTractable):
    """A target ℓ(θ) = Σ_n w_n f_n(x_nᵀθ + o_n) - γ log prior(θ), whose expectations are all one-dimensional: abstract.

    `torchngvi.GeneralizedLinear` is one; quadrature, bounds and local draws are estimators for such targets.

    >>> from torchngvi import GeneralizedLinear
    >>> issubclass(GeneralizedLinear, LinearTarget)
    True
    """

    @abstractmethod
    def marginals(self, frame: Frame) -> Marginals:
        """Compute the distributions of the linear predictors under q, with what their energies need."""

    def data_energy(self, frame: Frame) -> tuple[Tensor, Sites]:
        """Compute Σ_n w_n E[f_n], (*batch,), and its derivative as sites, both without the prior."""
        rows = self.marginals(frame)
        value, sites = rows.energy_from(rows.expected())
        return value, sites._replace(at=(rows.mean, rows.variance), bends=partial(bends_of, rows.likelihood, rows.y))

    def energy_from(self, frame: Frame, rows: Marginals, moments: Moments) -> tuple[Tensor, Sites]:
        """Compute E_q[ℓ] (*batch,) and its derivative from other moments than the likelihood's: a bound, or draws."""
        value, sites = self.with_prior(frame, *rows.energy_from(moments))
        assert isinstance(sites, Sites)
        return value, sites
