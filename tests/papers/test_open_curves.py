"""Curves that cannot leave the cone beside the natural-gradient flow: closed forms, identities, limits."""

import math
import pathlib
import re

import pytest
import torch

from examples.papers.open_questions.curves import CURVES, away, begun, optimum, robust, settled, under_noise
from examples.papers.open_questions.floor import gaussian
from examples.papers.open_questions.held_flow import HeldFlow
from examples.papers.open_questions.problems import exact_loss, few
from torchngvi import CholeskyGaussian, NaturalGradientVI
from torchngvi.adapters.flows import natural_gradient_flow
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Cost, Expectation, Raw
from torchngvi.rules import Geodesic, VariationalNewton
from torchngvi.stepsizes import Constant
from torchngvi.testing import check_rule

DTYPE = torch.float64


def near(actual, expected, size=1e-12):
    assert float((actual - expected).abs().max()) <= size * max(1.0, float(expected.abs().max()))


def quadratic():
    """Λ and μ of ℓ = ½(θ - μ)ᵀΛ(θ - μ), and a q that is far from it."""
    generator = torch.Generator().manual_seed(4)
    root = torch.randn(3, 3, dtype=DTYPE, generator=generator)
    precision = root @ root.mT + 0.1 * torch.eye(3, dtype=DTYPE)
    mean, C = torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE), torch.diag(torch.tensor([3.0, 0.1, 1.0], dtype=DTYPE))
    C = C + torch.tensor([[0, 0, 0], [0.2, 0, 0], [-0.4, 0.3, 0]], dtype=DTYPE)
    return precision, torch.tensor([0.3, 0.2, -1.0], dtype=DTYPE), CholeskyGaussian(3, mean=mean, scale=C, dtype=DTYPE)


def packet(q, g, H, gamma=1.0):
    return Expectation(torch.zeros((), dtype=DTYPE), Raw(g, H), gamma, True, Cost(1, 0))


def stepped(rule, q, g, H, t, gamma=1.0):
    """Mean and covariance after one step, which must stay in the cone."""
    new, inside = q.moved(rule(q, packet(q, g, H, gamma)).at(torch.tensor(t, dtype=DTYPE)))
    assert bool(inside)
    return new.vector, new.matrix @ new.matrix.mT


def test_it_is_a_rule():
    check_rule(HeldFlow)


class TestHeldFlow:
    @pytest.mark.parametrize("gamma", [1.0, 0.3])
    @pytest.mark.parametrize("t", [1e-3, 0.4, 2.0, 15.0])
    def test_on_a_quadratic_it_is_the_flow(self, t, gamma):
        """S(t) = e^{-γt} S + (1 - e^{-γt})/γ Λ, and S(t)(m(t) - μ) = e^{-γt} S (m - μ): for every t, at once."""
        precision, mu, q = quadratic()
        mean, covariance = stepped(HeldFlow(), q, precision @ (q.mean - mu), precision, t, gamma)
        decay = math.exp(-gamma * t)
        S = decay * q.precision + (1 - decay) / gamma * precision
        near(covariance, torch.linalg.inv(S))
        near(mean, mu + decay * torch.linalg.solve(S, q.precision @ (q.mean - mu)))

    @pytest.mark.accuracy
    def test_so_says_a_solver_of_the_flow(self):
        model = gaussian()
        q = begun(optimum(model), 5.0)
        for t in (0.3, 2.0):
            end = natural_gradient_flow(q, model, [t])
            p = CholeskyGaussian(3, mean=q.mean, scale=q.scale_tril, dtype=DTYPE)
            NaturalGradientVI(p, HeldFlow(), lr=t, step_size=Constant()).step(model)
            near(p.mean, end.mean[-1], 1e-8)
            near(p.covariance, end.covariance[-1], 1e-8)

    @pytest.mark.parametrize("t", [0.2, 3.0])
    def test_it_is_vn_at_a_shorter_step_where_the_curvature_is_positive(self, t):
        precision, mu, q = quadratic()
        g = torch.tensor([0.3, -2.0, 1.0], dtype=DTYPE)
        held, newton = (
            stepped(rule, q, g, precision, step)
            for rule, step in ((HeldFlow(), t), (VariationalNewton(), 1 - math.exp(-t)))
        )
        near(held[0], newton[0])
        near(held[1], newton[1])

    @pytest.mark.parametrize("t", [0.1, 1.0, 10.0])
    def test_it_stays_in_the_cone_whatever_the_curvature(self, t):
        _, _, q = quadratic()
        H = torch.tensor([[-3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, -40.0]], dtype=DTYPE)
        _, covariance = stepped(HeldFlow(), q, q.mean, H, t)
        assert float(torch.linalg.eigvalsh(covariance)[0]) > 0
        if t >= 1:
            path = VariationalNewton()(q, packet(q, q.mean, H))
            assert not bool(q.moved(path.at(torch.tensor(1 - math.exp(-t), dtype=DTYPE)))[1])

    def test_beyond_the_cone_it_leaves_the_flow_at_second_order(self):
        """N(t) - (e^{-t} I + sW) = t² W₋² + O(t³), W₋ the negative part."""
        _, _, q = quadratic()
        q = CholeskyGaussian(3, dtype=DTYPE)
        H = torch.tensor([[-3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, -4.0]], dtype=DTYPE)
        w, axes = torch.linalg.eigh(H)
        for t in (1e-3, 1e-4):
            N = HeldFlow()(q, packet(q, q.mean, H)).at(torch.tensor(t, dtype=DTYPE)).N
            linear = math.exp(-t) * torch.eye(3, dtype=DTYPE) - math.expm1(-t) * H
            near((N - linear) / t**2, axes * w.clamp_max(0).square() @ axes.mT, 30 * t)

    def test_without_temperature_time_is_the_step(self):
        _, _, q = quadratic()
        H, g = torch.eye(3, dtype=DTYPE), torch.ones(3, dtype=DTYPE)
        near(stepped(HeldFlow(), q, g, H, 0.7, 0.0)[1], torch.linalg.inv(q.precision + 0.7 * H))


class TestExponential:
    @pytest.mark.parametrize("t", [0.1, 0.4, 1.0])
    def test_every_exponential_integrator_with_a_held_gradient_is_the_geodesic(self, t):
        """dV/dt = -VGV with VG held from one side or from both: exp(-tVG) V and exp(-½tVG) V exp(-½tGV)."""
        precision, mu, q = quadratic()
        V, G = q.covariance, 0.2 * precision - q.precision
        both = torch.linalg.matrix_exp(-0.5 * t * V @ G)
        mean, covariance = stepped(Geodesic(), q, precision @ mu, 0.2 * precision, t)
        near(covariance, both @ V @ both.mT, 1e-11)
        near(covariance, torch.linalg.matrix_exp(-t * V @ G) @ V, 1e-11)
        near(mean, q.mean - t * V @ precision @ mu)

    @pytest.mark.parametrize("rho", [0.4, 1.7])
    def test_the_maps_of_one_eigenvalue(self, rho):
        """u' as the docstring of the study has it, for ℓ = ½wθ² in one dimension."""
        maps = {
            "flow, H held": lambda u: u / (1 + (1 - math.exp(-rho)) * (u - 1)),
            "VN": lambda u: u / (1 + rho * (u - 1)),
            "exponential": lambda u: u * math.exp(-rho * (u - 1)),
            "iBLR": lambda u: u / (1 + rho * (u - 1) + 0.5 * rho**2 * (u - 1) ** 2),
            "SR-VN": lambda u: u * (1 - 0.5 * rho * (u - 1)) ** 2,
        }
        w = torch.tensor([[2.0]], dtype=DTYPE)
        for name, expected in maps.items():
            for u in (0.6, 1.3, 4.0):
                q = CholeskyGaussian(1, scale=math.sqrt(u / 2), dtype=DTYPE)
                after = stepped(CURVES[name](), q, torch.zeros(1, dtype=DTYPE), w, rho)[1]
                near(2 * after, torch.tensor([[expected(u)]], dtype=DTYPE))

    @pytest.mark.accuracy
    @pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
    def test_staying_in_the_cone_is_not_converging(self):
        """At ρ = 2.3 the variance of the exponential curve goes round a cycle of two; the flow's curve converges."""
        model = gaussian()
        star = optimum(model)
        least, start = float(exact_loss(star, model)), begun(star, 0.9)
        assert settled("exponential", model, start, least, 2.3, 400) == "stays"
        assert int(settled("flow, H held", model, start, least, 2.3, 400)) < 10
        assert settled("VN", model, begun(star, 0.2), least, 2.3, 400) == "leaves"
        assert settled("SR-VN", model, begun(star, 5.0), least, 1.0, 400) == "rises"


@pytest.mark.accuracy
@pytest.mark.parametrize("name", CURVES)
def test_runs_are_off_the_flow_to_first_order(name):
    """Halving the step halves the distance; where ℓ is not quadratic this holds for the held flow too."""
    model = few()
    start = begun(optimum(model), 0.2)
    assert away(name, model, start, 40) / away(name, model, start, 80) == pytest.approx(2, rel=0.05)


@pytest.mark.accuracy
def test_the_optimum_without_log_concavity_is_stationary():
    model = robust()
    star = optimum(model)
    assert float(star.norm2(star.local(Quadrature()(star, model)))) < 1e-16


@pytest.mark.accuracy
def test_the_robust_regression_curves_down_at_its_start():
    """W has a negative eigenvalue there, -1 being that of P: the curves differ in kind."""
    model = robust()
    start = begun(optimum(model), 0.2)
    assert float(torch.linalg.eigvalsh(start.local(Quadrature()(start, model)).P)[0]) < -1


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
def test_noise_that_leaves_the_cone_is_said():
    star = optimum(few())
    found = under_noise("VN", few(), star, 0.6, 4, 8, 20)
    assert found["left"] > 0.1
    assert found["worst"] >= found["gap"] > 0
    assert under_noise("iBLR", few(), star, 0.1, 64, 8, 20)["left"] == 0


def test_every_claim_names_tests_and_commands_that_exist():
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs" / "capabilities.md").read_text(encoding="utf-8")
    table = text.split("\n## Printed claims that fail\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| paper")]
    assert len(lines) == 19
    for line in lines:
        named = re.findall(r"`(test_\w+\.py)((?:::\w+)+)`", line)
        assert named, line
        for file, path in named:
            (source,) = (path.read_text(encoding="utf-8") for path in (root / "tests").rglob(file))
            *of, name = path.removeprefix("::").split("::")
            assert f"def {name}(" in source
            assert all(f"class {owner}" in source for owner in of)
    for name in re.findall(r"python -m examples\.papers ([\w-]+)", text):
        assert (root / "configs" / "papers" / f"{name}.toml").is_file()
