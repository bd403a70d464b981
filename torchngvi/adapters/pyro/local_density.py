"""The log joint of a Pyro model with local latents in a plate, member by member, on a subsample of the plate.

Under the model the members i of the plate are independent given the global latents g,

    log p(data, g, b) = -ℓ_0(g) - Σ_i ℓ_i(b_i, g),

with the log Jacobians of the supports among the terms.  With weights u of the terms and one shift t = (t_b, t_g) for
all draws and members, L(u, t) = mean_s [u_0 ℓ_0(g_s + t_g) + Σ_i u_i ℓ_i(b_is + t_b, g_s + t_g)] has all that is
wanted as derivatives at u = 1, t = 0, because each term has a latent vector b_i of its own:

    E[ℓ_i] = ∂L/∂u_i        E[∇ℓ_i] = ∂²L/∂u_i∂t        E[∇²ℓ_i] = ∂³L/∂u_i∂t∂t.

The cost does not depend on the number of members beyond one run of the model, so that a model is run as it is written.
"""

import math
from typing import Any, NamedTuple, cast, final

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from torchngvi.adapters.pyro.batching import POINTS, best_way
from torchngvi.adapters.pyro.density import validate
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
from torchngvi.errors import InputError
from torchngvi.numerics.versions import tracked

_SMALL = 2000  # numbers of locals up to which derivatives are taken in one batched pass; beyond, caches are too small
_SPREAD = 0.1  # of the points where the model is tried, around the start


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
class PlateDensity:
    """The terms of a Pyro model on a subsample of a plate, whose members it asks for by their index."""

    enumerates = False

    def __init__(self, call: Call, layout: PlateLayout, start: tuple[Tensor, Tensor]) -> None:
        self.call, self.layout, (b, g) = call, layout, start
        self.index, self.nesting = torch.arange(layout.size - layout.members, layout.size, device=g.device), 0
        theta = torch.cat([b.expand(layout.members, -1).flatten(), g])
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(POINTS, len(theta), generator=generator, dtype=torch.float64).to(theta)
        points = theta + _SPREAD * noise
        layout.weights = 0.5 + torch.rand(layout.members + 1, generator=generator, dtype=torch.float64).to(theta)
        self.nesting = self._nesting(theta)
        self._check_separate(points[0])
        self._validate(theta)
        self.batched_by, self._batched = best_way(cast(Any, self), points)

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

    def one(self, theta: Tensor) -> Tensor:
        """The weighted log joint of one θ, (D,) -> ()."""
        values, log_jacobian = self.layout.constrained(theta)
        return log_jacobian + sum(log_prob.sum() for log_prob in self.scored(values))

    # -------------------------------------------------------------------------------- expectations

    @tracked
    @torch.enable_grad()
    def log_joint(self, index: Tensor, b: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        """-Σ_i u_i ℓ_i - u_0 ℓ_0 of each draw (S,), of members (B,) with b (S, B, r), g (S, P) and u (B + 1,)."""
        self.index, self.layout.weights = index, weights
        return self._batched(torch.cat([b.flatten(-2), g], -1)).detach().to(g.dtype)

    @tracked
    @torch.enable_grad()
    def terms(self, index: Tensor, b: Tensor, g: Tensor) -> Terms:
        """E[ℓ_i] of members (B,), and last E[ℓ_0], over draws b (S, B, r) and g (S, P), with their derivatives."""
        r, k, small = b.shape[-1], b.shape[-1] + g.shape[-1], b.numel() <= _SMALL
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
