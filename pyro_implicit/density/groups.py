# SPDX-License-Identifier: Apache-2.0
"""Latent variables of the groups of a hierarchical model, given the global latent variables."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pyro.infer.autoguide import init_to_sample
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.ops.tensor_utils import matvecmul
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.checks.observations import refuse_unfit_data
from pyro_implicit.density.model import compute_log_prob, subsampled_plate, trace_model
from pyro_implicit.density.policy import GROUPS
from pyro_implicit.density.target import Target
from pyro_implicit.ops.ensemble_hmc import ChainState, ensemble_move, score_of
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.ops.matrices import lower_factor, root_of_inverse
from pyro_implicit.ops.policy import MAX_PRODUCT_DIM
from pyro_implicit.ops.quadrature import NormalRule, log_integral, normal_rule
from pyro_implicit.runtime.sites import FlatPriorStart, is_data, is_discrete_latent, is_latent

__all__ = ["Conditional", "Groups"]

Values = dict[str, Tensor]


class Conditional(NamedTuple):
    r"""Gaussians at the conditional modes of groups, in unconstrained space.

    ``mode`` ``(num_points, num_groups, dim)``, and ``root`` F ``(num_points, num_groups, dim,
    dim)`` with the covariance :math:`F F^\top`, the negative inverse Hessian.
    """

    mode: Tensor
    root: Tensor

    def place(self, noise: Tensor) -> Tensor:
        """Map standard normal noise ``(num_points, num_draws, num_groups, dim)`` to values."""
        return self.mode.unsqueeze(1) + matvecmul(self.root.unsqueeze(1), noise)


class _Part(NamedTuple):
    """A local site: its columns in a group's vector, the shape of its unconstrained values without
    the groups, and the dimension of the groups, from the right."""

    columns: slice
    shape: torch.Size
    dim: int


class Groups:
    r"""The latent variables of single groups, given the global latent variables.

    The groups are the elements of one plate. Given the global latent variables :math:`\theta` they
    are independent, so that

    .. math:: p(x | \theta) = \prod_i \int p(x_i, z_i | \theta)\, dz_i .

    For every group of a minibatch and for many :math:`\theta` at once, Newton's method finds the
    mode of :math:`p(z_i | x_i, \theta)` in unconstrained space, and quadrature around the mode
    gives the integral (adaptive Gauss-Hermite quadrature). Nothing is stored for a group.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("groups", 1_000, subsample_size=len(x)):
    ...         z = pyro.sample("z", dist.Normal(mean, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> groups = Groups(model, (torch.tensor([0.0, 2.0]),))
    >>> groups.log_marginals({"mean": torch.zeros(1)})  # log N(x; 0, 2)
    tensor([[-1.2655, -2.2655]])

    :param model: a Pyro model with continuous latent variables in one plate of groups, and
        others outside. The data of a group lie in the same plate; further plates may lie inside.
    :param batch: the last positional arguments of the model: a first minibatch of groups.
    :param args: its first positional arguments.
    :param kwargs: its keyword arguments.
    :raises ValueError: for no latent variables in a plate, or in several plates of groups; for data
        outside of the plate that depend on them; for a model that draws the groups itself.
    :ivar sites: the names of the local latent variables.
    :ivar full_size: the number of groups of all data.
    :ivar num_arguments: the number of arguments of a minibatch.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        batch: tuple,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.num_arguments = len(batch)
        self.model = _FirstRows()(model)
        # A flat prior has no draws.
        self._drawn = InitMessenger(FlatPriorStart(init_to_sample))(self.model)
        first = trace_model(self._drawn, (*args, *batch), kwargs or {})
        _refuse_discrete(first)
        target = self.target = Target.of_minibatches(
            self.model, *args, batch=batch, allow_local=True, model_kwargs=kwargs
        )
        trace = target.trace_at(target.init_loc)
        frame = _plate_of_groups(trace, target.shapes)
        self.plate, self.dim = frame.name, frame.dim
        self.size, self.full_size = frame.size, frame.full_size or frame.size
        _refuse_own_rows(frame, (*args, *batch), kwargs or {})
        _refuse_more_subsampling(trace, frame)
        self._parts: dict[str, _Part] = {}
        start = 0
        for name, shape in target.shapes.items():
            site = trace.nodes[name]
            if _size_in(site, self.plate) is None:
                continue
            num_events = len(shape) - len(site["fn"].batch_shape)
            dim = self.dim - num_events
            rest = torch.Size(size for at, size in enumerate(shape) if at != len(shape) + dim)
            self._parts[name] = _Part(slice(start, start + rest.numel()), rest, dim)
            start += rest.numel()
        self.num_latents = start
        self.sites, self._rule = tuple(self._parts), NormalRule(GROUPS.num_nodes)
        self._refuse_shared_data()

    @property
    def hidden(self) -> tuple[str, ...]:
        """The names of all sites in the plate of the groups."""
        nodes = self.target.trace_at(self.target.init_loc).nodes
        return tuple(
            name
            for name, site in nodes.items()
            if site["type"] == "sample"
            and (_size_in(site, self.plate) is not None or name == self.plate)
        )

    def on(self, batch: tuple, rule: NormalRule | None = None) -> Groups:
        """Return the groups of another minibatch.

        :param batch: the last positional arguments of the model, as many as of the first one, or
            all of them.
        :param rule: rule of the quadrature; by default that of these groups.
        :raises TypeError: for another number of arguments.
        """
        number = len(self.target.args)
        if len(batch) not in (self.num_arguments, number):
            raise TypeError(
                f"a minibatch has {self.num_arguments} arguments, but got {len(batch)}. Cure: the "
                "arguments of the model, all of them"
            )
        found = copy.copy(self)
        found.target = self.target.on(batch, seed=0)
        found._rule = rule or self._rule
        trace = trace_model(self._drawn, found.target.args, found.target.kwargs)
        refuse_unfit_data(trace, " of a minibatch")
        sizes = [_size_in(site, self.plate) for site in trace.nodes.values()]
        found.size = max(size for size in sizes if size is not None)
        return found

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the quadrature."""
        return len(normal_rule(self.num_latents, self._rule, self.target.init_loc)[1])

    def log_marginals(self, values: Values, start: Tensor | None = None) -> Tensor:
        r"""Return :math:`\log \int p(x_i, z_i | \theta)\, dz_i`, differentiable by the values.

        The nodes of a product rule are constants, because the integral does not depend on them.

        :param values: values of the global sites, constrained, ``(num_points, *site_shape)``.
        :param start: initial values, as for :meth:`conditional`.
        :returns: ``(num_points, num_groups)``.
        """
        near = self.conditional({name: value.detach() for name, value in values.items()}, start)
        if self.num_latents > MAX_PRODUCT_DIM:
            near = self._moving(values, near)
        nodes, log_weights = normal_rule(self.num_latents, self._rule, near.mode)
        points = near.place(nodes[None, :, None])
        terms = self.log_joint(values, points) + log_weights[:, None]
        volume = torch.linalg.slogdet(near.root).logabsdet
        return log_integral(terms.movedim(1, 0), self.num_latents) + volume

    def _moving(self, values: Values, near: Conditional) -> Conditional:
        """Let the modes, and so the nodes, move with the values, by one Newton step.

        It is a control variate: the mean of the score by the latents is zero (Stein's identity).
        """
        if not any(value.requires_grad for value in values.values()):
            return near
        mode = near.mode.detach().requires_grad_()
        total = self.log_joint(values, mode.unsqueeze(1)).sum()
        (score,) = torch.autograd.grad(total, mode, create_graph=True)
        step = matvecmul(near.root, matvecmul(near.root.mT, score))
        return near._replace(mode=near.mode + step - step.detach())

    def log_joint(self, values: Values, local: Tensor) -> Tensor:
        r"""Return :math:`\log p(x_i, z_i | \theta)` of each group.

        :param values: as above.
        :param local: unconstrained, ``(num_points, num_draws, num_groups, dim)``.
        :returns: ``(num_points, num_draws, num_groups)``.
        """
        shape = local.shape[:3]
        runs, log_det = self._constrained(local.flatten(0, 1))
        runs |= {name: values[name].repeat_interleave(shape[1], 0) for name in self._shared(values)}
        return (self.target.read_at(runs, self._log_prob) + log_det).reshape(shape)

    def conditional(self, values: Values, start: Tensor | None = None) -> Conditional:
        """Climb to the conditional modes by Newton's method with the eigenvalues' absolute values.

        A step that lowers the density of its group is not taken, and the next one is shorter.

        :param values: as above, constants.
        :param start: where all points begin, ``(1, num_groups, dim)``; by default each begins at
            the means of the prior given its values.
        """
        number = len(next(iter(values.values())))
        point = self._start(values) if start is None else start.expand(number, -1, -1)
        log_prob, score, hessian = self._derivatives(values, point)
        length = torch.ones_like(log_prob)
        for _ in range(GROUPS.max_steps):
            root, _ = root_of_inverse(hessian)
            whitened = matvecmul(root.mT, score.nan_to_num())
            decrement = whitened.square().sum(-1)
            if not (decrement > GROUPS.at_top).any():
                break
            limit = GROUPS.longest_step / decrement.sqrt().clamp(min=GROUPS.longest_step)
            proposal = point + matvecmul(root, (length * limit).unsqueeze(-1) * whitened)
            new = self._derivatives(values, proposal)
            is_up = (new[0] >= log_prob) | ~log_prob.isfinite()
            point = torch.where(is_up[..., None], proposal, point)
            log_prob = torch.where(is_up, new[0], log_prob)
            score = torch.where(is_up[..., None], new[1], score)
            hessian = torch.where(is_up[..., None, None], new[2], hessian)
            length = torch.where(is_up, (2 * length).clamp(max=1.0), length / 4)
        # Eigenvectors would change their signs from point to point, and random nodes with them.
        return Conditional(point, lower_factor(root_of_inverse(hessian)[0]))

    @torch.no_grad()
    def draw(self, values: Values, num_moves: int = 0) -> Values:
        """Draw local latent variables, one set for each point.

        Draws of the conditional Gaussian are resampled by their importance weights; transitions of
        HMC, exact by Metropolis' rule, may follow.

        :param values: values of the global sites, constrained, ``(num_points, *site_shape)``.
        :param num_moves: the number of transitions for each group.
        :returns: by local site, constrained, ``(num_points, *site_shape)``.
        """
        at_once = max(1, GROUPS.elements_at_once // (GROUPS.num_proposals * self.size))
        number, parts = len(next(iter(values.values()))), []
        for first in range(0, number, at_once):
            some = {name: value[first : first + at_once] for name, value in values.items()}
            parts.append(self._draw(some, num_moves))
        return {name: torch.cat([part[name] for part in parts]) for name in self.sites}

    def _draw(self, values: Values, num_moves: int) -> Values:
        near = self.conditional(values)
        num_points, dim = len(near.mode), self.num_latents
        noise = torch.randn(num_points, GROUPS.num_proposals, self.size, dim).to(near.mode)
        log_q, noise = -0.5 * noise.square().sum(-1), GROUPS.proposal_scale * noise
        log_weights = self.log_joint(values, near.place(noise)) - log_q
        log_weights = log_weights.nan_to_num(-math.inf)
        gumbel = -torch.empty_like(log_weights).exponential_().log()
        chosen = (log_weights + gumbel).argmax(1, keepdim=True).unsqueeze(-1)
        noise = noise.gather(1, chosen.expand(-1, -1, -1, dim))

        def log_density(flat: Tensor) -> Tensor:
            return self.log_joint(values, near.place(flat.reshape(noise.shape))).flatten()

        score = score_of(log_density)
        if num_moves:
            start = noise.reshape(-1, dim)
            state = ChainState(start, *score(start))
            for _ in range(num_moves):
                move = ensemble_move(score, state, GROUPS.move_size, GROUPS.move_steps)
                state = move.state
            noise = state.position.reshape(noise.shape)
        return self._constrained(near.place(noise).squeeze(1))[0]

    def _shared(self, values: Mapping[str, Tensor]) -> list[str]:
        return [name for name in self.target.shapes if name not in self._parts and name in values]

    def _constrained(self, local: Tensor) -> tuple[Values, Tensor]:
        """Return values of the local sites, and the log-determinant of each group.

        :param local: ``(num_runs, num_groups, dim)``.
        """
        found, log_det = {}, torch.zeros_like(local[..., 0])
        for name, (columns, shape, dim) in self._parts.items():
            part = local[..., columns].reshape(*local.shape[:2], *shape).movedim(1, dim)
            transform = self.target.transforms[name]
            found[name] = transform(part)
            term = transform.log_abs_det_jacobian(part, found[name])
            log_det = log_det + _by_group(term, dim + part.dim() - term.dim(), keep=1)
        return found, log_det

    def _log_prob(self, trace: Trace) -> Tensor:
        """Return the log-density of each group, without the scale of the plate."""
        compute_log_prob(trace)
        total: Any = 0.0
        for site in trace.nodes.values():
            size = _size_in(site, self.plate) if site["type"] == "sample" else None
            if size is not None:
                total = total + _by_group(site["log_prob"], self.dim) * (size / self.full_size)
        return total

    def _start(self, values: Values) -> Tensor:
        """Return the prior's means given the values, or 0 in unconstrained space."""
        number = len(next(iter(values.values())))
        like = self.target.init_loc
        point = like.new_zeros(number, 1, self.size, self.num_latents)
        for _ in self.sites:  # the mean of a site may depend on the sites before it
            runs, _ = self._constrained(point.flatten(0, 1))
            runs |= {name: values[name] for name in self._shared(values)}
            means = self.target.read_at(runs, self._means)
            for name, (columns, shape, dim) in self._parts.items():
                mean = means[name].to(like)
                mean = mean.movedim(dim, 1).reshape(number, 1, self.size, shape.numel())
                point[..., columns] = mean.nan_to_num(0.0, 0.0, 0.0)
        return point.squeeze(1)

    def _means(self, trace: Trace) -> Values:
        found = {}
        for name in self.sites:
            site, transform = trace.nodes[name], self.target.transforms[name]
            try:
                mean = site["fn"].mean.expand(site["value"].shape)
            except NotImplementedError:
                mean = site["value"]
            found[name] = transform.inv(mean)
        return found

    def _derivatives(self, values: Values, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            log_prob = self.log_joint(values, point.unsqueeze(1)).squeeze(1)
            (score,) = torch.autograd.grad(log_prob.sum(), point, create_graph=True)
            basis = torch.eye(self.num_latents).to(point)
            hessian = hessian_products(score, point, basis).movedim(0, -2)
        return log_prob.detach(), score.detach(), hessian

    def _refuse_shared_data(self) -> None:
        """Check that all sites that depend on local latent variables lie in the plate."""

        def outside(trace: Trace) -> Values:
            compute_log_prob(trace)
            return {
                name: site["log_prob"].sum()
                for name, site in trace.nodes.items()
                if (is_data(site) or is_latent(site)) and _size_in(site, self.plate) is None
            }

        target = self.target
        with torch.enable_grad():
            values = target.constrain(torch.stack([target.init_loc, target.init_loc + 0.01]))
            local = [values[name].detach().requires_grad_() for name in self.sites]
            values |= dict(zip(self.sites, local, strict=True))
            for name, term in target.read_at(values, outside).items():
                if not term.requires_grad:
                    continue
                grads = torch.autograd.grad(term.sum(), local, retain_graph=True, allow_unused=True)
                if any(grad is not None and (grad != 0).any() for grad in grads):
                    raise ValueError(
                        f"site '{name}' depends on the latents of groups ({', '.join(self.sites)}),"
                        f" but lies outside of their plate '{self.plate}', so that its share of "
                        "each group is unknown. Cure: data (rows, groups) inside of the plate, "
                        "padded, with poutine.mask for the padding"
                    )


class _FirstRows(Messenger):
    """Takes the first elements of a subsampled plate: the minibatch itself selects the groups."""

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) and msg["value"] is None:
            size = msg["fn"].subsample_size or msg["fn"].size
            msg["value"], msg["done"] = torch.arange(size), True


def _size_in(site: Any, plate: str) -> int | None:
    """Return the size of a plate of a site, None if the site is not in it."""
    for frame in site.get("cond_indep_stack", ()):
        if frame.name == plate:
            return frame.size
    return None


def _by_group(term: Tensor, dim: int, keep: int = 0) -> Tensor:
    """Sum over all dimensions but the one of the groups, and the first ``keep``."""
    term = term.movedim(dim, -1)
    return term.flatten(keep, -2).sum(-2) if term.dim() > keep + 1 else term


def _plate_of_groups(trace: Trace, names: Any) -> Any:
    """Return the subsampled plate, or the only plate that all latent variables in plates share."""
    sites = [trace.nodes[name] for name in names]
    subsampled = [frame for site in sites if (frame := subsampled_plate(site)) is not None]
    found = {frame.name: frame for frame in subsampled}
    if not found:
        stacks = [{frame.name: frame for frame in site["cond_indep_stack"]} for site in sites]
        stacks = [stack for stack in stacks if stack]
        every = {name: frame for stack in stacks for name, frame in stack.items()}
        found = {n: frame for n, frame in every.items() if all(n in stack for stack in stacks)}
    if len(found) == 1:
        return next(iter(found.values()))
    raise ValueError(
        "amortize='conditional' is for latents in one plate of groups, but the plates of latents "
        f"are {sorted(found) or 'none'}. Cure: pyro.plate(name, number_of_all_groups, "
        "subsample_size=len(x)) for the groups"
    )


def _refuse_discrete(trace: Trace) -> None:
    found = [name for name, site in trace.nodes.items() if is_discrete_latent(site)]
    if found:
        raise ValueError(
            f"amortize='conditional' needs continuous latents, but the model has discrete ones "
            f"({', '.join(found)}). Cure: no amortize=, if all latents of rows are discrete; else "
            "sum them out in the model, for instance by MixtureSameFamily, or fit(model, 'auto', "
            "...) with all data at once"
        )


def _refuse_more_subsampling(trace: Trace, groups: Any) -> None:
    """Check that the data of a group are complete: its integral is no sum over rows."""
    for name, site in trace.nodes.items():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size not in (None, frame.size) and frame.name != groups.name:
                raise ValueError(
                    f"site '{name}' lies in the subsampled plate '{frame.name}', but "
                    f"amortize='conditional' needs all rows of a group (plate '{groups.name}') at "
                    "once. Cure: minibatches of whole groups"
                )


def _refuse_own_rows(frame: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if frame.size == (frame.full_size or frame.size):
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() and len(value) == frame.full_size:
            raise ValueError(
                f"the model draws {frame.size} of {frame.full_size} elements of plate "
                f"'{frame.name}' by itself, but every group must be met once in a pass. Cure: "
                "batches=loader, and a model whose arguments are one minibatch"
            )
