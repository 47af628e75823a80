# SPDX-License-Identifier: Apache-2.0
"""Beyond one process: ``DistributedDataParallel`` around Pyro's ``ELBOModule``."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import classifier, start_values, to_bayesian_
from tests.two_processes import in_two_processes

GUIDES = {
    "mean field": (AutoNormal, {"init_scale": 0.1}, ImplicitELBO),
    "implicit": (AutoSemiImplicit, {"noise_dim": 3, "frame": None}, LIVI_ELBO),
}


def gradients(name, rows, wrap):
    """Of all parameters, after one step on some of the rows."""
    make_guide, options, elbo = GUIDES[name]
    with pyro.settings.context(module_local_params=True):
        pyro.set_rng_seed(0)
        x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
        model = classifier(to_bayesian_(net), num_data=40)
        guide = make_guide(model, init_loc_fn=init_to_value(values=start_values(model)), **options)
        module = elbo(num_particles=2)(model, guide.double())
        module(x[rows], y[rows])  # makes the guide's parameters
        module.double()
        pyro.set_rng_seed(1)  # the same particles in all processes
        wrapped = wrap(module)  # kept until the gradients are there: it has the hooks
        wrapped(x[rows], y[rows]).backward()
    return {name: value.grad for name, value in module.named_parameters()}


def work(rank, folder):
    found = {
        name: gradients(name, slice(4 * rank, 4 * rank + 4), DistributedDataParallel)
        for name in GUIDES
    }
    if rank == 0:
        torch.save(found, folder / "gradients.pt")


@pytest.mark.skipif(not distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_have_the_gradient_of_one(tmp_path):
    in_two_processes(work, tmp_path)
    found = torch.load(tmp_path / "gradients.pt")
    for name in GUIDES:
        expected = gradients(name, slice(8), lambda module: module)
        assert expected.keys() and all(value.abs().max() > 0 for value in expected.values())
        for key, value in expected.items():
            torch.testing.assert_close(found[name][key], value)
