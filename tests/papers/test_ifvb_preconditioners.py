"""Preconditioners as matrices: the recursion, its block and matrix-free forms, and what the others invert."""

import math
import pathlib

import pytest
import torch
from helpers import seeded
from ifvb_parts import PreconditionedVI

from torchngvi import ifvb, metrics
from torchngvi.errors import InputError

FLOAT = torch.float64


def family(D, *batch):
    """Any family of this size: preconditioners that learn see its shape alone."""
    return ifvb.MeanFieldGaussian(torch.zeros(*batch, D, dtype=FLOAT))


def scores(n, D, *batch, seed=0, spread=4.0):
    """Rows of a Fisher matrix with eigenvalues from 1 to 10^spread."""
    scale = torch.logspace(0, spread / 2, D, dtype=FLOAT)
    turn = torch.linalg.qr(torch.randn(D, D, generator=seeded(99), dtype=FLOAT))[0]
    return torch.randn(n, *batch, D, generator=seeded(seed), dtype=FLOAT) * scale @ turn


def absorbed(rule, rows, block, generator=None):
    state = rule.fresh(family(rows.shape[-1], *rows.shape[1:-1]))
    generator = generator or seeded(1)
    for piece in rows.split(block):
        state = rule.absorb(state, piece, generator)
    return state


def test_many_scores_at_once_are_taken_in_pieces():
    """A warm-up of any size: no factorisation of more than some hundred rows."""
    rows = scores(5000, 4, spread=1.0)
    rule = ifvb.Recursive(eps=1.0, c_beta=0.0)
    assert relative(rule.inverse(absorbed(rule, rows, 5000)), rule.inverse(absorbed(rule, rows, 50))) < 1e-12


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.sparse(2)
@pytest.mark.parametrize(("D", "block"), [(50, 1), (50, 40), (300, 1), (300, 7), (300, 64)])
def test_t1_recursion_is_the_inverse(D, block):
    """Theorem 4.1 for fixed λ: P is the inverse of εI + Σφφᵀ, whatever the block and with vectors waiting."""
    rows = scores(1500 if D == 300 else 6000, D)
    rule = ifvb.Recursive(eps=0.5, c_beta=0.0)
    state = absorbed(rule, rows, block)
    H = 0.5 * torch.eye(D, dtype=FLOAT) + rows.mT @ rows
    inverse = rule.inverse(state) / len(rows)
    assert relative(inverse @ H, torch.eye(D, dtype=FLOAT)) < 1e-9
    rounding = 10 * torch.finfo(FLOAT).eps * 2.0 / float(inverse.max())  # of P₀ = 2I, seen from the last P
    assert rounding < 1e-9
    assert relative(inverse, torch.linalg.inv(H)) < rounding
    assert float((inverse - inverse.mT).abs().max()) <= 1e-13 * float(inverse.abs().max())
    assert float(torch.linalg.eigvalsh(inverse)[0]) > 0
    assert state["count"].item() == len(rows)


def test_t1_in_single_precision():
    """After 20,000 updates with eigenvalues from 1 to 10^4."""
    rows = scores(20_000, 50).float()
    rule = ifvb.Recursive(eps=1.0, c_beta=0.0)
    state = rule.fresh(family(50).float())
    for piece in rows.split(10):
        state = rule.absorb(state, piece, seeded())
    H = torch.eye(50, dtype=FLOAT) + rows.double().mT @ rows.double()
    assert relative(rule.inverse(state).double() / len(rows), torch.linalg.inv(H)) < 1e-4


@pytest.mark.parametrize("c_beta", [0.0, 0.7])
@pytest.mark.parametrize("D", [6, 80])
def test_block_equals_sequential(D, c_beta):
    """Remark 4.1: S scores at once are S updates one after the other, their Z included."""
    rows, Z = scores(60, D, spread=1.0), torch.randn(60, D, generator=seeded(5), dtype=FLOAT)
    rule = ifvb.Recursive(eps=2.0, c_beta=c_beta, beta=0.2)

    P = torch.eye(D, dtype=FLOAT) / 2.0
    for index, (phi, z) in enumerate(zip(rows, Z, strict=True)):
        u = P @ phi
        P = P - torch.outer(u, u) / (1 + phi @ u)
        b = c_beta * (index + 1) ** -0.2
        u = P @ z
        P = P - b * torch.outer(u, u) / (1 + b * z @ u)
    for block in (1, 6, 20):
        state = rule.fresh(family(D))
        for start in range(0, 60, block):
            state = _absorb_with(rule, state, rows[start : start + block], Z[start : start + block])
        assert relative(rule.inverse(state) / 60, P) < 1e-12


def _absorb_with(rule, state, rows, Z):
    """Absorb with these normal draws."""
    real, torch.randn = torch.randn, lambda *args, out, **kwargs: out.copy_(Z)
    try:
        return rule.absorb(state, rows, seeded())
    finally:
        torch.randn = real


@pytest.mark.accuracy
def test_t2_bias_of_the_perturbation():
    """E[H̃_s/s] - I_F = (ε/s) I + (c_β/s) Σ k^{-β} I exactly, so s^β times it tends to c_β/(1 - β) I."""
    s, D, runs, eps, c_beta, beta = 2000, 4, 400, 1.0, 0.5, 0.1
    F = torch.diag(torch.tensor([0.2, 0.5, 1.0, 3.0], dtype=FLOAT))
    rows = torch.randn(s, runs, D, generator=seeded(3), dtype=FLOAT) * F.diagonal().sqrt()
    rule = ifvb.Recursive(eps=eps, c_beta=c_beta, beta=beta)
    H = torch.linalg.inv(rule.inverse(absorbed(rule, rows, 50)))
    excess = H - F
    k = torch.arange(1, s + 1, dtype=FLOAT)
    expected = (eps + c_beta * float((k**-beta).sum())) / s
    error = excess.std(0) / math.sqrt(runs)
    assert ((excess.mean(0) - expected * torch.eye(D, dtype=FLOAT)).abs() < 4.5 * error).all()
    scaled = s**beta * excess.mean(0).diagonal()
    assert ((scaled - c_beta / (1 - beta)).abs() < 4.5 * s**beta * error.diagonal() + 0.005).all()
    # without Z the error is noise, s^{-1/2}
    rule = ifvb.Recursive(eps=eps, c_beta=0.0)
    sizes = []
    for count in (200, 2000):
        state = absorbed(rule, rows[:count], 50)
        sizes.append(float((torch.linalg.inv(rule.inverse(state)) - F).square().mean().sqrt()))
    assert math.log(sizes[0] / sizes[1]) / math.log(10) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("Z", [0.0, 0.3])
def test_limited_memory_with_room_for_all_is_the_recursion(Z):
    rows, g = scores(40, 30, spread=1.0), scores(1, 30, seed=7)[0]
    kept = ifvb.MatrixFree(5, eps=2.0, c_beta=Z, beta=0.2, keep=80, warmup=1)
    dense = ifvb.Recursive(5, eps=2.0, c_beta=Z, beta=0.2)
    a, b = absorbed(dense, rows, 5), absorbed(kept, rows, 5)
    assert relative(kept.direction(b, g, None), dense.direction(a, g, None)) < 1e-12


def test_limited_memory_by_a_window_is_the_newest_terms_and_the_start():
    """k (εI + Σ φφᵀ)⁻¹ g over the newest k scores, where ρ is such that ε = ρ Σ|φ|²/D."""
    rows, g, eps, k = scores(40, 30, spread=1.0), scores(1, 30, seed=7)[0], 2.0, 12
    newest = rows[-k:]
    window = ifvb.Window(k, 4, rho=eps * 30 / float(newest.square().sum()))
    expected = k * torch.linalg.solve(eps * torch.eye(30, dtype=FLOAT) + newest.mT @ newest, g)
    assert relative(window.direction(absorbed(window, rows, 4), g, None), expected) < 1e-12
    recursion = ifvb.Recursive(4, eps=eps, c_beta=0.0)  # which has seen these alone
    assert relative(recursion.direction(absorbed(recursion, newest, 4), g, None), expected) < 1e-12


def test_matrix_free_with_vectors_dropped():
    """Positive definite, and not the inverse of what remains."""
    rows = scores(40, 20, spread=1.0)
    rule = ifvb.MatrixFree(2, eps=1.0, c_beta=0.0, keep=10)
    state = absorbed(rule, rows, 2)
    assert state["V"].shape == (10, 20)
    P = rule.inverse(state) / 40
    assert float(torch.linalg.eigvalsh(P)[0]) > 0
    for kept in (rows[-10:], rows[:10]):  # nor of the oldest
        assert relative(P, torch.linalg.inv(torch.eye(20, dtype=FLOAT) + kept.mT @ kept)) > 0.05


def test_lambda_max_is_bounded_by_the_perturbation():
    """λ_max of t P is below t^β/(c_β (1 - β)..): O(t^β) where no score was ever seen, and t/ε without Z."""
    silent = torch.zeros(3000, 4, dtype=FLOAT)
    with_z = ifvb.Recursive(eps=1.0, c_beta=0.5, beta=0.1)
    largest = []
    for count in (300, 3000):
        state = absorbed(with_z, silent[:count], 10)
        largest.append(float(torch.linalg.eigvalsh(with_z.inverse(state))[-1]))
    assert largest[1] == pytest.approx(3000**0.1 * 0.9 / 0.5, rel=0.15)
    assert largest[1] / largest[0] == pytest.approx(10**0.1, rel=0.15)
    without = ifvb.Recursive(eps=1.0, c_beta=0.0)
    assert float(without.inverse(absorbed(without, silent, 10))[0, 0]) == pytest.approx(3000.0)


def test_scale_of_the_scores_sets_eps_and_c_beta():
    """Rescaled scores give a rescaled inverse, where eps and c_beta are left to them."""
    rows = scores(50, 6, spread=1.0)
    rule = ifvb.Recursive()
    a, b = (rule.inverse(absorbed(rule, factor * rows, 10)) for factor in (1.0, 10.0))
    assert relative(100 * b, a) < 1e-10
    first = rows[:10].square().mean()
    Z = torch.randn(10, 6, generator=seeded(1), dtype=FLOAT)  # and c_beta = 0.03 of it
    weight = 0.03 * first * torch.arange(1, 11, dtype=FLOAT) ** -0.1
    H = first * torch.eye(6, dtype=FLOAT) + rows[:10].mT @ rows[:10] + (weight * Z.mT) @ Z
    assert relative(rule.inverse(absorbed(rule, rows[:10], 10)), 10 * torch.linalg.inv(H)) < 1e-10
    state = absorbed(ifvb.Recursive(c_beta=0.0), rows, 10)
    H = torch.linalg.inv(ifvb.Recursive(c_beta=0.0).inverse(state)) * 50
    assert relative(H, first * torch.eye(6, dtype=FLOAT) + rows.mT @ rows) < 1e-10


@pytest.mark.parametrize("block", [1, 3])
def test_scores_beyond_the_range_are_not_absorbed(block):
    """Finite, with squares that overflow: no factor, so that the sum stays as it was."""
    for rule in (ifvb.Recursive(eps=1.0, c_beta=0.0), ifvb.MatrixFree(eps=1.0, c_beta=0.0)):
        state = absorbed(rule, scores(6, 4, spread=1.0), block)
        before = rule.inverse(state) / 6
        state = rule.absorb(state, torch.full((block, 4), 1e200, dtype=FLOAT), seeded())
        assert relative(rule.inverse(state) / (6 + block), before) < 1e-12


def damped(rows, rho, g):
    """(F̂ + ρ tr(F̂)/D I)⁻¹g, by an inverse."""
    F, D = rows.mT @ rows / len(rows), rows.shape[-1]
    return torch.linalg.inv(F + rho * F.trace() / D * torch.eye(D, dtype=FLOAT)) @ g


def test_plain_batch_fisher_is_singular():
    """Eq 4.1: rank S at most; refused for S < D, and solved without damping otherwise."""
    rows = scores(5, 12)
    assert int(torch.linalg.matrix_rank(rows.mT @ rows)) == 5
    with pytest.raises(InputError, match=r"5 scores give a Fisher matrix of rank 5 at most, singular for D = 12"):
        ifvb.BatchFisher(5, 0.0).fresh(family(12))
    rows, g = scores(40, 12), scores(1, 12, seed=8)[0]
    rule = ifvb.BatchFisher(40, 0.0)
    assert relative(rule.direction(absorbed(rule, rows, 40), g, None), damped(rows, 0.0, g)) < 1e-9
    singular = torch.zeros(40, 12, dtype=FLOAT)
    assert rule.direction(absorbed(rule, singular, 40), g, None).isnan().all()


def test_blocks_of_a_product_are_exact():
    """A mean-field Gaussian: blocks and the whole tend to the same closed form."""
    q = ifvb.MeanFieldGaussian(torch.tensor([0.0, 1.0, 0.5, -1.0], dtype=FLOAT))
    rule = ifvb.Blocks(ifvb.Recursive(eps=1.0, c_beta=0.0), [1, 1, 1, 1])
    state = rule.fresh(q)
    state = rule.absorb(state, q.score(q.sample(20_000, seeded())).detach(), seeded())
    g = torch.ones(4, dtype=FLOAT)
    assert torch.allclose(rule.direction(state, g, q), q.exact_fisher_solve(g), rtol=0.05)


def test_exact_identity_and_nagvac_ask_the_family():
    q = ifvb.RankOneGaussian(*(torch.tensor(row, dtype=FLOAT) for row in ([0, 0, 0], [1, 2, 1], [1, 1, 2])))
    g = torch.arange(1.0, 10.0, dtype=FLOAT)
    for rule, expected in (
        (ifvb.Identity(), g),
        (ifvb.Exact(), q.exact_fisher_solve(g)),
        (ifvb.NAGVAC(), q.block_fisher_solve(g)),
        (ifvb.PublishedNAGVAC(), q.published_block_solve(g)),
    ):
        assert torch.equal(rule.direction(rule.fresh(q), g, q), expected)
        assert (rule.samples, rule.remembers) == (0, False)


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    """D = 10,000 where there is not enough, in GiB."""
    monkeypatch.setattr(metrics.recursive, "free_bytes", lambda device: 0.5 * 2**30)
    message = (
        r"the inverse Fisher matrix of 10,000 variational parameters needs 1.51 GiB and 0.5 GiB of cpu memory are "
        r"free. Use Blocks, Window or BatchFisher"
    )
    with pytest.raises(InputError, match=message):
        PreconditionedVI(family(10_000), ifvb.Recursive())
    ifvb.Recursive().fresh(family(100))
    assert ifvb.Blocks(ifvb.Recursive(), [1000] * 10).fresh(family(10_000)).keys() == {str(i) for i in range(10)}


def test_free_memory_is_the_least_that_is_known(monkeypatch):
    """Of the machine (in kB), and of the group of processes: its limit less what it holds; "max" is no limit."""
    files = {"meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n", "memory.max": "9e9", "memory.current": "4e9"}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: files[self.name])
    cpu = torch.device("cpu")
    assert metrics.recursive.free_bytes(cpu) == 5e9
    files["memory.max"] = "max\n"
    assert metrics.recursive.free_bytes(cpu) == 8 * 2**30
    files["meminfo"] = ""
    assert metrics.recursive.free_bytes(cpu) == math.inf


def test_rounding_does_not_add_up_in_the_inverse():
    """P is made symmetric again by every 32 blocks, in strips of 128 rows."""
    rule = ifvb.Recursive(10, c_beta=0.0)  # ten scores of 150 are a block
    rows = scores(10, 150, spread=1.0)
    state = absorbed(rule, rows, 10)
    state["P"][0, -1] += 1e-6
    state["P"][140, 3] += 1e-6
    for _ in range(31):
        assert not torch.equal(state["P"], state["P"].mT)
        state = rule.absorb(state, rows, seeded())
    assert torch.equal(state["P"], state["P"].mT)


def test_defaults_of_the_damped_matrices():
    """Fifty scores and a damping of a hundredth of the mean eigenvalue, which is level with a tuned IFVB."""
    assert (ifvb.BatchFisher().samples, ifvb.BatchFisher().rho) == (50, 0.01)
    assert (ifvb.Window().keep, ifvb.Window().samples, ifvb.Window().rho) == (100, 10, 0.01)
