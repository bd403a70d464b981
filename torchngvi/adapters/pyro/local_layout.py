"""Where the latents of a Pyro model with a subsampled plate are: in each member of the plate, or outside it."""

from typing import Any, cast

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from torchngvi.adapters.pyro.sites import Layout, Site, Values, check_size, random_sites
from torchngvi.errors import InputError


class PlateLayout:
    """The places of the latents: of each member of the plate in b_i, (r,), and of all others in g, (P,)."""

    def __init__(self, trace: Trace, plate: str) -> None:
        frames = [f for site in random_sites(trace) for f in site["cond_indep_stack"] if f.name == plate]
        if not frames:
            raise InputError(f"no site of the model is in a plate {plate!r}; name the plate of the local latents.")
        if not frames[0].vectorized:
            raise InputError(f"the model loops over the plate {plate!r}; write it as `with pyro.plate(...) as index`.")
        check_size(frames[0])
        self.plate, self.dim = plate, frames[0].dim
        self.members, self.size = frames[0].size, frames[0].full_size or frames[0].size
        layout = Layout(_without(trace, plate))  # refuses what a Gaussian cannot stand for
        missing = [site.name for site in layout.sites if site.idle is not None]
        if missing:
            raise InputError(
                f"the site {missing[0]!r} comes from obs_mask=, which memoised locals do not know: nothing would "
                "confine its values at rows that are observed. Mask the likelihood (poutine.mask) in its place, which "
                "leaves the missing rows out."
            )
        inside = {s["name"] for s in random_sites(trace) if any(f.name == plate for f in s["cond_indep_stack"])}
        self.sites, self.shapes = layout.sites, layout.shapes
        self.places: dict[str, slice] = {}  # in b_i or in g
        widths = {True: 0, False: 0}
        for site in layout.sites:
            local = site.name in inside
            width = site.free.numel() // (self.members if local else 1)
            self.places[site.name] = slice(widths[local], widths[local] + width)
            widths[local] += width
        self.locals = frozenset(site.name for site in layout.sites if site.name in inside)
        self.r, self.P = widths[True], widths[False]
        if not self.r:
            raise InputError(f"no latent site is in the plate {plate!r}; AutoGaussian is the guide for such a model.")
        if not self.P:
            raise InputError(
                f"every latent site is in the plate {plate!r}, whose members have nothing in common: there is nothing "
                "to fit but one member after another. Fit log_joint of a member."
            )
        self.weights: Tensor | None = None  # of the members and of what they share, (B + 1,)

    def axis(self, site: Site) -> int:
        """The axis of the plate in the unconstrained value of a local site, from the left."""
        return site.batch_dims + self.dim

    def free(
        self,
        site: Site,
        b: Tensor,  # (*sample, B, r)
        g: Tensor,  # (*sample, P)
    ) -> Tensor:
        """The unconstrained value of a site, (*sample, *free), for as many members as b has."""
        place, sample = self.places[site.name], g.shape[:-1]
        if site.name not in self.locals:
            return g[..., place].reshape(sample + site.free)
        axis = self.axis(site)
        rest = site.free[:axis] + site.free[axis + 1 :]
        return b[..., place].reshape(*b.shape[:-1], *rest).movedim(b.ndim - 2, b.ndim - 2 + axis)

    def start(self, trace: Trace) -> tuple[Tensor, Tensor]:
        """The unconstrained values of a trace: the mean of b_i over its members, (r,), and g, (P,)."""
        b, g = [], []
        for site in self.sites:
            u = site.transform.inv(trace.nodes[site.name]["value"])
            if site.name in self.locals:
                b.append(u.movedim(self.axis(site), 0).reshape(self.members, -1).mean(0))
            else:
                g.append(u.reshape(-1))
        return torch.cat(b).detach(), torch.cat(g).detach()

    def constrained(self, theta: Tensor, nesting: int = 0) -> tuple[Values, Tensor]:
        """The values of the sites, and the log Jacobian of their supports with the weights of the terms."""
        assert self.weights is not None
        sample, ends = theta.shape[:-1], self.members * self.r
        b, g = theta[..., :ends].reshape(*sample, self.members, self.r), theta[..., ends:]
        log_jacobian, values = theta.new_zeros(sample), {}
        for site in self.sites:
            u = self.free(site, b, g)
            x = site.transform(u)
            each = site.transform.log_abs_det_jacobian(u, x)
            if site.name in self.locals:
                each = each.movedim(len(sample) + self.axis(site), -1).reshape(*sample, -1, self.members).sum(-2)
                log_jacobian = log_jacobian + weighted(each, self.weights[:-1]).sum(-1)
            else:
                log_jacobian = log_jacobian + weighted(each.reshape(*sample, -1).sum(-1), self.weights[-1])
            values[site.name] = x.reshape(sample + (1,) * (nesting - site.batch_dims) + site.shape)
        return values, log_jacobian


def weighted(terms: Tensor, weights: Tensor) -> Tensor:
    """Terms times their weights; 0 where the weight is 0, even of a term that is not finite.

    >>> weighted(torch.tensor([2.0, -torch.inf]), torch.tensor([0.5, 0.0]))
    tensor([1., 0.])
    """
    return weights * torch.where(weights == 0, 0.0, terms)


def _without(trace: Trace, plate: str) -> Trace:
    """A copy of a trace whose sites are not in the plate."""
    bare = trace.copy()
    for name, site in trace.nodes.items():
        if site["type"] == "sample":
            frames = tuple(frame for frame in site["cond_indep_stack"] if frame.name != plate)
            cast(Any, bare.nodes)[name] = {**site, "cond_indep_stack": frames}
    return bare
