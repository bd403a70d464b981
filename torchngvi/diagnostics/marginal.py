"""The margin of one coordinate by Laplace's method: how wide it is where no draw of q comes.

    p(θ_k) ∝ max p(θ) · |∇²ℓ(θ) without k|^-1/2        the maximum and the Hessian over all coordinates but k

(Tierney and Kadane 1986, Journal of the American Statistical Association 81).  It is exact where the others are
Gaussian given θ_k, as the effects of a hierarchical model given its scale are about, and so follows the neck of a
funnel down, of which importance weights and linear response see the upper end alone.  Nothing is drawn.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_number
from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.linear_response import difference_step
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.factors import Guarded
from torchngvi.models.log_joint import as_target, read_gaussian
from torchngvi.posteriors.gaussian import Gaussian


class Margin(NamedTuple):
    """One coordinate's margin, by Laplace's method.

    Attributes:
        mean: of the coordinate.
        sd: of the coordinate.
        log_evidence: log ∫ p(θ) dθ by the same method, at γ = 1; far from that of importance weights it says that
            Laplace's method does not hold.
        nodes: at which the margin was found.

    >>> Margin(0.0, 1.0, 0.0, 13).nodes
    13
    """

    mean: float
    sd: float
    log_evidence: float
    nodes: int


@torch.no_grad()
def laplace_margin(
    q: Gaussian,
    target: Target,
    coordinate: int,
    *,
    max_gradients: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> Margin | None:
    """Follow the margin of one coordinate to both sides until what it adds to the variance has fallen by eight nats.

    The maximum at a node is looked for by Newton's method, from where the last one points; its Hessian is a difference
    of 2D + 1 gradients in one call, in the frame of q. Some 15 nodes take 20 such calls.

    Args:
        q: one posterior, near the density; it is the unit of the steps.
        target: a log joint that gives the same value twice.
        coordinate: k, of θ.
        max_gradients: a call that would exceed it is not made.
        over: whether there is no time left; asked before each call.

    Returns:
        Mean and standard deviation of the margin; None where it was not followed to both ends, because the budget is
        used up, the log joint is not finite or raises an error there, or has no maximum over the other coordinates.

    Raises:
        InputError: a batch of posteriors, a coordinate that q has not, a budget that is no number.
        PairError: a posterior that is no Gaussian.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(2, scale=0.5, dtype=torch.float64)  # four times too narrow
    >>> found = laplace_margin(q, LogJoint(lambda theta: -0.125 * theta.square().sum(-1)), 0)
    >>> abs(found.sd - 2.0) < 0.02, abs(found.mean) < 1e-6
    (True, True)
    """
    q = read_gaussian("laplace_margin", q, target)
    if q.batch_shape:
        raise InputError(f"laplace_margin takes one posterior at a time; got a batch of shape {tuple(q.batch_shape)}.")
    coordinate = read_count("coordinate", coordinate, "counts the coordinates of θ from 0", at_least=0)
    if coordinate >= q.dim:
        raise InputError(f"coordinate counts the {q.dim} coordinates of θ from 0; got {coordinate}.")
    max_gradients = read_number("max_gradients", max_gradients, "is a budget of gradients", at_least=0, infinite=True)
    target = target if isinstance(target, Guarded) else Guarded(as_target(target))  # far away it need not answer
    search = _Search(q, target, coordinate, max_gradients, over)
    middle = search.settled(torch.zeros_like(search.along))
    if middle is None:
        return None
    nodes = {0.0: middle.value}
    for sign in (1.0, -1.0):
        side = search.side(middle, sign)
        if side is None:
            return None
        nodes.update(side)
    mean, sd, log_mass = _moments(nodes)
    log_evidence = log_mass + 0.5 * (q.dim - 1) * math.log(2 * math.pi) + float(q.log_det_root())
    return Margin(float(q.mean[coordinate]) + search.unit * mean, search.unit * sd, log_evidence, len(nodes))


class _Node(NamedTuple):
    """A point of the path: x whose others are at their maximum, the logarithm of the margin, and dx/ds."""

    x: Tensor
    value: float
    tangent: Tensor


class _Search:
    """The path through x of θ = m + C Q x, whose first entry moves θ_k alone and whose others leave it."""

    nodes = 24  # of a side
    first, growth, shrinking, least = 0.5, 1.5, 0.5, 0.1  # step in sds of q, its factors, and where a side is given up
    gentle, steep = 1.0, 3.0  # nats of change of the margin below which the step grows, and above which it is undone
    drop = (
        8.0  # nats below its top at which a side ends, of the margin times the square of the distance from the middle
    )
    newton = 4  # steps to the maximum at a node
    settles = 0.02  # square of the decrement up to which the quadratic model has the rest
    furthest = 2.0  # decrement of a step

    def __init__(self, q: Gaussian, target: Target, coordinate: int, most: float, over: Callable[[], bool]) -> None:
        self.target, self.frame, self.most, self.over, self.spent = target, q.frame(), most, over, 0
        along = self.frame.pull(
            torch.nn.functional.one_hot(torch.tensor([coordinate], device="cpu"), q.dim).to(self.frame.mean)
        )[0]
        self.unit, self.along = float(along.norm()), along / along.norm()
        self.step = difference_step(along.dtype)
        self.basis: Tensor | None = None  # Q, (D, D)

    def _derivatives(self, x: Tensor) -> tuple[float, Tensor, Tensor] | None:
        """ℓ/γ, its gradient and its Hessian at x; None where it is not finite, or there is no room for it."""
        dim = len(x)
        self.spent += 2 * dim + 1
        if self.spent > self.most or self.over():
            return None
        if self.basis is None:
            eye = torch.eye(dim, dtype=x.dtype, device=x.device)
            self.basis = torch.linalg.qr(torch.cat([self.along[:, None], eye], 1))[0]
            self.basis[:, 0] = self.along
        shift = self.step * torch.eye(dim, dtype=x.dtype, device=x.device)
        points = torch.cat([x[None], x + shift, x - shift])
        energy, gradient = energy_and_gradient(self.target, self.frame.mean + self.frame.push(points @ self.basis.mT))
        gradient = self.frame.pull(gradient) @ self.basis / self.target.temperature
        if not bool(energy.isfinite().all() & gradient.isfinite().all()):
            return None
        hessian = (gradient[1 : dim + 1] - gradient[dim + 1 :]) / (2 * self.step)
        return float(energy[0]) / self.target.temperature, gradient[0], 0.5 * (hessian + hessian.mT)

    def settled(self, x: Tensor) -> _Node | None:
        """The maximum over all entries but the first, from x."""
        for _ in range(self.newton):
            found = self._derivatives(x)
            if found is None:
                return None
            energy, gradient, hessian = found
            root, failed = torch.linalg.cholesky_ex(hessian[1:, 1:])
            if bool(failed):
                return None
            right = torch.stack([gradient[1:], hessian[1:, 0]], -1)
            step, bend = torch.cholesky_solve(right, root).unbind(-1)
            decrement = float(gradient[1:] @ step)
            far = decrement > self.settles
            cut = min(1.0, self.furthest / math.sqrt(decrement)) if far else 1.0
            x = torch.cat([x[:1], x[1:] - cut * step])
            if not far:
                value = -energy + 0.5 * decrement - float(root.diagonal().log().sum())
                return _Node(x, value, torch.cat([torch.ones_like(x[:1]), -bend]))
        return None

    def side(self, node: _Node, sign: float) -> dict[float, float] | None:
        """The logarithm of the margin by the place s, in sds of q, to one side; None where it does not end."""
        place, step, found = 0.0, self.first, dict[float, float]()
        top = node.value  # of what the variance has from a node
        for _ in range(self.nodes):
            new = self.settled(node.x + sign * step * node.tangent)
            while (new is None or node.value - new.value > self.steep) and step > self.least:
                if self.spent > self.most or self.over():
                    return None
                step *= self.shrinking
                new = self.settled(node.x + sign * step * node.tangent)
            if new is None:
                return None
            place, change = place + sign * step, abs(new.value - node.value)
            node, found[place] = new, new.value
            share = new.value + 2 * math.log(max(abs(place), 1.0))
            top = max(top, share)
            if share < top - self.drop:
                return found
            step *= self.growth if change < self.gentle else 1.0
        return None


def _moments(nodes: dict[float, float], fine: int = 20) -> tuple[float, float, float]:
    """Mean, standard deviation and log mass of a density whose logarithm is known at nodes, by cubics between them."""
    s, value = torch.tensor(sorted(nodes.items()), dtype=torch.float64, device="cpu").unbind(1)
    width, rise = s.diff(), value.diff()
    chord = rise / width
    inner = (chord[1:] * width[:-1] + chord[:-1] * width[1:]) / (width[1:] + width[:-1])  # of the parabola of three
    slope = torch.cat([chord[:1], inner, chord[-1:]])
    t = ((torch.arange(fine, dtype=torch.float64, device="cpu") + 0.5) / fine)[:, None]
    bend = (1 - t) * (slope[:-1] * width - rise) - t * (slope[1:] * width - rise)
    log_mass = (value[:-1] + t * rise + t * (1 - t) * bend + (width / fine).log()).flatten()
    weight = log_mass.softmax(0)
    at = (s[:-1] + t * width).flatten()
    mean = weight @ at
    return float(mean), float((weight @ (at - mean).square()).sqrt()), float(log_mass.logsumexp(0))
