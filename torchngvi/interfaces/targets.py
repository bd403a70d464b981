"""What q approximates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces.frame import Frame
from torchngvi.interfaces.packets import Raw, Sites
from torchngvi.interfaces.posterior import Posterior
from torchngvi.numerics.gaussian_integrals import Moments

# likelihood, e (*batch, N), v (*batch, N), y (*batch, N) -> E[f(η, y)] under N(e, v), and its derivatives
ScalarRule = Callable[[Any, Tensor, Tensor, Tensor], Moments]


class Target(ABC):
    """What q approximates: ℓ(θ), with the temperature γ of its Gaussian or other prior."""

    temperature: float
    comparable: bool = True  # every evaluation sees one objective: False for a mini-batch
    coupled: bool = False  # the objective is no sum over the batch members of q: they are judged together
    coding: tuple[float, ...] = ()  # the classes that its labels are, in their order
    draws_at_once: int = 2048  # of a call of log_joint that is differentiated: bounds the memory
    batches: Iterable[Any] = ()  # what a pass over the data iterates over; its generators belong to the run

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


class LinearTarget(TractableTarget):
    """ℓ(θ) = Σ_n f_n(x_nᵀθ + o_n) - γ log prior, all expectations one-dimensional."""

    @abstractmethod
    def expected_energy(self, frame: Frame, expected: ScalarRule | None = None) -> tuple[Tensor, Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative as sites.

        ``expected`` takes the place of the likelihood's own E[f_n] and its derivatives: a bound, or draws.
        """


class SeparableTarget(Target):
    """A target whose likelihood is a sum over data, each term to be had alone."""

    prior: Target  # its log joint is log p(θ)

    @abstractmethod
    def terms(
        self,
        theta: Tensor,  # (S, D)
    ) -> Tensor:
        """log p(y_n | θ), (S, N)."""
