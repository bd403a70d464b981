"""A guide for Pyro models whose plate of local latents is too large to be run at once.

    q(g, b) = N(g; m, V) Π_i N(b_i; c_i - K_iᵀg, S_i⁻¹)

For a model whose terms are log p(g) + Σ_i log p(y_i, b_i | g) a Gaussian with the precision in this arrow loses nothing
against a full covariance: where q is the best Gaussian, its precision is E_q[∇²ℓ], which has zeros between members.

The log joint of a run on some members, -log p(data, g, b) = ℓ_0(g) + Σ_i ℓ_i(b_i, g), has the log Jacobians of the
supports among its terms.  With weights u of the terms and one shift t = (t_b, t_g) for all draws and members,
L(u, t) = mean_s [u_0 ℓ_0(g_s + t_g) + Σ_i u_i ℓ_i(b_is + t_b, g_s + t_g)] has all that is wanted as derivatives at
u = 1, t = 0, because each term has a latent vector b_i of its own:

    E[ℓ_i] = ∂L/∂u_i        E[∇ℓ_i] = ∂²L/∂u_i∂t        E[∇²ℓ_i] = ∂³L/∂u_i∂t∂t.

The bound, with each member at its best given q(g), is a function of q(g) alone, as in `torchngvi.models.mixed_batches`,
here with expectations over draws that a batch keeps from pass to pass.  `fit_guide` goes through the plate once, where
q(g) takes steps on each batch: what the batches before have said of g, by their slopes g* and curvatures H* where q(g)
then was, is a Gaussian factor exp(-½ gᵀΛg + hᵀg) beside it.  From there each pass is an evaluation of the whole bound,
whose steps are those of `torchngvi.fit`.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, Self, cast, final

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import init_to_median
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from torchngvi.adapters.pyro.density import Runs, best_way, points_about, validate
from torchngvi.adapters.pyro.layout import (
    Call,
    Conditioned,
    Layout,
    Plate,
    Scored,
    Site,
    Values,
    check_size,
    is_enumerated,
    is_subsampled,
    random_sites,
)
from torchngvi.arguments import read_callable, read_instance, read_number, read_shares, read_size
from torchngvi.errors import InputError
from torchngvi.expectations import Antithetic, Quasi
from torchngvi.expectations.draws import drawn_seed
from torchngvi.fitting.loop import Ending, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.steps import PassesOverMembers
from torchngvi.fitting.stopping import Criterion, Evaluations, NormBelow, Seconds, Stalled, Standing, Stop, joined
from torchngvi.interfaces import Frame
from torchngvi.methods import VN
from torchngvi.models.mixed_batches import BoundOfMembers, Locals, Seen, natural_norm, settled
from torchngvi.numerics import linalg
from torchngvi.numerics.arrays import tracked
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import PrecisionCholeskyGaussian

_NEAR = 0.3  # natural norm up to which a member is near its best, and q(g) that of a batch at the first visits
_DRAWS = 64  # of a fresh ELBO, in mirrored pairs
_STALL = 10  # rejected steps in a row after which nothing more is to be had
_KNOWN = ("tolerance", "max_evaluations", "max_seconds", "stop", "callbacks", "progress", "checkpoint")


# -------------------------------------------------------------------------------- the log joint, member by member


class PlateLayout(Layout):
    """The latents b_i, (r,), of each member of a plate, one member after another, and then all others g, (P,)."""

    def __init__(self, trace: Trace, plate: str) -> None:
        inside = {s["name"]: f for s in random_sites(trace) for f in s["cond_indep_stack"] if f.name == plate}
        if not inside:
            raise InputError(f"no site of the model is in a plate {plate!r}; name the plate of the local latents.")
        frame = next(iter(inside.values()))
        if not frame.vectorized:
            raise InputError(f"the model loops over the plate {plate!r}; write it as `with pyro.plate(...) as index`.")
        check_size(frame)
        self.plate, self.dim_of_plate = plate, frame.dim
        self.members, self.size = frame.size, frame.full_size or frame.size
        super().__init__(trace, local=plate)  # refuses what a Gaussian cannot stand for
        missing = [site.name for site in self.sites if site.idle is not None]
        if missing:
            raise InputError(
                f"the site {missing[0]!r} comes from obs_mask=, which memoised locals do not know: nothing would "
                "confine its values at rows that are observed. Mask the likelihood (poutine.mask) in its place, which "
                "leaves the missing rows out."
            )
        self.locals = frozenset(site.name for site in self.sites if site.name in inside)
        plates = (Plate(plate, frame.dim, frame.size),)
        pieces: tuple[list[Tensor], list[Tensor]] = [], []  # coordinates of the locals by member, and of the globals
        self.places: dict[str, slice] = {}  # in b_i or in g
        widths = [0, 0]
        for site in self.sites:
            shared = site.name not in self.locals
            pieces[shared].append(site.by_member(() if shared else plates))
            width = pieces[shared][-1].shape[1]
            self.places[site.name] = slice(widths[shared], widths[shared] + width)
            widths[shared] += width
        self.r, self.P = widths
        if not self.r:
            raise InputError(f"no latent site is in the plate {plate!r}; AutoGaussian is the guide for such a model.")
        if not self.P:
            raise InputError(
                f"every latent site is in the plate {plate!r}, whose members have nothing in common: there is nothing "
                "to fit but one member after another. Fit log_joint of a member."
            )
        self.arrange(torch.cat([torch.cat(each, 1).flatten() for each in pieces]))
        self.weights = torch.ones(self.members + 1)  # of the members and of what they share

    def _axis(self, site: Site) -> int:
        """The axis of the plate in the unconstrained value of a local site, from the left."""
        return site.batch_dims + self.dim_of_plate

    def free(self, site: Site, b: Tensor, g: Tensor) -> Tensor:
        """The unconstrained value (*sample, *free) of a site at b (*sample, B, r) and g (*sample, P)."""
        place, sample = self.places[site.name], g.shape[:-1]
        if site.name not in self.locals:
            return g[..., place].reshape(sample + site.free)
        axis = self._axis(site)
        rest = site.free[:axis] + site.free[axis + 1 :]
        return b[..., place].reshape(*b.shape[:-1], *rest).movedim(b.ndim - 2, b.ndim - 2 + axis)

    def start(self, trace: Trace) -> tuple[Tensor, Tensor]:
        """The unconstrained values of a trace: the mean of b_i over its members, (r,), and g, (P,)."""
        theta = self.unconstrained({site.name: cast(Any, trace.nodes[site.name])["value"] for site in self.sites})
        b, g = theta.detach().tensor_split([self.members * self.r])
        return b.reshape(self.members, self.r).mean(0), g.clone()

    def _summed(self, site: Site, each: Tensor, samples: int) -> Tensor:
        """The log Jacobian of a site, with the weights of the terms."""
        sample = each.shape[:samples]
        if site.name not in self.locals:
            return weighted(each.reshape(*sample, -1).sum(-1), self.weights[-1])
        each = each.movedim(samples + self._axis(site), -1).reshape(*sample, -1, self.members).sum(-2)
        return weighted(each, self.weights[:-1]).sum(-1)


def weighted(terms: Tensor, weights: Tensor) -> Tensor:
    """Terms times their weights; 0 where the weight is 0, even of a term that is not finite."""
    return weights * torch.where(weights == 0, 0.0, terms)


class Terms(NamedTuple):
    """Of each member of a batch, and last of what all share: expectations of -log p over draws."""

    value: Tensor  # (B + 1,)
    g: Tensor  # (B + 1, r + P), the locals before the globals
    H: Tensor  # (B + 1, r + P, r + P)


class _Weighted(Scored):
    """`Scored` with the weights of the terms, and without the scale by which the plate stands for all its members."""

    def __init__(self, values: Values, layout: PlateLayout, index: Tensor) -> None:
        super().__init__(values, layout.shapes, {layout.plate: index})
        self.layout = layout

    def score(self, log_prob: Tensor, msg: Any) -> Tensor:
        """The log probability of a site with its weights."""
        weight, scale = self.layout.weights[-1], msg["scale"]
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.layout.plate:
                weight = self.layout.weights[:-1].reshape(-1, *(1,) * (-frame.dim - 1))
                scale = scale * frame.size / (frame.full_size or frame.size)
        return weighted(scale_and_mask(log_prob, scale, msg["mask"]), weight)


@final
class PlateDensity(Runs):
    """The terms of a Pyro model on a subsample of a plate, whose members it asks for by their index."""

    layout: PlateLayout
    enumerates, nesting = False, 0

    def __init__(self, call: Call, layout: PlateLayout, start: tuple[Tensor, Tensor]) -> None:
        self.call, self.layout, (b, g) = call, layout, start
        self.index = torch.arange(layout.size - layout.members, layout.size, device=g.device)
        theta = torch.cat([b.expand(layout.members, -1).flatten(), g])
        generator = torch.Generator().manual_seed(0)
        points = points_about(theta, generator)
        layout.weights = 0.5 + torch.rand(layout.members + 1, generator=generator, dtype=torch.float64).to(theta)
        self.nesting = self._nesting(theta)
        self._check_separate(points[0])
        self._validate(theta)
        self.batched_by, self._batched = best_way(self, points)

    def _nesting(self, theta: Tensor) -> int:
        """The number of dimensions of the plates, from a run in which everything is looked at."""
        with pyro.validation_enabled(False), poutine.trace() as tracer:
            log_probs = self.scored(self.layout.constrained(theta)[0])
        sites = [site for site in tracer.trace.nodes.values() if site["type"] == "sample"]
        drawn: Any = tracer.trace.nodes.get(self.layout.plate, {"value": None})["value"]
        if drawn is None or not torch.equal(torch.as_tensor(drawn), self.index):
            raise InputError(
                f"the plate {self.layout.plate!r} is given its indices, and the guide has to choose them: write it "
                "with subsample_size=, and let the model have the data of all members."
            )
        frames = [frame for site in sites for frame in site["cond_indep_stack"]]
        for frame in frames:
            if frame.name != self.layout.plate and is_subsampled(frame):
                raise InputError(
                    f"the plate {frame.name!r} is subsampled beside {self.layout.plate!r}; run it in full, or leave "
                    "out its subsample_size."
                )
        for name, site in tracer.trace.nodes.items():
            if site["type"] == "sample" and is_enumerated(site):
                raise InputError(f"the latent site {name!r} is enumerated, which AutoLocalGaussian does not sum out.")
        if any(bool(log_prob.isnan().any()) for log_prob in log_probs):
            raise InputError(
                "the log density of the model is NaN at its initial point. Look for missing data or parameters out of "
                "range there, or choose another init_loc_fn."
            )
        return max((-frame.dim for frame in frames if frame.dim is not None), default=0)

    @torch.no_grad()
    def _validate(self, theta: Tensor) -> None:
        """Pyro's own validation of the model at the start, on all members of the plate, a subsample at a time."""
        values, layout = self.layout.constrained(theta)[0], self.layout
        for index in torch.arange(layout.size, device=theta.device).split(layout.members):
            index = index if len(index) == layout.members else self.index

            given = Conditioned(values, layout.shapes, {layout.plate: index})
            run = self.call._replace(model=given(self.call.model)).trace
            validate(run, math.inf, f"at its start, on some members of the plate {layout.plate!r}")

    def _check_separate(self, theta: Tensor) -> None:
        """Terms of a member, and those outside the plate, may have no slope in the latents of other members."""
        kept, layout = self.layout.weights, self.layout
        shared = torch.zeros_like(kept)
        shared[-1] = 1.0
        member = torch.arange(layout.members, device=kept.device)
        halves = [member >> bit & 1 == side for bit in range((layout.members - 1).bit_length()) for side in (0, 1)]
        of_members = [torch.cat([half.to(kept), kept.new_zeros(1)]) for half in halves]
        cases = [(shared, "outside the plate"), *((weights, "of a member") for weights in of_members)]
        for weights, whose in cases:
            layout.weights = weights
            with torch.enable_grad():
                leaf = theta.clone().requires_grad_()
                slope = _slopes(self.one(leaf), leaf)
            slope = slope[: layout.members * layout.r].reshape(layout.members, layout.r)
            if bool((slope[weights[:-1] == 0] != 0).any()):
                raise InputError(
                    f"a site {whose} depends on latents of another member of the plate {layout.plate!r}: the members "
                    "are not independent given the globals. Use AutoGaussian with the plate in full."
                )
        layout.weights = kept

    # -------------------------------------------------------------------------------- one run of the model

    def scored(self, values: Values) -> list[Tensor]:
        """The weighted log probabilities of a run of the model at these values."""
        return list(_Weighted(values, self.layout, self.index).run(self.call).values())

    # -------------------------------------------------------------------------------- expectations

    @tracked
    @torch.enable_grad()
    def log_joint(self, index: Tensor, b: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        """-Σ_i u_i ℓ_i - u_0 ℓ_0 of each draw (S,), of members (B,) with b (S, B, r), g (S, P) and u (B + 1,)."""
        self.index, self.layout.weights = index, weights
        return self._batched(torch.cat([b.flatten(-2), g], -1)).detach().to(g.dtype)

    @tracked
    @torch.enable_grad()
    def terms(self, index: Tensor, b: Tensor, g: Tensor, at_once: int = 2000) -> Terms:
        """E[ℓ_i] of members (B,), and last E[ℓ_0], over draws b (S, B, r) and g (S, P), with their derivatives."""
        # at_once: numbers of locals up to which derivatives are taken in one batched pass; beyond, caches are too small
        r, k, small = b.shape[-1], b.shape[-1] + g.shape[-1], b.numel() <= at_once
        t, u = g.new_zeros(k, requires_grad=True), g.new_ones(len(index) + 1, requires_grad=True)
        self.index, self.layout.weights = index, u
        loss = -self._batched(torch.cat([(b + t[:r]).flatten(-2), g + t[r:]], -1)).to(g.dtype).mean()
        slope = _slopes(loss, t, graph=True)
        value, gradient = _slopes(loss, u), _jacobian(slope, u, small)
        rows, columns = torch.tril_indices(k, k, device=t.device)
        curvature = _jacobian(_jacobian(slope, t, small, graph=True)[rows, columns], u, small)
        H = value.new_zeros(len(value), k, k)
        H[:, rows, columns] = H[:, columns, rows] = curvature.mT
        return Terms(value.detach(), gradient.mT.detach(), H)


def _slopes(y: Tensor, x: Tensor, graph: bool = False) -> Tensor:
    """The gradient of y () in x, zero where y does not depend on x."""
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y, x, retain_graph=True, create_graph=graph, materialize_grads=True)[0]


def _jacobian(y: Tensor, x: Tensor, at_once: bool, graph: bool = False) -> Tensor:
    """∂y/∂x of vectors, (len(y), len(x)), all rows in one batched pass or one after another."""
    if not at_once:
        return torch.stack([_slopes(each, x, graph) for each in y])
    if not y.requires_grad:
        return torch.zeros(len(y), len(x), dtype=y.dtype, device=y.device)
    eye = torch.eye(len(y), dtype=y.dtype, device=y.device)
    (rows,) = torch.autograd.grad(
        y, x, eye, retain_graph=True, create_graph=graph, materialize_grads=True, is_grads_batched=True
    )
    return rows


# -------------------------------------------------------------------------------- the bound


@final
class Sites(torch.nn.Module):
    """What is kept of n members, b_i | g ~ N(c_i - K_iᵀg, S_i⁻¹), as buffers."""

    centre: Tensor  # c, (n, r)
    precision: Tensor  # S, (n, r, r)
    slope: Tensor  # K, (n, P, r)
    rho: Tensor  # (n,), the next step of the locals alone
    visited: Tensor  # (n,)

    def __init__(self, n: int, start: tuple[Tensor, Tensor], scale: float) -> None:
        super().__init__()
        b, g = start
        eye = torch.eye(len(b), dtype=b.dtype, device=b.device)
        self.register_buffer("centre", b.repeat(n, 1))
        self.register_buffer("precision", (scale**-2 * eye).repeat(n, 1, 1))
        self.register_buffer("slope", g.new_zeros(n, len(g), len(b)))
        self.register_buffer("rho", g.new_ones(n))
        self.register_buffer("visited", torch.zeros(n, dtype=torch.bool, device=g.device))

    def of(self, index: Tensor, mean: Tensor) -> Locals:
        """What is kept of some members (B,), at m_g; those never visited begin at the mean of all that were."""
        kept, new = [x[index] for x in (self.centre, self.precision, self.slope)], ~self.visited[index]
        if bool(self.visited.any()) and bool(new.any()):
            for x, whole in zip(kept, (self.centre, self.precision, self.slope), strict=True):
                x[new] = whole[self.visited].mean(0)
        centre, precision, slope = kept
        return Locals(centre - mean @ slope, precision, slope, self.rho[index])

    def keep(self, index: Tensor, mean: Tensor, here: Locals) -> None:
        """Take what was found for some members at q(g) of this mean."""
        self.centre[index], self.precision[index] = here.mean + mean @ here.slope, here.precision
        self.slope[index], self.rho[index], self.visited[index] = here.slope, here.rho, True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("message", "pull", "shared", "shared_pull", "total", "total_pull"):  # that 0.2.0 kept as well
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class FreshElbo(NamedTuple):
    """An unbiased estimate of an ELBO in nats, with its standard error.

    >>> str(FreshElbo(-1234.5, 0.21))
    'on 64 fresh draws the ELBO is -1234.5 ± 0.2'
    """

    elbo: float
    error: float

    def __str__(self) -> str:
        return f"on {_DRAWS} fresh draws the ELBO is {self.elbo:.9g} ± {self.error:.1g}"


@final
class Visits(BoundOfMembers):
    """The bound L* of q(g), by visits to the members of a plate, whose sites they move, in batches."""

    kind = "with memoised locals"

    def __init__(self, sites: Sites, density: PlateDensity, num_particles: int) -> None:
        self.sites, self.density, self.num_particles = sites, density, num_particles
        self.dim, self.members, self.r = density.layout.P, density.layout.size, density.layout.r
        self.like, self.tolerance, self.seed = sites.centre, 0.0, drawn_seed()
        self.batches: list[tuple[Tensor, Tensor]] = self._in_batches()
        zero = self.like.new_zeros(self.dim)
        self.others = self.said = torch.outer(zero, zero), zero  # Λ and h beside the batches, and with their members

    def _in_batches(self) -> list[tuple[Tensor, Tensor]]:
        """All members in random batches of the size of the subsample; which of each batch were in none before."""
        n, size, device = self.members, self.density.layout.members, self.like.device
        order = torch.arange(n) if size == n else torch.randperm(n)
        places = [torch.arange(first, first + size) for first in range(0, n, size)]
        return [(order[place % n].to(device), (place < n).to(device)) for place in places]

    def tensors(self) -> tuple[Tensor, ...]:
        """The members of each batch: what the model reads is not known."""
        return tuple(index for index, _ in self.batches)

    def known_data(self) -> tuple[Tensor, ...]:
        """None: the batches are random."""
        return ()

    def noise(self, members: int) -> tuple[Tensor, Tensor]:
        """z of the members, (S, B, r), and of the globals, (S, P), in antithetic pairs."""
        quasi = Quasi(self.num_particles // 2, seed=drawn_seed())
        half = quasi(self.like.new_zeros(members, self.r)).movedim(0, -1)  # (B, r, S/2)
        root, _ = linalg.small_cholesky(half @ half.mT / half.shape[-1])
        half = linalg.small_solve(root, half).movedim(-1, 0)
        return torch.cat([half, -half]), Antithetic(self.num_particles)(self.like.new_zeros(self.dim))

    def first(self, q: PrecisionCholeskyGaussian) -> None:
        """Visit the batches in turn."""
        batches, optimizer = self.batches, VN(q)
        for batch in batches:
            self.visit(q, optimizer, batch)
        self.batches, self.others = batches, (0 * self.others[0], 0 * self.others[1])

    def visit(
        self, q: PrecisionCholeskyGaussian, optimizer: NaturalGradientVI, batch: tuple[Tensor, Tensor], rounds: int = 40
    ) -> None:
        """Take steps of q(g) until it is near the best of a batch and of what those before have said."""
        # rounds: steps of q(g) on a batch at the first visits
        self.batches = [batch]
        for _ in range(rounds):
            near = bool(optimizer.evaluate(self).norm2 <= _NEAR**2)
            optimizer.step(self)
            if near:
                break
        assert optimizer.last is not None
        if not bool(optimizer.last.accepted):
            self.expected_energy(q.frame())
        self.others = self.said

    def summed(self, frame: Frame, allowed: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solve all members, which keep their sites."""
        return self._pass(frame, self.seed, allowed)

    @torch.no_grad()
    def norm_at(self, frame: Frame) -> float:
        """The natural norm over all coordinates on fresh draws, without a step of anything."""
        _, g, H, left = self._pass(frame, drawn_seed(), math.inf, keeps=False)
        return math.hypot(natural_norm(frame, g, H), float(left.sqrt()))

    def _pass(
        self, frame: Frame, seed: int, allowed: float, keeps: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, P, share = frame.mean, self.dim, 1 / len(self.batches)
        precision, pull = self.others
        value = 0.5 * (precision * (frame.dense() @ frame.dense().mT + mean[:, None] * mean)).sum() - pull @ mean
        g, H, left, shared_g, shared_H = (mean.new_zeros(shape) for shape in ((P,), (P, P), (), (P,), (P, P)))
        visited = min(self.members, sum(len(index) for index, _ in self.batches))
        for number, (index, new) in enumerate(self.batches):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + number)
                z = self.noise(len(index))
            here, seen, norm2, shared = self._settled(index, frame, z, allowed**2 / visited)
            if keeps:
                self.sites.keep(index, mean, here)
            each_g, each_H = seen.onto_globals(here.slope)
            # the terms that all share are seen at the draws of each batch
            value, left = value + seen.value[new].sum() + share * shared[0], left + norm2[new].sum()
            g, H = g + each_g[new].sum(0), H + each_H[new].sum(0)
            shared_g, shared_H = shared_g + share * shared[1], shared_H + share * shared[2]
        if keeps:
            self.said = precision + H, pull + H @ mean - g
        value = value - 0.5 * self.members * self.r * math.log(2 * math.pi)
        return value, g + shared_g + precision @ mean - pull, H + shared_H + precision, left

    def _settled(
        self, index: Tensor, frame: Frame, z: tuple[Tensor, Tensor], share: float, most: int = 40
    ) -> tuple[Locals, Seen, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The members of a batch at their best for q(g), what is seen there, and the terms that all share."""
        # most: steps of the members alone
        dense, r = frame.dense(), self.r

        def see(here: Locals) -> Seen:
            root = here.root
            value, g, H = self.density.terms(index, *_drawn(here, root, frame, z))
            shared[:] = value[-1], g[-1, r:], H[-1, r:, r:]  # the same wherever the members are
            return Seen.of(value[:-1], g[:-1], H[:-1], root)

        def goes_on(norm2: Tensor) -> bool:
            return bool((~(norm2 <= share)).any())  # NaN too

        shared: list[Tensor] = []
        at = self.sites.of(index, frame.mean)
        here, seen, norm2 = settled(at, see, dense, share, goes_on, most, near=_NEAR**2)
        # the mean of ½ δᵀHδ over the draws in values gives way to its expectation ½ tr(HV)
        b, g = _drawn(here, here.root, frame, z)
        off = torch.cat([b - here.mean, (g - frame.mean)[:, None].expand(-1, len(index), -1)], -1)
        error = here.cliques(here.root, dense @ dense.mT) - torch.einsum("sbi,sbj->bij", off, off) / len(off)
        seen = seen._replace(value=seen.value + 0.5 * (seen.H * error).sum((1, 2)))
        value, slope, H = shared
        return here, seen, norm2, (value + 0.5 * (H * error[0, r:, r:]).sum(), slope, H)

    @torch.no_grad()
    def fresh_elbo(self, frame: Frame) -> FreshElbo:
        """Average log p - log q over joint draws of the globals and all members, which are seen a batch at a time."""
        generator = torch.Generator().manual_seed(drawn_seed())

        def mirrored(*shape: int) -> Tensor:
            half = torch.randn(_DRAWS // 2, *shape, generator=generator, dtype=self.like.dtype).to(self.like.device)
            return torch.cat([half, -half])

        z_g = mirrored(self.dim)
        log_weight = 0.5 * z_g.square().sum(-1) + frame.dense().diagonal().log().sum()  # -log q(g), (S,)
        for number, (index, new) in enumerate(self.batches):
            z, here = (mirrored(len(index), self.r), z_g), self.sites.of(index, frame.mean)
            weights = torch.cat([new.to(z_g), z_g.new_full((1,), float(number == 0))])  # what all share counts once
            log_q = here.root.diagonal(dim1=-2, dim2=-1).log() - 0.5 * z[0].square()
            log_weight = log_weight + self.density.log_joint(index, *_drawn(here, here.root, frame, z), weights)
            log_weight = log_weight - log_q.sum(-1)[:, new].sum(-1)
        constant = 0.5 * (self.dim + self.members * self.r) * math.log(2 * math.pi)
        pairs = constant + log_weight.reshape(2, -1).mean(0)
        return FreshElbo(float(pairs.mean()), float(pairs.std() / len(pairs) ** 0.5))

    def state(self) -> dict[str, Any]:
        """Copy what a pass begins from."""
        sites = {name: value.clone() for name, value in self.sites.state_dict().items()}
        of_pass = {"left": self.left, "gradient": self.gradient, "seed": self.seed, "batches": self.batches}
        return {"sites": sites, **of_pass}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.left, self.gradient, self.seed = state["left"], state["gradient"], state["seed"]
        self.sites.load_state_dict(state["sites"])
        self.batches = state["batches"]


def _drawn(here: Locals, root: Tensor, frame: Frame, z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Draws from the marginals of members: b_i, (S, B, r), and g, (S, P)."""
    off, own = frame.push(z[1]), linalg.small_tsolve(root, z[0].movedim(0, -1)).movedim(-1, 0)
    return here.mean - torch.einsum("sp,bpr->sbr", off, here.slope) + own, frame.mean + off


# -------------------------------------------------------------------------------- the guide


class AutoLocalGaussian(AutoGuide):
    """A Gaussian guide with a stored site for each member of a subsampled plate, and a dense one over the globals.

    Take it for hierarchical models with local latents in one plate, ``with pyro.plate("patients", n,
    subsample_size=B)``, of which a run of the model sees B members.  The memory is that of n sites of r (1 + r + P)
    numbers, with r latents of a member and P globals.  `fit_guide` fits it, without a learning rate.

    Globals and the locals of a member may each be several sites, in any supports; plates of rows within a member, run
    in full, are fine.  The cost grows with (r + P)²; a few tens of globals are many.

    That members do not read one another's latents is tried on the members of a run.  With a subsample of one there is
    no other member to try it with, and that the members are independent given the globals is taken on trust.

    Args:
        model: a Pyro model.
        plate: the name of the plate of the local latents.
        init_loc_fn: a strategy of `pyro.infer.autoguide.initialization`.
        init_scale: the standard deviation of every latent at the start, in unconstrained space.
        num_particles: the number of draws a batch and evaluation, even, and at least 2 (r + 1).

    Raises:
        InputError: on set-up, models it is not for (`PlateLayout`, `PlateDensity`), too few particles; on use, a guide
            that was not set up.

    >>> import pyro
    >>> from torchngvi.adapters.pyro import fit_guide
    >>> _ = torch.manual_seed(0)
    >>> y = torch.randn(200, 4, dtype=torch.float64) + torch.randn(200, 1, dtype=torch.float64)
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=torch.float64), 10.0))
    ...     with pyro.plate("patients", len(y), subsample_size=50) as index:
    ...         b = pyro.sample("b", dist.Normal(mu, 1.0))
    ...         pyro.sample("y", dist.Normal(b[:, None], 1.0).expand([50, 4]).to_event(1), obs=y[index])
    >>> guide = AutoLocalGaussian(model, "patients")
    >>> fit_guide(model, guide, y, options={"progress": False}).converged
    True
    >>> bool((guide.median()["mu"] - y.mean() * 0.9999).abs() < 1e-3), guide.median()["b"].shape
    (True, torch.Size([200]))
    """

    memo: Sites
    q: PrecisionCholeskyGaussian

    def __init__(
        self,
        model: Callable[..., Any],
        plate: str,
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
        num_particles: int = 16,
    ) -> None:
        read_callable("model", model, "is a function or a module that samples")
        read_callable("init_loc_fn", init_loc_fn, "is a strategy such as init_to_median")
        init_scale = read_number("init_scale", init_scale, "is a standard deviation in unconstrained space", above=0)
        plate = read_instance("plate", plate, str, "is the name of a plate")
        num_particles = read_size("num_particles", num_particles, "counts draws")
        super().__init__(model)
        self.plate, self.init_scale, self.num_particles = plate, init_scale, num_particles
        self._init_loc_fn = init_loc_fn

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model once with these arguments to lay out the sites, unless that was done before; returns the guide.

        Raises:
            InputError: as `PlateLayout`; too few particles.
        """
        if self.prototype_trace is None:
            trace: Any = Call(self.model, args, kwargs).prototype(self._init_loc_fn)
            with torch.inference_mode(False), torch.no_grad():
                layout = PlateLayout(trace, self.plate)
                if self.num_particles % 2 or self.num_particles < 2 * (layout.r + 1):
                    raise InputError(
                        f"num_particles is even and at least 2 (r + 1) = {2 * (layout.r + 1)}, for draws of a member's "
                        f"{layout.r} latents with the covariance I; got {self.num_particles}."
                    )
                for name in ("_INPUT", "_RETURN"):
                    trace.remove_node(name)
                self.layout, self._start = layout, layout.start(trace)
                self._frames = {s.name: trace.nodes[s.name]["cond_indep_stack"] for s in layout.sites}
                self._prototype_frames = {f.name: f for frames in self._frames.values() for f in frames}
                self.prototype_trace = trace
                self.memo = Sites(layout.size, self._start, self.init_scale)
                self.q = PrecisionCholeskyGaussian(layout.P, mean=self._start[1], scale=self.init_scale)
        return self

    @property
    def posterior(self) -> PrecisionCholeskyGaussian:
        """The posterior q(g) of the globals, in unconstrained space, (P,).

        Raises:
            InputError: a guide that was not set up.
        """
        if self.prototype_trace is None:
            raise InputError("the guide has no posterior before it has seen the model: call guide.setup(*args) first.")
        return self.q

    def visits(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Visits:
        """The sites of the guide with the terms of a model, which visit members by their index, a batch at a time.

        Raises:
            InputError: as `setup` and `PlateDensity`.
        """
        self.setup(*args, **kwargs)
        with torch.inference_mode(False):
            density = PlateDensity(Call(model, args, kwargs), self.layout, self._start)
        return Visits(self.memo, density, self.num_particles)

    def elbo(self, *args: Any, **kwargs: Any) -> FreshElbo:
        """Estimate the ELBO over all members in nats, without bias, with its standard error, by one pass on new draws.

        Raises:
            InputError: as `visits`.
        """
        return self.visits(self.model, args, kwargs).fresh_elbo(self.posterior.frame())

    # -------------------------------------------------------------------------------- as a guide of Pyro

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the globals, and the locals of a subsample of the plate given them; the values of the sites by name."""
        self.setup(*args, **kwargs)
        q, memo, layout, name = self.posterior, self.memo, self.layout, self._pyro_name
        plates, mine = self._create_plates(*args, **kwargs), poutine.runtime.InferDict(is_auxiliary=True)
        shared = dist.MultivariateNormal(q.mean.detach(), precision_matrix=q.precision.detach())
        g = pyro.sample(f"_{name}_globals", shared, infer=mine)
        with plates[self.plate] as index:
            shape = (len(index), *(1,) * (-layout.dim_of_plate - 1))
            c, K, S = (x[index].reshape(*shape, *x.shape[1:]) for x in (memo.centre, memo.slope, memo.precision))
            given = dist.MultivariateNormal(c - (g[..., None, :] @ K)[..., 0, :], precision_matrix=S)
            b = pyro.sample(f"_{name}_locals", given, infer=mine)
        sample = g.shape[:1] if g.ndim > 1 else g.shape[:0]  # vectorised particles
        return self._sites_at(plates, b.reshape(*sample, len(index), layout.r), g.reshape(*sample, layout.P))

    def _sites_at(self, plates: dict[str, Any], b: Tensor, g: Tensor) -> dict[str, Tensor]:
        nesting = max((-f.dim for f in self._prototype_frames.values()), default=0)
        sample, result = g.shape[:-1], {}
        for site in self.layout.sites:
            u = self.layout.free(site, b, g)
            x = site.transform(u)
            each = site.transform.inv.log_abs_det_jacobian(x, u)
            if sample:
                room = (1,) * (nesting - site.batch_dims)
                x, each = (t.reshape(*sample, *room, *t.shape[len(sample) :]) for t in (x, each))
            event = len(site.shape) - site.batch_dims
            each = sum_rightmost(each, each.ndim - x.ndim + event)
            with ExitStack() as stack:
                for frame in self._frames[site.name]:
                    stack.enter_context(plates[frame.name])
                result[site.name] = pyro.sample(site.name, dist.Delta(x, log_density=each, event_dim=event))
        return result

    @torch.no_grad()
    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The quantiles of each latent at levels between 0 and 1, (levels, *shape), the plate at its full size."""
        frame, memo = self.posterior.frame(), self.memo
        root, _ = linalg.small_cholesky(memo.precision)
        own = linalg.small_inverse(root).square().sum(-2)
        across = (frame.dense().mT @ memo.slope).square().sum(-2)
        mean = memo.centre - frame.mean @ memo.slope
        z = torch.special.ndtri(torch.as_tensor(read_shares("quantiles", quantiles)).to(mean))
        b = mean + z[:, None, None] * (own + across).sqrt()
        g = frame.mean + z[:, None] * frame.variance.sqrt()
        return {site.name: site.transform(self.layout.free(site, b, g)) for site in self.layout.sites}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of each latent, the plate at its full size."""
        return {name: value[0] for name, value in self.quantiles([0.5]).items()}


# -------------------------------------------------------------------------------- the fit


@final
class PassesOverPlate(PassesOverMembers):
    """Passes over the members of a plate, after the first visits."""

    bound: Visits

    def __init__(self, q: PrecisionCholeskyGaussian, visits: Visits, stop: Criterion) -> None:
        visits.tolerance = stop.tolerance
        super().__init__(q, visits, stop)
        self.name = "AutoLocalGaussian"

    def begin(self) -> None:
        """Visit all members once, unless an earlier run has."""
        if not bool(self.bound.sites.visited.all()):
            self.show("first visits")
            assert isinstance(self.q, PrecisionCholeskyGaussian)
            self.bound.first(self.q)
            self.show("")

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Say how far from the best q is on draws that no pass has seen."""
        ending, frame = super().ending(stop, last), self.q.frame()
        self.show("fresh draws")
        judged = self.bound.fresh_elbo(frame)
        self.show("")
        if not math.isfinite(judged.elbo):
            reason = f"because {judged}: no Gaussian fits inside the support. Transform the constrained coordinates."
            return ending._replace(converged=False, reason=reason, loss=-judged.elbo, members=torch.tensor(False))
        ending = ending._replace(loss=-judged.elbo)
        if last.stalled >= _STALL:
            reason = (
                f"because {last.stalled} steps in a row were rejected ({last.at()}): on the draws of the run "
                "the bound and its derivatives agree no further. Use more num_particles, or a larger tolerance."
            )
            return ending._replace(reason=f"{reason} On{str(judged)[2:]}.")
        if not ending.converged:
            return ending._replace(reason=f"{ending.reason.rstrip('.')}; {judged}.")
        norm = self.bound.norm_at(frame)
        above = 0.5 * norm**2
        reason = (
            f"{ending.reason.rstrip('.')}; {judged}, and the norm is {norm:.2g}, which puts q about {above:.2g} nats "
            f"from the best, {1e3 * above / self.bound.members:.2g} a thousand members."
        )
        return ending._replace(reason=reason, norm=norm)

    def settings(self) -> dict[str, str]:
        """The problem, with the sizes of plate and subsample."""
        layout = self.bound.density.layout
        sizes = f"{layout.plate}: {layout.members} of {layout.size}, {self.bound.num_particles} particles"
        return {**super().settings(), "plate": sizes}


def fit_locals(call: Call, guide: AutoLocalGaussian, options: dict[str, Any], passes: int = 100) -> FitResult:
    """Fit a guide with memoised locals, in place: what `fit_guide` does with one."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"of the options of fit_guide an AutoLocalGaussian knows {', '.join(_KNOWN)}; got {', '.join(unknown)}."
        )
    visits = guide.visits(*call)
    layout = visits.density.layout
    dim = layout.size * layout.r + layout.P
    tolerance = options.get("tolerance")
    tolerance = 0.1 * math.sqrt(max(dim, 100) / 100) if tolerance is None else tolerance
    stop: Criterion = NormBelow(tolerance) | Evaluations(options.get("max_evaluations", passes)) | Stalled(_STALL)
    if options.get("max_seconds") is not None:
        stop = stop | Seconds(options["max_seconds"])
    stop = joined(stop, options.get("stop"))
    return Loop(
        PassesOverPlate(guide.posterior, visits, stop),
        stop,
        callbacks=checked_callbacks(options.get("callbacks", ())),
        progress=options.get("progress", True),
        checkpoint=options.get("checkpoint"),
        every=1,
    ).run()
