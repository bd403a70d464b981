"""Scripts that train a posterior over a network and do something else than they mean: each is right, or is named."""

import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_networks import adamw, adamw_of, attached, data, fit_digits, means, mlp, train
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR
from torch.optim.swa_utils import AveragedModel

from torchngvi import networks
from torchngvi.errors import CalibrationWarning, InputError

pytestmark = pytest.mark.filterwarnings("error")


def planned_share(t, steps):
    """f, with a warm-up of a step and the value at .98 S from there on."""
    return 0.5 * (1 + math.cos(math.pi * min(t, int(0.98 * steps)) / steps))


SCHEDULES = {  # with their factors after t of 12 steps
    "none": (lambda opt: None, lambda t: 1.0),
    "the same": (lambda opt: CosineAnnealingLR(opt, 12), lambda t: 0.5 * (1 + math.cos(math.pi * t / 12))),
    "slower": (lambda opt: LinearLR(opt, 1.0, 0.5, 12), lambda t: 1 - t / 24),
    "faster": (lambda opt: ExponentialLR(opt, 0.6), lambda t: 0.6**t),
    "warm-up": (lambda opt: LinearLR(opt, 0.1, 1.0, 4), lambda t: min(0.1 + 0.9 * t / 4, 1.0)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("planned", [True, False])
def test_of_two_schedules_the_smaller_one_holds_and_never_the_product(schedule, planned):
    """κ of each move is r min(f, g)², of the own cosine f and the factor g of the rate; with no steps r g²."""
    make, share = SCHEDULES[schedule]
    model = mlp()
    q, optimizer, radius = networks.network(model, 20, temperature=0.0), adamw(model), 1e-3 / math.sqrt(12)
    networks.attach(
        optimizer, q, steps=12 if planned else None, radius=radius, curvature=networks.Curvature()
    )  # that observes nothing
    scheduler = make(optimizer)
    precision = torch.cat([each.flatten() for family in q.each() for each in family.precisions()])
    for t in range(12):
        before = means(q)
        train(model, optimizer, 1, scheduler, batch=data(20))
        kappa = 0.5 * (precision * (means(q) - before).square()).sum().item() / 20
        own = planned_share(t, 12) if planned else 1.0
        assert kappa == pytest.approx(radius * min(own, share(t)) ** 2, rel=1e-2)


def test_groups_share_the_factor_of_the_one_that_has_fallen_least():
    def run(other, planned):
        model = mlp()
        q = networks.network(model, 20, temperature=0.0)
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        networks.attach(optimizer, q, steps=planned, radius=math.inf)
        train(model, optimizer, 5, batch=data(20))  # at t = 5 of 10 the own schedule is at ½
        optimizer.param_groups[1]["lr"] = 0.1 * other
        before = {name: m.clone() for name, m in q.mean.items()}
        gradient = {}
        x, y = data(20)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            gradient[name] = p.grad.clone() + q.prior[name] * before[name]
        optimizer.step()
        return [
            ((before[name] - q.mean[name]) / gradient[name]).nanmedian().item() / 0.1
            for name in ("0.weight", "2.weight")
        ]

    assert run(0.2, 10) == pytest.approx([0.5, 0.1], rel=1e-3)
    assert run(0.8, None) == pytest.approx([1.0, 0.8], rel=1e-3)


@pytest.mark.accuracy
def test_digits_without_a_scheduler_are_fitted_as_with_one():
    """README's three lines: the test NLL is that of a cosine, and larger if nothing falls."""
    alone, cosine, never = (
        fit_digits(adamw_of(1.0), 640, 800, **keywords)
        for keywords in ({}, {"schedule": CosineAnnealingLR}, {"radius": 0.04 / 640**0.5})
    )
    assert alone == pytest.approx(cosine, abs=0.01)  # rounding of the rate alone parts them
    assert alone < never - 0.05


@pytest.mark.parametrize("order", ["attach, load", "load q, attach, load the optimizer"])
def test_a_run_that_goes_on_in_the_middle_of_its_schedule(order):
    def start(q_state=None, times=1.0):
        model = mlp()
        with torch.no_grad():
            model[0].weight *= times  # which is another size of the units at the start
        q = networks.network(model, 20)
        if q_state is not None:
            q.load_state_dict(q_state)
        optimizer = adamw(model)
        networks.attach(optimizer, q, steps=20)
        return model, q, optimizer

    model, q, optimizer = start()
    train(model, optimizer, 20)
    half, hq, ho = start()
    train(half, ho, 9)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "q": hq.state_dict(), "opt": ho.state_dict()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    other, oq, oo = start(None if order == "attach, load" else read["q"], 3.0)
    other.load_state_dict(read["model"])
    oq.load_state_dict(read["q"])
    oo.load_state_dict(read["opt"])
    train(other, oo, 11, first=9)
    assert torch.equal(means(oq), means(q))


def test_a_second_training_has_a_schedule_of_its_own():
    model, q, optimizer, handle = attached(steps=10)
    train(model, optimizer, 10)
    end = means(q).clone()
    handle.remove()
    networks.attach(optimizer, q, steps=10)
    train(model, optimizer, 1, first=10)
    assert (means(q) - end).norm() > 1e-3


def test_steps_beyond_the_planned_ones_are_short_and_told():
    model, q, optimizer, _ = attached(steps=60)
    at = [means(q).clone()]
    for first, count in ((0, 1), (1, 59), (60, 1)):
        train(model, optimizer, count, first=first)
        at.append(means(q).clone())
    assert 0 < (at[3] - at[2]).norm() < 0.005 * (at[1] - at[0]).norm()
    train(model, optimizer, 29, first=61)
    with pytest.warns(UserWarning, match=r"has taken 90 steps, and attach was given steps=60.*epochs \* len") as caught:
        train(model, optimizer, 10, first=90)
    assert len(caught) == 1
    assert caught[0].filename == train.__code__.co_filename


def test_epochs_given_as_steps_are_told_within_one_pass():
    model, _, optimizer, _ = attached(steps=5, num_data=1000)
    train(model, optimizer, 5)
    with pytest.warns(
        UserWarning, match=r"goes on after steps=5, with 120 labels of num_data=1,000 so far.*not epochs"
    ):
        train(model, optimizer, 1)
    train(model, optimizer, 10)  # once


def test_a_training_that_ended_early_is_told_by_calibrate():
    warnings.filterwarnings("ignore", "The temperature chosen")
    x, y = data(20)
    model, q, optimizer, handle = attached(steps=40)
    train(model, optimizer, 10)
    with pytest.warns(CalibrationWarning, match=r"took 10 of the steps=40 .* only fallen to 0.85"):
        networks.calibrate(q, [(x, y)])
    handle.remove()
    with pytest.warns(CalibrationWarning, match="took 10 of the steps=40"):
        networks.calibrate(q, [(x, y)])
    model, q, optimizer, _ = attached(steps=None, radius=0.01)
    train(model, optimizer, 10)
    with pytest.warns(CalibrationWarning, match="rate has not fallen, and attach was given a radius and no steps"):
        networks.calibrate(q, [(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # of what was tried
        warnings.filterwarnings("error", "The training took|The learning rate")
        model, q, optimizer, _ = attached(steps=10)
        train(model, optimizer, 9)
        networks.calibrate(q, [(x, y)])


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as its best known package has it: a second pass beside the weights."""

    def __init__(self, parameters, rho=0.05, **keywords):
        super().__init__(parameters, {"rho": rho, **keywords})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **keywords)
        self.param_groups = self.base_optimizer.param_groups

    def each(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.each()]).norm()
        for p in self.each():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.each():
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def sam(model, lr):
    return SAM(model.parameters(), lr=lr)


def test_sam_passes_a_second_time_at_the_draw():
    """The mean moves by the gradient at the draw of the weights that SAM has moved, and by the prior's part there."""
    x, y = data(20)
    options = {"temperature": 0.5, "prior_precision": 2.0}
    model, q, optimizer, _ = attached(num_data=20, steps=None, make=sam, options=options, radius=math.inf)
    calls, at_first = [], F.cross_entropy(mlp()(x), y)

    def closure():
        calls.append(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def gradients(moved):
        plain = mlp()
        with torch.no_grad():
            for p, value in zip(plain.parameters(), moved, strict=True):
                p.copy_(value)
        F.cross_entropy(plain(x), y).backward()
        return [p.grad for p in plain.parameters()]

    for k in range(20):
        start = [m.clone() for m in q.mean.values()]
        draw = [p.detach().clone() for p in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        first = [p.grad.clone() for p in model.parameters()]
        optimizer.step(closure)
        if k == 0:
            norm = torch.stack([g.norm() for g in first]).norm()
            beside = [0.05 * g / norm for g in first]
            second = gradients([d + b for d, b in zip(draw, beside, strict=True)])
            for m, s, b, g in zip(q.mean.values(), start, beside, second, strict=True):
                torch.testing.assert_close(m, s - 0.1 * (g + 0.1 * (s + b)), rtol=1e-4, atol=1e-6)
    assert len(calls) == 20
    assert q.draw == 20
    model.eval()
    assert F.cross_entropy(model(x), y) < at_first - 0.03


def test_an_optimizer_that_calls_its_closure_twice():
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            self.losses = [closure().item(), closure().item()]
            super().step()

    x, y = data(20)
    ends = []
    for kind in (torch.optim.SGD, Twice):
        model, q, optimizer, _ = attached(make=lambda model, lr, kind=kind: kind(model.parameters(), lr))
        train(model, optimizer, 5, batch=(x, y), step=lambda optimizers, closure: optimizers[0].step(closure))
        ends.append(means(q))
    assert optimizer.losses[0] == optimizer.losses[1]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_steps_that_the_hooks_do_not_see_are_refused():
    """Of SAM in two parts, and of an optimizer that was made again after attach."""
    x, y = data(20)
    model, _, optimizer, _ = attached(steps=50, make=sam)

    def two_parts():
        for _ in range(20):
            F.cross_entropy(model(x), y).backward()
            optimizer.first_step()
            F.cross_entropy(model(x), y).backward()
            optimizer.second_step()

    with pytest.raises(InputError, match=r"changed 10 times in training without a step\(\) .* \.base_optimizer"):
        two_parts()
    model, q, _, _ = attached()
    with pytest.raises(InputError, match=r"without a step\(\) of the optimizer that q is attached to"):
        train(model, adamw(model, 0.01), 20)
    model = mlp()
    optimizer = SAM(model.parameters(), lr=0.1)
    q = networks.network(model, 20)
    networks.attach(optimizer.base_optimizer, q, steps=20)
    two_parts()
    assert q.draw == 20


@pytest.mark.parametrize("added", [False, True])
def test_layers_that_join_later_are_refused(added):
    """Of what was frozen, and of what is added to the optimizer."""
    model = mlp()
    model[0].requires_grad_(False)
    _, _, optimizer, _ = attached(model=model, make=lambda model, lr: adamw(model[2] if added else model))
    train(model, optimizer, 2)
    model[0].requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    with pytest.raises(InputError, match="moves the parameter 0.weight and 1 more now, and was frozen, or no part"):
        train(model, optimizer, 1)


def test_what_is_no_part_of_q_needs_a_rate_of_its_own():
    """A layer that the structure leaves out may join with a rate that it can be trained with, and not with 1."""
    x, y = data(20)
    for lr in (0.01, 1.0):
        model = mlp()
        model[0].requires_grad_(False)
        _, _, optimizer, _ = attached({"2.*": "diagonal"}, model=model, make=lambda model, lr: adamw(model[2]))
        train(model, optimizer, 2)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": lr})
        if lr < 1:
            before = model[0].weight.detach().clone()
            train(model, optimizer, 3)
            assert 0 < (model[0].weight - before).abs().max() < 0.05
        else:
            with pytest.raises(InputError, match="0.weight and 1 more now, at the learning rate 1 or more, .* Say lr="):
                train(model, optimizer, 1)
    model, temperature = mlp(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1.0, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"one of shape \(\) at the learning rate 1 or more, .* group of its own"):
        networks.attach(optimizer, networks.network(model, 20), steps=10)


def first_step(loss, labels=None, likelihood="categorical", outputs=3, network_of=None, passes=1, rows=20):
    model = mlp(outputs=outputs) if network_of is None else network_of()
    _, _, optimizer, _ = attached(num_data=500, model=model, options={"likelihood": likelihood})
    x, y = data(rows)
    y = y if labels is None else labels(y)
    for _ in range(passes):
        loss(model(x), y).backward()
    optimizer.step()


SLIPS = {
    "numbers": (
        lambda f, y: F.mse_loss(f, F.one_hot(y, 3) + torch.arange(20.0)[:, None]),
        "is not -log p of one label each",
    ),
    "sum": (lambda f, y: F.cross_entropy(f, y, reduction="sum"), "weighs its labels 20 in all.*it is the sum"),
    "num_data": (lambda f, y: 500 * F.cross_entropy(f, y), "weighs its labels 500 in all.*multiplied by num_data"),
    "factor": (lambda f, y: 0.1 * F.cross_entropy(f, y), "weighs its labels 0.1 in all, .*without a factor"),
    "class weights": (
        lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([1.0, 2.0, 5.0])),
        "weighs its labels by other weights .* class weights",
    ),
    "smoothing": (lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1), r"smoothed labels, label_smoothing=0.1:"),
    "focal": (
        lambda f, y: (F.cross_entropy(f, y, reduction="none") * (1 - f.softmax(-1)[range(20), y]) ** 2).mean(),
        "other weights than the same for all",
    ),
    "mixup": (
        lambda f, y: 0.6 * F.cross_entropy(f, y) + 0.4 * F.cross_entropy(f, y.roll(1)),
        "is not -log p of one label each",
    ),
    "margin": (lambda f, y: F.multi_margin_loss(f, y), "is not -log p of one label each"),
    "padding": (
        lambda f, y: F.cross_entropy(f, torch.where(torch.arange(20) < 5, -100, y)),
        r"leaves 25% of the labels out, .*lambda logits: logits\[mask\]",
    ),
    "softmax": (lambda f, y: F.nll_loss(f.log(), y), "The outputs of the network are probabilities, which sum to 1"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_losses_that_are_not_the_mean_of_log_p_are_told(slip):
    loss, text = SLIPS[slip]
    keywords = {"network_of": lambda: nn.Sequential(mlp(), nn.Softmax(-1))} if slip == "softmax" else {}
    with pytest.warns(UserWarning, match=text.replace("class weights", r"\(class weights")) as caught:
        first_step(loss, **keywords)
    assert len(caught) == 1


def test_passes_that_are_accumulated_are_divided_by_their_number():
    with pytest.warns(UserWarning, match="weighs its labels 4 in all.*4 passes were accumulated; divide each loss"):
        first_step(F.cross_entropy, passes=4)
    first_step(lambda f, y: F.cross_entropy(f, y) / 4, passes=4)


def test_labels_that_are_left_out_are_all_counted():
    with pytest.warns(UserWarning, match="leaves 50% of the labels out") as caught:
        first_step(lambda f, y: F.cross_entropy(f, torch.where(torch.arange(400) % 2 > 0, -100, y)), rows=400)
    assert len(caught) == 1


@pytest.mark.parametrize("clears", [True, False])
def test_a_pass_for_gradients_at_the_inputs(clears):
    """That of an adversary, whose gradients of the weights are cleared before the loss, or are not computed."""
    model, _, optimizer, _ = attached(num_data=500, options={})
    for _ in range(3):
        x, y = data(20)
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x) if not clears else (loss.backward(), x.grad)[1:]
        optimizer.zero_grad()
        F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), y).backward()
        optimizer.step()


def test_passes_that_are_accumulated_by_hand():
    model, _, optimizer, _ = attached(num_data=500)
    parts = [torch.autograd.grad(F.cross_entropy(model(x), y) / 4, [*model.parameters()]) for x, y in [data(20)] * 4]
    for p, *gradients in zip(model.parameters(), *parts, strict=True):
        p.grad = sum(gradients)
    optimizer.step()


def test_a_head_whose_loss_passes_back_first():
    class Two(nn.ModuleList):
        def forward(self, x):
            return self[0](x), self[1](x)

    look = networks.SampledLabels(output=lambda heads: heads[0])
    model, _, optimizer, _ = attached(num_data=500, model=Two([mlp(), nn.Linear(4, 1)]), curvature=look)
    train(model, optimizer, 3, loss=lambda heads, y: F.cross_entropy(heads[0], y) + heads[1].square().mean())


BINARY = {
    "mean": (F.binary_cross_entropy_with_logits, None),
    "sum": (lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"), "it is the sum over labels"),
    "pos_weight": (
        lambda f, y: F.binary_cross_entropy_with_logits(f, y, pos_weight=torch.tensor(3.0)),
        "by other weights",
    ),
    "sigmoid": (F.binary_cross_entropy, "outputs of the network are all between 0 and 1"),
    "smoothing": (lambda f, y: F.binary_cross_entropy_with_logits(f, 0.1 + 0.8 * y), "label_smoothing=0.2:"),
}


@pytest.mark.parametrize("slip", BINARY)
def test_losses_of_labels_0_and_1(slip):
    loss, text = BINARY[slip]
    keywords = {"labels": lambda y: (y > 0).float()[:, None], "likelihood": "bernoulli", "outputs": 1}
    if slip == "sigmoid":
        keywords["network_of"] = lambda: nn.Sequential(mlp(outputs=1), nn.Sigmoid())
    if text is None:
        first_step(loss, **keywords)
    else:
        with pytest.warns(UserWarning, match=text):
            first_step(loss, **keywords)


@pytest.mark.parametrize(
    "right",
    [
        F.cross_entropy,
        lambda f, y: F.nll_loss(f.log_softmax(-1), y),
        lambda f, y: F.cross_entropy(f.double(), y),
        lambda f, y: F.cross_entropy(f, y) + 1e-3 * f.new_zeros(()),
        lambda f, y: -networks.Categorical().log_prob(f, y).mean(),
    ],
)
def test_losses_that_are_right_are_not_told(right):
    first_step(right)
    first_step(lambda f, y: right(f, y), network_of=lambda: nn.Sequential(mlp(), nn.LogSoftmax(-1)))


def test_a_network_that_is_fitted_well_is_not_told():
    model = mlp()
    x, y = data(20)
    train(model, torch.optim.Adam(model.parameters(), lr=0.05), 300, batch=(x, y))
    _, _, optimizer, _ = attached(num_data=20, model=model, options={"temperature": 0.0})
    train(model, optimizer, 10, batch=(x, y))


def test_two_columns_under_a_gaussian_of_one_scale():
    """Mean and standard deviation are named, in any order and of any form; two numbers a row are not."""
    y = torch.randn(40, 1, generator=torch.Generator().manual_seed(2))
    forms = {
        "log sd": lambda f: F.gaussian_nll_loss(f[:, :1], y, (2 * f[:, 1:]).exp()),
        "log variance": lambda f: F.gaussian_nll_loss(f[:, :1], y, f[:, 1:].exp()),
        "softplus first": lambda f: -torch.distributions.Normal(f[:, 1:], F.softplus(f[:, :1])).log_prob(y).mean(),
        "two numbers": lambda f: F.mse_loss(f, torch.cat([y, y.roll(1)], 1)),
        "a function": lambda f: networks.Gaussian(1.0).loss(f, torch.cat([y, y**2], 1)),
    }
    for form, loss in forms.items():
        options = {"likelihood": networks.Gaussian(1.0)}
        model, _, optimizer, _ = attached(model=mlp(outputs=2, seed=1), options=options)
        x = data(40)[0]
        loss(model(x)).backward()
        if form in ("two numbers", "a function"):
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"two outputs a row, .*networks.HeteroscedasticGaussian\(\)"):
                optimizer.step()


@pytest.mark.accuracy
def test_the_heteroscedastic_likelihood():
    """Its curvature is the Fisher information, by terms and by sampled labels, and its noise is found."""
    torch.manual_seed(0)
    noise, output = networks.HeteroscedasticGaussian(), torch.randn(5, 4, requires_grad=True)
    terms = noise.curvature_terms(output)
    jacobian = torch.stack([torch.autograd.grad(t, output, retain_graph=True)[0] for t in terms[0].flatten()])[:, 0]
    fisher = torch.diag(torch.cat([(-2 * output[0, 2:]).exp(), torch.full((2,), 2.0)]))
    torch.testing.assert_close(jacobian.mT @ jacobian, fisher, rtol=1e-5, atol=1e-6)
    generator, squares = torch.Generator().manual_seed(0), 0.0
    for _ in range(4000):
        losses = noise.sampled_losses(output, generator)
        squares = squares + torch.autograd.grad(losses.sum(), output)[0].square() / 4000
    torch.testing.assert_close(squares[0], fisher.diag(), rtol=0.15, atol=0)
    y = torch.randn(5, 2)
    exact = torch.distributions.Normal(output[:, :2], output[:, 2:].exp())
    torch.testing.assert_close(noise.log_prob(output, y), exact.log_prob(y))
    torch.testing.assert_close(noise.loss(output, y), -exact.log_prob(y).mean() - 0.5 * math.log(2 * math.pi))
    x = torch.linspace(-1, 1, 400)[:, None]
    y = (0.05 + 0.4 * (x > 0)) * torch.randn(400, 1)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    _, q, optimizer, _ = attached(num_data=400, model=model, steps=300, options={"likelihood": noise})
    train(model, optimizer, 300, loss=noise.loss, batch=(x, y))
    model.eval()
    aleatoric = q.predictive(x).aleatoric.sqrt()
    assert 0.03 < aleatoric[:150].median() < 0.09
    assert 0.35 < aleatoric[250:].median() < 0.55
    assert q.log_prob(x, y).mean() > 0.3  # of one scale -0.28 at best


@pytest.mark.parametrize("num_data", [5, 50, 100])
def test_the_labels_of_a_pass_are_those_of_num_data(num_data):
    x, y = data(50)
    model, _, optimizer, _ = attached(num_data=num_data, steps=100, curvature=networks.SampledLabels(every=1))

    def epoch(times=1):
        for _ in range(times):
            for rows in torch.randperm(50).split(12):
                train(model, optimizer, 1, batch=(x[rows], y[rows]))

    if num_data == 50:
        epoch(4)
        return
    if num_data == 5:
        with pytest.warns(UserWarning, match="A batch has 12 labels, more than num_data=5"):
            epoch()
    else:
        epoch()
    with pytest.warns(UserWarning, match=f"a pass has 50 labels, where num_data={num_data}") as caught:
        epoch(3)
    assert len(caught) == 1


def test_batches_of_any_size_are_no_passes():
    """Buckets and packed sequences: their sizes say nothing, even where some are alike."""
    x, y = data(50)
    model, _, optimizer, _ = attached(steps=100, num_data=1000)
    for rows in (12, 12, 7, 12, 9, 12, 12, 7, 7, 12, 12, 7, 12, 12, 7):
        train(model, optimizer, 1, batch=(x[:rows], y[:rows]))


def test_an_average_of_draws_is_told():
    model, q, optimizer, _ = attached(steps=20)
    averaged, right = AveragedModel(model), AveragedModel(model)
    for k in range(3):
        train(model, optimizer, 1, first=k)
        with q.at_mean():
            right.update_parameters(model)
    averaged.load_state_dict(averaged.state_dict())
    train(model, optimizer, 1)
    model.eval()
    model(data(20)[0])
    averaged.update_parameters(model)  # of the mean
    model.train()
    train(model, optimizer, 1)
    averaged.update_parameters(model)
    with pytest.warns(UserWarning, match=r"averaged what the parameters hold, which is a draw .*q.at_mean\(\)"):
        train(model, optimizer, 1)


def test_weights_that_are_changed_between_steps_are_told():
    """By a second optimizer, or by hand: what is written over a draw is lost; within at_mean() it is not."""
    model, q, optimizer, _ = attached(steps=20)
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    x, y = data(20)

    def both(times):
        for _ in range(times):
            F.cross_entropy(model(x), y).backward()
            other.step()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="changed between two steps by something else .* several optimizers in a list"):
        both(3)
    model, q, optimizer, _ = attached(steps=20)
    train(model, optimizer, 1)
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)
    with pytest.warns(UserWarning, match="changed between two steps by something else"):
        train(model, optimizer, 1)
    model, q, optimizer, _ = attached(steps=20)
    for _ in range(3):
        train(model, optimizer, 1)
        with q.at_mean(), torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        assert means(q).abs().max() <= 0.1


def test_transforms_of_functions_while_training():
    x, y = data(20)
    model, q, optimizer, _ = attached()
    held = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    with pytest.raises(InputError, match=r"under a transform of torch.func \(grad, vmap or another one\) in training"):
        torch.func.grad(loss)(held)
    with q.at_mean():
        torch.func.grad(loss)(held)
    model.eval()
    torch.func.grad(loss)(held)
    model, _, optimizer, _ = attached(curvature=networks.GradientNoise(20))
    held = {name: p.detach() for name, p in model.named_parameters()}
    for name, gradient in torch.func.grad(loss)(held).items():
        model.get_parameter(name).grad = gradient
    optimizer.step()


def test_traces_and_exports_are_of_the_mean():
    x, _ = data(20)
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.trace
    model, q, optimizer, _ = attached()
    train(model, optimizer, 2)
    for record in (lambda: torch.jit.trace(model, x), lambda: torch.export.export(model, (x,))):
        with pytest.raises(InputError, match=r"traced or exported in training, .* model.eval\(\) first"):
            record()
    model.eval()
    expected = model(x)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    model.train()
    train(model, optimizer, 2)
    assert not torch.equal(model.eval()(x), expected)
    assert torch.equal(traced(x), model(x))


def test_laplace_says_how_wide_it_is():
    x, y = data(20)
    q = networks.network(mlp(), 20)
    found = q.laplace([(x, y)])
    assert (found.labels, found.num_data, found.temperature) == (20, 20, 0.05)
    assert "temperature=0.05: standard deviations are 0.224 of the posterior's" in repr(found)
    assert "calibrate(q, loader)" in repr(found)
    sds = means(q) * 0 + torch.cat([v.flatten() for v in q.variance.values()]).sqrt()
    q.temper_(1.0)
    whole = torch.cat([v.flatten() for v in q.variance.values()]).sqrt()
    torch.testing.assert_close(sds, 0.05**0.5 * whole)
    found = networks.network(mlp(), 20, temperature=1.0).laplace([(x, y)])
    assert repr(found).endswith("standard deviations are the posterior's)")


def test_loops_that_leave_a_line_out_are_told():
    x, y = data(20)
    model, _, optimizer, _ = attached()

    def without_zero_grad():
        for _ in range(4):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"gradients of the step before were still there .*zero_grad\(\)") as caught:
        without_zero_grad()
    assert len(caught) == 1
    model, _, optimizer, _ = attached()

    def without_backward():
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y)
            optimizer.step()

    with pytest.warns(UserWarning, match=r"no parameter of q has a gradient: call loss.backward\(\)") as caught:
        without_backward()
    assert len(caught) == 1
    model, _, optimizer, _ = attached(steps=20)
    for how in (True, False):  # zeroed in place, or between the loss and its backward pass
        for _ in range(4):
            if how:
                optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y)
            if not how:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_evaluation_mode_that_is_left_on_is_told():
    model, q, optimizer, _ = attached(steps=40)
    train(model, optimizer, 2)
    model.eval()
    q.predict(data(20)[0])
    with pytest.warns(UserWarning, match=r"in evaluation mode at a step .* model.train\(\)") as caught:
        train(model, optimizer, 12)
    assert len(caught) == 1
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, q, optimizer, _ = attached(steps=20, model=model)
    model[1].eval()
    train(model, optimizer, 20)
    assert q.observed == 2


@pytest.mark.parametrize("option", [{"weight_decay": 0.1}, {"maximize": True}])
def test_options_that_come_later_are_refused(option):
    model, _, optimizer, _ = attached()
    train(model, optimizer, 1)
    optimizer.param_groups[0].update(option)
    with pytest.raises(InputError, match=f"AdamW has {next(iter(option))}="):
        train(model, optimizer, 1)


@pytest.mark.parametrize("limit", [1e-3, 1.0, None])
def test_clipping_beside_which_the_prior_counts_is_told(limit):
    """As the prior's part is added afterwards: a common limit is not named, nor are gradients that are the same."""
    model, _, optimizer, _ = attached(steps=40)
    x, y = data(20)

    def run():
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    if limit == 1e-3:
        with pytest.warns(
            UserWarning, match="Gradients have the same norm, 0.001, in all of 3 steps, as clipped ones do"
        ) as caught:
            run()
        assert len(caught) == 1
    else:
        run()


def test_rates_that_move_nothing_are_told():
    x, y = data(20)
    model, _, optimizer, _ = attached(lr=0.0)
    with pytest.warns(UserWarning, match="The learning rate of the optimizer is 0"):
        train(model, optimizer, 2)
    for lr in (1e-5, 1.0):
        model, q, optimizer, _ = attached(lr=lr, steps=None, radius=0.01)
        train(model, optimizer, 20)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            networks.calibrate(q, [(x, y)])
        assert any("shortened no step of the training: the learning rate, 1e-05" in str(w.message) for w in caught) == (
            lr < 1
        )


def test_an_optimizer_whose_step_is_that_of_its_base_steps_once():
    """Whose class calls super().step(), within which the hooks of torch run once more."""

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    ends = []
    for kind in (torch.optim.AdamW, Own, torch.optim.AdamW):
        model, q, optimizer, _ = attached(
            make=lambda model, lr, kind=kind: kind(model.parameters(), lr, weight_decay=0.0)
        )
        train(model, optimizer, 5)
        assert q.draw == 5
        ends.append(means(q))
    assert torch.equal(ends[0], ends[1])


def test_von_is_watched_as_attach_is():
    model = mlp()
    optimizer = networks.VON(model, 1000, steps=5)
    train(model, optimizer, 5)
    with pytest.warns(UserWarning, match="goes on after steps=5, with 120 labels of num_data=1,000 so far"):
        train(model, optimizer, 1)
    own, users = mlp(), mlp()
    ends = []
    for model in (own, users):
        optimizer = networks.VON(model, 20, steps=20)
        train(model, optimizer, 20, CosineAnnealingLR(optimizer, 20) if model is users else None)
        ends.append(means(optimizer.q))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_outputs_that_the_script_changes_in_place():
    """What the loss is of, and not what stands in the outputs when it passes back."""

    def loss(f, y):
        value = F.cross_entropy(f * 1.0, y)
        f.detach().mul_(2.0)
        return value

    first_step(loss)


def test_a_network_in_bfloat16_is_not_told():
    x, y = data(20)
    model, q, optimizer, _ = attached(steps=10)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert q.draw == 3
