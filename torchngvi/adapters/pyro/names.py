"""Names for the coordinates of θ, from the sites of a Pyro model and the scales on which they are fitted."""

import itertools

import torch
from torch.distributions import AffineTransform, ComposeTransform, ExpTransform, IndependentTransform, Transform

from torchngvi.adapters.pyro.sites import Layout


def coordinate_names(layout: Layout) -> list[str]:
    """Name the coordinates of θ: "mu", "log tau", "theta[0, 3]"."""
    names = []
    for site in layout.sites:
        name = f"{_scale(site.transform)}{site.name}"
        indices = itertools.product(*map(range, site.free))
        names += [f"{name}[{', '.join(map(str, index))}]" if index else name for index in indices]
    return names if layout.order is None else [names[k] for k in layout.order.tolist()]


def _scale(transform: Transform) -> str:
    """On which scale θ is, in a word before the name of the site."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    parts = transform.parts if isinstance(transform, ComposeTransform) else [transform]
    parts = [part for part in parts if not _is_identity(part)]
    if not parts:
        return ""
    return "log " if len(parts) == 1 and isinstance(parts[0], ExpTransform) else "unconstrained "


def _is_identity(transform: Transform) -> bool:
    """Such as the shift of a bound at zero."""
    if not isinstance(transform, AffineTransform):
        return False
    return bool((torch.as_tensor(transform.loc) == 0).all() & (torch.as_tensor(transform.scale) == 1).all())
