# SPDX-License-Identifier: Apache-2.0
"""What a model may do inside vmap, and bad matrices there: values and gradients as outside."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.compiled.recorder import DispatchMode
from pyro_implicit.density import Target, find_modes, run_mode
from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.run_mode import RunMode

pytestmark = pytest.mark.usefixtures("double")


def both_ways(model, points):
    """Values and gradients in one go, without any warning, and one by one."""
    density, looped = Target(model), Target(model)
    looped._runs.batched = BatchedRuns("looped", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = density.score(points)
    assert density._runs.batched.mode == "vmap"
    return found, looped.score(points)


# Each makes a matrix B, good where x is positive, and returns what it gives.
def by_cholesky(b):
    return torch.linalg.cholesky(b).sum()


def by_covariance(b):
    return dist.MultivariateNormal(torch.zeros(2), covariance_matrix=b).log_prob(torch.ones(2))


def by_precision(b):
    return dist.MultivariateNormal(torch.zeros(2), precision_matrix=b).log_prob(torch.ones(2))


def by_inverse(b):
    return torch.linalg.inv(b).sum()


def by_solution(b):
    return torch.linalg.solve(b, torch.ones(2)).sum()


def by_eigenvalues(b):
    return torch.linalg.eigh(b).eigenvalues.log().sum()


def singular(x):
    """Positive-definite, or of zeros."""
    return x.clamp(min=0) * torch.tensor([[2.0, 0.3], [0.3, 1.0]])


def nan_matrix(x):
    return x.log() + torch.tensor([[20.0, 0.3], [0.3, 10.0]])


@pytest.mark.parametrize(
    "function, matrix",
    [
        (by_cholesky, singular),
        (by_cholesky, nan_matrix),
        (by_covariance, singular),
        (by_precision, singular),
        (by_inverse, singular),
        (by_solution, singular),
        (by_eigenvalues, nan_matrix),
    ],
)
def test_a_bad_matrix_is_its_own_runs_affair(function, matrix):
    def model():
        x = pyro.sample("x", dist.Normal(1.0, 1.0))
        pyro.factor("f", function(matrix(x)))

    points = torch.tensor([[1.3], [-0.7], [0.4], [-2.0]])
    found, looped = both_ways(lambda: model(), points)
    bad = points[:, 0] < 0
    for log_prob, score in (found, looped):
        assert (log_prob[bad] == -math.inf).all() and (score[bad] == 0).all()
    # The good ones by hand, in a run that meets no bad one.
    x = points[~bad, 0].clone().requires_grad_()
    expected = dist.Normal(1.0, 1.0).log_prob(x)
    expected = expected + torch.stack([function(matrix(x_k)) for x_k in x])
    for log_prob, score in (found, looped):
        torch.testing.assert_close(log_prob[~bad], expected.detach())
        torch.testing.assert_close(
            score[~bad, 0], torch.autograd.grad(expected.sum(), x, retain_graph=True)[0]
        )


def test_a_gradient_in_what_good_and_bad_matrices_share():
    shared = torch.tensor(2.0, requires_grad=True)
    batch = torch.stack([torch.eye(2), -torch.eye(2)])
    with RunMode():
        factor = torch.linalg.cholesky(shared * batch)
        solution = torch.linalg.solve(shared * batch * torch.tensor([1.0, 0.0])[:, None, None],
                                      torch.ones(2, 1))  # fmt: skip
    assert factor[1].isnan().all() and solution[1].isnan().all()
    factor.nan_to_num().sum().backward()
    assert shared.grad.item() == pytest.approx(1 / math.sqrt(2.0))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(-torch.eye(2))


@pytest.mark.parametrize("function", [torch.logdet, lambda x: torch.linalg.slogdet(x).logabsdet])
def test_derivatives_next_to_a_singular_matrix(function):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.factor("f", function(x * torch.eye(2)))

    log_prob, score, hessian = Target(model).derivatives(torch.tensor([[1.0, 2.0], [1.0, 0.0]]))
    assert log_prob.isfinite().tolist() == [True, False]
    torch.testing.assert_close(score, torch.tensor([[0.0, -1.5], [0.0, 0.0]]))
    torch.testing.assert_close(hessian[0], torch.tensor([[-2.0, 0.0], [0.0, -1.25]]))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_derivatives_next_to_a_matrix_whose_transpose_alone_has_no_factor(is_transposed):
    singular = torch.tensor([[0.63, 0.63], [0.54, 0.54]])  # its second pivot is rounded to 2e-8
    assert torch.linalg.lu_factor_ex(singular.mT).info != torch.linalg.lu_factor_ex(singular).info
    singular = singular.mT if is_transposed else singular

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("f", torch.logdet(singular + x * torch.eye(2)))

    _, _, hessian = Target(model).derivatives(torch.tensor([[0.0], [1.0]]))
    # log(x (x + 1.17)) - x^2 / 2
    expected = torch.tensor(-1 - 1 / 2.17**2 - 1.0)
    torch.testing.assert_close(hessian[1, 0, 0], expected)


def test_a_scale_that_underflows():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, (-(x**2)).exp()), obs=torch.tensor(0.5))

    points = torch.tensor([[0.3], [100.0], [-0.5], [math.nan]])
    (log_prob, score), looped = both_ways(model, points)
    assert log_prob.isfinite().tolist() == [True, False, True, False]
    assert (score[[1, 3]] == 0).all() and (score[[0, 2]] != 0).all()
    torch.testing.assert_close((log_prob, score), looped)


Y = torch.tensor([0.3, -0.4, 0.8, 0.1, -1.1], dtype=torch.float64)


@pytest.mark.parametrize("loc", [0.0, 1e7])
def test_rounding_is_no_disagreement(loc):
    """Off by .3 under vmap: next to latents that are resolved to 1 a matter of order in a sum."""
    torch.set_default_dtype(torch.float32)

    def model():
        x = pyro.sample("x", dist.Normal(loc, 10.0))
        off = 0.3 if torch._C._functorch.is_batchedtensor(x) else 0.0
        pyro.sample("y", dist.Normal(x - loc + off, 1.0), obs=torch.tensor(2.0))

    density = Target(model)
    points = loc + torch.tensor([[4.0], [7.0]])
    if loc == 0.0:
        with pytest.warns(UserWarning, match="there and .* outside; are latents"):
            density.log_prob(points)
    else:
        density.log_prob(points)
    assert density.is_vectorized == (loc != 0.0)


def garch():
    """Latents are written into a tensor that the model makes."""
    a = pyro.sample("a", dist.Beta(2.0, 2.0))
    variance = torch.zeros(5)
    variance[0] = a
    for t in range(1, 5):
        variance[t] = 0.1 + a * Y[t - 1] ** 2 + 0.5 * variance[t - 1]
    total = torch.zeros(())
    total += variance.sum()
    assert (variance > 0).all(), f"negative variance {variance}"
    loc = 2 * Y
    loc += a
    loc -= a / 2
    loc *= a
    loc /= a
    pyro.factor("total", -total)
    with pyro.plate("times", 5):
        pyro.sample("y", dist.Normal(loc, variance.sqrt()), obs=Y)


def clipped():
    """Elements are set through a mask of latents, and compared."""
    x = pyro.sample("x", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    bounded = x.clone()
    bounded[x > 0.5] = 0.5
    bounded[0][x[1] > 0] = 2.0  # a mask of a single element, as in Pyro's safe_normalize
    near = torch.isclose(x, Y, atol=0.5)
    with pyro.plate("rows", 5):
        pyro.sample("y", dist.Normal(bounded, torch.where(near, 1.0, 2.0)), obs=Y)


def selecting():
    """A mask of data that the model makes, among tensors that latents are written into."""
    x = pyro.sample("x", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    seen = torch.tensor([0.3, -0.4, 0.8, 0.1, -1.1]) > 0
    upper, table = torch.ones(5), torch.ones(5, 2)
    upper[seen] = torch.sigmoid(x[seen] - 0.5)
    table[seen, 0] = x[seen]
    with pyro.plate("rows", 5):
        pyro.factor("f", (upper + 0.1).log() - table.square().sum(-1))


def branching():
    """Runs part at two branches, and meet again."""
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    loc = 2 * x[0] if x[0] > 0 else x[0] ** 2
    if x.sum() > 0.3:
        loc = loc + 1
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))


def guarded():
    """Runs of impossible parameters raise an error."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    if x < 0:
        raise ValueError("x must be positive")
    pyro.sample("y", dist.Poisson(x), obs=torch.tensor(2.0))


@pytest.mark.parametrize("model", [garch, clipped, selecting, branching, guarded])
def test_what_models_do(model):
    points = torch.randn(7, Target(model).latent_dim)
    found, looped = both_ways(model, points)
    for one, other in zip(found, looped, strict=True):
        torch.testing.assert_close(one, other)
    if model is guarded:
        assert torch.equal(found[0].isinf(), points[:, 0] < 0)
    else:
        assert found[1].isfinite().all() and (found[1] != 0).any()


def test_each_group_of_branches_runs_once():
    ran = []

    def model():
        ran.append(1)
        branching()

    density = Target(model)
    points = torch.tensor([[1.0, 1.0], [1.0, -2.0], [-1.0, 3.0], [-1.0, -1.0]]).repeat(10, 1)
    for _ in range(2):  # both try to record the model, which branches
        density.score(points)
    ran.clear()
    density.score(points)
    # Four groups, three batches that part, and a plain run at the first parting.
    assert len(ran) == 8


def test_a_write_that_is_lost_is_seen():
    """As the value does not reach the tensor that other code holds."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        loc = 2 * Y
        loc.add_(x)
        pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=Y)

    density = Target(model)
    with pytest.warns(UserWarning, match="its log-density is .* there and .* outside"):
        density.score(torch.ones(2, 1))


def test_too_many_branches_are_looped():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        total = x
        for k in range(-20, 20):
            if x > k / 10:
                total = total + 1
        pyro.factor("f", total)

    density = Target(model)
    with pytest.warns(UserWarning, match="its runs take too many different branches, behind site"):
        log_prob = density.log_prob(torch.linspace(-2, 2, 30).unsqueeze(-1))
    assert log_prob.isfinite().all()


def test_numbers_that_differ_later_on():
    """The first batch has one value, the second two."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("f", x * x.item())

    density = Target(model)
    density.log_prob(torch.ones(1, 1))
    with pytest.warns(UserWarning, match="asked for its number .*2 particles take .* s, one takes"):
        log_prob = density.log_prob(torch.tensor([[1.0], [2.0]]))
    torch.testing.assert_close(log_prob[1] - log_prob[0], torch.tensor(1.5))


def test_the_same_minibatch_for_all_branches():
    seen = []

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=5) as index:
            seen.append(index)
        if x > 0:
            pyro.factor("f", x)

    from tests.density.test_batched_runs import prepare

    prepared, _ = prepare(model)
    runs = BatchedRuns("Test")
    for _ in range(2):
        seen.clear()
        prepared, _ = prepare(model)
        seen.clear()
        runs.map(prepared, {"x": torch.tensor([1.0, -1.0, 2.0])}, log_probs_total)
        assert all(index.equal(seen[-1]) for index in seen[-2:])


def log_probs_total(trace):
    return trace.log_prob_sum()


def kernel(x, scale):
    return (-0.5 * ((x[:, None] - x) / scale) ** 2).exp()


def gp_counts():
    """A kernel with next to no jitter has no factor for long scales."""
    x = torch.linspace(0, 1, 8)
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    covariance = kernel(x, scale) + 1e-16 * torch.eye(8)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(8), covariance))
    with pyro.plate("rows", 8):
        pyro.sample("y", dist.Poisson(f.exp()), obs=torch.arange(8.0))


def sir():
    """Draws of the prior send more people out than there are."""
    beta = pyro.sample("beta", dist.LogNormal(0.5, 1.0))
    gamma = pyro.sample("gamma", dist.LogNormal(-1.0, 1.5))
    s, i = torch.tensor(99.0), torch.tensor(1.0)
    for t, y in enumerate([1.0, 2.0, 4.0, 7.0, 12.0]):
        new = beta * s * i / 100
        s, i = s - new, i + new - gamma * i
        pyro.sample(f"y_{t}", dist.Poisson(i), obs=torch.tensor(y))
        pyro.sample(f"z_{t}", dist.Binomial(100, i / 100), obs=torch.tensor(y))


@pytest.mark.parametrize("model", [gp_counts, sir])
def test_the_search_survives_impossible_draws(model):
    pyro.set_rng_seed(3)
    density = Target(model)
    starts = density.sample_prior(50)
    assert len(starts) < 50 or not density.log_prob(starts).isfinite().all()
    modes = find_modes(density, num_starts=4, max_rounds=1, max_iterations=5)
    assert modes.elbo[0].isfinite() and density.is_vectorized


def test_densities_do_not_loop_after_values_were_read(monkeypatch):
    """What replaces functions for vmap is left out where it is not needed, and comes back."""

    loops = []
    replace_tensors = run_mode._replace_tensors

    def model(counts):
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        pyro.sample("counts", dist.Multinomial(6, share), obs=counts)

    monkeypatch.setattr(
        run_mode, "_replace_tensors", lambda *a: loops.append(1) or replace_tensors(*a)
    )
    density = Target(model, torch.tensor([1.0, 2.0, 3.0]))
    draws = {"share": dist.Dirichlet(torch.ones(3)).sample((4,))}
    density.read_at(draws, lambda trace: trace.nodes["share"]["value"])
    for _ in range(2):
        log_density = density.log_prob(density.unconstrain(draws))
        assert log_density.shape == (4,) and log_density.isfinite().all()
    assert loops == []


def test_hidden_markov_models_do_not_loop(monkeypatch):
    def model(y):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        step = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
        pyro.sample("y", dist.DiscreteHMM(torch.zeros(2), step, dist.Normal(loc, 1.0)), obs=y)

    y = torch.randn(9)
    density, alone = Target(model, y), torch.randn(3, 2)
    one_by_one = [
        poutine.trace(poutine.condition(model, {"loc": loc})).get_trace(y).log_prob_sum()
        for loc in alone
    ]
    monkeypatch.setattr(run_mode, "_replace_tensors", None)
    torch.testing.assert_close(density.log_prob(alone), torch.stack(one_by_one))


class Branching(dist.Normal):
    def log_prob(self, value):
        log_prob = super().log_prob(value)
        return log_prob[log_prob < 1]


def hidden(x):
    step = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    return dist.DiscreteHMM(torch.zeros(2), step, dist.Normal(x * torch.ones(2), 1.0))


@pytest.mark.parametrize(
    "make, y, replaces",
    [(lambda x: Branching(x, 1.0), torch.zeros(1), True), (hidden, torch.zeros(5), False)],
)
def test_a_warm_call_runs_the_model_once(make, y, replaces):
    """The way in which a model can be run is remembered, and not found by an error each time."""
    modes = []

    def model():
        modes.append(run_mode.active_mode.get())
        pyro.sample("y", make(pyro.sample("x", dist.Normal(0, 1))), obs=y)

    target = Target(model)
    for _ in range(2):
        target.log_prob(torch.randn(3, 1))
    modes.clear()
    target.log_prob(torch.randn(3, 1))
    assert [mode is not None for mode in modes] == [replaces]


def test_a_distribution_that_vmap_refuses_leaves_no_garbage():
    """What it had computed by then would else be kept until Python looks for cycles."""

    class Branching(dist.Normal):
        def log_prob(self, value):
            log_prob = super().log_prob(value)
            seen.append(weakref.ref(log_prob))
            return log_prob[log_prob < -1].sum(-1, keepdim=True)  # at one of two points

    def model():
        pyro.sample("y", Branching(pyro.sample("x", dist.Normal(0, 1)), 1), obs=torch.zeros(1))

    seen = []
    density = Target(model)
    assert density.is_vectorized
    gc.disable()
    try:
        seen.clear()
        density.log_prob(torch.tensor([[0.0], [5.0]]))
        assert len(seen) > 2 and not any(one() is not None for one in seen)
    finally:
        gc.enable()


def einsum(equation, swapped=False):
    def function(one, other):
        return torch.einsum(equation, *((other, one) if swapped else (one, other)))

    return function


@pytest.mark.parametrize(
    "function, shapes, is_product",
    [
        (torch.matmul, ((5, 4), (4, 3)), True),
        (torch.matmul, ((5, 4), (4,)), False),
        (einsum("nfk,...fk->...n"), ((5, 3, 4), (3, 4)), True),
        (einsum("nfk,mf->mkn"), ((5, 3, 4), (2, 3)), True),
        (einsum("mf,nfk->kmn", swapped=True), ((5, 3, 4), (2, 3)), True),
        (einsum("nfk,fk->nk"), ((5, 3, 4), (3, 4)), False),
        (einsum("fk,nfk->fn", swapped=True), ((5, 3, 4), (3, 4)), False),
        (einsum("nfk,f->k"), ((5, 3, 4), (3,)), False),
        (einsum("ii,ij->j"), ((3, 3), (3, 2)), False),
    ],
)
def test_products_with_a_matrix_of_all_runs(function, shapes, is_product):
    """They agree with those of single runs, and are one product of two matrices."""
    one, others = torch.randn(shapes[0]), torch.randn(6, *shapes[1])

    def in_mode(tag, other):
        with RunMode(tag):
            return function(one, other)

    tag = torch.ones(6, dtype=torch.bool)
    weights = torch.randn(torch.func.vmap(function, (None, 0))(one, others).shape)
    found, expected = [], []
    for results, run in (
        (found, torch.func.vmap(in_mode)),
        (expected, lambda tag, other: torch.stack([function(one, row) for row in other])),
    ):
        points = others.clone().requires_grad_()
        value = run(tag, points)
        results += [value, *torch.autograd.grad((value * weights).sum(), points)]
    torch.testing.assert_close(found, expected)
    with Names() as names:
        torch.func.vmap(in_mode)(tag, others)
    if is_product:
        assert [name for name in names.seen if "mm" in name] == ["mm"]


class Names(DispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_normal_by_its_precision():
    """Value and gradient are those of torch, also for a batch of matrices, and of none."""
    root = torch.randn(2, 4, 4, dtype=torch.float64)
    base = root @ root.mT + torch.eye(4)
    loc, y = torch.randn(2, 2, 4, dtype=torch.float64)

    def model():
        scale = pyro.sample("scale", dist.Normal(torch.zeros(()).double(), 1.0))
        shift = pyro.sample("shift", dist.Normal(torch.zeros(4).double(), 1.0).to_event(1))
        normal = dist.MultivariateNormal(loc + shift, precision_matrix=base + scale * torch.eye(4))
        with pyro.plate("rows", 2):
            pyro.sample("y", normal, obs=y)

    target = Target(model)
    latent = torch.randn(6, 5, dtype=torch.float64)
    latent[:, 0].clamp_(min=-0.4)
    latent[0, 0] = -100.0  # no precision
    found, score = target.score(latent)
    assert found[0] == -math.inf and (score[0] == 0).all()
    scale, shift = latent[1:, 0].requires_grad_(), latent[1:, 1:].requires_grad_()
    covariance = (base + scale[:, None, None, None] * torch.eye(4)).inverse()
    exact = torch.distributions.MultivariateNormal(loc + shift[:, None], covariance)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(torch.cat([scale[:, None], shift], -1))
    expected = exact.log_prob(y).sum(-1) + prior.sum(-1)
    torch.testing.assert_close(found[1:], expected.detach())
    by_scale, by_shift = torch.autograd.grad(expected.sum(), (scale, shift))
    torch.testing.assert_close(score[1:, 0], by_scale)
    torch.testing.assert_close(score[1:, 1:], by_shift)


@pytest.mark.parametrize(
    "of_keywords, of_positions",
    [
        (lambda b: torch.linalg.cholesky(input=b), torch.linalg.cholesky),
        (lambda b: torch.linalg.inv(A=b), torch.linalg.inv),
        (lambda b: torch.linalg.eigvalsh(input=b), torch.linalg.eigvalsh),
        (lambda b: torch.linalg.solve(A=b, B=torch.ones(2)), by_solution),
        (lambda b: torch.linalg.solve(b, B=torch.ones(2)), by_solution),
        (lambda b: torch.matmul(input=torch.ones(3, 2), other=b), lambda b: torch.ones(3, 2) @ b),
        (lambda b: torch.mm(b, mat2=b), lambda b: b @ b),
        (lambda b: b * torch.isclose(input=b, other=torch.eye(2)), lambda b: b * (b == 1)),
    ],
)
def test_operands_may_be_keyword_arguments(of_keywords, of_positions):
    def make(function):
        def model():
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.factor("f", -function(x.exp() * torch.eye(2)).sum())

        return model

    points = torch.tensor([[0.0], [0.3]])
    found, one_by_one = both_ways(make(of_keywords), points)
    for value, alone, expected in zip(
        found, one_by_one, Target(make(of_positions)).score(points), strict=True
    ):
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(alone, expected)
