# SPDX-License-Identifier: Apache-2.0
"""``fit`` called in wrong ways, and with keywords of the model that are named like its own."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.density import Target
from pyro_implicit.fitting import Schedule, fit, gaussian_guide, train
from pyro_implicit.infer import ImplicitELBO

Y = torch.tensor([1.0, 2.0, 4.5])


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


WRONG = [
    (lambda: fit(model, Y, Y), TypeError, 'but got a Tensor.*Cure: fit(model, "auto", x, y)'),
    (lambda: fit(model, {"x": Y}), TypeError, "but got a dict: the model's arguments come after"),
    (lambda: fit(model, "auto", Y, num_steps=0), ValueError, "num_steps must be at least 1"),
    (
        lambda: fit(model, "auto", Y, checkpoint_every=0),
        ValueError,
        "checkpoint_every must be at least 1",
    ),
    (lambda: fit(model, None, Y), TypeError, 'must be "auto" or a guide, but got a NoneType'),
    (lambda: fit(model, AutoNormal, Y), TypeError, "the class AutoNormal.*AutoNormal(model), ...)"),
    (lambda: fit(model, "nuts", Y), ValueError, "\"auto\" or a guide, but got 'nuts'"),
    (lambda: fit(model, "auto", Y, loss=ImplicitELBO()), ValueError, "loss is for a given guide"),
    (lambda: fit(model, AutoNormal(model), Y, loss=ImplicitELBO), TypeError, "loss=ImplicitELBO()"),
    (lambda: fit(model, AutoNormal(model), Y, loss=0.3), TypeError, "0.3.*model_kwargs={'loss'"),
    (
        lambda: fit(model, AutoNormal(model), Y, loss=RenyiELBO()),
        TypeError, "ELBO with a differentiable_loss.*but got <pyro.infer.renyi_elbo.RenyiELBO",
    ),
    (lambda: fit(3, "auto", Y), TypeError, "model must be a Pyro model, a callable, but got int"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, message", WRONG)
def test_misplaced_arguments(call, kind, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(kind, match=pattern):
        call()


@pytest.mark.filterwarnings("ignore:TraceEnum_ELBO found no sample site")
def test_any_elbo_of_pyro_that_can_train_does():
    """``TraceEnum_ELBO`` is no ``Trace_ELBO``."""
    loss = TraceEnum_ELBO(max_plate_nesting=1)
    assert len(fit(model, AutoNormal(model), Y, Y, loss=loss, num_steps=2).losses) == 2


def clashing(seed, lr, loss=0.0, name=0.0, scale_tril=1.0):
    """Keywords named like those of ``fit``, ``train`` and ``gaussian_guide``."""
    x = pyro.sample("x", dist.Normal(seed + lr + loss + name, scale_tril))
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.0))


KEYWORDS = {"seed": 10.0, "lr": 20.0, "loss": 30.0, "name": 40.0, "scale_tril": 0.1}
MEAN = 100 / 1.01


def test_keywords_of_the_model_reach_it():
    result = fit(clashing, "auto", seed=1, model_kwargs=KEYWORDS, num_steps=25, progress=False)
    assert result.guide.median()["x"].item() == pytest.approx(MEAN, abs=0.05)
    guide = AutoNormal(clashing)
    result = fit(clashing, guide, model_kwargs=KEYWORDS, num_steps=1, progress=False)
    assert result.losses[0] > 4e5  # 100 / 0.1 squared, and halved


def test_keywords_of_the_other_functions():
    density = Target(clashing, model_kwargs=KEYWORDS | {"loss": 0.0}, loss=5.0)
    assert density.score(torch.tensor([[70 / 1.01]]))[1].abs() < 1e-2
    frame = torch.tensor([MEAN]), torch.tensor([[0.1]])
    guide = gaussian_guide(clashing, *frame, model_kwargs=KEYWORDS)
    options = {"schedule": Schedule(num_steps=1), "name": "a", "progress": False}
    losses = train(clashing, guide, ImplicitELBO(), model_kwargs=KEYWORDS, **options)
    # Exact up to the start: log N(0; 100, 1.01), halved squares
    assert losses[0] == pytest.approx(0.5 * 1e4 / 1.01 + 0.92, abs=12)


def test_a_new_guide_that_would_go_on_from_another():
    """As after ``SVI`` with Pyro's own; to call it once says that this is meant."""
    first = AutoNormal(model)
    fit(model, first, Y, Y, num_steps=5, progress=False)
    with pytest.warns(UserWarning, match="new AutoNormal .'AutoNormal.locs.slope' .*Cure: pyro"):
        fit(model, AutoNormal(model), Y, Y, num_steps=5, progress=False)
    fit(model, first, Y, Y, num_steps=5, progress=False)
    meant = AutoNormal(model)
    meant(Y, Y)
    fit(model, meant, Y, Y, num_steps=5, progress=False)
