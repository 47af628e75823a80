# SPDX-License-Identifier: Apache-2.0
"""Names of one's own: no other guide, of this process or another, changes the values."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.util import get_rng_state

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, AutoSemiImplicit, GatedMLP, fit
from pyro_implicit.guides import AutoMixture
from pyro_implicit.guides.auto_draws import forget, own_names


def model():
    pyro.sample("x", dist.Normal(0.0, 1.0))


def implicit(loc):
    guide = own_names(AutoImplicit(model, AutoregressiveGenerator, frame=None, init_scale=1e-3))
    guide()
    guide.loc.data.fill_(loc)
    return guide


def mixture(loc):
    parts = [
        AutoImplicit(model, AutoregressiveGenerator, frame=None, init_scale=1e-3) for _ in range(2)
    ]
    guide = own_names(AutoMixture(model, parts))
    guide()
    for part in guide.components:
        part.loc.data.fill_(loc)
    return guide


def gaussian(loc, kind=AutoNormal):
    guide = own_names(kind(model, init_scale=1e-3))
    guide()
    next(guide.parameters()).data.fill_(loc)
    return guide


MAKE = {"implicit": implicit, "mixture": mixture, "gaussian": gaussian}


def location(guide):
    return torch.stack([guide()["x"] for _ in range(5)]).mean().item()


# Each guide in a file is loaded beside the one that this process makes in the same order.
PROCESS = """
import sys
import pyro, torch
sys.path.insert(0, {folder!r})
from test_auto_draws_names import MAKE, answers, fitted, location
torch.set_num_threads(1)
pyro.set_rng_seed(0)
for kind, make in MAKE.items():
    own = make(-7.0)
    location(own)
    loaded = torch.load({file!r} + kind, weights_only=False)
    print(location(loaded), location(own), location(loaded))

loaded = torch.load({file!r} + "fit", weights_only=False)
before = answers(loaded)
fitted(9.0)
assert answers(loaded) == before, before
print(before[0])
"""


def fitted(value):
    """The guide of a fit in double precision."""
    y = torch.full((6,), value, dtype=torch.float64)

    def rows(y):
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    return fit(rows, "auto", y, num_steps=2, refine=False, seed=0, progress=False).guide


def answers(guide):
    pyro.set_rng_seed(7)
    return guide.median()["x"].item(), guide()["x"].item()


def test_a_guide_loaded_in_another_process_keeps_its_values(tmp_path):
    """Without a name of its own the loaded guide answers with the values of the other."""
    for kind, make in MAKE.items():
        torch.save(make(1.0), tmp_path / f"guide_{kind}")
    of_fit = fitted(0.5)
    torch.save(of_fit, tmp_path / "guide_fit")
    code = PROCESS.format(folder=str(Path(__file__).parent), file=str(tmp_path / "guide_"))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    *values, median = (float(word) for word in result.stdout.split())
    assert median == pytest.approx(answers(of_fit)[0], abs=1e-12)
    assert values == pytest.approx([1.0, -7.0, 1.0] * len(MAKE), abs=0.05)


@pytest.mark.parametrize("kind", MAKE)
def test_guides_of_one_process_keep_their_values(kind):
    guides = [MAKE[kind](loc) for loc in (1.0, 2.0)]
    assert [location(guide) for guide in guides] == pytest.approx([1.0, 2.0], abs=0.05)
    names = set(pyro.get_param_store().keys())
    assert len(names) == 2 * len({name.split(".", 1)[1] for name in names})


def several(size):
    return lambda: pyro.sample("x", dist.Normal(torch.zeros(size), 1.0).to_event(1))


def plain(width):
    return AutoSemiImplicit(model, GatedMLP(1, 1, hidden=(width,)), frame=None)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda size: AutoSemiImplicit(several(size)), "AutoSemiImplicit.loc"),
        (plain, r"AutoSemiImplicit.generator\$\$\$"),
        (lambda size: AutoMixture(model, [plain(4) for _ in range(size)]), "AutoMixture.log_weigh"),
    ],
    ids=["latents", "generator", "mixture"],
)
def test_parameters_of_another_guide_in_the_store_are_named(make, name):
    first = make(2)
    first()
    values = first()["x"]
    second = make(3)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"holds '{name}.*of another guide.*Cure: pyro.clear"):
            second()
    assert first()["x"].shape == values.shape  # untouched
    pyro.clear_param_store()
    second()


def test_names_of_fitted_components():
    parts = [AutoImplicit(model) for _ in range(2)]
    for part, loc in zip(parts, (1.0, 2.0), strict=True):
        pyro.clear_param_store()
        part()
        part.loc.data.fill_(loc)
    pyro.clear_param_store()
    guide = own_names(AutoMixture(model, parts))
    guide()
    assert [part.loc.item() for part in guide.components] == [1.0, 2.0]
    assert all(name.startswith(f"{guide._pyro_name}.") for name in pyro.get_param_store().keys())


def test_no_seeded_stream_is_read():
    names, draws = [], []
    for makes_names in (True, True, False):
        pyro.set_rng_seed(0)
        if makes_names:
            names.append(own_names(AutoNormal(model))._pyro_name)
        state = get_rng_state()
        draws.append((torch.rand(3).tolist(), random.random(), state["numpy"][1].tolist()))
    assert names[0] != names[1]
    assert draws[0] == draws[1] == draws[2]


@pytest.mark.parametrize("kind", MAKE)
def test_forgetting_empties_the_store_and_keeps_the_guide(kind):
    kept, dropped = MAKE[kind](1.0), MAKE[kind](2.0)
    location(kept)
    names = set(pyro.get_param_store().keys())
    location(dropped)
    forget(dropped)
    assert set(pyro.get_param_store().keys()) <= names
    assert [location(guide) for guide in (kept, dropped)] == pytest.approx([1.0, 2.0], abs=0.05)
    assert location(gaussian(3.0, AutoMultivariateNormal)) == pytest.approx(3.0, abs=0.05)


def test_nothing_of_a_forgotten_guide_stays_alive():
    """Not in the store's map from tensors to names either, which has those of before."""
    guide = own_names(
        AutoNormal(lambda: pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1)))
    )
    guide()
    forget(guide)
    assert not pyro.get_param_store()._param_to_name
    assert guide()["x"].shape == (3,)
