"""Parts that break their contract, one promise each: every check of torchngvi.testing must find them.

They are written as a third party might get them wrong, on top of parts that are right.
"""

import math
from dataclasses import dataclass, replace

import torch
from arrow import ScalarArrow

from torchngvi.expectations import Fixed, Independent, PerFactor, Quadrature, SampleAverage, Stein
from torchngvi.expectations.flat import Pathwise, _constants, _packet, _Scored
from torchngvi.fitting import Evaluations
from torchngvi.fitting.steps import Steps
from torchngvi.interfaces import Bent, Coordinates, Cost, Momentum, Rule, StepSize, Tangent
from torchngvi.methods import Snngm
from torchngvi.metrics import Adam as AdamMetric
from torchngvi.metrics import BatchFisher, Exact, Identity, Recursive, Window
from torchngvi.models import BernoulliLogit, BernoulliProbit, GaussianNoise, Likelihood, LogJoint, PoissonLog, StudentT
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.flat import Beta
from torchngvi.rules import NaturalGradient, NormalizedMomentum, QuasiNewton, RootGradient
from torchngvi.stepsizes import SufficientDecrease
from torchngvi.structures import Dense


class Uphill(Rule):
    """The sign of the step is wrong."""

    emits, natural = Tangent, True

    def __call__(self, q, e):
        path = NaturalGradient()(q, e)
        return replace(path, at=lambda rho: path.at(-rho))


class SaysNatural(RootGradient):
    """A Euclidean gradient that says it is the natural one, and so would be accelerated."""

    natural = True


class NoSpeed(RootGradient):
    """A Euclidean gradient whose steps are not as long as their natural norm says."""

    def __call__(self, q, e):
        return replace(super().__call__(q, e), speed2=None)


class OneStepForAll(Rule):
    """Every member goes as far as the first."""

    emits, natural = Tangent, True

    def __call__(self, q, e):
        path = NaturalGradient()(q, e)
        return replace(path, at=lambda rho: path.at(rho.flatten()[0].expand_as(rho)))


class NeedsMore(NaturalGradient):
    """It takes the exponential of a matrix without asking for a full algebra."""

    def __call__(self, q, e):
        q.structure.exp(q.local(e).P)
        return super().__call__(q, e)


@dataclass(frozen=True)
class WrongMetric(ScalarArrow):
    """An entry outside of squares is stored once, and so must count twice."""

    def flat(self, symmetric):
        return symmetric * 0.5**0.5

    def unflat(self, vector):
        return vector * 2**0.5


@dataclass(frozen=True)
class Transposed(Dense):
    """L x and Lᵀ x in each other's place."""

    def mv(self, root, x):
        return super().tmv(root, x)


@dataclass(frozen=True)
class HoldsWithOne(Dense):
    """A failed factorisation is told of matrices without one positive entry on the diagonal only."""

    def cholesky(self, symmetric):
        factor, ok = super().cholesky(symmetric)
        return factor, ok | (self.diagonal(symmetric) > 0).any(-1)


@dataclass(frozen=True)
class RegularByItsFirst(Dense):
    """A root whose first entry is not 0 passes for regular."""

    def positive_root(self, root):
        turned, _ = super().positive_root(root)
        return turned, root.isfinite().all((-2, -1)) & (self.diagonal(root)[..., 0] != 0)


@dataclass(frozen=True)
class DoubleRoot(Dense):
    """The factor is in float64, whatever it was made of."""

    def cholesky(self, symmetric):
        factor, ok = super().cholesky(symmetric)
        return factor.double(), ok


@dataclass(frozen=True)
class DoubleExponential(Dense):
    """The exponential is in float64, whatever it was made of."""

    def exp(self, symmetric):
        return super().exp(symmetric).double()


@dataclass(frozen=True)
class Banded(ScalarArrow):
    """Neighbours in a chain: the product of two such matrices has three bands."""

    def positions(self):
        place = torch.arange(self.dim)
        return torch.cat([place, place[1:]]), torch.cat([place, place[:-1]])


class Biased(Stein):
    """A tenth too much of a."""

    def __call__(self, q, target):
        e = super().__call__(q, target)
        return e._replace(derivative=e.derivative._replace(a=1.1 * e.derivative.a))


class SaysComparable(Stein):
    """New draws at each call, whose values say nothing about a step."""

    def __init__(self):
        super().__init__(Independent(8))
        self.comparable = True

    def __call__(self, q, target):
        self.comparable = False
        e = super().__call__(q, target)
        self.comparable = True
        return e._replace(comparable=target.comparable)


class ForFree(Quadrature):
    """It does not count what it evaluates."""

    def __call__(self, q, target):
        e = super().__call__(q, target)
        return e._replace(cost=e.cost._replace(gradients=0))


class HidesItsNoise(SampleAverage):
    """A derivative that is that of the value up to noise, of which nothing is told."""

    def __init__(self):
        super().__init__(Fixed(6))

    def __call__(self, q, target):
        return super().__call__(q, target)._replace(noise2=None)


class SaysPrecise(HidesItsNoise):
    """A hundredth of the standard error."""

    def __call__(self, q, target):
        e = SampleAverage.__call__(self, q, target)
        return e._replace(noise2=1e-4 * e.noise2)


class BiasedPart(PerFactor):
    """A tenth too much of a, in the sum over the cliques."""

    def __init__(self):
        super().__init__(Stein(Independent(4)))

    def __call__(self, q, target):
        e = super().__call__(q, target)
        return e._replace(derivative=e.derivative._replace(a=1.1 * e.derivative.a))


class OfTheSameBatch(_Scored):
    """The constants of the very draws that they are subtracted from."""

    def __init__(self):
        super().__init__(4)

    def __call__(self, q, target):
        score, h = self._draw(q, target)
        gradient = (score * (h[..., None] - _constants(score, h))).mean(0)
        return _packet(q, target, h.mean(0), gradient, Cost(0, 0, self.draws))


class GoesUp(Pathwise):
    """The gradient of the bound in the place of that of L."""

    def __init__(self):
        super().__init__(2)

    def __call__(self, q, target):
        e = super().__call__(q, target)
        return e._replace(derivative=e.derivative._replace(a=-e.derivative.a))


class TakesAnything(CholeskyGaussian):
    """A step to NaN is a step in the cone."""

    def moved(self, move):
        new, ok = super().moved(move)
        return new, torch.ones_like(ok)


class TakesNaN(CholeskyGaussian):
    """The mean is not looked at."""

    def _proper(self, mean, root):
        return super()._proper(torch.zeros_like(mean), root)


class Inverted(CholeskyGaussian):
    """The sign of log|det C| is that of the precision."""

    def log_det_root(self):
        return -super().log_det_root()


class HalfTangent(CholeskyGaussian):
    """The whole triangle of P in the place of tril½."""

    def tangent(self, e):
        a, P = self.local(e)
        frame, structure = self.frame(), self.structure
        return Coordinates(frame.push(a), structure.matmul(frame.root, structure.tril(P)))


class OtherDraws(Beta):
    """Draws with a and b in each other's place."""

    def __init__(self):
        super().__init__(torch.tensor([2.5, 4.0], dtype=torch.float64))

    def sample(self, shape=(), generator=None, at=None):
        return 1 - super().sample(shape, generator, at)


class OtherScore(OtherDraws):
    """The score of one parameter is twice too large."""

    def sample(self, shape=(), generator=None, at=None):
        return Beta.sample(self, shape, generator, at)

    def score(self, theta, at=None):
        return super().score(theta, at) * torch.tensor([1.0, 2.0], dtype=theta.dtype)


class OtherFisher(OtherScore):
    """Twice the inverse Fisher matrix."""

    def score(self, theta, at=None):
        return Beta.score(self, theta, at)

    def exact_fisher_solve(self, gradient, at=None):
        return 2 * super().exact_fisher_solve(gradient, at)


class Unnormalised(Beta):
    """The density is without a factor that no score sees."""

    def __init__(self):
        super().__init__(torch.tensor([2.5, 4.0], dtype=torch.float64))

    def log_prob(self, theta, at=None):
        return super().log_prob(theta, at) - 0.1


class GoesAnywhere(OtherFisher):
    """Every λ is a distribution."""

    def moved(self, move):
        new, ok = super().moved(move)
        return new, torch.ones_like(ok)


class Together(SufficientDecrease):
    """One reach for all members."""

    def propose(self, path, lr, like, state):
        return super().propose(replace(path, norm2=lambda: path.norm2().max().expand_as(like)), lr, like, state)


class Waits(StepSize):
    """It asks the device for a number at each step."""

    needs_natural = True

    def propose(self, path, lr, like, state):
        return torch.full_like(like, min(lr, 1 / path.norm2().max().sqrt().item()))


class JudgesInVain(StepSize):
    """It would judge, and is of the kind that nobody asks."""

    def propose(self, path, lr, like, state):
        return torch.ones_like(like) * lr

    def judge(self, trial, state):
        return trial.after < trial.before, state


class SaysTrial(StepSize):
    """It says that it needs a trial, and could not judge it."""

    needs_trial = True

    def propose(self, path, lr, like, state):
        return torch.ones_like(like) * lr


class ReadsTheMetric(SufficientDecrease):
    """It waits for the pairs of a quasi-Newton memory."""

    def propose(self, path, lr, like, state):
        return super().propose(path, lr, like, state) * (1 + state["kept"].sum(0))


class AcceptsNaN(SufficientDecrease):
    """A rejection is a rise that was seen, which a NaN is not."""

    def judge(self, trial, state):
        _, new = super().judge(trial, state)
        return ~(trial.after > trial.before + trial.slack), new


class ForgetsTheBatch(NormalizedMomentum):
    """One norm for all members."""

    def __call__(self, q, change, norm2, state):
        size = sum(x.square().sum() for x in change).sqrt().clamp_min(1e-9)
        memory = {f"mean_{name}": part / size for name, part in change._asdict().items()}
        return Coordinates(*memory.values()), memory


class Average(Momentum):
    """Heavy ball: right."""

    needs_natural = False

    def init(self, q):
        return {"vector": torch.zeros_like(q.mean_probe), "matrix": torch.zeros_like(q.root_probe)}

    def __call__(self, q, change, norm2, state):
        memory = {name: 0.9 * state[name] + 0.1 * part for name, part in change._asdict().items()}
        return Coordinates(**memory), memory


class CountsRejections(Average):
    """It starts anew after a rejection, which the optimizer counts."""

    def __call__(self, q, change, norm2, state):
        return super().__call__(q, change, norm2, {name: state[name] for name in ("vector", "matrix", "rejections")})


class Euclidean(QuasiNewton):
    """It measures by the stored entries, in which a square holds an entry twice and an arrow once."""

    def __call__(self, q, gradient, went, state):
        (local, _), new = super().__call__(q, gradient, went, state)
        inner = (gradient.a * local.a).sum(-1) + (gradient.P * local.P).flatten(len(q.batch_shape)).sum(-1)
        return Bent(local, inner), new


class ReadsTheStepSize(QuasiNewton):
    """It asks how far steps reach, which the step size knows."""

    def __call__(self, q, gradient, went, state):
        (local, slope), new = super().__call__(q, gradient, went, state)
        return Bent(local, torch.minimum(slope, state["reach"])), new


class NeverForgets(QuasiNewton):
    """What was learned of another target stays."""

    def forget(self, keep, state):
        return None


class SaysConvex(Likelihood):
    """Student's t is not log-concave."""

    discrete, convex = False, True

    def __init__(self):
        self.of = StudentT(1.0, dof=2.0)

    def energy(self, eta, y):
        return self.of.energy(eta, y)

    def expected(self, mean, variance, y):
        return self.of.expected(mean, variance, y)

    def checked(self, y):
        return y


class WrongCurvature(Likelihood):
    """∂F/∂v in the place of 2 ∂F/∂v."""

    discrete = False

    def energy(self, eta, y):
        return PoissonLog().energy(eta, y)

    def expected(self, mean, variance, y):
        moments = PoissonLog().expected(mean, variance, y)
        return moments._replace(curvature=0.5 * moments.curvature)

    def checked(self, y):
        return y


class StiffCurvature(WrongCurvature):
    """β has no graph."""

    convex = True

    def expected(self, mean, variance, y):
        moments = PoissonLog().expected(mean, variance, y)
        return moments._replace(curvature=moments.curvature.detach() + 0 * mean)


class ZeroAndOne(BernoulliLogit):
    """Another coding of the classes."""

    def checked(self, y):
        return (y == y.max()).to(y.dtype)


class SaysSelfConcordant(BernoulliProbit):
    """The third derivative of -log Φ exceeds the second."""

    self_concordant = True


class MoreThanOne(BernoulliLogit):
    """Twice the probability of each class."""

    def energy(self, eta, y):
        return super().energy(eta, y) - math.log(2)

    def expected(self, mean, variance, y):
        moments = super().expected(mean, variance, y)
        return moments._replace(value=moments.value - math.log(2))


class WithoutItsConstant(GaussianNoise):
    """½(y - η)², and no ½ log 2π."""

    def energy(self, eta, y):
        return 0.5 * (y - eta).square()


class NarrowExpectation(PoissonLog):
    """A quadrature that misses where exp η has its weight under a wide normal."""

    def expected(self, mean, variance, y):
        moments = super().expected(mean, variance, y)
        return moments._replace(value=torch.where(variance > 50, 0.5, 1.0) * moments.value)


class WritesToItsState(Recursive):
    """It updates the matrix in place, so that a step which is not taken leaves a trace."""

    def absorb(self, state, scores, generator=None):
        state["P"].copy_(super().absorb(state, scores, generator)["P"])
        return super().absorb(state, scores, generator)


class OneMatrixForAll(BatchFisher):
    """The scores of all members in one matrix."""

    def absorb(self, state, scores, generator=None):
        members = scores.reshape(len(scores), -1, scores.shape[-1]).mean(1)
        return super().absorb(state, members.reshape(-1, *(1,) * (scores.ndim - 2), scores.shape[-1]) + 0 * scores)


class UnitLength(Exact):
    """A direction of length one, which is no linear map."""

    def direction(self, state, gradient, q):
        step = super().direction(state, gradient, q)
        size = step.square().sum(-1, keepdim=True).sqrt()
        return step / torch.where(size > 0, size, 1.0)


class OneSided(Exact):
    """A linear map that is not symmetric."""

    exact = False

    def direction(self, state, gradient, q):
        return super().direction(state, gradient + 0.05 * gradient.cumsum(-1), q)


class HalfOfIt(Exact):
    """Half of the inverse Fisher matrix, which is said to be the whole."""

    def direction(self, state, gradient, q):
        return 0.5 * super().direction(state, gradient, q)


class ExactInSilence(Exact):
    """The inverse Fisher matrix, of which nothing is said."""

    exact = False


class PlainButNatural(Identity):
    """The gradient as it is, in the name of a natural one."""

    natural = True


class KeepsNaN(Window):
    """It takes in every score."""

    def absorb(self, state, scores, generator=None):
        ones = torch.ones_like(scores[..., 0])
        return {"rows": torch.cat([state["rows"], scores]), "kept": torch.cat([state["kept"], ones])}


class RemembersNaN(AdamMetric):
    """It takes in every gradient."""

    def noticed(self, state, gradient, q):
        return self.momentum.moments(Coordinates(gradient, q.no_matrix), state)


class CountsOnItself(Identity):
    """It remembers on the part, which no state dict holds."""

    def __init__(self):
        self.steps = 0

    def direction(self, state, gradient, q):
        self.steps += 1
        return gradient / self.steps


class AlwaysDouble(Identity):
    """It works in float64, whatever λ is."""

    def direction(self, state, gradient, q):
        return gradient.double()


class AsksTheDevice(Identity):
    """It waits for a number at each step."""

    def direction(self, state, gradient, q):
        return gradient / max(1.0, gradient.square().sum().item() * 0)


class TakesAnyShape(Identity):
    """A gradient of another shape passes."""

    def bent(self, q, gradient, state, at):
        return Bent(gradient, gradient.a.square().sum(-1)), state


class WrongSlope(Identity):
    """|d| in the place of ⟨∇L, d⟩."""

    def bent(self, q, gradient, state, at):
        bent, state = super().bent(q, gradient, state, at)
        return bent._replace(slope=bent.slope.sqrt()), state


class LeavesTheManifold(Identity):
    """A constant is added, along the manifold or not."""

    def bent(self, q, gradient, state, at):
        bent, state = super().bent(q, gradient, state, at)
        step = torch.where(gradient.a == 0, gradient.a, gradient.a + 0.01)
        return Bent(bent.local._replace(a=step), (step * gradient.a).sum(-1)), state


class OppositeEntropy(Steps):
    """An engine whose loss has the entropy with the other sign."""

    def __init__(self, log_joint):
        q = CholeskyGaussian(2, dtype=torch.float64)
        super().__init__(q, LogJoint(log_joint), Snngm(q, lr=0.05, estimator=Stein(8)), Evaluations(50))

    def advance(self):
        standing = super().advance()
        return standing._replace(loss=standing.loss + 2 * self.q.entropy().detach())


class NothingSpent(OppositeEntropy):
    """It says that a run has cost nothing."""

    def advance(self):
        return Steps.advance(self)._replace(spent=(0, 0))


class HalfOfTheGradients(OppositeEntropy):
    """It counts one gradient for two."""

    def advance(self):
        standing = Steps.advance(self)
        evaluations, gradients = standing.spent
        record = standing.record._replace(gradients=gradients // 2)
        return standing._replace(record=record, spent=(evaluations, gradients // 2))


class ForgetsItsOptimizer(OppositeEntropy):
    """Its state is without a part on which the rest of a run depends."""

    advance = Steps.advance

    def load_state_dict(self, state):
        super().load_state_dict({**state, "optimizer": self.optimizer.state_dict()})


class ForgetsAThing(ForgetsItsOptimizer):
    """Its state is without a part that only the end reads."""

    def load_state_dict(self, state):
        Steps.load_state_dict(self, {**state, "first_loss": None})


class PutsNothing(ForgetsItsOptimizer):
    """It leaves q where it is when it is put into a state."""

    def load_state_dict(self, state):
        Steps.load_state_dict(self, {**state, "posterior": self.q.state_dict()})


class SetsNoMark(ForgetsItsOptimizer):
    """It does not say from where a run can be gone on with."""

    def advance(self):
        standing, self.marked = Steps.advance(self), None
        return standing


class NeverGoesBack(OppositeEntropy):
    """An interrupt leaves q in the middle of a step."""

    advance = Steps.advance

    def go_back(self, coordinates):
        pass
