# SPDX-License-Identifier: Apache-2.0
"""Pyro models of labels or numbers by a network."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Literal, TypeAlias

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_implicit.nn.bayesian import has_priors, moved
from pyro_implicit.nn.policy import FAR_FROM_UNIT, INITIAL_NOISE, LEAST_NOISE
from pyro_implicit.runtime.messages import refuse_nonpositive, warn_user
from pyro_implicit.runtime.sites import owned_by, put_into_store

__all__ = ["NetworkModel", "classifier", "regressor", "unfit_layers"]

Noise: TypeAlias = (
    float | Literal["learn", "half_normal", "heteroscedastic"] | dist.TorchDistribution
)


def classifier(net: nn.Module, num_data: int, *, temperature: float = 1.0) -> NetworkModel:
    r"""Make a Pyro model of labels by a network, with one logit for each class.

    The equivalent model by hand is

    .. code-block:: python

        def model(x, y=None):
            logits = net(x)  # before the plate: one set of weights for all rows
            with pyro.plate("data", 60_000, subsample_size=len(x)):
                return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    **Example:**

    >>> from pyro_implicit.nn import to_bayesian_
    >>> net = to_bayesian_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> model = classifier(net, num_data=150)
    >>> x, y = torch.randn(10, 4), torch.randint(3, (10,))
    >>> trace = poutine.trace(model).get_trace(x, y)
    >>> trace.nodes["y"]["scale"]
    15.0

    :param net: network from rows ``(batch, ...)`` to logits ``(batch, num_classes)``, after
        :func:`~pyro_implicit.nn.to_bayesian_`.
    :param num_data: number of all rows, by which the likelihood of a minibatch is scaled.
    :param temperature: the likelihood is raised to ``1 / temperature``. Only 1 is Bayesian; a lower
        temperature counts each row more than once. :func:`~pyro_implicit.nn.evaluate` reports it.
    :returns: the model ``(x, y=None)``, whose sites are the network's parameters by their names,
        and ``"y"``. It is a module, for ``.to(device)`` and
        :class:`~pyro.infer.elbo.ELBOModule`.
    :raises ValueError: for a network without priors, or numbers that are not positive. When called,
        for batch normalisation or dropout in training mode, wrong shapes, or more rows than
        ``num_data``.
    :raises TypeError: when called, for a network that does not return a tensor.
    """
    return NetworkModel(net, num_data, _Labels(), temperature)


def regressor(
    net: nn.Module,
    num_data: int,
    *,
    noise: Noise,
    temperature: float = 1.0,
) -> NetworkModel:
    r"""Make a Pyro model of numbers with Gaussian noise by a network.

    The equivalent model by hand, with a learnt noise, is

    .. code-block:: python

        def model(x, y=None):
            mean = net(x).squeeze(-1)
            noise = pyro.param("noise", torch.tensor(0.5), constraint=constraints.positive)
            with pyro.plate("data", 400, subsample_size=len(x)):
                return pyro.sample("y", dist.Normal(mean, noise), obs=y)

    **Example:**

    >>> from pyro_implicit.nn import to_bayesian_
    >>> net = to_bayesian_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> model = regressor(net, num_data=150, noise=dist.Gamma(1.0, 0.1))
    >>> trace = poutine.trace(model).get_trace(torch.randn(10, 4), torch.randn(10))
    >>> trace.nodes["precision"]["value"].shape, trace.nodes["y"]["fn"].batch_shape
    (torch.Size([]), torch.Size([10]))

    :param net: network from rows ``(batch, ...)`` to means ``(batch,)``, ``(batch, 1)`` or, for
        several targets, ``(batch, num_targets)``, after :func:`~pyro_implicit.nn.to_bayesian_`.
    :param num_data: number of all rows, by which the likelihood of a minibatch is scaled.
    :param noise: a number: the standard deviation. ``"learn"``: a parameter with initial value 0.5,
        for targets of unit scale. ``"half_normal"``: a latent variable, the site ``"noise"``, with
        a half-normal prior of scale 1. A distribution of scalars: the prior of the *precision*
        (inverse variance), such as ``Gamma(1.0, 0.1)``. ``"heteroscedastic"``: the network has
        twice as many outputs, and softplus turns the second half into standard deviations.
    :param temperature: the likelihood is raised to ``1 / temperature``. Only 1 is Bayesian.
    :returns: the model ``(x, y=None)``, whose sites are the network's parameters by their names,
        ``"precision"`` or ``"noise"`` if it has a prior, and ``"y"``.
    :raises TypeError: for a noise of another kind.
    :raises ValueError: as :func:`classifier`.
    :warns UserWarning: at the first call with targets far from unit scale.
    """
    return NetworkModel(net, num_data, _Numbers(noise), temperature)


class NetworkModel(nn.Module):
    """The model that :func:`classifier` and :func:`regressor` return.

    :param net: with priors on its parameters.
    :param num_data: number of all rows.
    :param likelihood: function from the network's output to the distribution of the targets.
    :param temperature: temperature of the likelihood.
    """

    def __init__(
        self, net: nn.Module, num_data: int, likelihood: _Labels | _Numbers, temperature: float
    ) -> None:
        if not has_priors(net):
            raise ValueError(
                f"the network ({type(net).__name__}) has no priors. Cure: to_bayesian_(net) before"
            )
        refuse_nonpositive(num_data=num_data, temperature=temperature)
        super().__init__()
        self.net, self.likelihood = net, likelihood
        self.num_data, self.temperature = num_data, temperature
        self._has_seen_targets = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Run the model.

        :param x: rows, ``(batch, ...)``.
        :param y: their targets, ``(batch,)``, or ``(batch, num_targets)``.
        :returns: the targets, drawn unless given.
        """
        for _, error in unfit_layers(self.net):
            raise error
        for name, own in owned_by(self):
            put_into_store(name, own)
        if isinstance(x, DataLoader):
            raise TypeError("the model takes rows, not a loader of them. Cure: batches=loader")
        rows, output = len(x), self._output(x)
        _refuse_output(output, rows)
        distribution = self.likelihood(output)
        if y is not None:
            y = _fitting(y, distribution, rows, self.num_data)
            if not self._has_seen_targets and isinstance(self.likelihood, _Numbers):
                _warn_of_units(y)
            self._has_seen_targets = True
        subsample = torch.arange(rows, device=x.device)
        size = rows if y is None else self.num_data
        with (
            poutine.scale(scale=1 / self.temperature),
            pyro.plate("data", size, subsample=subsample, dim=-1),
        ):
            return pyro.sample("y", distribution, obs=y)

    def _output(self, x: Tensor) -> Tensor:
        try:
            return self.net(x)
        except RuntimeError as error:
            if x.is_floating_point() and x.dtype not in {
                one.dtype for one in (*self.parameters(), *self.buffers())
            }:
                raise ValueError(
                    f"rows of {x.dtype} do not suit the network ({error}). Cure: one dtype for "
                    "rows and network, for instance x.float()"
                ) from error
            raise


class _Labels(nn.Module):
    def forward(self, logits: Tensor) -> dist.TorchDistribution:
        if logits.dim() != 2 or logits.shape[-1] < 2:
            raise ValueError(
                "a classifier's network must give logits (batch, num_classes), but its output has "
                f"shape {tuple(logits.shape)}. Cure: one output for each class, two for yes and no"
            )
        return dist.Categorical(logits=logits)


class _Numbers(PyroModule):
    def __init__(self, noise: Noise) -> None:
        super().__init__()
        known = ("learn", "half_normal", "heteroscedastic")
        if isinstance(noise, dist.Distribution):
            if noise.batch_shape or noise.event_shape:
                raise ValueError(
                    f"the prior of the precision must be of scalars, but {noise} is of shape "
                    f"{tuple(noise.shape())}"
                )
        elif not (noise in known if isinstance(noise, str) else isinstance(noise, Real)):
            raise TypeError(
                'noise must be a number, "learn", "half_normal", "heteroscedastic" or a '
                f"distribution of the precision, but got {noise!r}"
            )
        elif not isinstance(noise, str):
            refuse_nonpositive(noise=noise)
        self.kind = noise
        if noise == "learn":
            # Not a PyroParam, which would take the stored value of another model of the same name.
            self.log_noise = nn.Parameter(torch.tensor(INITIAL_NOISE).log())

    @property
    def noise(self) -> Tensor:
        return self.log_noise.exp()

    def forward(self, output: Tensor) -> dist.TorchDistribution:
        mean, noise = output, self.kind
        if noise == "heteroscedastic":
            if output.dim() != 2 or output.shape[-1] % 2:
                raise ValueError(
                    "with noise='heteroscedastic' the network must give a mean and a scale for "
                    f"each target, but its output has shape {tuple(output.shape)}"
                )
            mean, raw = output.chunk(2, dim=-1)
            noise = nn.functional.softplus(raw) + LEAST_NOISE
        elif isinstance(noise, dist.Distribution):
            noise = pyro.sample("precision", moved(noise, output)) ** -0.5
        elif noise == "half_normal":
            noise = pyro.sample("noise", dist.HalfNormal(output.new_ones(())))
        elif noise == "learn":
            noise = self.noise
        distribution = dist.Normal(mean, noise)
        if mean.dim() == 2 and mean.shape[-1] == 1:
            return dist.Normal(mean.squeeze(-1), distribution.scale.squeeze(-1))
        return distribution.to_event(mean.dim() - 1)


def _fitting(y: Tensor, distribution: dist.TorchDistribution, rows: int, num_data: int) -> Tensor:
    if y.dim() == 2 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    if y.shape != distribution.shape():
        raise ValueError(
            f"the targets have shape {tuple(y.shape)}, but the network's output has shape "
            f"{tuple(distribution.shape())}"
        )
    if rows > num_data:
        raise ValueError(
            f"a minibatch has {rows} rows, but num_data is {num_data}, the number of all rows that "
            "the network is trained on. Cure: that number; held-out rows in smaller minibatches"
        )
    return y


def _warn_of_units(y: Tensor) -> None:
    size = y.detach().double().square().mean().sqrt().item()
    if y.numel() > 1 and size > 0 and not 1 / FAR_FROM_UNIT < size < FAR_FROM_UNIT:
        warn_user(
            f"the root mean square of the targets is {size:.3g}, but networks, their priors and "
            'noise="learn" are initialised for unit scale, so that training takes long. Cure: (y - '
            "y_train.mean()) / y_train.std(), and predictions scaled back",
        )


def _refuse_output(output: object, rows: int) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the network returns a {type(output).__name__}, but must return one tensor. Cure: a "
            "module around it that returns the tensor that the targets depend on"
        )
    if output.shape[:1] != (rows,):
        raise ValueError(
            f"the network's output for {rows} rows has shape {tuple(output.shape)}, but its first "
            "dimension must be that of the rows. Cure: squeeze(-1) instead of squeeze(), which "
            "also removes the rows' dimension of a single row"
        )


def unfit_layers(net: nn.Module) -> Iterator[tuple[nn.Module, ValueError]]:
    """Yield layers whose mode makes rows depend on each other or on noise, and the error for each.

    **Example:**

    >>> [(_, error)] = unfit_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    >>> print(error)
    layer '1', a Dropout, draws noise that is not part of the model. Cure: ...

    :param net: a network.
    """
    for name, layer in net.named_modules():
        kind = type(layer).__name__.removeprefix("Pyro")
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            if layer.training or layer.running_mean is None:
                error = ValueError(
                    f"layer '{name}', a {kind}, normalises by the moments of the minibatch, so "
                    "that rows depend on each other and the likelihood is not a product. Cure: "
                    "net.eval() after pretraining, which keeps its running moments, or GroupNorm "
                    "instead"
                )
                yield layer, error
        elif layer.training and _dropout(layer) > 0:
            error = ValueError(
                f"layer '{name}', a {kind}, draws noise that is not part of the model. Cure: "
                "net.eval(), or remove it: the weights are random already"
            )
            yield layer, error


def _dropout(layer: nn.Module) -> float:
    share = getattr(
        layer, "p" if isinstance(layer, nn.modules.dropout._DropoutNd) else "dropout", 0
    )
    return share if isinstance(share, (int, float)) else 0.0
