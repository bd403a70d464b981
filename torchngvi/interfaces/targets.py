"""What q approximates."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces.frame import Frame
from torchngvi.interfaces.packets import FullPrior, Prior, Raw, Sites
from torchngvi.interfaces.posterior import Posterior
from torchngvi.numerics.gaussian_integrals import Moments

if TYPE_CHECKING:  # torch may be built without it
    from torch.distributed import ProcessGroup


class Target(ABC):
    """What q approximates: ℓ(θ), with the temperature γ of its Gaussian or other prior."""

    temperature: float
    comparable: bool = True  # every evaluation sees one objective: False for a mini-batch
    coupled: bool = False  # the objective is no sum over the batch members of q: they are judged together
    coding: tuple[float, ...] = ()  # the classes that its labels are, in their order
    draws_at_once: int = 2048  # of a call of log_joint that is differentiated: bounds the memory
    batches: Iterable[Any] = ()  # what a pass over the data iterates over; its generators belong to the run
    in_passes: bool = False  # an evaluation is a pass over data in batches: no modes are searched for
    processes: "ProcessGroup | None" = None  # which sum its values, so that every evaluation is a collective

    @abstractmethod
    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """-ℓ(θ), (*sample, *batch)."""

    def check(self, q: "Posterior") -> None:  # noqa: B027  nothing to check is a fair answer
        """Raise where this target cannot be approximated by this q."""

    def admit(self, q: "Posterior") -> None:
        """`check`, and that q was not evaluated on labels of other classes, which it remembers.

        Raises:
            InputError: as `check`; parts of the data coded by what they happen to hold, which would fit one q to
                several problems.
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
        """The tensors a value depends on; when one changes, an old packet is not used again."""

    def settings(self) -> tuple[object, ...]:
        """What else a value depends on, compared by ``==``: the settings of its parts."""
        return ()

    def known_data(self) -> tuple[Tensor, ...]:
        """The tensors that tell this problem from another, as far as they are known."""
        return self.tensors()


class TractableTarget(Target):
    """A target that knows E_q[ℓ] for a Gaussian q."""

    @abstractmethod
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative."""

    def negative_elbo(self, q: "Posterior") -> Tensor:
        """L(q) = E_q[ℓ] - γ entropy(q), (*batch,), differentiable in the probes of q.

        For γ = 1 the negative evidence lower bound, all constants included.
        """
        self.admit(q)
        return self.expected_energy(q.probed())[0] - self.temperature * q.entropy()


class Additive(Target):
    """A target that is a sum over its data and a prior that is counted once: ℓ(θ) = -Σ_parts log p(y_part | θ) + prior.

    Sums over rows, over the batches of a file and over processes are one thing: parts of the data add up, the prior
    does not.  So a class says what its data add, and the joint is written here.  A Gaussian prior is weighed by γ,
    so that L = E_q[data] + γ KL(q‖prior); a prior that is itself a `Target` counts as it is.
    """

    prior: Prior | FullPrior | Target

    @abstractmethod
    def data_log_likelihood(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Σ w log p(y | θ) without the prior, (*sample, *batch)."""

    def log_prior(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """What the prior adds to the log joint, (*sample, *batch)."""
        if isinstance(self.prior, Target):
            return self.prior.log_joint(theta)
        return -self.temperature * self.prior.energy(theta)

    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """The data's log likelihood and the log prior, (*sample, *batch)."""
        return self.data_log_likelihood(theta) + self.log_prior(theta)

    def pieces(self) -> Iterator["Additive"]:
        """Targets whose data make up those of this one, in the order of a pass: each with the whole prior."""
        yield self


class SeparableTarget(Additive):
    """An additive target whose data are told one by one, as an estimate of the Fisher matrix needs them.

    It stands beside `Additive`, which knows sums: data in batches add up without having their terms at once.
    """

    prior: Target  # its log joint is log p(θ)

    @abstractmethod
    def terms(
        self,
        theta: Tensor,  # (S, D)
    ) -> Tensor:
        """log p(y_n | θ), (S, N)."""

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """The sum of the terms, (S,)."""
        return self.terms(theta).sum(-1)


class AdditiveTractable(Additive, TractableTarget):
    """An additive target with a Gaussian prior, whose data know their expectation for a Gaussian q."""

    prior: Prior | FullPrior

    @abstractmethod
    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """E_q[-Σ w log p(y | θ)] (*batch,), differentiable in the frame, and its derivative, both without the prior.

        The derivative is the caller's own: the prior may be added to it in place.
        """

    def with_prior(self, frame: Frame, value: Tensor, derivative: Raw | Sites) -> tuple[Tensor, Raw | Sites]:
        """An expectation of the data, with what is counted once."""
        value = value + self.temperature * self.prior.expected_energy(frame)
        return value, derivative.with_prior(self.prior.scaled(self.temperature), frame.mean)

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative: data and prior."""
        return self.with_prior(frame, *self.data_energy(frame))


class ScalarLikelihood(Protocol):
    """-log p(y | η) of one linear predictor, and its expectation; see `torchngvi.models.Likelihood`."""

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """-log p(y | η), elementwise."""

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Its expectation under η ~ N(mean, variance), with the derivatives α and β."""


class Marginals(NamedTuple):
    """The linear predictors of the rows under q, η_n = x_nᵀθ + o_n ~ N(e_n, v_n), with all that their energies need.

    An estimator may take any moments of the likelihood under N(e_n, v_n), a bound or draws, for the exact ones.
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
        """F, α and β of each row, as the likelihood knows them."""
        moments: Moments = self.likelihood.expected(self.mean, self.variance, self.y)
        return moments

    def energy_from(
        self,
        moments: Moments,  # F, α and β of each row, (*batch, N)
    ) -> tuple[Tensor, Sites]:
        """Σ_n w_n F_n (*batch,), and its derivative as sites; without a prior."""
        value, alpha, beta = (self.weights * part for part in moments)
        return value.sum(-1), Sites(self.rows, self.projected, alpha, beta, None, self.theta)


class LinearTarget(AdditiveTractable):
    """ℓ(θ) = Σ_n w_n f_n(x_nᵀθ + o_n) - γ log prior, all expectations one-dimensional."""

    @abstractmethod
    def marginals(self, frame: Frame) -> Marginals:
        """The distributions of the predictors under q, with what their energies need."""

    def data_energy(self, frame: Frame) -> tuple[Tensor, Sites]:
        """Σ_n w_n E[f_n] (*batch,), and its derivative as sites."""
        rows = self.marginals(frame)
        return rows.energy_from(rows.expected())

    def energy_from(self, frame: Frame, rows: Marginals, moments: Moments) -> tuple[Tensor, Sites]:
        """E_q[ℓ] (*batch,) and its derivative, from other moments than the likelihood's own: a bound, or draws."""
        value, sites = self.with_prior(frame, *rows.energy_from(moments))
        assert isinstance(sites, Sites)
        return value, sites
