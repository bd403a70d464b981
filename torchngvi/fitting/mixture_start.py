"""Where a mixture starts: one component at each mode that a search finds, as wide as the curvature says there."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.arguments import read_seed, read_tensor
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.mode import find_modes, search_points
from torchngvi.models.arguments import FullPrecision, as_target, read_posterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.mixture import Mixture

_LEAST = 5.0  # nats of evidence below the largest, down to which a mode counts


def mixture_at_modes(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    *,
    starts: Tensor | None = None,  # (M, D)
    seed: int = 0,
) -> Mixture:
    """Make a mixture with one component at each mode of the log joint that a search finds, for `torchngvi.fit`.

    Components are Laplace's Gaussians in the coordinates and the structure of q, and weights the softmax of Laplace's
    log evidences; where modes are far apart this is nearly the optimum.  Modes whose Gaussians overlap by more than
    0.95 are taken once, and those with less than e⁻⁵ of the largest evidence not at all.

    Args:
        q: a Gaussian, as before a fit or after one, around which modes are looked for; it is not changed.
        target: a model, or a function of theta returning the log joint.
        starts: points from which the search begins besides the mean of q, (M, D); by default 4 to 16, half of them
            uniform on (-2, 2), half within six standard deviations of q.  A mode that none of them leads to is not
            found.
        seed: of these points.

    Returns:
        The mixture, the component with the largest weight first.

    Raises:
        InputError: a batch of posteriors, starts of another shape, no mode found.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, fit
    >>> def log_joint(x):  # with the weights 0.25 and 0.75
    ...     return torch.logaddexp(-0.5 * (x + 4) ** 2, 1.0986123 - 0.5 * (x - 4) ** 2).sum(-1)
    >>> mixture = mixture_at_modes(CholeskyGaussian(1, dtype=torch.float64), log_joint)
    >>> result = fit(mixture, log_joint, progress=False)
    >>> result.converged, mixture
    (True, Mixture(2 x CholeskyGaussian, D = 1, weights 0.75, 0.25))
    """
    read_posterior("mixture_at_modes", q, target)
    if not isinstance(q, Gaussian) or q.batch_shape:
        got = f"a batch of shape {tuple(q.batch_shape)}" if isinstance(q, Gaussian) else type(q).__name__
        raise InputError(f"mixture_at_modes looks around one Gaussian, such as CholeskyGaussian(3); got {got}.")
    target, mean = as_target(target), q.frame().mean
    what, shape = f"are points (M, D) with D = {len(mean)}", (None, len(mean))
    points = (
        search_points(mean, q.stddev, read_seed("seed", seed))
        if starts is None
        else (read_tensor("starts", starts, what, like=mean, shape=shape))
    )
    with FullPrecision(q.device.type):
        found = find_modes(target, torch.cat([mean[None], points]), 200 + 20 * q.dim)
    modes = [mode for mode in found if mode is not None and mode.found]
    if not modes:
        raise InputError(
            f"none of {len(found)} searches came to a mode, where the Hessian is negative definite. Give starts=, or "
            "the means of the components: Mixture(CholeskyGaussian(D, (K,), mean=...))."
        )
    highest = max(mode.log_evidence for mode in modes)
    mixture = Mixture.of_modes([mode for mode in modes if mode.log_evidence > highest - _LEAST])
    if type(mixture.components) is type(q) and mixture.components.structure == q.structure:
        return mixture
    return Mixture(type(q).from_posterior(mixture.components, structure=q.structure), mixture.weights)
