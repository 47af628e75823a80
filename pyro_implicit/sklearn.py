# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks as scikit-learn estimators (``pip install pyro-implicit[networks]``).

The module is above ``fitting`` in the layers of the package, and not in ``nn``, because it calls
:func:`~pyro_implicit.fit`. ``import pyro_implicit`` does not import it.
"""

from __future__ import annotations

import copy
import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Self

import numpy as np
import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from pyro_implicit.fitting import FitPolicy, fit
from pyro_implicit.nn import NetworkModel, Prediction, classifier, predict, regressor, to_bayesian_
from pyro_implicit.nn.bayesian import Prior
from pyro_implicit.nn.models import Noise
from pyro_implicit.nn.policy import NOISE_PRECISION, ROWS_AT_ONCE
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import refuse_counts, refuse_no_probability, refuse_nonpositive

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]

ACTIVATIONS = {"logistic": nn.Sigmoid, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(eq=False, repr=False)
class _BayesianMLP(BaseEstimator):
    hidden_layer_sizes: int | Sequence[int] = (32, 32)
    activation: str = "relu"
    _: KW_ONLY
    prior: Prior = "fan_in"
    num_networks: int = 200
    max_seconds: float | None = None
    policy: FitPolicy | None = None
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    def _make_network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        sizes = (num_inputs, *self._hidden(), num_outputs)
        refuse_counts(**{"sizes in hidden_layer_sizes": min(sizes)}, num_networks=self.num_networks)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)}, but got {self.activation!r}"
            )
        layers: list[nn.Module] = []
        for width, following in pairwise(sizes):
            layers += [nn.Linear(width, following), ACTIVATIONS[self.activation]()]
        return to_bayesian_(nn.Sequential(*layers[:-1]), self.prior)

    def _hidden(self) -> list[int]:
        return [operator.index(size) for size in np.ravel(self.hidden_layer_sizes)]

    def _policy(self) -> FitPolicy:
        policy = self.policy or FitPolicy()
        if not self._hidden():
            return policy  # one mode: a linear model is fitted exactly
        return replace(policy, network=replace(policy.network, most_searched_weights=0))

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _standardise(self, X: NDArray) -> Tensor:
        self.input_scaler_ = StandardScaler().fit(X)
        return torch.tensor(self.input_scaler_.transform(X), dtype=torch.float32)

    def _train(self, model: NetworkModel, x: Tensor, y: Tensor, seed: int) -> Self:
        self.result_ = fit(
            model,
            "auto",
            x,
            y,
            max_seconds=self.max_seconds,
            seed=seed,
            progress=self.verbose,
            policy=self._policy(),
        )
        with seeded(seed):
            draws = self.result_.sample(self.num_networks)
        # Predictions of a row must not depend on the rounding of other rows: double precision.
        self.draws_ = {name: value.detach().double() for name, value in draws.items()}
        self.model_ = copy.deepcopy(model).double()
        return self

    def _predict(
        self, X: ArrayLike, weights: dict[str, Tensor] | None = None, seed: int = 0, **options: Any
    ) -> Iterator[Prediction]:
        check_is_fitted(self)
        inputs = validate_data(self, X, reset=False, dtype=np.float64, order="C")
        rows = torch.tensor(self.input_scaler_.transform(inputs)).split(ROWS_AT_ONCE)
        weights = weights or self.draws_
        count = len(next(iter(weights.values())))
        return predict(weights, rows, count, model=self.model_, seed=seed, **options)

    def sample(
        self,
        X: ArrayLike,
        num_samples: int = 1,
        random_state: int | np.random.RandomState | None = None,
    ) -> NDArray:
        """Draw targets or labels from the posterior predictive distribution, jointly for all rows.

        :param X: inputs, ``(num_rows, num_columns)``.
        :param num_samples: the number of draws. Each uses its own draw of the weights, up to
            ``num_networks``.
        :param random_state: seed or generator of the draws.
        :returns: targets or labels, ``(num_samples, num_rows)``.
        """
        refuse_counts(num_samples=num_samples)
        check_is_fitted(self)
        random = check_random_state(random_state)
        stored = len(next(iter(self.draws_.values())))
        chosen = random.choice(stored, num_samples, replace=num_samples > stored)
        weights = {name: value[chosen] for name, value in self.draws_.items()}
        seed = int(random.randint(np.iinfo(np.int32).max))
        found = self._predict(X, weights, seed, interval=None, draws=True)
        draws = torch.cat([part.draws for part in found if part.draws is not None], 1)
        return self._targets_of(draws.cpu().numpy())

    @abstractmethod
    def _targets_of(self, draws: NDArray) -> NDArray:
        """Return draws of the model as targets of the user."""


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(RegressorMixin, _BayesianMLP):
    r"""Regression by a Bayesian neural network, with intervals.

    The model is :math:`y \sim N(f_w(x), \sigma^2)` with priors on the weights w and on the
    precision. Inputs and targets are standardised inside, so that priors and noise have their
    meaning in standardised units; arguments and results have the units of the data. Equal targets
    have no scale: their unit stays one.

    **Example:**

    >>> import numpy as np
    >>> X = np.linspace(-2, 2, 40)[:, None]
    >>> y = 100 + 30 * X[:, 0] + 10 * np.random.RandomState(0).randn(40)
    >>> line = BayesianMLPRegressor(hidden_layer_sizes=(), random_state=0).fit(X, y)
    >>> mean, sd = line.predict([[1.0]], return_std=True)
    >>> print(f"{mean[0]:.0f} {sd[0]:.1f}")
    131 11.0
    >>> low, high = line.predict_interval([[1.0]], level=0.9)[0]
    >>> print(f"{low:.0f} {high:.0f}")
    113 149

    :param hidden_layer_sizes: the widths of the hidden layers. Without hidden layers the model is
        Bayesian linear regression, which ``fit`` solves exactly for at most 100 weights. With them
        ``fit`` trains an ensemble and runs a chain from each member, for networks of any size.
    :param activation: ``"relu"``, ``"tanh"``, ``"logistic"`` or ``"silu"``.
    :param noise: None: a precision with the prior Gamma(1, 0.1), inferred with the weights. This
        prior adds about ``0.2 / num_rows`` to the noise variance of standardised targets; for few
        rows with little noise choose another. A number: the standard deviation, in units of the
        targets. ``"heteroscedastic"``: a standard deviation for each row, from a second output.
        ``"learn"``: a parameter, by maximum likelihood. A distribution: the prior of the precision
        of standardised targets (:func:`~pyro_implicit.nn.regressor`).
    :param prior: the prior of the weights (:func:`~pyro_implicit.nn.to_bayesian_`).
    :param num_networks: the number of posterior draws of the weights that predict.
    :param max_seconds: the approximate limit of wall time of ``fit``. By default its budget is that
        of ``policy``, about three minutes of one core. A run that the limit shortens is not
        reproducible.
    :param policy: budgets and limits of :func:`~pyro_implicit.fit`.
    :param random_state: seed or generator of all random numbers of ``fit``.
    :param verbose: whether to show progress bars.
    :ivar result_: the :class:`~pyro_implicit.fitting.Fit`; ``print(result_)`` shows its stages.
    :ivar model_: the Pyro model, in double precision.
    :ivar draws_: the draws of its latent variables, by site.
    :ivar n_features_in_: the number of columns of ``X``; ``feature_names_in_`` has their names if
        ``X`` was a data frame.
    :raises TypeError: by ``fit``, for sparse matrices.
    :raises ValueError: by ``fit``, for NaN, infinite or non-numeric entries, fewer than two rows,
        and invalid arguments.
    """

    noise: Noise | None = field(default=None, kw_only=True)

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit the weights.

        :param X: inputs, ``(num_rows, num_columns)``, an array or a data frame of numbers.
        :param y: targets, ``(num_rows,)``.
        :returns: the estimator itself.
        :raises ValueError: for invalid data or arguments, see the class.
        """
        inputs, values = validate_data(
            self,
            X,
            y,
            dtype=np.float64,
            order="C",  # data frames and arrays give bit-identical results
            y_numeric=True,
            multi_output=True,
            ensure_min_samples=2,
        )
        targets = column_or_1d(values, dtype=np.float64, warn=True)[:, None]
        self.target_scaler_ = StandardScaler().fit(targets)
        if np.ptp(targets) == 0:
            self.target_scaler_.mean_ = targets[0]  # without the rounding error of a mean
        noise: Any = self.noise
        if noise is None:
            noise = dist.Gamma(*NOISE_PRECISION)
        elif isinstance(noise, Real):
            refuse_nonpositive(noise=float(noise))
            noise = float(noise) / float(self.target_scaler_.scale_[0])
        seed = self._seed()
        with seeded(seed):
            net = self._make_network(inputs.shape[1], 2 if noise == "heteroscedastic" else 1)
        model = regressor(net, len(inputs), noise=noise)
        scaled = torch.tensor(self.target_scaler_.transform(targets)[:, 0], dtype=torch.float32)
        return self._train(model, self._standardise(inputs), scaled, seed)

    def predict(self, X: ArrayLike, return_std: bool = False) -> NDArray | tuple[NDArray, NDArray]:
        """Predict the mean of the targets.

        :param X: inputs, ``(num_rows, num_columns)``.
        :param return_std: whether to return standard deviations, of weights and noise together.
        :returns: the mean ``(num_rows,)``, or mean and standard deviation.
        """
        found = list(self._predict(X, interval=None))
        mean = torch.cat([part.mean for part in found if part.mean is not None]).cpu().numpy()
        if not return_std:
            return self._targets_of(mean)
        variance = torch.cat([part.variance for part in found if part.variance is not None])
        return self._targets_of(mean), variance.sqrt().cpu().numpy() * self.target_scaler_.scale_[0]

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> NDArray:
        """Predict the central interval of a new target.

        :param X: inputs, ``(num_rows, num_columns)``.
        :param level: the probability of the interval.
        :returns: lower and upper ends, ``(num_rows, 2)``.
        :raises ValueError: for a level outside of (0, 1).
        """
        refuse_no_probability(level=level)
        found = self._predict(X, interval=level)
        ends = torch.cat([part.interval for part in found if part.interval is not None], 1)
        return self._targets_of(ends.cpu().numpy()).T

    def _targets_of(self, value: NDArray) -> NDArray:
        return value * self.target_scaler_.scale_[0] + self.target_scaler_.mean_[0]


class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):
    """Classification by a Bayesian neural network, with probabilities averaged over its weights.

    Inputs are standardised inside. Classes are those of the training part: a class that it misses
    has no column in ``predict_proba``.

    **Example:**

    >>> import numpy as np
    >>> X = np.linspace(-3, 3, 60)[:, None]
    >>> model = BayesianMLPClassifier(hidden_layer_sizes=(), random_state=0)
    >>> model = model.fit(X, np.where(X[:, 0] > 0, "yes", "no"))
    >>> model.predict([[-2.0], [2.0]]), model.classes_
    (array(['no', 'yes'], dtype='<U3'), array(['no', 'yes'], dtype='<U3'))

    :param hidden_layer_sizes: as for :class:`BayesianMLPRegressor`; so are ``activation``,
        ``prior``, ``num_networks``, ``max_seconds``, ``policy``, ``random_state`` and ``verbose``.
    :ivar classes_: the labels, sorted, in the order of the columns of ``predict_proba``.
    :ivar result_: the :class:`~pyro_implicit.fitting.Fit`; ``model_``, ``draws_`` and
        ``n_features_in_`` are as for :class:`BayesianMLPRegressor`.
    :raises TypeError: by ``fit``, for sparse matrices.
    :raises ValueError: by ``fit``, for NaN, infinite or non-numeric entries of ``X``, a single
        class, continuous labels, and invalid arguments.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit the weights.

        :param X: inputs, ``(num_rows, num_columns)``, an array or a data frame of numbers.
        :param y: labels, ``(num_rows,)``: numbers or strings.
        :returns: the estimator itself.
        :raises ValueError: for invalid data or arguments, see the class.
        """
        inputs, values = validate_data(self, X, y, dtype=np.float64, order="C", multi_output=True)
        labels = column_or_1d(values, warn=True)
        check_classification_targets(labels)
        encoder = LabelEncoder().fit(labels)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has 1 class, {self.classes_.tolist()[0]!r}, but a classifier needs rows of two "
                "classes or more. Cure: other rows, for instance a stratified split"
            )
        seed = self._seed()
        with seeded(seed):
            net = self._make_network(inputs.shape[1], len(self.classes_))
        model, targets = classifier(net, len(inputs)), torch.tensor(encoder.transform(labels))
        return self._train(model, self._standardise(inputs), targets, seed)

    def predict_proba(self, X: ArrayLike) -> NDArray:
        """Predict the probabilities of the classes.

        :param X: inputs, ``(num_rows, num_columns)``.
        :returns: probabilities, ``(num_rows, num_classes)``.
        """
        found = self._predict(X, interval=None)
        return torch.cat([p.probability for p in found if p.probability is not None]).cpu().numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray:
        """Predict the logarithms of the probabilities of the classes.

        :param X: inputs, ``(num_rows, num_columns)``.
        :returns: logarithms, ``(num_rows, num_classes)``.
        """
        return np.log(self.predict_proba(X))

    def predict(self, X: ArrayLike) -> NDArray:
        """Predict the most probable class.

        :param X: inputs, ``(num_rows, num_columns)``.
        :returns: labels, ``(num_rows,)``.
        """
        probability = self.predict_proba(X)
        return self.classes_[probability.argmax(1)]

    def _targets_of(self, draws: NDArray) -> NDArray:
        return self.classes_[draws]
