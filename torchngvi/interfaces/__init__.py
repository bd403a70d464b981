"""READ FIRST: the four axes, and everything that passes between them.

q = N(m, V) with V = C Cᵀ, ℓ = -log joint, L(q) = E_q[ℓ] - γ entropy(q); with g = E_q[∇ℓ] and
H = E_q[∇²ℓ], all methods speak of the gradient in the *frame* of q,

    a = Cᵀ g        W = Π(Cᵀ H C)        P = W - γ I        (Π keeps the pattern of q)

in which a and P vanish at the optimum and give the natural norm, |∇L|²_F⁻¹ = |a|² + ½‖P‖²_F.

| axis        | question                                 | folder         |
|-------------|------------------------------------------|----------------|
| posterior   | which distribution, in which coordinates | `posteriors`   |
| expectation | how E_q[ℓ] and its derivatives come      | `expectations` |
| rule        | along which curve                        | `rules`        |
| step size   | how far                                  | `stepsizes`    |

A step takes the axes in order: the estimator of the expectation makes an `Expectation`, the rule makes of it a `Path`,
the step size chooses ρ, and q makes the move `path.at(ρ)` by `Posterior.moved`.  `optim` owns that loop, and the
trial, in which q moves, is evaluated there, and is kept or restored.  The parts never call one another; they exchange
the packets and moves that are defined here.

In reading order: `packets` (what of q may be read, the Gaussian priors, and what an expectation hands on), `posterior`
(which moves a rule may ask of q, and its contract), `targets`, and `parts`, the contracts of the axes.

A part of your own has its check in `torchngvi.testing`, and a worked example in CONTRIBUTING.md.

Three known methods as combinations:

    VN        = CovarianceRoot   x VariationalNewton x Constant(ρ)       V' = C (I + ρP)⁻¹ Cᵀ
    VN (NGVI) = NaturalGaussian  x NaturalGradient   x Constant(ρ)       S' = (1 - γρ) S + ρH
    SR-VN     = CovarianceRoot   x NaturalGradient   x Constant(ρ)       C' = C - ρ C tril½[P]

A posterior over a flat vector λ has no frame: ∇L in λ takes the place of a, there is no matrix, and a `Metric` turns
the gradient into what the rule follows, so that

    IFVB      = FlatPosterior    x RootGradient      x KLRadius(0.1)     λ' = λ - ρ t P ∇L, P learnt by `Recursive`
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces.packets import (
    Change,
    Cost,
    Curved,
    Derivative,
    Expectation,
    Frame,
    Framed,
    FullPrior,
    Local,
    Prior,
    Raw,
    Sites,
    clique_frames,
    known_everywhere,
    may_be_asked,
    where_members,
)
from torchngvi.interfaces.posterior import (
    Affine,
    Congruence,
    Coordinates,
    LogTangent,
    Move,
    Path,
    Posterior,
    Root,
    RootTangent,
    Tangent,
    once,
)
from torchngvi.interfaces.targets import (
    Additive,
    AdditiveTractable,
    LinearTarget,
    Marginals,
    ScalarLikelihood,
    SeparableTarget,
    Target,
    TractableTarget,
)

__all__ = [
    "Change",
    "Acceleration",
    "Additive",
    "AdditiveTractable",
    "Affine",
    "Bent",
    "Congruence",
    "Coordinates",
    "Cost",
    "Curved",
    "Derivative",
    "Estimator",
    "Expectation",
    "Frame",
    "Framed",
    "FullPrior",
    "LinearTarget",
    "Local",
    "LogTangent",
    "Marginals",
    "Metric",
    "Momentum",
    "Move",
    "Path",
    "Posterior",
    "Prior",
    "Raw",
    "Root",
    "RootTangent",
    "Rule",
    "ScalarLikelihood",
    "SeparableTarget",
    "Sites",
    "StepSize",
    "Tangent",
    "Target",
    "TractableTarget",
    "Trial",
    "TrialStepSize",
    "known_everywhere",
    "may_be_asked",
    "once",
    "where_members",
    "clique_frames",
]


# ------------------------------------------------------------------------------------ the contracts of the parts


class Estimator(ABC):
    """How E_q[ℓ] and its derivative are found at one q: by draws, by quadrature or in closed form; abstract.

    Attributes:
        comparable: as in `Expectation`: two calls at one q agree, and the derivative is that of the value, up to its
            ``noise2`` where it tells one.
        needs: the kind of target that it can evaluate.
        unbiased: whether the means over its draws are those of E_q[ℓ] for every ℓ, not only for a quadratic one.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, Stein
    >>> from torchngvi.models import LogJoint
    >>> target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1), 1.0)
    >>> e = Stein(8)(CholeskyGaussian(2), target)
    >>> e.comparable, e.derivative.a.shape
    (False, torch.Size([2]))
    """

    comparable: bool  # see Expectation.comparable
    needs: type[Target]  # the targets it can evaluate
    unbiased: bool = True  # the means over its draws are those of E_q[ℓ]; else of a quadratic ℓ in the right model only

    def prepared(self, source: Any) -> Any:
        """Turn what a user handed to ``step`` into what this estimator takes; by default return it as it is."""
        return source

    def check(self, q: "Posterior") -> None:
        """Raise where the estimator cannot evaluate this q, which by default is one without a frame.

        Raises:
            PairError: a flat posterior, for an estimator that reads mean and root.
        """
        if not q.framed:
            raise PairError(
                f"{type(self).__name__} reads the mean and the root of q, and {type(q).__name__} is a vector of "
                "parameters without them. Use an estimator of torchngvi.ifvb, such as ControlVariate(100)."
            )

    @abstractmethod
    def __call__(self, q: "Posterior", target: Target) -> Expectation:
        """Evaluate at q: value and derivative of E_q[ℓ]."""

    def recalling(self, learned: Mapping[str, Tensor]) -> "Estimator":
        """Return an estimator that knows what an earlier call has learnt; by default itself, for nothing is learnt.

        Args:
            learned: the ``learned`` of an earlier `Expectation`; entries of other names are ignored.

        Returns:
            A new estimator, or this one where calls learn nothing from one another.
        """
        return self

    @property
    def fixed(self) -> bool:
        """Whether every call sees the same draws, so that the value is exact for their average, which is not E_q[ℓ]."""
        return False

    def fresh(self, number: int) -> "Estimator":
        """Return the estimator on the number-th set of draws that have not been fitted to; itself unless `fixed`."""
        return self


class Rule(ABC):
    """Along which curve a step goes from q; abstract.

    Attributes:
        emits: the kind of move, which the posterior must take.
        natural: whether the path starts along the natural gradient, which is -(a, P) in the frame.
        full_algebra: whether it needs products that leave a pattern; the structure of q must then be a `FullAlgebra`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.interfaces import Cost, Framed
    >>> from torchngvi.rules import VariationalNewton
    >>> e = Expectation(torch.tensor(0.0), Framed(torch.tensor([2.0]), torch.ones(1, 1)), 1.0, True, Cost(1, 0))
    >>> path = VariationalNewton()(CholeskyGaussian(1), e)
    >>> path.at(torch.tensor(0.5)), path.norm2().item()
    (Congruence(N=tensor([[1.]]), force=tensor([-1.])), 4.0)
    """

    emits: type  # the kind of move
    natural: bool  # the path starts along the natural gradient, in the frame -(a, P)
    full_algebra: bool = False  # it needs products that leave a pattern: the structure of q must be a FullAlgebra

    @abstractmethod
    def __call__(self, q: "Posterior", e: Expectation) -> Path:
        """Return the path that starts at q, from the value and derivative there; nothing of q or of e is changed."""


class Trial(NamedTuple):
    """What a step size that judges its trials reads of one, each entry (*batch,).

    Attributes:
        before: L at q, in nats.
        after: L at the q' that was tried.
        slope: -dL/dρ at ρ = 0.
        length: ρ times the natural norm of the direction.
        rho: ρ.
        slack: the nats that a kept step may lose, where the derivative is that of the value up to noise.

    >>> Trial(before=2.0, after=1.0, slope=4.0, length=1.0, rho=0.5).slack
    0.0
    """

    before: Tensor  # L
    after: Tensor  # L
    slope: Tensor  # -dL/dρ at 0
    length: Tensor  # ρ times the natural norm of the direction
    rho: Tensor
    slack: Tensor | float = 0.0  # nats a kept step may lose, where the derivative is one up to noise


class StepSize(ABC):
    """How far along the path a step goes, decided before it by the learning rate or by a limit on its length; abstract.

    Attributes:
        needs_trial: whether steps are tried and may be taken back; said by the kind, `StepSize` or `TrialStepSize`.
        needs_natural: whether it reads the natural norm of the gradient as the length of a step.
        needs_tangent: whether it reads the change of q's own coordinates as the length of a step.

    >>> import torch
    >>> from torchngvi.stepsizes import KLRadius
    >>> path = Path(lambda rho: rho, lambda: torch.tensor(8.0), lambda: torch.tensor(8.0))
    >>> KLRadius(1.0).propose(path, 1.0, torch.tensor(0.0), {}).item()  # √(2/8)
    0.5
    """

    needs_trial: ClassVar[bool] = False  # said by the kind: whether steps are tried, and may be taken back
    needs_natural: bool = False  # it reads the natural norm as the length of a step
    needs_tangent: bool = False  # it reads the change of q's own coordinates as the length of a step

    def init(self, like: Tensor) -> dict[str, Any]:
        """Make the state: none, for what decides before the step has nothing to learn from it."""
        return {}

    @abstractmethod
    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Choose the step size along a path.

        Args:
            path: the curve, of which norm and slope are computed only if they are read.
            lr: the learning rate, an upper limit on ρ.
            like: a tensor (*batch,) of the dtype and device of q.
            state: the part's own.

        Returns:
            ρ (*batch,), positive.
        """


class TrialStepSize(StepSize):
    """How far along the path a step goes, found by trial; abstract.

    q moves, is evaluated there, and goes back for the members whose step is rejected.  It needs an estimator that is
    ``comparable``.

    >>> import torch
    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> control, state = SufficientDecrease(), SufficientDecrease().init(torch.tensor(0.0))
    >>> one = torch.tensor(1.0)
    >>> control.judge(Trial(one, 2 * one, one, one, one), state)[0].item()  # L rose
    False
    """

    needs_trial = True

    @abstractmethod
    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Make the state tensors, one entry a batch member, of the dtype and device of ``like`` (*batch,)."""

    @abstractmethod
    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Say for which members (*batch,) the trial is kept, and return the state for the next step."""


class Bent(NamedTuple):
    """A gradient after a metric has acted on it.

    Attributes:
        local: B∇L, which the rule takes for the gradient.
        slope: ⟨∇L, B∇L⟩, (*batch,), positive where B∇L is a direction of ascent.

    >>> import torch
    >>> from torchngvi.metrics import Identity
    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> q, metric = MeanFieldGaussian(torch.zeros(2)), Identity()
    >>> bent, _ = metric(q, Local(torch.tensor([3.0, 4.0]), q.no_matrix), torch.tensor(0.0), metric.init(q))
    >>> bent.slope.item()  # of the plain gradient, its squared length
    25.0
    """

    local: Local  # B∇L: the rules take it for the gradient
    slope: Tensor  # ⟨∇L, B∇L⟩, (*batch,)


class Metric(ABC):
    """A linear map B that turns the gradient ∇L into the direction B∇L that the rule follows; abstract.

    There are two kinds.  An `Acceleration` improves on a natural gradient, which q gives it in its frame, and is judged
    by trial.  Other metrics are given the plain gradient of a q that has no frame and take the part of the inverse
    Fisher matrix, or of another B, which may be learnt from step to step; they need no trial.

    Attributes:
        natural: whether B∇L is, or estimates, the natural gradient, so that its slope is a squared natural norm.
        exact: whether B is the inverse Fisher matrix itself, free of noise.

    >>> import torch
    >>> from torchngvi.metrics import Exact
    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> q, metric = MeanFieldGaussian(torch.zeros(2)), Exact()
    >>> bent, _ = metric(q, Local(torch.tensor([3.0, 4.0]), q.no_matrix), torch.tensor(0.0), metric.init(q))
    >>> bent.local.a.tolist(), bent.slope.item()  # F⁻¹∇L with F = diag(1, 2)
    ([3.0, 2.0], 17.0)
    """

    natural: bool  # B∇L is, or estimates, the natural gradient: its slope is a squared natural norm
    exact: bool = False  # B is the inverse Fisher matrix itself

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Any]:
        """Make the state: tensors, counts and dicts of them, saved with the optimizer and read by nobody else."""

    @abstractmethod
    def __call__(
        self,
        q: "Posterior",
        gradient: Local,
        went: Tensor,  # ρ of the step before along the bent gradient, 0 where there was none, (*batch,)
        state: dict[str, Any],
    ) -> tuple[Bent, dict[str, Any]]:
        """Return the bent gradient at q, and what of the state is to change when the step is taken."""

    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:  # noqa: B027  what depends on q alone stays true
        """Drop what is known, but for the members (*batch,) of the mask, because q or the target was changed."""


class Acceleration(Metric):
    """A metric that makes a better direction of a natural gradient of L/γ, and is judged by trial; abstract.

    >>> from torchngvi.metrics import QuasiNewton
    >>> isinstance(QuasiNewton(5), Acceleration), QuasiNewton(5).natural
    (True, True)
    """

    natural = True

    @abstractmethod
    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:
        """Drop what is known, but for the members (*batch,) of the mask, because q or the target was changed."""


class Momentum(ABC):
    """An average, over the steps, of the changes of q's own coordinates; abstract.

    Attributes:
        needs_natural: whether it normalises natural gradients.
        carried: the names of the state tensors that average changes of the vector, to be carried along a manifold.
        of_steps: whether it averages steps that the step size has limited already, and is not limited afterwards.

    >>> from torchngvi.momentum import Adam
    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> set(Adam().carried) <= set(Adam().init(q))
    True
    """

    needs_natural: bool  # it normalises natural gradients
    carried: tuple[str, ...] = ()  # names of the state tensors that average changes of the vector on a manifold
    of_steps: bool = False  # it averages steps as long as the step size lets them be, and is not limited afterwards

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Tensor]:
        """Make the state tensors, (*batch, ...), in the posterior's own coordinates."""

    @abstractmethod
    def __call__(
        self,
        q: "Posterior",
        change: Coordinates,  # -λ̇, of a step of ρ = 1
        norm2: Callable[[], Tensor],  # squared natural norm of λ̇, (*batch,)
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """Return the change to make instead, and what of the state is new once the step is taken."""
