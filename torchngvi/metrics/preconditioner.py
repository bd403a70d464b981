"""The metrics of flat posteriors, which stand in the place of I_F⁻¹ in λ ← λ - ρ I_F⁻¹∇L.

I_F depends on q alone, so that a metric learns from scores φ at draws of its own, which need no data: after
``loss.backward()`` as well as on a target.  Draws for the gradient and for the metric are independent.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_list, read_size
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Bent, Coordinates, Local, Metric, Posterior
from torchngvi.momentum import Adam as AdamMomentum
from torchngvi.numerics.linalg import solve_symmetric
from torchngvi.posteriors.flat.flat_gaussian import RankOneGaussian
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

State = dict[str, Any]  # tensors and counts, saved with the optimizer
_AT_ONCE = 256  # scores of a warm-up


class Preconditioner(Metric):
    """The abstract base of the metrics of flat posteriors, which turn a gradient in λ into the direction of a step.

    A subclass says what it remembers (`fresh`), how scores enter (`absorb`) and what it makes of a gradient
    (`direction`); when scores are drawn, and where, is said here.  A state is never written to: what is new is
    returned, so that a step which is not taken, or taken twice, finds the state as it was.

    Attributes:
        samples: the number S of scores that it wants a step, 0 where it learns from none.
        remembers: whether past scores count, so that a warm-up helps.
        warmup: the number of scores before the first step, where it remembers; None for max(2D, 1000).
        generator: the generator of the draws; torch's own by default.

    >>> from torchngvi.metrics import Recursive
    >>> isinstance(Recursive(), Preconditioner), Recursive().remembers
    (True, True)
    """

    samples: int = 0  # S: scores it wants a step
    remembers: bool = False  # past scores count, so that a warm-up helps
    natural = True  # the direction estimates I_F⁻¹∇L, so that (direction)ᵀ∇L is a squared length in nats
    warmup: int | None = None  # scores before the first step, where it remembers; None for max(2D, 1000)
    generator: torch.Generator | None = None  # of the draws

    def fresh(self, q: FlatPosterior) -> State:
        """Return the state before the first score: nothing, unless a subclass remembers something.

        Raises:
            InputError: if the posterior cannot be served, or there is not enough memory.
        """
        return {}

    def absorb(
        self,
        state: State,
        scores: Tensor,  # (S, *batch, D)
        generator: torch.Generator | None = None,
    ) -> State:
        """Return the state after S more scores; the state itself, unless a subclass learns from them."""
        return state

    def noticed(
        self,
        state: State,
        gradient: Tensor,  # (*batch, D)
        q: FlatPosterior,
    ) -> State:
        """Return the state after a gradient; the state itself, unless a subclass learns from gradients."""
        return state

    @abstractmethod
    def direction(
        self,
        state: State,
        gradient: Tensor,  # (*batch, D)
        q: FlatPosterior,
    ) -> Tensor:
        """Return what the step goes along after a change of sign, (*batch, D); NaN for members without one."""

    def init(self, q: Posterior) -> State:
        """Return the state before the first score, with the number of scores drawn.

        Raises:
            PairError: if q is not a flat posterior.
        """
        return self.fresh(_flat(self, q)) | {"fisher_draws": 0}

    def __call__(self, q: Posterior, gradient: Local, went: Tensor, state: State) -> tuple[Bent, State]:
        """Return the bent gradient at λ, and the state after fresh scores from λ were taken in."""
        q = _flat(self, q)
        return self.bent(q, gradient, state, q.vector)

    def bent(
        self,
        q: FlatPosterior,
        gradient: Local,
        state: State,
        at: Tensor,  # (*batch, D), where scores are drawn
    ) -> tuple[Bent, State]:
        """Make the direction along the manifold of q, after the scores of this step were taken in.

        Args:
            q: the posterior whose λ is moved.
            gradient: ∇L at q.
            state: the state of this metric, which is left as it is.
            at: the vector at which scores are drawn, (*batch, D), such as the average of AIFVB.

        Returns:
            The direction with its product with the gradient, and the new state.

        Raises:
            InputError: if the gradient has another shape than λ.
        """
        if gradient.a.shape != q.vector.shape:
            raise InputError(
                f"the gradient must have the shape {tuple(q.vector.shape)} of lambda; got {tuple(gradient.a.shape)}."
            )
        if self.remembers and not state["fisher_draws"]:
            count = max(2 * q.size, 1000) if self.warmup is None else self.warmup
            for start in range(0, count, _AT_ONCE):
                state = self._drawn(q, state, at, min(_AT_ONCE, count - start))
        if self.samples:
            state = self._drawn(q, state, at, self.samples)
        state = state | self.noticed(state, gradient.a, q)
        direction = q.projected(q.vector, self.direction(state, gradient.a, q))
        return Bent(Local(direction, gradient.P), (direction * gradient.a).sum(-1)), state

    def _drawn(self, q: FlatPosterior, state: State, at: Tensor, count: int) -> State:
        """The state after the scores of so many draws at that vector."""
        with torch.no_grad():
            scores = q.score(q.sample(count, self.generator, at), at)
        new = self.absorb(state, scores, self.generator)
        return state | new | {"fisher_draws": state["fisher_draws"] + count}


def check_warmup(warmup: int | None) -> int | None:
    """Check a number of scores before the first step."""
    return None if warmup is None else read_size("warmup", warmup, "counts scores before the first step", at_least=0)


def _flat(metric: Preconditioner, q: Posterior) -> FlatPosterior:
    if not isinstance(q, FlatPosterior):
        raise PairError(
            f"{type(metric).__name__} learns from the scores of a flat posterior; got {type(q).__name__}. "
            "Use FlatCholesky, or leave the metric out."
        )
    return q


def finite_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Set the scores (S, *batch, D) that are not finite to zero, and return which are, (S, *batch)."""
    fine = scores.sum(-1).isfinite()  # of a sum: one pass, and no NaN or infinity cancels in it
    return torch.where(fine[..., None], scores, 0.0), fine


def check_count(name: str, value: int) -> int:
    """Check a number of draws or vectors."""
    return read_size(name, value, "counts draws")


@final
class Identity(Preconditioner):
    """No metric: the direction is the ordinary gradient ∇L, so that steps depend on the units and coordinates of λ.

    Use it as the baseline that shows what a metric gains (Godichon-Baggioni, Nguyen and Tran 2023, Eq 2.5).

    >>> import torch
    >>> from torchngvi.ifvb import Beta
    >>> Identity().direction({}, torch.ones(2), Beta(torch.ones(2))).tolist()
    [1.0, 1.0]
    """

    natural = False

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the gradient as it is."""
        return gradient


def damped_solve(
    rows: Tensor,  # (n, *batch, D)
    count: Tensor,  # (*batch,), rows that are not empty
    rho: float,
    gradient: Tensor,  # (*batch, D)
) -> Tensor:
    """Solve (F̂ + ρ tr(F̂)/D I) x = g, with F̂ = ΦᵀΦ/n and the scores as the rows of Φ.

    With n < D it is x = (g - Φᵀ(nδI + ΦΦᵀ)⁻¹Φg)/δ, δ = ρ tr(F̂)/D, by the n x n matrix alone.
    """
    Phi = rows.movedim(0, -2)
    n, D = Phi.shape[-2:]
    square = Phi.square().sum((-2, -1))
    n_delta = (rho / D * square)[..., None, None]  # nδ
    g = count.clamp_min(1)[..., None] * gradient
    if n < D:
        inner = Phi @ Phi.mT + n_delta * torch.eye(n, dtype=Phi.dtype, device=Phi.device)
        small = solve_symmetric(inner, (Phi @ g[..., None])[..., 0])
        return (g - (Phi.mT @ small[..., None])[..., 0]) / n_delta[..., 0]
    return solve_symmetric(Phi.mT @ Phi + n_delta * torch.eye(D, dtype=Phi.dtype, device=Phi.device), g)


@final
class Exact(Preconditioner):
    """The natural gradient I_F⁻¹∇L in closed form, from `FlatPosterior.exact_fisher_solve`.

    It is free of noise, and the first choice where the posterior knows its Fisher matrix (Godichon-Baggioni, Nguyen and
    Tran 2023, Eq 3.4).

    Raises:
        PairError: at construction of an optimizer, if the posterior does not know its Fisher matrix.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> Exact().direction({}, torch.tensor([1.0, 1.0]), MeanFieldGaussian(torch.zeros(2))).tolist()
    [1.0, 0.5]
    """

    exact = True

    def fresh(self, q: FlatPosterior) -> State:
        """Return an empty state, after one call that has a posterior without a closed form refused here.

        Raises:
            PairError: if the posterior does not know its Fisher matrix.
        """
        q.exact_fisher_solve(torch.zeros_like(q.vector))
        return {}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the natural gradient I_F⁻¹∇L."""
        return q.exact_fisher_solve(gradient)


class _Slice:
    """What the preconditioner of a block sees of the posterior: the length and place of its part of λ."""

    def __init__(self, vector: Tensor) -> None:
        self.vector, self.size = vector, vector.shape[-1]


@final
class Blocks(Preconditioner):
    """A block-diagonal metric: a copy of one preconditioner for each consecutive block of λ.

    Use it where λ is too long for a D x D matrix, for it needs ΣD_b² numbers, or where q is a product over the blocks,
    so that its Fisher matrix is block-diagonal.

    Args:
        rule: the preconditioner, `Recursive`, `MatrixFree`, `Window` or `BatchFisher`; its warm-up and generator are
            those of all blocks.
        sizes: the lengths of the blocks, which sum to D.

    Raises:
        InputError: if the rule takes no scores, or there are no sizes; at construction of an optimizer, if the sizes do
            not sum to D.

    >>> from torchngvi.ifvb import MeanFieldGaussian, Recursive
    >>> len(Blocks(Recursive(), [2, 2]).fresh(MeanFieldGaussian(torch.zeros(4))))
    2
    """

    def __init__(self, rule: Preconditioner, sizes: Sequence[int]) -> None:
        read_instance("rule", rule, Preconditioner, "is one that learns from scores, such as Recursive()")
        sizes = read_list("sizes", sizes, "lists the length of each block")
        if rule.samples == 0 or isinstance(rule, Blocks):
            raise InputError(f"Blocks splits a rule that learns from scores; got {type(rule).__name__}.")
        if not sizes:
            raise InputError("sizes lists the length of each block; got none.")
        self.rule, self.sizes = rule, [check_count("a block size", size) for size in sizes]
        self.samples, self.remembers = rule.samples, rule.remembers
        self.warmup, self.generator = rule.warmup, rule.generator

    def fresh(self, q: FlatPosterior) -> State:
        """Return one state for each block.

        Raises:
            InputError: if the sizes do not sum to D, or the rule refuses a block.
        """
        if sum(self.sizes) != q.size:
            raise InputError(f"the blocks have {sum(self.sizes)} entries and lambda has {q.size}.")
        pieces = q.vector.detach().split(self.sizes, -1)
        return {str(i): self.rule.fresh(_Slice(piece)) for i, piece in enumerate(pieces)}  # type: ignore[arg-type]

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Hand its part of the scores to the preconditioner of each block."""
        pieces = enumerate(scores.split(self.sizes, -1))
        return {str(i): state[str(i)] | self.rule.absorb(state[str(i)], piece, generator) for i, piece in pieces}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the directions of the blocks, side by side."""
        pieces = gradient.split(self.sizes, -1)
        return torch.cat([self.rule.direction(state[str(i)], piece, q) for i, piece in enumerate(pieces)], -1)


def _rank_one(q: FlatPosterior) -> RankOneGaussian:
    if not isinstance(q, RankOneGaussian):
        raise PairError(f"NAGVAC is for a RankOneGaussian; got {type(q).__name__}. Use Exact, or IFVB.")
    return q


class _BlockSolve(Preconditioner):
    """The base of both forms of NAGVAC, a closed form that learns nothing from scores."""

    def fresh(self, q: FlatPosterior) -> State:
        """Return an empty state, after a check of the posterior."""
        _rank_one(q)
        return {}


@final
class NAGVAC(_BlockSolve):
    """The natural gradient of a `RankOneGaussian` with a block-diagonal Fisher matrix, each block inverted exactly.

    The blocks are those of (μ, b, c) (Tran, Nguyen, Nott and Kohn 2020); the inverse of that of b is (Σ - bbᵀ/(2a))/a.
    Use it to compare with the published method: `Exact` costs as much and drops no block.

    Raises:
        PairError: at construction of an optimizer, if the posterior is another than `RankOneGaussian`.

    >>> import torch
    >>> from torchngvi.ifvb import RankOneGaussian
    >>> q = RankOneGaussian(torch.zeros(3), torch.ones(3), torch.ones(3))
    >>> NAGVAC().direction({}, torch.ones(9), q)[:3].tolist()  # of the mean: Σ g = (I + bbᵀ) g
    [4.0, 4.0, 4.0]
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the natural gradient of each block, side by side."""
        return _rank_one(q).block_fisher_solve(gradient)


@final
class PublishedNAGVAC(_BlockSolve):
    """The form of NAGVAC that is usually run, with Σ/(2a) in the place of the inverse of the block of b.

    Use it to reproduce published results; `NAGVAC` inverts that block exactly, and `Exact` drops none.

    Raises:
        PairError: at construction of an optimizer, if the posterior is another than `RankOneGaussian`.

    >>> import torch
    >>> from torchngvi.ifvb import RankOneGaussian
    >>> q = RankOneGaussian(torch.zeros(3), torch.ones(3), torch.ones(3))
    >>> PublishedNAGVAC().direction({}, torch.ones(9), q)[:3].tolist()  # of the mean: Σ g = (I + bbᵀ) g
    [4.0, 4.0, 4.0]
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the approximate natural gradient of each block, side by side."""
        return _rank_one(q).published_block_solve(gradient)


@final
class Adam(Preconditioner):
    """Adam's running moments of the gradient in the place of a metric, coordinate by coordinate.

    It equals `torch.optim.Adam` at a constant step.  Use it as the method to compare with that needs no Fisher
    matrix; unlike the momentum `torchngvi.rules.Adam` it makes a direction, which step sizes may limit and a momentum
    average.

    Args:
        betas: the weights of the past in the averages of g and of g², each in [0, 1).
        eps: the positive number that is added to √v̂, in the units of the coordinates.

    Raises:
        InputError: if a beta lies outside [0, 1), or eps is not positive.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> metric, q, gradient = Adam(), MeanFieldGaussian(torch.zeros(2)), torch.tensor([3.0, -0.1])
    >>> state = metric.noticed(metric.fresh(q), gradient, q)
    >>> metric.direction(state, gradient, q).round(decimals=3).tolist()  # signs at first
    [1.0, -1.0]
    """

    natural = False

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.momentum = AdamMomentum(betas, eps)

    def fresh(self, q: FlatPosterior) -> State:
        """Return moments of zero, and a count of no steps."""
        return dict(self.momentum.init(q))

    def noticed(self, state: State, gradient: Tensor, q: FlatPosterior) -> State:
        """Return the moments with this gradient in them, for the members whose gradient is finite."""
        fine = gradient.isfinite().all(-1)
        new = self.momentum.moments(Coordinates(gradient, q.no_matrix), state)
        masks = {name: fine if value.ndim == fine.ndim else fine[..., None] for name, value in new.items()}
        return {name: torch.where(masks[name], value, state[name]) for name, value in new.items()}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return m̂/(√v̂ + ε) of the moments, in which the gradient is already."""
        fine = gradient.isfinite().all(-1)
        return torch.where(fine[..., None], self.momentum.change(q, state).vector, torch.nan)
