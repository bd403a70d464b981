"""What a script can hand to a posterior over a network by mistake, each with the sentence that it gets."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from torchngvi.errors import InputError
from torchngvi.networks import (
    VOGN,
    VON,
    Bernoulli,
    Categorical,
    Gaussian,
    GradientNoise,
    SampledLabels,
    attach,
    calibrate,
    network,
)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(rows: int = 20):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.arange(rows) % 3


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)


def seen(model=None):
    """A posterior that has observed curvature."""
    q = network(mlp() if model is None else model, 20)
    q.laplace([data()])
    return q


class Empty(nn.Module):
    """A layer beside parameters of no numbers."""

    def __init__(self, empty=True):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)
        if empty:
            self.none, self.rows, self.columns = (nn.Parameter(torch.zeros(*shape)) for shape in ((0,), (0, 4), (3, 0)))

    def forward(self, x):
        return self.layer(x) + sum(p.sum() for name, p in self.named_parameters() if "layer" not in name)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_parameters_of_no_numbers_change_nothing(structure):
    x, y = data()
    ends = []
    for empty in (True, False):
        model = Empty(empty)
        # the noise is drawn for all parameters in one piece, so that it is the same without them only at 0
        q = network(model, 20, structure, temperature=0.0)
        optimizer = adamw(model)
        attach(optimizer, q, steps=5, curvature=SampledLabels(every=1))
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        q.laplace([(x, y)])
        q.temper_(1.0)
        ends.append((q.mean["layer.weight"], q.variance["layer.weight"], q.kl()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", [data()[0].numpy(), data()[0].tolist(), None, [data()]], ids=type)
def test_inputs_that_are_no_tensor(given):
    x, y = data()
    q = seen()
    kind = type(given).__name__
    calls = (
        q.predict,
        q.predictive,
        lambda x: q.log_prob(x, y),
        lambda x: calibrate(q, [(x, y)]),
        lambda x: q.laplace([(x, y)]),
    )
    for call in calls:
        with pytest.raises(
            InputError, match=rf"cannot be called on a {kind}: linear.*torch.as_tensor\(x\) of an array"
        ):
            call(given)
    assert torch.equal(q.model(x), q.model.eval()(x))  # at the mean, as before


def test_what_a_network_says_of_tensors_is_its_own_word():
    """And a network that takes arrays gets them."""
    x, _ = data()
    q = seen()
    for wrong in ((x, x), {"other": x}):
        with pytest.raises(TypeError, match="forward"):
            q.predict(wrong)

    class OfArrays(nn.Sequential):
        def forward(self, x):
            return super().forward(torch.as_tensor(x))

    model = OfArrays(nn.Linear(4, 3))
    q = network(model, 20, temperature=0.0)
    q.laplace([(x, x)])
    torch.testing.assert_close(q.predict(x.numpy()), model.eval()(x).softmax(-1))


def test_functions_that_find_the_outputs():
    x, y = data()
    q = seen()
    for call in (lambda read: q.predict(x, read=read), lambda read: q.laplace([(x, y)], read=read)):
        with pytest.raises(InputError, match="^read is a function of what the network returns, .*; got 3"):
            call(3)
        with pytest.raises(InputError, match="read returns the tensor of outputs; got a NoneType from it"):
            call(lambda returned: None)
    with pytest.raises(InputError, match="^output is a function of what the network returns, .*; got 3"):
        SampledLabels(output=3)
    for cut, text in (
        (lambda logits: None, "output returns the tensor of outputs; got a NoneType from it"),
        (lambda logits: logits.detach(), r"A function output= must keep the graph, which detach\(\)"),
    ):
        model = mlp()
        optimizer = adamw(model)
        attach(optimizer, network(model, 20), steps=5, curvature=SampledLabels(output=cut))

        def step(model=model, optimizer=optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        with pytest.raises(InputError, match=text):
            step()


def test_loaders_that_are_none():
    q = seen()
    for call in (lambda: calibrate(q, None), lambda: q.laplace(None)):
        with pytest.raises(InputError, match="a loader of data is a DataLoader or a list of pairs .*; got a NoneType"):
            call()


class Passes(torch.optim.Optimizer):
    """An optimizer as Accelerate makes it: one of torch by its class alone, which passes steps on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


class Holds:
    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize("wrapper", [Passes, Holds])
def test_optimizers_that_wrap_another_one(wrapper):
    model = mlp()
    q = network(model, 20)
    wrapped = wrapper(adamw(model))
    for given in (wrapped, [wrapped]):
        with pytest.raises(
            InputError, match=f"The {wrapper.__name__} given wraps an optimizer of torch, .* its .optim"
        ):
            attach(given, q, steps=5)
    del wrapped.optimizer
    if wrapper is Passes:
        with pytest.raises(InputError, match="Passes given has not called __init__ of torch.optim.Optimizer"):
            attach(wrapped, q, steps=5)


def test_a_wrapped_optimizer_trains_as_the_one_within():
    """Attached before it is wrapped, or to what is within: the same bits as without a wrapper."""
    x, y = data()
    ends = []
    for how in ("alone", "before", "within"):
        model = mlp()
        q, optimizer = network(model, 20), adamw(model)
        steps = optimizer if how == "alone" else Passes(optimizer)
        attach(steps.optimizer if how == "within" else optimizer, q, steps=5)
        for _ in range(5):
            steps.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            steps.step()
        assert q.draw == 5
        ends.append(q.mean["0.weight"])
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_networks_that_were_changed_afterwards():
    """A q over weights that the network does not use any more would predict with others, and say nothing."""
    x, y = data()
    model = mlp()
    q, optimizer = network(model, 20), adamw(model)
    q.laplace([(x, y)])
    model[2] = nn.Linear(8, 3)
    calls = (
        lambda: q.predict(x),
        lambda: q.laplace([(x, y)]),
        lambda: calibrate(q, [(x, y)]),
        lambda: attach(optimizer, q, steps=5),
        lambda: VON(q, steps=5),
    )
    for call in calls:
        with pytest.raises(
            InputError, match="The parameter 2.weight that q is over is no part of the network any more"
        ):
            call()


def test_posteriors_that_no_step_may_change():
    model = mlp()
    with torch.inference_mode():
        q = network(model, 20)
    with pytest.raises(InputError, match=r"made within torch.inference_mode\(\), .*; call torchngvi.network outside"):
        attach(adamw(model), q, steps=5)


def test_copies_and_states_of_others():
    x, y = data()
    optimizer = VON(mlp(), num_data=20, steps=5)
    model, copied = copy.deepcopy((optimizer.q.model, optimizer))
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(InputError, match=r"A copy of VON has no posterior; copy q \(copy.deepcopy\(optimizer.q\)\)"):
        copied.step()
    with pytest.raises(
        InputError, match=r"not the state of an attachment, .* returns; it has \['attachment', 'param_groups'"
    ):
        optimizer.attachment.load_state_dict(optimizer.state_dict())
    another = VON(copy.deepcopy(optimizer.q), steps=5)
    nn.functional.cross_entropy(another.q.model(x), y).backward()
    another.step()
    assert (another.q.draw, optimizer.q.draw) == (1, 0)


def test_parameters_without_values_or_of_eight_bits():
    with pytest.raises(
        InputError, match="The parameter weight is on the device meta, without values; load the weights"
    ):
        network(nn.Linear(2, 3, device="meta"), 20)
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match="of 16 bits at least; weight has the dtype torch.float8_e4m3fn. Freeze it"):
        network(model, 20)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"structure": {3: "dense"}}, r"structure is by patterns of names of parameters, such as 'head.\*'; got 3"),
        ({"structure": {}}, "structure names no parameter; give a family"),
        ({"structure": {"*": ["dense"]}}, r"structure is one of 'diagonal', .*; got \['dense'\]"),
        (
            {"prior_precision": torch.ones(2)},
            r"prior_precision is larger than 0 and finite; got a tensor of shape",
        ),
        ({"temperature": torch.ones(2)}, r"temperature must be a number; got a tensor of shape \(2,\), torch\.float32"),
    ],
)
def test_arguments_of_network(argument, text):
    with pytest.raises(InputError, match=text):
        network(mlp(), 20, **argument)


def test_arguments_of_optimizers_and_curvatures():
    with pytest.raises(InputError, match="^lr is the length of a step .*; got 'a'"):
        VON(mlp(), num_data=20, steps=3, lr="a")
    with pytest.raises(InputError, match="^beta must be"):
        VON(mlp(), num_data=20, steps=3, beta=None)
    for given in ("a", 0):
        with pytest.raises(InputError, match=f"^batch_size is the number of labels .* must be .*; got {given!r}"):
            GradientNoise(given)
    optimizer = VOGN(mlp(), num_data=20, lr=0.1)
    for given, kind in ((3, "int"), (torch.ones(3), "Tensor")):
        with pytest.raises(
            InputError, match=f"with the graph of the outputs; got a {kind} without a graph. Compute them with red"
        ):
            optimizer.backward(given)


def test_scales_of_the_noise():
    x = torch.zeros(3, 1)
    for wrong in (-1.0, 0, float("nan"), "a", None):
        for call in (
            lambda noise: noise.loss(x, x),
            lambda noise: noise.log_prob(x, x),
            lambda noise: noise.moments(x),
        ):
            with pytest.raises(InputError, match=f"function scale returns a standard deviation, .* got {wrong!r}"):
                call(Gaussian(lambda wrong=wrong: wrong))
    for right in (0.5, np.array(0.5), np.float32(0.5), torch.tensor(0.5)):
        assert Gaussian(lambda right=right: right).loss(x, x + 1).item() == Gaussian(0.5).loss(x, x + 1).item()
    with pytest.raises(InputError, match="loss takes the outputs of the network as one tensor; got a tuple"):
        Gaussian(0.5).loss((x,), x)


def test_places_of_the_classes():
    x, y = data()
    for wrong in ("a", 1.0, True):
        with pytest.raises(InputError, match=f"class_dim is the dimension of the output .*; got {wrong!r}"):
            Categorical(wrong)
    q = network(mlp(), 20, likelihood=Categorical(5))
    with pytest.raises(InputError, match=r"got \(20, 3\), with the classes in dimension 5\."):
        q.laplace([(x, y)])


def test_labels_of_other_kinds():
    x, y = data()
    q = seen()
    with pytest.raises(InputError, match="labels are classes, integers from 0 to 2; got torch.complex64"):
        q.log_prob(x, y.to(torch.complex64))
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(q.log_prob(x, y.to(dtype)), q.log_prob(x, y))
    output = torch.tensor([0.5, -0.5])
    for wrong, first in (([-1.0, 1.0], -1), ([0.0, 2.0], 2)):
        with pytest.raises(InputError, match=rf"labels of a Bernoulli likelihood are 0 and 1; got {first}.*\(y > 0\)"):
            Bernoulli().log_prob(output, torch.tensor(wrong))
    for dtype in (torch.bool, torch.int64, torch.float64):
        found = Bernoulli().log_prob(output, torch.tensor([0, 1]).to(dtype))
        torch.testing.assert_close(found, nn.functional.logsigmoid(torch.tensor([-0.5, -0.5])))
