"""Leave-one-out predictive densities of rows, or groups of rows, of a regression, by dividing out their sites.

`cavities` takes the sites out and lets the others respond; where they respond by more than a bound, the optimum without
the rows is found by a fit.  `joint` has the densities of several rows together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.diagnostics import log_expected_likelihood
from torchngvi.diagnostics.left_out import LeftOut
from torchngvi.errors import InputError, PairError
from torchngvi.models import GeneralizedLinear
from torchngvi.models.arguments import read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.inference_mode import tracked
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.solved.cavities import WIDEST, Optimum, refit
from torchngvi.solved.joint import joint_log_density

_FLAG = 1e-3  # ν² up to which corrected densities were right to 2e-4 on the problems it was chosen on
_AT_ONCE = 20_000_000  # numbers


@dataclass(frozen=True, repr=False)
class LeaveOneOut(LeftOut):
    """What q says of each row, or group of rows, that it has not seen.

    Attributes:
        density: log p(y_i | the other rows) under the Gaussian q_-i, (N,), in nats; of groups of all their rows
            together, (G,).
        in_sample: the same under q itself.
        resolved: where q_-i was found by a fit.
        evaluations: of those fits, all members of a batch at once.
        response: ν², by how much the other sites respond; of a design of more than 60 columns the same of the row's own
            site at its cavity.  Infinite where next to nothing but these rows determines some direction, so that they
            cannot be divided out of a q that is as exact as this one.
        shift: by how much the mean of q moves without them, in its standard deviations, (N, D).
        error: the standard error of the density of a group of several rows, which is an integral by draws; 0 of rows.
        groups: the names of the groups, sorted, in the order of all the others; None of rows.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> X, y = torch.ones(4, 1).double(), [0.0, 1.0, 2.0, 5.0]
    >>> model, q = GeneralizedLinear(X, y, "gaussian"), CholeskyGaussian(1, dtype=torch.float64)
    >>> result = fit(q, model, progress=False)
    >>> found = leave_one_out(q, model)
    >>> [round(x, 4) for x in found.density.tolist()]  # N(y_i; sum of the others/4, 1 + 1/4)
    [-2.6305, -1.2555, -1.1305, -8.2555]
    >>> round(found.total, 3), round(found.complexity, 3)
    (-13.272, 3.132)
    >>> print(leave_one_out(q, model, groups=["a", "a", "b", "b"]))
    elpd -14.72 ± 6.00 nats over 2 groups, p_loo 4.76; 0 of them by a fit without the group.
    """

    response: Tensor  # (N,)
    shift: Tensor  # (N, D)
    error: Tensor  # (N,)
    groups: tuple[Any, ...] | None = None

    @property
    def parts(self) -> str:  # type: ignore[override]
        """What is left out, a plural."""
        return "rows" if self.groups is None else "groups"


@tracked
def leave_one_out(
    q: Gaussian,
    model: GeneralizedLinear,
    flag: float = _FLAG,
    *,
    groups: Any = None,  # (N,)
) -> LeaveOneOut:
    """Compute the log predictive density of each row under the Gaussian fitted to the others, without N refits.

    One wants it to compare models and to find rows that a model does not expect.  A row is divided out of q as a site;
    the response of the other sites follows from the Hessian of L; and rows that they respond to strongly are fitted
    anew, all in a few batches.  Pareto-smoothed importance sampling, which ArviZ has, misses such rows: its k speaks
    of draws, and not of the sites.  Rows that tell of one another, such as visits of a patient, are left out together
    by `groups`.

    Args:
        q: the optimum of the model, dense, without batch dimensions.
        model: one design with rows of weights that are not negative, at the temperature 1.  Densities are of a row as
            it is, without its weight; a row of weight 0 is one that was left out anyway.
        flag: the ν² above which a row, or group, is fitted anew; 0 for all, infinity for none but those that cannot be
            divided out.
        groups: of each row a number or name of its group, to leave out whole groups: then all that is returned is of
            groups, and the density that of all rows of one together.

    Returns:
        The densities, and how they were found.

    Raises:
        PairError: another model, or a posterior that is not dense.
        InputError: a q of another size or dtype than the model, or not at its optimum, a flag that is negative, groups
            of another number of rows or only one of them.
    """
    _check(q, model, flag)
    here, count = Optimum.of(q, model), len(model.X)
    if groups is not None:
        names, member = numbered(groups, count)
        return _of_groups(here, model, flag, names, torch.tensor(member, device=model.X.device))
    rows = torch.arange(count, device=model.X.device)
    parts = [here.without_rows(chunk) for chunk in rows.split(_size(count, q.dim))]
    mean, root = (torch.cat([cavity[k] for cavity, _ in parts]) for k in range(2))
    response = torch.cat([change for _, change in parts])
    resolved = ((response > flag) | ~response.isfinite()) & (here.weights > 0)
    evaluations = _resolve(model, rows, resolved, mean, root)
    spread = (root.mT @ here.X[..., None])[..., 0].square().sum(-1)
    density = _log_density(model, rows, (here.X * mean).sum(-1) + model.offset, spread.sqrt())
    inside = _log_density(model, rows, here.e, here.v.sqrt())
    shift = (mean - q.mean) / q.stddev
    return LeaveOneOut(density, inside, resolved, evaluations, response, shift, torch.zeros_like(density))


def _of_groups(
    here: Optimum,
    model: GeneralizedLinear,
    flag: float,
    names: tuple[Any, ...],
    member: Tensor,  # the group of each row, (N,)
) -> LeaveOneOut:
    """Leave out the rows of each group together."""
    groups = torch.arange(len(names), device=member.device)
    size = max(1, _AT_ONCE // here.X.numel())  # whose tables of rows are there at once, of wide designs too
    parts = [here.without(member == chunk[:, None]) for chunk in groups.split(size)]
    mean, root = (torch.cat([cavity[k] for cavity, _ in parts]) for k in range(2))
    response = torch.cat([change for _, change in parts])
    there = torch.zeros_like(response).index_add(0, member, here.weights) > 0
    resolved = ((response > flag) | ~response.isfinite()) & there
    evaluations = _resolve(model, member, resolved, mean, root)
    density, error = joint_log_density(model, member, (mean, root), (here.mean, here.C))
    twice = [here.divided(member == chunk[:, None], 1.0) for chunk in groups.split(size)]
    seen = tuple(torch.cat([cavity[k] for cavity in twice]) for k in range(2))
    inside, _ = joint_log_density(model, member, (here.mean, here.C), (seen[0], seen[1]))
    counts = torch.bincount(member, minlength=len(names))
    single = (counts[member] == 1).nonzero()[:, 0]  # rows that are a group
    at = member[single]
    x, offset = here.X[single], model.offset[single]
    sd = (root[at].mT @ x[..., None])[..., 0].norm(dim=-1)
    density[at] = _log_density(model, single, (x * mean[at]).sum(-1) + offset, sd)
    inside[at] = _log_density(model, single, here.e[single], here.v[single].sqrt())
    error[at] = 0.0
    shift = (mean - here.mean) / here.V.diagonal().sqrt()
    return LeaveOneOut(density, inside, resolved, evaluations, response, shift, error, names)


def numbered(groups: Any, count: int) -> tuple[tuple[Any, ...], list[int]]:
    """Number the groups in the order of their names."""
    if isinstance(groups, Tensor) and groups.is_meta:
        raise InputError("groups names the group of each row; a tensor on a meta device has no names.")
    values = groups.tolist() if hasattr(groups, "tolist") else groups
    values = list(values) if isinstance(values, Iterable) else [values]
    values = [value.tolist() if isinstance(value, Tensor) else value for value in values]  # tensors hash as objects
    missing = [value for value in values if _missing(value)]
    if missing:
        raise InputError(f"groups names the group of each row; it is missing ({missing[0]}) in {len(missing)} rows.")
    try:
        names = tuple(sorted(set(values)))
    except TypeError as error:
        raise InputError(
            f"groups names the group of each row, all by numbers or all by texts; got {values[:2]}, .. ({error})."
        ) from error
    if len(values) != count or len(names) < 2:
        raise InputError(
            f"groups names the group of each of the {count} rows, at least two of them; got {len(values)} names of "
            f"{len(names)} groups."
        )
    number = {name: k for k, name in enumerate(names)}
    return names, [number[value] for value in values]


def _missing(name: Any) -> bool:
    """Whether it is None, or no number, time or text, of which no library says that it equals itself."""
    try:
        return name is None or bool(name != name)
    except TypeError:  # of pandas.NA
        return True
    except ValueError:  # of an array, which is refused as a name
        return False


def _size(count: int, dim: int) -> int:
    """How many rows are left out at once."""
    return max(1, _AT_ONCE // (count * dim if dim <= WIDEST else dim**2))


def _resolve(model: GeneralizedLinear, member: Tensor, resolved: Tensor, mean: Tensor, root: Tensor) -> int:
    """Fit what is marked without its rows, from where it is thought to be, and write it there."""
    evaluations = 0
    for chunk in resolved.nonzero()[:, 0].split(max(1, _AT_ONCE // (len(member) * mean.shape[1]))):
        if len(chunk):
            mean[chunk], root[chunk], more = refit(model, member == chunk[:, None], mean[chunk], root[chunk])
            evaluations += more
    return evaluations


def _check(q: Gaussian, model: GeneralizedLinear, flag: float) -> None:
    read_posterior("leave_one_out", q, model)
    wants = "leave_one_out takes a GeneralizedLinear with one dense design and one y; got"
    if not isinstance(model, GeneralizedLinear):
        raise PairError(f"{wants} {type(model).__name__}.")
    if sparse.is_sparse(model.X) or model.X.ndim > 2 or model.y.ndim > 1:
        X, y = model.X, model.y
        raise PairError(f"{wants} X of {tuple(X.shape)}, {X.layout}, and y of {tuple(y.shape)}.")
    if not isinstance(q, Gaussian) or q.batch_shape or q.structure.widest < q.dim:
        raise PairError(
            "leave_one_out divides rows out of one dense Gaussian, since a mean field has no covariances with which "
            f"the others could respond; got {q!r}."
        )
    model.check(q)
    if model.temperature != 1:
        raise InputError(
            f"leave_one_out is of a posterior, at the temperature 1; this model has {model.temperature:g}."
        )
    read_number("flag", flag, "bounds ν²", at_least=0, infinite=True)


def _log_density(model: GeneralizedLinear, rows: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """log E p(y_i | η) of some rows under η ~ N(e_i, s_i²), (n,)."""
    found = log_expected_likelihood(model.likelihood, *(x.double() for x in (mean, sd, model.y[rows])))
    return found.to(mean.dtype)
