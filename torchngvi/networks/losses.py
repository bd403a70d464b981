"""What the gradient of a script's loss at the outputs of the network says of that loss: numbers, and their sentences.

The loss that a posterior is made for is the mean of -log p(y | output), whose gradient at the logits of a label is
c (p - e_y), p the probabilities, e_y the unit vector of the label and c = 1/B.  Whatever else the script computes, such
as a sum over labels, weights of classes or smoothed labels, leaves its mark there.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROWS = 256  # labels that are looked at, evenly over the batch
_CLOSE = 1e-3  # relative distance of two numbers that are equal but for rounding in single precision
_LEFT_OUT = 0.1  # share of labels without a gradient; fewer, such as the last token of a text, hardly matter
_EXPLAINED = 0.99  # of the variance of a column by the square of another one's gradient, which no label explains


def take_rows(logits: Tensor) -> Tensor:
    """Return some rows of logits, or of a gradient at them, which the script may change in place later."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows[:: -(-max(len(rows), 1) // _ROWS)].clone()


def weigh_labels(logits: Tensor, gradient: Tensor, count: int) -> Tensor:
    """Return what weights a loss gives to the labels of a batch, from its gradient at their logits.

    >>> logits, y = torch.zeros(4, 3, requires_grad=True), torch.arange(4) % 3
    >>> (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y, reduction="sum"), logits)
    >>> weigh_labels(logits.detach(), gradient, 4)[0]
    tensor(4.)
    """
    classes = logits.shape[-1]
    x, r = logits.float(), gradient.float()
    p = x.softmax(-1)
    r = r - p * r.sum(-1, keepdim=True)  # of log p as outputs, too, the gradient at logits
    others = torch.ones_like(p).scatter(-1, r.argmin(-1, keepdim=True), 0.0)
    mass, left_out = (p * others).sum(-1), (r == 0).all(-1)
    used = ~left_out & (mass > _CLOSE)
    rows = used.sum()
    c = torch.where(used, (r * others).sum(-1) / mass, 0.0)
    mean = c.sum() / rows
    spread = torch.where(used, (c - mean).abs(), 0.0).max() / mean
    here = others * used[:, None]

    def distance(expected: Tensor) -> Tensor:
        return ((r - expected).abs() * here / (p + 1 / classes)).max() / mean

    share = here / here.sum()
    p_mean, r_mean = (share * p).sum(), (share * r).sum()
    slope = (share * (p - p_mean) * (r - r_mean)).sum() / (share * (p - p_mean).square()).sum()
    offset = slope * p_mean - r_mean
    inside, event = ((x >= 0) & (x <= 1)).all(), (x[:, 1] == 0).all()
    probabilities = inside * (((x.sum(-1) - 1).abs() < _CLOSE).all() + 2 * event * (x[:, 0] > 0).all())
    return torch.stack(
        [
            mean * (count * (1 - left_out.float().mean())),
            spread,
            distance(c[:, None] * p),
            offset * classes / slope,
            distance(slope * p - offset),
            left_out.float().mean(),
            probabilities.float(),
        ]
    )


def tell_of_weights(
    found: Sequence[Sequence[float]], labels: int, num_data: int, precision: float, scaled: bool = False
) -> Iterator[str]:
    """Iterate over what there is to say of the loss of a first step."""
    close = max(_CLOSE, 4 * precision)
    total = sum(each[0] for each in found)
    spread, misfit, smoothing, residual, left_out, probabilities = (max(each[k] for each in found) for k in range(1, 7))
    if probabilities == 1:
        yield (
            "The outputs of the network are probabilities, which sum to 1, and the likelihood takes them for logits: "
            "leave the softmax at its end away, for cross_entropy has one of its own."
        )
    elif misfit < close and spread < close and abs(total - 1) > max(close, 0.01) and not scaled:
        yield (
            f"The loss of the first step weighs its labels {total:.4g} in all, where the mean of -log p weighs them 1: "
            f"{_cause(total, labels, len(found), num_data)}. The posterior would be that of {total:.4g} times as many "
            "data, and the observed curvature is not."
        )
    elif probabilities == 2 and spread >= close:
        yield (
            "The outputs of the network are all between 0 and 1, and the likelihood takes them for logits: leave the "
            "sigmoid at its end away, and take binary_cross_entropy_with_logits."
        )
    elif misfit >= close or spread >= close:
        if residual < close and close < smoothing < 1:
            yield (
                f"The loss of the first step has smoothed labels, label_smoothing={smoothing:.2g}: it is not -log p of "
                "the labels that the posterior is made for, whose predictions it makes less sure. Take the loss "
                "without smoothing; the average over draws does the same for a reason."
            )
        elif misfit < close:
            yield (
                f"The loss of the first step weighs its labels by other weights than the same for all, up to "
                f"{spread + 1:.3g} times their mean (class weights, a focal loss, or no cross-entropy): the curvature "
                "and the predictive probabilities are those of -log p without weights. Take the mean of -log p, or an "
                "OutputLikelihood of your own that has the weights."
            )
        else:
            yield (
                "The loss of the first step is not -log p of one label each: its gradients at the outputs are those of "
                "mixed labels, or of another loss, while the curvature and the predictions are those of the likelihood "
                "that torchngvi.network was given."
            )
    if left_out > _LEFT_OUT:
        yield (
            f"The loss of the first step leaves {left_out:.0%} of the labels out, such as padding, and the curvature "
            "counts them. Leave them out there, too: curvature=SampledLabels(output=lambda logits: logits[mask])."
        )


def _cause(total: float, labels: int, forwards: int, num_data: int) -> str:
    """What makes a loss weigh so much, and what to do."""

    def near(number: int) -> bool:
        return abs(total / number - 1) < 0.05

    if labels > 1 and near(labels):
        return 'it is the sum over labels; take reduction="mean"'
    if near(num_data):
        return "it is multiplied by num_data, which the posterior does by itself; take the mean"
    if forwards > 1 and near(forwards):
        return f"{forwards} passes were accumulated; divide each loss by their number"
    return "take the mean over the labels, without a factor"


def find_scale_column(output: Tensor, gradient: Tensor) -> Tensor:
    """Return how well the gradient at one column of two is explained by the square of the other's.

    That of the logarithm of a standard deviation, or of another function of it, is c (1 - (y - mean)²/variance) up to a
    slope, and that of the mean c (mean - y)/variance; two labels of a row explain nothing of each other.

    >>> output = torch.tensor([[0.1 * k, 0.01 * k] for k in range(20)], requires_grad=True)
    >>> loss = torch.nn.functional.gaussian_nll_loss(output[:, 0], torch.arange(20) % 3, (2 * output[:, 1]).exp())
    >>> bool(find_scale_column(output.detach(), *torch.autograd.grad(loss, output)) > 0.99)
    True
    """
    dtype = torch.float32 if output.device.type == "mps" else torch.float64
    f, r = (part.detach().reshape(-1, 2).to(dtype) for part in (output, gradient))
    found = []
    for mean, scale in ((0, 1), (1, 0)):
        y = r[:, scale] - r[:, scale].mean()
        square, column = (r[:, mean] / r[:, mean].abs().max()).square(), f[:, scale]
        without = torch.stack([torch.ones_like(column), column], -1)
        residual, beyond = (
            (y - basis @ (basis.mT @ y)).square().sum()
            for basis in (
                torch.linalg.qr(torch.cat([without, square[:, None], (square * column)[:, None]], -1))[0],
                torch.linalg.qr(without)[0],
            )
        )
        found.append(torch.where(beyond > 0.1 * y.square().sum(), 1 - residual / beyond, 0.0))
    return torch.stack(found).nan_to_num().max()


def tell_of_columns(found: float) -> Iterator[str]:
    """Iterate over what there is to say of a network with two outputs a row under a Gaussian likelihood."""
    if found > _EXPLAINED:
        yield (
            "The network has two outputs a row, and the loss takes one for the standard deviation of the other, while "
            "networks.Gaussian(scale) takes both for means. Say likelihood=networks.HeteroscedasticGaussian(), whose "
            "loss(output, y) takes the mean and the logarithm of the standard deviation."
        )
