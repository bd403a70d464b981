"""Leave-one-group-out densities of a mixed model: how well each group is predicted by the others.

With the random effects integrated out, the likelihood is a product over groups, p(y | g) = Π p(y_i | g) of the globals
g.  So draws of their posterior, weighted by 1/p(y_i | g), are draws of the posterior without group i (Merkle, Furr and
Rabe-Hesketh 2019), and

    log p(y_i | the others) = -log E[1/p(y_i | g)]

by Pareto-smoothed weights.  Where rows have weights the group is taken out with them, and the density is that of its
rows as they are.  Where their k-hat says that they are of no use, the model is fitted without the group.
"""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.diagnostics.psis import LeftOut, smoothed
from torchngvi.errors import InputError
from torchngvi.mixed_models import asked
from torchngvi.mixed_models.integrated import Weighted, integrated
from torchngvi.mixed_models.locals import ByQuadrature, Locals
from torchngvi.models import GaussianMixed, MarginalMixed
from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors.gaussian import Gaussian

_AT_ONCE = 4_000_000  # importance weights that are smoothed
Integrated = TypeVar("Integrated", bound=IntegratedMixed)


@dataclass(frozen=True, repr=False)
class GroupsLeftOut(LeftOut):
    """What the posterior says of each group of a mixed model that it has not seen.

    Attributes:
        density: log p(y_i | the other groups) of all rows of each group together, (n,), in nats; of rows as they are,
            without their weights.
        in_sample: the same given all groups.
        resolved: for which groups the model was fitted without them.
        evaluations: of those fits.
        k_hat: of the importance weights that take each group out, (n,); NaN where there were none.
        groups: the names of the groups.
    """

    k_hat: Tensor  # (n,)
    groups: tuple[str, ...]

    parts = "groups"


@tracked
@torch.no_grad()
def leave_one_group_out(
    locals: Locals,
    weighted: Weighted,
    posterior: Gaussian,
    names: tuple[str, ...],
    worst: float,
    seed: int,
) -> GroupsLeftOut:
    """Compute log p(y_i | the others) of every group, see `MixedResult.leave_one_group_out`."""
    if not isinstance(locals, ByQuadrature):
        raise InputError(
            "leave_one_group_out needs the likelihood of each group, its random effects integrated out, and this fit "
            "has a Gaussian over all coordinates: fit with marginalise='quadrature'."
        )
    worst = read_number("worst", worst, "bounds a k-hat", at_least=0, infinite=True)
    target, seed = locals.target, asked.seed_of(seed)
    target.rows.check_one_process("leaving groups out")
    there = weighted.weights > 0
    theta, log_weights = weighted.theta[there], weighted.weights[there].double().log()[:, None]
    marginal = _marginal(target)
    as_they_are = _reweighed(marginal, torch.ones_like(target.rows.weights))
    log_p = _of_groups(as_they_are, theta)  # (S, n)
    fitted = log_p if bool((target.rows.weights == 1).all()) else _of_groups(marginal, theta)
    density, k_hat = _divided(log_weights, fitted, log_p)
    inside = (log_weights + log_p).logsumexp(0) - log_weights.logsumexp(0)
    resolved = ~(k_hat <= worst) | (worst == 0)
    evaluations = 0
    for group in resolved.nonzero()[:, 0].tolist():
        weights = torch.where(target.rows.groups == group, 0.0, target.rows.weights)
        without = _reweighed(target, weights)
        found = integrated(without, copy.deepcopy(posterior), len(weighted.theta), seed, False, fitted=True)
        again = _of_groups(as_they_are, found.draws.theta)[:, group]
        density[group] = (found.draws.weights.double().log() + again).logsumexp(0)
        evaluations += found.fit.evaluations
    return GroupsLeftOut(density, inside, resolved, evaluations, k_hat, names)


def _of_groups(
    marginal: MarginalMixed,
    theta: Tensor,  # (S, P)
) -> Tensor:
    """log p(y_i | g) of each group, (S, n)."""
    return torch.cat([marginal.of_groups(part).double() for part in marginal.chunks(theta)])


def _divided(
    log_weights: Tensor,  # (S, 1)
    fitted: Tensor,  # log p(y_i | g) as it is in the posterior, (S, n)
    log_p: Tensor,  # (S, n)
) -> tuple[Tensor, Tensor]:
    """The log densities of groups by weights that take each of them out, and their k-hat, (n,)."""
    densities, k_hats = [], []
    for groups in torch.arange(log_p.shape[1], device=log_p.device).split(max(1, _AT_ONCE // len(log_p))):
        new = smoothed(log_weights - fitted[:, groups])
        densities.append((new.log_weights + log_p[:, groups]).logsumexp(0))
        k_hats.append(new.k_hat)
    return torch.cat(densities), torch.cat(k_hats)


def _marginal(target: IntegratedMixed) -> MarginalMixed:
    """The same log joint group by group; for Gaussian noise by a quadrature that is exact."""
    if isinstance(target, MarginalMixed):
        return target
    return MarginalMixed(target.model, learned=target.learned)


def _reweighed(target: Integrated, weights: Tensor) -> Integrated:
    """The log joint with other weights of rows, under the same prior."""
    model = copy.copy(target.model)
    model.rows = copy.copy(model.rows)
    model.rows.weights = weights
    options: dict[str, Any] = {"learned": target.learned}
    if isinstance(target, MarginalMixed):
        new: Any = MarginalMixed(model, target.nodes, target.start, **options)
    else:
        new = GaussianMixed(model, **options)
    new.parameter_prior = target.parameter_prior
    return new
