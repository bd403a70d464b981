"""Leave-one-group-out densities of a mixed model: how well each group is predicted by the others.

With the random effects integrated out, the likelihood is a product over groups, p(y | g) = Π p(y_i | g) of the globals
g.  So draws of their posterior, weighted by 1/p(y_i | g), are draws of the posterior without group i (Merkle, Furr and
Rabe-Hesketh 2019), and

    log p(y_i | the others) = -log E[1/p(y_i | g)]

by Pareto-smoothed weights.  Where their k-hat says that they are of no use, the model is fitted without the group.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchngvi.diagnostics.left_out import LeftOut
from torchngvi.diagnostics.psis import smoothed
from torchngvi.errors import InputError
from torchngvi.mixed_models import asked
from torchngvi.mixed_models.integrated import Weighted, integrated
from torchngvi.mixed_models.locals import ByQuadrature, Locals
from torchngvi.models import GaussianMixed, MarginalMixed
from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.posteriors.gaussian import Gaussian


@dataclass(frozen=True, repr=False)
class GroupsLeftOut(LeftOut):
    """What the posterior says of each group of a mixed model that it has not seen.

    Attributes:
        density: log p(y_i | the other groups) of all rows of each group together, (n,), in nats.
        in_sample: the same given all groups.
        resolved: for which groups the model was fitted without them.
        evaluations: of those fits.
        k_hat: of the importance weights that take each group out, (n,); NaN where there were none.
        groups: the names of the groups.
    """

    k_hat: Tensor  # (n,)
    groups: tuple[str, ...]

    parts = "groups"


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
    if not isinstance(worst, int | float) or not worst >= 0:
        raise InputError(f"worst bounds a k-hat, and is not negative; got {worst}.")
    target, seed = locals.target, asked.seed_of(seed)
    target.rows.check_one_process("leaving groups out")
    marginal = _marginal(target)
    there = weighted.weights > 0
    theta, log_weights = weighted.theta[there], weighted.weights[there].double().log()[:, None]
    log_p = torch.cat([marginal.of_groups(part) for part in marginal.chunks(theta)]).double()  # (S, n)
    without = smoothed(log_weights - log_p)
    density = (without.log_weights + log_p).logsumexp(0)
    inside = (log_weights + log_p).logsumexp(0) - log_weights.logsumexp(0)
    resolved = ~(without.k_hat <= worst) | (worst == 0)
    evaluations = 0
    for group in resolved.nonzero()[:, 0].tolist():
        found = integrated(_without(target, group), copy.deepcopy(posterior), len(weighted.theta), seed, False)
        again = torch.cat([marginal.of_groups(part)[:, group] for part in marginal.chunks(found.draws.theta)])
        density[group] = (found.draws.weights.double().log() + again.double()).logsumexp(0)
        evaluations += found.fit.evaluations
    return GroupsLeftOut(density, inside, resolved, evaluations, without.k_hat, names)


def _marginal(target: IntegratedMixed) -> MarginalMixed:
    """The same log joint group by group; for Gaussian noise by a quadrature that is exact."""
    if isinstance(target, MarginalMixed):
        return target
    return MarginalMixed(target.model, learned=target.learned, scales=target.scales)


def _without(target: IntegratedMixed, group: int) -> IntegratedMixed:
    """The log joint without the rows of a group, under the same prior."""
    model = copy.copy(target.model)
    model.rows = copy.copy(model.rows)
    model.rows.weights = torch.where(model.rows.groups == group, 0.0, model.rows.weights)
    options: dict[str, Any] = {"learned": target.learned, "scales": target.scales}
    if isinstance(target, MarginalMixed):
        new: IntegratedMixed = MarginalMixed(model, target.nodes, target.start, **options)
    else:
        new = GaussianMixed(model, **options)
    new.parameter_prior = target.parameter_prior
    return new
