# SPDX-License-Identifier: Apache-2.0
"""Which ELBO a guide gets."""

from __future__ import annotations

import copy

import pyro
import pyro.distributions as dist
import pytest
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal, AutoNormalMessenger

from pyro_implicit.fitting import default_loss, fit
from pyro_implicit.generators import MLP, AutoregressiveGenerator, GatedMLP, ResidualGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.infer import KIVI_ELBO, LIVI_ELBO, ImplicitELBO, InjectiveELBO


def model(shift=0.0):
    with pyro.plate("three", 3):
        pyro.sample("x", dist.Normal(shift, 1.0))


def test_by_the_kind_of_guide():
    semi = default_loss(AutoSemiImplicit(model, frame=None), 5)
    assert isinstance(semi, LIVI_ELBO) and semi.num_particles == 5 and semi.nonfinite == "skip"
    assert type(default_loss(AutoNormal(model), 7)) is ImplicitELBO
    assert default_loss(AutoDelta(model), 7).num_particles == 1  # its draws are all the same
    assert default_loss(AutoNormalMessenger(model), 128).num_particles == 8  # one after the other


@pytest.mark.parametrize(
    "generator",
    [AutoregressiveGenerator, lambda size: ResidualGenerator(size, core_dim=2)],
)
def test_injective_generators_get_the_exact_density(generator):
    found = default_loss(AutoImplicit(model, generator, frame=None), 6)
    assert isinstance(found, InjectiveELBO) and found.coverage == 1.0 and found.num_particles == 6


def test_draws_of_a_vague_prior_may_be_impossible():
    """The model runs to see its plates, not its density."""

    def vague():
        rate = pyro.sample("level", dist.Normal(0.0, 1e4)).abs().exp()
        with pyro.plate("rows", 3, subsample_size=2):
            pyro.factor("data", (rate - rate).expand(2))

    found = default_loss(AutoImplicit(vague, AutoregressiveGenerator, frame=None), 6)
    assert isinstance(found, InjectiveELBO) and found.coverage == 0.0


@pytest.mark.parametrize(
    "generator",
    [
        None,
        lambda size: GatedMLP(size, size),
        lambda size: MLP(size, size),
        lambda size: MLP(2, size),
    ],
)
def test_others_get_none(generator):
    """The exact density of a generator that folds is another."""
    found = default_loss(AutoImplicit(model, generator, frame=None), 6)
    assert isinstance(found, KIVI_ELBO) and found.num_particles == 6


@pytest.mark.parametrize(
    "kinds, kind",
    [
        ([AutoSemiImplicit, AutoNormal], LIVI_ELBO),
        ([AutoSemiImplicit, AutoImplicit], KIVI_ELBO),
        ([AutoNormal, AutoNormal], ImplicitELBO),
    ],
)
def test_a_list_of_guides(kinds, kind):
    """One for each layer of a network, say."""

    def two():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0))

    guide = AutoGuideList(two)
    for name, part in zip("xy", kinds, strict=True):
        options = {"frame": None} if issubclass(part, AutoImplicit) else {}
        guide.append(part(poutine.block(two, expose=[name]), **options))
    result = fit(two, guide, num_steps=2, num_particles=4, progress=False)
    assert f"2 steps of {kind.__name__}" in result.stages[0].outcome


def test_a_copy_has_no_coverage():
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    assert default_loss(guide, 4).coverage == 1.0
    with pytest.warns(UserWarning, match="copy of a guide has no model.*coverage 0. Cure: "):
        assert default_loss(copy.deepcopy(guide), 4).coverage == 0.0


def test_fit_uses_it():
    result = fit(
        model, AutoImplicit(model, frame=None), num_steps=2, num_particles=8, progress=False
    )
    assert "KIVI_ELBO" in result.stages[0].outcome and len(result.losses) == 2
    guide = AutoSemiImplicit(model, frame=None)
    result = fit(model, guide, num_steps=2, num_particles=4, progress=False)
    assert result.guide is guide and "LIVI_ELBO" in result.stages[0].outcome


def test_a_guide_that_was_never_called_wants_the_models_arguments():
    def shifted(lr):
        pyro.sample("x", dist.Normal(lr, 1.0))

    guide = AutoImplicit(shifted, AutoregressiveGenerator, frame=None)
    assert isinstance(default_loss(guide, 4, model_kwargs={"lr": 1.0}), InjectiveELBO)
