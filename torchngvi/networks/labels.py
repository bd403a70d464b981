"""Checks of the labels that predictions are compared with, each with its sentence."""

import torch
from torch import Tensor

from torchngvi.errors import InputError

OF_NUMBERS = "Use y[:, None] for one number a row, or squeeze the outputs."
OF_CLASSES = (
    "They are taken without the classes, which are last; where they come second, as in images of labels, say "
    "likelihood=torchngvi.networks.Categorical(class_dim=1), and for labels that are numbers Gaussian(scale)."
)


def check_labels(shape: torch.Size, y: Tensor, hint: str = OF_NUMBERS) -> None:
    """Refuse labels that would be broadcast against outputs of another shape, into pairs of no meaning."""
    if not isinstance(y, Tensor):
        raise InputError(f"labels are a tensor, with one label for each output; got a {type(y).__name__}.")
    if y.ndim == 0 or y.ndim > len(shape) or y.shape != shape[len(shape) - y.ndim :] or len(shape) - y.ndim > 1:
        raise InputError(
            f"labels must have the shape of the outputs of the network, one for each; got labels {tuple(y.shape)} for "
            f"outputs {tuple(shape)}, draws first. {hint}"
        )


def check_classes(classes: int, y: Tensor) -> None:
    """Refuse labels that are no class, such as -100, which cross_entropy leaves out."""
    if y.is_floating_point() or y.is_complex():
        raise InputError(
            f"labels are classes, integers from 0 to {classes - 1}; got {y.dtype}. Say y.long(), or Gaussian(scale)."
        )
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        raise InputError(
            f"labels are classes from 0 to {classes - 1}; got {y[wrong][0].item()}. Leave out those that the loss "
            "leaves out: the labels y[mask], with read=lambda logits: logits[mask] for their outputs."
        )


def check_binary(y: Tensor) -> None:
    """Refuse labels that are neither 0 nor 1 nor between them, such as -1 and 1."""
    wrong = (y < 0) | (y > 1)
    if wrong.any():
        raise InputError(
            f"labels of a Bernoulli likelihood are 0 and 1; got {y[wrong][0].item()}. Say (y > 0).float() for labels "
            "-1 and 1, and Categorical() for more than two classes."
        )
