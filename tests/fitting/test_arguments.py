# SPDX-License-Identifier: Apache-2.0
"""``fit`` called in wrong ways, and with keywords of the model that are named like its own."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.testing.fakes import NonreparameterizedBeta
from pyro.infer import (
    SVI,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.density import Modes, Target
from pyro_implicit.diagnostics import diagnose
from pyro_implicit.fitting import Fit, Schedule, exact_guide, fit, train
from pyro_implicit.infer import LIVI_ELBO, ImplicitELBO, InjectiveELBO, evidence_bound
from pyro_implicit.mcmc import refine

Y = torch.tensor([1.0, 2.0, 4.5])


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


WRONG = [
    (lambda: fit(model, Y, Y), TypeError, 'but got a Tensor.*Cure: fit(model, "auto", x, y)'),
    (lambda: fit(model, {"x": Y}), TypeError, "but got a dict: the model's arguments come after"),
    (lambda: fit(model, "auto", Y, num_steps=0), ValueError, "num_steps must be at least 1"),
    (lambda: fit(model, "auto", Y, refine="no"), ValueError, "refine must be .*True or False"),
    (lambda: fit(model, "auto", Y, seed=-1), ValueError, "seed must be at least 0"),
    (lambda: LIVI_ELBO(num_probes=0), ValueError, "num_probes must be at least 1"),
    (lambda: LIVI_ELBO(max_iterations=0), ValueError, "max_iterations must be at least 1"),
    (lambda: fit(model, "auto", Y, epochs=0), ValueError, "epochs must be at least 1"),
    (lambda: fit(model, "auto", Y, epochs=5), ValueError, "but there are none. Cure: num_steps"),
    (
        lambda: fit(model, "auto", batches=[(Y, Y)], num_steps=5),
        ValueError,
        "num_steps is the length of a training without batches. Cure: epochs",
    ),
    (
        lambda: fit(model, "auto", Y, checkpoint_every=0),
        ValueError,
        "checkpoint_every must be at least 1",
    ),
    (lambda: fit(model, "auto", Y, max_seconds=0), ValueError, "max_seconds must be positive"),
    (lambda: fit(model, None, Y), TypeError, 'must be "auto" or a guide, but got a NoneType'),
    (lambda: fit(model, AutoNormal, Y), TypeError, "the class AutoNormal.*AutoNormal(model), ...)"),
    (lambda: fit(model, "nuts", Y), ValueError, "\"auto\" or a guide, but got 'nuts'"),
    (lambda: fit(model, "auto", Y, loss=ImplicitELBO()), ValueError, "loss is for a given guide"),
    (lambda: fit(model, AutoNormal(model), Y, loss=ImplicitELBO), TypeError, "loss=ImplicitELBO()"),
    (lambda: fit(model, AutoNormal(model), Y, loss=0.3), TypeError, "0.3.*model_kwargs={'loss'"),
    (
        lambda: fit(model, AutoNormal(model), Y, loss=RenyiELBO()),
        TypeError, "RenyiELBO, which has no differentiable_loss,.*Cure: loss=ImplicitELBO(8)",
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


def test_the_cures_for_a_loss_without_a_differentiable_loss():
    """As in Pyro's third tutorial of SVI: a Beta without reparameterisation."""

    def coin(x):
        fairness = pyro.sample("fairness", dist.Beta(10.0, 10.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Bernoulli(fairness), obs=x)

    def guide(x):
        alpha = pyro.param("alpha", torch.tensor(15.0), constraint=dist.constraints.positive)
        pyro.sample("fairness", NonreparameterizedBeta(alpha, 15.0))

    x = torch.tensor([1.0] * 6 + [0.0] * 4)
    with pytest.raises(TypeError, match="loss is a TraceGraph_ELBO, which has no differentiable_l"):
        fit(coin, guide, x, loss=TraceGraph_ELBO(), progress=False)
    assert len(fit(coin, guide, x, loss=ImplicitELBO(8), num_steps=2, progress=False).losses) == 2
    SVI(coin, guide, pyro.optim.Adam({"lr": 0.01}), TraceGraph_ELBO()).step(x)


def clashing(seed, lr, loss=0.0, name=0.0, scale_tril=1.0):
    """Keywords named like those of ``fit``, ``train`` and ``exact_guide``."""
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
    modes = Modes(torch.tensor([[MEAN]]), torch.tensor([[[0.1]]]), torch.zeros(1))
    guide = exact_guide(clashing, modes, **KEYWORDS)
    options = {"schedule": Schedule(num_steps=1), "name": "a", "progress": False}
    losses = train(clashing, guide, InjectiveELBO(), model_kwargs=KEYWORDS, **options)
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


def two_latents(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, scale), obs=y)


def one_of_two(x, y=None):
    pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def another_model(x, y=None):
    pyro.sample("level", dist.Normal(0.0, 1.0))


def simulator(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Delta(x @ weight).to_event(1), obs=y)


X2, Y20 = torch.linspace(-1.0, 1.0, 40).reshape(20, 2), torch.linspace(-1.0, 1.0, 20)
QUICK = {"num_steps": 2, "progress": False}
GUIDES = [
    (another_model, r"has no draws of \['scale', 'weight'\], .*but has \['level'\]"),
    (one_of_two, r"AutoNormal has no draws of \['scale'\], which the model samples\. Cure:"),
]


@pytest.mark.parametrize(("wrong", "message"), GUIDES)
def test_a_guide_of_another_model_is_refused_before_any_training(wrong, message, monkeypatch):
    monkeypatch.setattr("pyro_implicit.fitting.stages.train", None)
    with pytest.raises(ValueError, match=message):
        fit(two_latents, AutoNormal(wrong), X2, Y20, **QUICK)
    with pytest.raises(ValueError, match=message):
        fit(two_latents, AutoNormal(wrong), batches=[(X2, Y20)], epochs=1, progress=False)


def test_a_guide_may_leave_discrete_latents_to_the_elbo():
    def mixture(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        which = pyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc + which, 1.0), obs=y)

    guide = AutoNormal(pyro.poutine.block(mixture, hide=["which"]))
    result = fit(mixture, guide, Y[0], loss=TraceEnum_ELBO(), **QUICK)
    assert list(result.sample(2)) == ["loc"]


def test_a_loss_that_does_not_sum_over_discrete_latents_is_refused():
    def mixture(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        which = pyro.sample("which", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(loc + which, 1.0), obs=y)

    guide = AutoNormal(pyro.poutine.block(mixture, hide=["which"]))
    marked = config_enumerate(mixture)
    lacks = "Trace_ELBO does not sum over the discrete latent 'which', which the guide lacks. Cure"
    for model_, loss, message in (
        (mixture, Trace_ELBO(), lacks + ": loss=Imp"),
        (marked, Trace_ELBO(), lacks),
        (mixture, TraceEnum_ELBO(), "'which', which the model does not mark. Cure: fit.config_enu"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(model_, guide, Y[0], loss=loss, **QUICK)
        with pytest.raises(ValueError, match=message):
            fit(model_, guide, batches=[Y[:1]], loss=loss, epochs=1, progress=False)
    fit(mixture, guide, Y[0], loss=ImplicitELBO(8), **QUICK)
    fit(marked, guide, Y[0], loss=TraceEnum_ELBO(), **QUICK)

    def own(y):
        pyro.sample("loc", dist.Normal(pyro.param("own_loc", torch.tensor(0.0)), 1.0))
        pyro.sample("which", dist.Bernoulli(0.5))

    fit(mixture, own, Y[0], loss=Trace_ELBO(), **QUICK)  # a guide that has the latent


def refined(model, *args, **options):
    return refine(model, AutoNormal(model), *args, num_chains=8, progress=False, **options)


REFUSED = {
    "no rows": (
        lambda: fit(two_latents, "auto", X2[:0], Y20[:0]),
        ValueError,
        "argument 1 has no rows, shape (0, 2) and argument 2 .*Cure: data of at least one row",
    ),
    "no rows, a guide": (
        lambda: fit(two_latents, AutoNormal(two_latents), X2[:0], Y20[:0]),
        ValueError,
        "argument 1 has no rows",
    ),
    "no rows, chains": (lambda: refined(two_latents, X2[:0], Y20[:0]), ValueError, "has no rows"),
    "swapped": (
        lambda: fit(AutoNormal(two_latents), two_latents, X2, Y20),
        TypeError,
        "fit needs the model first, but got AutoNormal there.*Cure: fit(model, guide, ...)",
    ),
    "swapped functions": (
        lambda: fit(one_of_two, two_latents, X2, Y20),
        TypeError,
        "guide two_latents observes site 'y'.*Cure: the order of arguments is (model, guide, *args",
    ),
    "misspelt": (
        lambda: fit(two_latents, "auto", X2, Y20, num_step=5),
        TypeError,
        "keyword argument 'num_step', which fit passes on.*Cure: num_steps=",
    ),
    "misspelt for refine": (
        lambda: refined(two_latents, X2, Y20, max_gradient=5),
        TypeError,
        "'max_gradient', which refine passes on.*Cure: max_gradients=",
    ),
    "misspelt for diagnose": (
        lambda: diagnose(two_latents, AutoNormal(two_latents), X2, Y20, num_sample=5),
        TypeError,
        "'num_sample', which diagnose passes on.*Cure: num_samples=",
    ),
    "wall time for diagnose": (
        lambda: diagnose(two_latents, AutoNormal(two_latents), X2, Y20, max_seconds=5.0),
        TypeError,
        "'max_seconds', which diagnose passes on.*Cure: max_core_seconds=",
    ),
    "misspelt for evidence_bound": (
        lambda: evidence_bound(two_latents, AutoNormal(two_latents), X2, Y20, num_sample=5),
        TypeError,
        "'num_sample', which evidence_bound passes on.*Cure: num_samples=",
    ),
    "misspelt for Fit.diagnose": (
        lambda: Fit(source=(two_latents, (X2, Y20), {})).diagnose(num_sample=5),
        TypeError,
        "diagnose() got an unexpected keyword argument 'num_sample'. Cure: num_samples=",
    ),
    "misspelt for Fit.update": (
        lambda: Fit(source=(two_latents, (X2, Y20), {})).update(two_latents, X2, Y20, num_step=5),
        TypeError,
        "update() got an unexpected keyword argument 'num_step'. Cure: num_steps=",
    ),
    "unknown for Fit.compare": (
        lambda: Fit(source=(two_latents, (X2, Y20), {})).compare({}, zzz=5),
        TypeError,
        "'zzz'. Cure: reference= or num_samples= or quantities= or seed= or policy=",
    ),
    "unknown": (
        lambda: fit(two_latents, "auto", X2, Y20, zzz=5),
        TypeError,
        "'zzz', which fit passes on.*Cure: leave it out, or give the model such a parameter",
    ),
    "a wrong length": (
        lambda: fit(two_latents, "auto", X2, Y20[:9]),
        ValueError,
        "site 'y' has shape (9,), but its distribution (20,), where plate 'rows' has 20: these do",
    ),
    "a wrong length, a guide": (
        lambda: fit(two_latents, AutoNormal(two_latents), X2, Y20[:9]),
        ValueError,
        "site 'y' has shape (9,), but its distribution (20,)",
    ),
    "a simulator": (
        lambda: fit(simulator, "auto", X2, Y20),
        ValueError,
        "site 'y' observes a Delta.*simulator and has no likelihood. Cure: a distribution of the",
    ),
    "a simulator, a guide": (
        lambda: fit(simulator, AutoNormal(simulator), X2, Y20),
        ValueError,
        "site 'y' observes a Delta",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_faults_are_named_with_their_cure(name, monkeypatch):
    # Nothing is searched: each fault is found in the first run of the model.
    monkeypatch.setattr("pyro_implicit.fitting.stages.find_modes", None)
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message).replace(r"\.\*", ".*")):
        call()


def test_a_model_with_an_unlike_keyword_of_its_own_keeps_its_error():
    def fails(y):
        pyro.sample("x", dist.Normal(0.0, wrong=1.0))

    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'$"):
        fit(fails, "auto", Y)


def scaled(x, y):
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(torch.as_tensor(x * weight), 1.0).to_event(1), obs=y)


def test_pandas_is_named():
    pandas = pytest.importorskip("pandas")
    x, y = pandas.Series(Y.numpy()), pandas.Series(Y.numpy(), index=[5, 7, 9])
    cure = "argument 1 is a Series.*Cure: torch.tensor\\(argument.to_numpy"
    with pytest.raises(TypeError, match=cure):
        fit(scaled, "auto", x, Y)
    with pytest.raises(TypeError, match=cure):
        fit(scaled, AutoNormal(scaled), x, Y)
    with pytest.raises(TypeError, match="site 'y' is a Series.*Cure: torch.tensor\\(y.to_numpy"):
        fit(scaled, "auto", Y, y)


def test_loaded_with_another_model_or_without_the_data(tmp_path):
    fit(two_latents, AutoNormal(two_latents), X2, Y20, **QUICK).save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match=r"has no draws of \['level'\], .*has \['scale', 'weight'"):
        Fit.load(tmp_path / "fit.pt", another_model, X2, Y20)
    result = Fit.load(tmp_path / "fit.pt", two_latents)
    assert result.sample(2)["scale"].shape == (2,)
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'\).*Cure: give Fit.load"):
        result.diagnose()


def test_a_function_without_a_module():
    """As of code that ``exec`` runs."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(pyro.param("prior", torch.zeros(())), 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    model.__module__ = None
    result = fit(model, AutoNormal(model), torch.tensor(0.5), num_steps=2, progress=False)
    assert result.sample(3)["mean"].shape == (3,)
