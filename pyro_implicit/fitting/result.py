# SPDX-License-Identifier: Apache-2.0
"""What ``fit`` returns, stage by stage."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.density.model import SubsampledError
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics import Comparison, Diagnosis, compare, diagnose
from pyro_implicit.export.arviz import (
    NUM_CHAINS,
    as_datatree,
    as_inferencedata,
    joined,
    model_groups,
)
from pyro_implicit.fitting.arguments import refuse_unfit_guide
from pyro_implicit.fitting.candidates import corrected_draws
from pyro_implicit.fitting.parameters import Learnt, put_back
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.mcmc import AutoConditional, Refined
from pyro_implicit.runtime.files import read_file, write_file
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import Printed, Table
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["Fit", "Stage"]

NUM_CORRECTED = 10_000
NUM_EXPORTED = 2000
KIND = "a result of fit"


@dataclass
class Stage:
    """One stage of :func:`fit`: its ``name``, the ``seconds`` it took, and in words its
    ``outcome``: what it found, or why it failed; then ``error`` is the error.
    """

    name: str
    seconds: float = 0.0
    outcome: str = ""
    error: Exception | None = None


@dataclass(repr=False)
class Fit(Printed):
    """What :func:`fit` returns; ``print`` it for a table of its stages.

    ``guide`` is the fitted guide, ``losses`` are those of its training, one for each step (of a
    mixture's components one after the other). ``bounds`` are what decided between the candidates,
    in nats: the mean of log p - log q without its lowest hundredth; ``chosen`` is the name of the
    one that ``guide`` is. ``num_modes`` is the number of separate modes that the search found, None
    where there was none. ``stages`` tells what was done, a failed candidate with its reason.
    ``parameters`` are what the model learnt beside its latents, by name, unconstrained.
    ``refined`` are the chains that moved the guide's draws on, None where none did; ``correction``
    is the effective sample size, as a share, of importance weights that right them, None where
    none do. If ``interrupted``, by Ctrl-C, this is the best there was by then.
    """

    guide: Any = None
    losses: list[float] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    num_modes: int | None = None
    chosen: str = "guide"
    stages: list[Stage] = field(default_factory=list)
    refined: Refined | None = None
    correction: float | None = None
    interrupted: bool = False
    parameters: dict[str, Learnt] = field(default_factory=dict, repr=False)
    minibatches: bool = False
    """Whether the data came in minibatches, which are not in ``source``."""
    source: tuple[Any, tuple, dict[str, Any]] = field(default=(None, (), {}), repr=False)
    """The model, its arguments and its keyword arguments."""

    @cached_property
    def density(self) -> Target:
        """The model's log-density.

        :raises SubsampledError: if the model subsamples its data, or had them in minibatches.
        """
        model, args, kwargs = self._of_all_data()
        own: Iterable[Tensor] = getattr(self.guide, "parameters", tuple)()
        device = next((one.device for one in own), torch.device("cpu"))
        with seeded(0, device):  # the first draws repeat by seed like all others
            return Target(model, *args, model_kwargs=kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without ``density``, which remembers runs that cannot be copied."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With the model back in a guide that runs it."""
        vars(self).update(state)
        self._attach()

    def _attach(self) -> None:
        if isinstance(self.guide, AutoConditional) and self.source[0] is not None:
            self.guide.attach(self.source[0])

    @in_turn
    def sample(
        self, num_samples: int, *args: Any, corrected: bool | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draws of the posterior: refined ones where there are, else the guide's.

        :param num_samples: so many; of refined ones no draw comes twice before all have come once.
        :param args: of the model, as ``kwargs``, for a guide written by hand that reads them.
        :param corrected: whether draws of a guide with an exact density are resampled, four for
            one, by Pareto-smoothed importance weights; by default where ``correction`` says so.
        :returns: by site, ``(num_samples, *site_shape)``.
        :raises ValueError: for ``corrected=True`` of a guide without an exact density.
        """
        if corrected is None:
            corrected = self.correction is not None
        if corrected:
            return self._corrected(num_samples)
        guide = self.guide if self.refined is None else self.posterior
        return draw(guide, num_samples, *args, **kwargs)

    @property
    @in_turn
    def posterior(self) -> Any:
        """A guide for ``Predictive``: refined or corrected draws if there are, else ``guide``."""
        if self.refined is not None:
            if isinstance(self.refined, Refined):
                return self.refined.as_guide()
            return StoredDraws(self.refined.get_samples())
        if self.correction is not None:
            return StoredDraws(self._corrected(NUM_CORRECTED), settled=True, modes_weighed=True)
        return self.guide

    def diagnose(self, **options: Any) -> Diagnosis:
        """What :func:`~pyro_implicit.diagnose` says of refined or corrected draws, or of the guide.

        :param options: of that function.
        :raises SubsampledError: if the model subsamples its data, or had them in minibatches.
        """
        model, args, kwargs = self._of_all_data()
        return diagnose(model, self.posterior, *args, model_kwargs=kwargs, **options)

    def compare(self, reference: Any, **options: Any) -> Comparison:
        """What :func:`~pyro_implicit.compare` says of these draws beside others, say of NUTS.

        :param reference: an ``MCMC``, draws or another guide.
        :param options: of that function.
        """
        model, args, kwargs = self.source
        return compare(model, self.posterior, reference, *args, model_kwargs=kwargs, **options)

    @in_turn
    def to_datatree(
        self,
        num_samples: int | None = None,
        *,
        log_likelihood: bool = False,
        posterior_predictive: bool = False,
        prior: int | None = None,
        num_chains: int | None = NUM_CHAINS,
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, Any] | None = None,
    ) -> Any:
        """Draws of the posterior as an xarray ``DataTree`` in ArviZ's layout.

        Of ArviZ 1.x all functions take it; those of 0.x take :meth:`to_inferencedata`.

        :param num_samples: so many of :meth:`sample`, as one chain; by default all refined draws in
            ``num_chains`` long chains, or 2,000 draws where nothing was refined.
        :param log_likelihood: as for :meth:`Refined.to_datatree
            <pyro_implicit.mcmc.Refined.to_datatree>`, as are the others, and what is raised.
        """
        if num_samples is None and self.refined is not None:
            posterior = joined(self.refined.get_samples(group_by_chain=True), num_chains)
        else:
            draws = self.sample(num_samples or NUM_EXPORTED, *self.source[1], **self.source[2])
            posterior = {name: value.unsqueeze(0) for name, value in draws.items()}
        groups = model_groups(posterior, self.source, log_likelihood, posterior_predictive, prior)
        return as_datatree(groups, coords, dims)

    def to_inferencedata(self, *args: Any, **kwargs: Any) -> Any:
        """The same as an ``InferenceData`` of ArviZ 0.x.

        :param args: of :meth:`to_datatree`, as ``kwargs``.
        :raises ImportError: without ArviZ 0.x.
        """
        return as_inferencedata(self.to_datatree(*args, **kwargs))

    def save(self, path: str | Path) -> None:
        """Write all but the model and its data into one file, complete or not there at all.

        The model's parameters are in it, those without priors of a network's layers too.

        :param path: of the file. The guide is pickled, so that what it is made of, such as a
            generator's class, must be importable when it is loaded.
        :raises OSError: if it cannot be written; a file that was there is as it was.
        """
        content = self.__getstate__()
        content["source"] = (None, (), {})
        content["parameters"] = {
            name: Learnt(value.detach().clone(), constraint)
            for name, (value, constraint) in self.parameters.items()
        }
        content["stages"] = [replace(stage, error=None) for stage in self.stages]
        write_file(Path(path), content, KIND)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Callable[..., Any],
        *args: Any,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Fit:
        """What :meth:`save` wrote. Only load files that you have written: pickles can do anything.

        The model gets the parameters that it had learnt: in its modules, or in Pyro's store. All
        that has no place yet is put on the CPU, the guide too.

        :param path: of the file.
        :param model: that was fitted, with its ``args`` and ``kwargs``. Without these the result
            can be drawn from, but nothing that runs the model works.
        :param model_kwargs: more of these, whatever their names.
        :raises ValueError: for a file that is damaged, or no result of ``fit``, or of another
            version's format; for a model that has other latents or parameters of other shapes.
        """
        content = read_file(Path(path), "cpu", KIND)
        result = cls(**{**content, "source": (model, args, {**kwargs, **(model_kwargs or {})})})
        result._attach()
        if result._misses_data() is None and not result.minibatches:
            refuse_unfit_guide(model, result.guide, *result.source[1:])
        put_back(content["parameters"], model)
        return result

    def _misses_data(self) -> TypeError | None:
        """Why the model cannot run on the arguments of :meth:`load`, if it cannot."""
        model, args, kwargs = self.source
        try:
            inspect.signature(model).bind(*args, **kwargs)
        except TypeError as error:
            return error
        except ValueError:  # of a function without a signature
            pass
        return None

    def _of_all_data(self) -> tuple[Any, tuple, dict[str, Any]]:
        if self.minibatches:
            raise SubsampledError(
                "the model was fitted by minibatches, but this wants all data. Cure: diagnose(model"
                ", result.posterior, x, y) with all of them, if they fit in memory; of networks, "
                "pyro_implicit.nn.evaluate on held-out rows"
            )
        missing = self._misses_data()
        if missing is not None:
            raise TypeError(
                f"the model cannot run with the arguments that this result has ({missing}). Cure: "
                "give Fit.load the model's data: Fit.load(path, model, x, y)"
            ) from missing
        return self.source

    def _corrected(self, num_samples: int) -> dict[str, Tensor]:
        if not has_exact_density(self.guide):
            raise ValueError(
                "corrected=True wants an AutoMixture or an injective AutoImplicit, whose density "
                f"is exact, but this {type(self.guide).__name__} has none. Cure: refine=True"
            )
        return corrected_draws(self.guide, self.density, num_samples)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a stage and leave its line in the result.

        **Example:**

        >>> result = Fit()
        >>> with result.stage("search") as line:
        ...     line.outcome = "1 mode"
        >>> result.stages[0].name, result.stages[0].outcome
        ('search', '1 mode')

        :param name: of the stage.
        """
        line = Stage(name)
        self.stages.append(line)
        start = time.perf_counter()
        try:
            yield line
        finally:
            line.seconds = time.perf_counter() - start

    @contextmanager
    def attempt(self, name: str) -> Iterator[Stage]:
        """A stage that may fail: what was found before is kept, and the line has the reason.

        :param name: of the stage.
        """
        with self.stage(name) as line:
            try:
                yield line
            except Exception as error:  # the model's own too, of any kind
                line.error = error
                line.outcome = f"failed: {first_line(error)}"

    def _blocks(self) -> Iterator[str | Table]:
        rows = [(stage.name, f"{stage.seconds:.1f}", stage.outcome) for stage in self.stages]
        head = ("stage", "seconds", "outcome")
        yield Table([head, *rows], header=True, align="lrl", widths=(20, 7))
        if self.interrupted:
            yield (
                "interrupted by Ctrl-C: the best guide and draws so far; with checkpoint= the same "
                "call goes on"
            )
