# SPDX-License-Identifier: Apache-2.0
"""``fit`` in two processes of ``torch.distributed``."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, fit
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.fitting import HeldOut
from pyro_implicit.infer import AVB_ELBO, ImplicitELBO
from pyro_implicit.runtime.minibatches import BatchStream
from tests.two_processes import in_two_processes

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="torch without torch.distributed"
)
NUM_ROWS = 16


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, 3, dtype=torch.float64, generator=generator)
    return x, x.sum(-1) + torch.randn(NUM_ROWS, dtype=torch.float64, generator=generator)


def model(x, y):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 1.0), obs=y)


def with_param(x, y):
    pyro.param("noise", x.new_ones(()))
    model(x, y)


def parts(rank):
    """Minibatches of four rows, or of two of them for each rank."""
    x, y = data()
    for start in range(0, NUM_ROWS, 4):
        rows = (
            slice(start, start + 4)
            if rank is None
            else slice(start + 2 * rank, start + 2 * rank + 2)
        )
        yield x[rows], y[rows]


CASES = {
    "mean field": (lambda: AutoNormal(model), ImplicitELBO(3)),
    "implicit": (lambda: AutoSemiImplicit(model, noise_dim=2, frame=None), LIVI_ELBO(2)),
}


def fitted(case, rank, folder):
    """Parameters after five epochs, the losses, and what the held-out rows said."""
    make_guide, loss = CASES[case]
    options = {
        "batches": list(parts(rank)), "loss": loss, "seed": 0, "compile": "trace",
        "checkpoint": folder / case, "validation": list(parts(rank)), "progress": False,
    }  # fmt: skip
    pyro.clear_param_store()
    pyro.set_rng_seed(0 if rank is None else rank)  # other starts: those of the first count
    guide = make_guide()
    guide(*data())
    result = fit(model, guide, epochs=5, **options)
    values = {name: value.detach() for name, value in guide.named_parameters()}
    return values, torch.tensor(result.losses), result.stages[0].outcome


def uneven_score(rank):
    """The held-out score of the first row in one process and of all others in the other one."""
    x, y = data()
    rows = {None: slice(None), 0: slice(0, 1), 1: slice(1, None)}[rank]
    pyro.clear_param_store()
    guide = AutoNormal(model)
    guide(x, y)
    return torch.tensor(HeldOut(model, [(x[rows], y[rows])])(guide))


def draws_by_passes(rank):
    """Draws of the automatic fit, whose passes add up the minibatches of all processes, and draws
    after the same data once more."""
    batches = list(parts(rank))
    result = fit(model, batches=batches, seed=0, progress=False)
    pyro.set_rng_seed(rank or 0)  # without a seed, those of the processes would differ
    more = result.update(model, batches=batches, progress=False)
    return result.sample(8000)["weight"], result.passes.num_units, more.sample(8000)["weight"]


def mixture(y):
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", 20, subsample_size=len(y)):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(4 * z - 2, 1.0), obs=y)


def shares_by_passes(rank):
    """The mean; the processes have 11 and 9 rows, in minibatches of unequal sizes."""
    parts = torch.tensor([-2.0, 2.0]).repeat(10).split((6, 5, 5, 4))
    batches = parts if rank is None else parts[2 * rank : 2 * rank + 2]
    result = fit(mixture, batches=batches, seed=0, progress=False)
    pyro.set_rng_seed(rank or 0)
    if rank is not None:
        with pytest.raises(SubsampledError, match="budgets of diagnose differ.*Cure"):
            result.diagnose()
    return result.sample(8000)["p"].mean()


def refusal(*args, **kwargs):
    pyro.clear_param_store()
    with pytest.raises((TypeError, ValueError)) as caught:
        fit(*args, **kwargs, progress=False)
    return str(caught.value)


def work(rank, folder):
    found = {case: fitted(case, rank, folder) for case in CASES}
    batches, same = list(parts(rank)), list(parts(None))
    messages = [
        refusal(model, AutoNormal(model), batches=same),
        refusal(model, AutoNormal(model), batches=batches, refine=True),
        refusal(with_param, AutoNormal(model), batches=batches),
        refusal(model, AutoSemiImplicit(model), batches=batches, loss=AVB_ELBO(2)),
    ]
    passes = (draws_by_passes(rank), shares_by_passes(rank))
    torch.save((found, messages, uneven_score(rank), *passes), folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    in_two_processes(work, folder)
    return folder


def load(folder, rank):
    return torch.load(folder / f"{rank}.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(folder, tmp_path, case):
    expected, losses, outcome = fitted(case, None, tmp_path)
    assert len(losses) == 20
    for rank in range(2):
        values, found, found_outcome = load(folder, rank)[0][case]
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(found, losses)
        assert found_outcome == outcome and "held-out NLL" in outcome


def test_held_out_rows_have_equal_weights_in_processes_of_any_size(folder):
    expected = uneven_score(None)
    for rank in range(2):
        torch.testing.assert_close(load(folder, rank)[2], expected)


def test_refuses_what_processes_cannot_share(folder):
    same, chains, store, networks = load(folder, 1)[1]
    assert "same minibatches" in same
    assert "DistributedSampler" in same
    assert "chains run in a single process" in chains
    assert "refine_by_minibatches(model, result.guide, batches=all_rows)" in chains
    assert "'noise'" in store
    assert "PyroParam" in store
    assert "AVB_ELBO trains networks" in networks


def test_a_distributed_sampler_shuffles_anew_in_each_epoch():
    rows = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(rows, num_replicas=2, rank=0, shuffle=True)
    stream = BatchStream(DataLoader(rows, batch_size=4, sampler=sampler))

    def epochs():
        return [stream.next()[0].tolist() for _ in range(3)]

    state = stream.state()
    first = epochs()
    assert first[0] != first[1] != first[2]
    middle = stream.state()
    then = epochs()
    stream.restore(middle)
    assert epochs() == then
    stream.restore(state)
    assert epochs() == first


def test_passes_have_the_rows_of_all_processes(folder):
    x, y = data()
    for rank in range(2):
        once, num_rows, twice = load(folder, rank)[3]
        assert num_rows == NUM_ROWS
        for number, draws in ((1, once), (2, twice)):
            covariance = torch.linalg.inv(number * x.mT @ x + torch.eye(3))
            mean, sds = number * covariance @ (x.mT @ y), covariance.diagonal().sqrt()
            torch.testing.assert_close(draws.mean(0), mean, atol=0.06 * sds.min().item(), rtol=0)
            torch.testing.assert_close(draws.std(0), sds, atol=0, rtol=0.05)


def test_passes_of_processes_are_at_the_same_points(folder):
    """Discrete latent variables of rows draw other numbers of random numbers in each process."""
    expected = shares_by_passes(None).item()
    for rank in range(2):
        assert load(folder, rank)[4] == pytest.approx(expected, abs=0.01)
