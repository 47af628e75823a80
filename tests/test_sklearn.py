# SPDX-License-Identifier: Apache-2.0
"""scikit-learn estimators: its own checks, closed forms, bad data."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.base import clone
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_implicit.fitting import BudgetPolicy, FitPolicy, NetworkPolicy
from pyro_implicit.sklearn import BayesianMLPClassifier, BayesianMLPRegressor


def ensemble_of_two(num_steps: int) -> FitPolicy:
    """The cost of these networks is estimated, not measured: the same steps everywhere."""
    network = NetworkPolicy(num_members=2, training_seconds=1e-3, least_gradients=10**9)
    return FitPolicy(budget=BudgetPolicy(least_steps=num_steps), network=network)


TINY: dict[str, Any] = {"hidden_layer_sizes": (8,), "num_networks": 2, "random_state": 0}
REGRESSOR = BayesianMLPRegressor(**TINY, policy=ensemble_of_two(30))
CLASSIFIER = BayesianMLPClassifier(**TINY, policy=ensemble_of_two(50))
ROWS, NOISE = 60, 3.0


CHECKS = parametrize_with_checks([REGRESSOR, CLASSIFIER])  # a generator, which pytest deprecates


def short_name(value: Any) -> str:
    return type(value).__name__ if hasattr(value, "fit") else value.func.__name__


def is_contained(check: Any) -> bool:
    """Trainings on writable and on float64 data: one on read-only float32 data checks the same."""
    return short_name(check).endswith("_train") and check.keywords.get("X_dtype") != "float32"


CASES = [case for case in CHECKS.args[1] if not is_contained(case[1])]


@pytest.mark.parametrize(CHECKS.args[0], CASES, ids=short_name)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    if not short_name(check).endswith("_train"):  # the others ask for no accuracy
        estimator = clone(estimator).set_params(policy=ensemble_of_two(1))
    check(estimator)


def line(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    X = random.randn(rows, 3) * [1.0, 100.0, 0.01] + [0.0, 5.0, -1.0]
    return X, 50.0 + X @ [4.0, 0.05, -300.0] + NOISE * random.randn(rows)


def linear_predictive(X: np.ndarray, y: np.ndarray, new: np.ndarray) -> tuple[Any, Any]:
    """Bayesian linear regression with the estimator's prior, in closed form."""
    center, scale = X.mean(0), X.std(0)
    A, B = (np.c_[(part - center) / scale, np.ones(len(part))] for part in (X, new))
    noise = NOISE / y.std()
    prior = np.diag([3 / 9, 3 / 9, 3 / 9, 1.0])  # N(0, 9 / fan-in) of weights, N(0, 1) of the bias
    covariance = np.linalg.inv(A.T @ A / noise**2 + prior)
    mean = B @ covariance @ A.T @ ((y - y.mean()) / y.std()) / noise**2
    variance = ((B @ covariance) * B).sum(1) + noise**2
    return y.mean() + y.std() * mean, y.std() * variance**0.5


@pytest.fixture(scope="module")
def fitted() -> BayesianMLPRegressor:
    return BayesianMLPRegressor((), noise=NOISE, num_networks=4000, random_state=0).fit(*line())


@pytest.fixture(scope="module")
def small() -> BayesianMLPRegressor:
    return clone(REGRESSOR).fit(*line())


def test_linear_regression_agrees_with_its_closed_form(fitted: BayesianMLPRegressor) -> None:
    """4,000 draws, of which the mean is allowed four standard errors."""
    new, _ = line(20, seed=1)
    mean, sd = linear_predictive(*line(), new)
    found, found_sd = fitted.predict(new, return_std=True)
    of_weights = np.sqrt(sd**2 - NOISE**2)
    assert (abs(found - mean) < 4 * of_weights / 4000**0.5).all()
    assert_allclose(found_sd, sd, rtol=0.005)
    ends = stats.norm(mean, sd).interval(0.8)
    assert_allclose(fitted.predict_interval(new, 0.8), np.transpose(ends), atol=0.02 * NOISE)


def test_samples_have_the_predictive_moments(fitted: BayesianMLPRegressor) -> None:
    new = line(20, seed=1)[0] * 2
    mean, sd = fitted.predict(new, return_std=True)
    draws = fitted.sample(new, 4000, random_state=0)
    assert draws.shape == (4000, 20)
    assert_allclose(draws.mean(0), mean, atol=4 * sd.max() / 4000**0.5)
    assert_allclose(draws.std(0), sd, rtol=0.05)
    _, without_noise = linear_predictive(*line(), new)
    weights = (without_noise**2 - NOISE**2)[:, None] ** 0.5
    assert np.cov(draws[:, 0], draws[:, 1])[0, 1] != pytest.approx(0, abs=0.02 * weights.max())
    assert (fitted.sample(new, 2, random_state=0) == fitted.sample(new, 2, random_state=0)).all()
    assert (fitted.sample(new, 2, random_state=0) != fitted.sample(new, 2, random_state=1)).all()
    assert fitted.sample(new[:1], 4001).shape == (4001, 1)  # more than there are weights


def test_unknown_noise_is_inferred_and_intervals_cover() -> None:
    model = BayesianMLPRegressor((), num_networks=400, random_state=0).fit(*line())
    new, targets = line(500, seed=2)
    mean, sd = model.predict(new, return_std=True)
    reference = make_pipeline(StandardScaler(), BayesianRidge()).fit(*line())
    its_mean, its_sd = reference.predict(new, return_std=True)
    assert_allclose(mean, its_mean, atol=0.3 * NOISE)  # its priors are others
    assert sd.mean() == pytest.approx(its_sd.mean(), rel=0.06)
    low, high = model.predict_interval(new, 0.9).T
    covered = (abs(targets - its_mean) < 1.645 * its_sd).mean()  # .84 of these targets
    assert ((low < targets) & (targets < high)).mean() == pytest.approx(covered, abs=0.04)


def test_linear_classifier_agrees_with_penalised_logistic_regression() -> None:
    random = np.random.RandomState(0)
    X = random.randn(2000, 2)
    y = np.where(random.rand(2000) < 1 / (1 + np.exp(-X @ [2.0, -1.0] - 0.5)), "b", "a")
    model = BayesianMLPClassifier((), num_networks=500, random_state=0).fit(X, y)
    reference = LogisticRegression(C=1e3).fit(X, y)
    new = random.randn(50, 2)
    assert model.classes_.tolist() == ["a", "b"]
    assert_allclose(model.predict_proba(new), reference.predict_proba(new), atol=0.02)
    assert model.score(X, y) == pytest.approx(reference.score(X, y), abs=0.005)
    draws = model.sample(new, 500, random_state=0)
    assert_allclose((draws == "b").mean(0), model.predict_proba(new)[:, 1], atol=0.1)


def test_networks_run_chains_whatever_their_size() -> None:
    network = NetworkPolicy(
        num_members=2, training_seconds=1e-3, chain_seconds=10.0, least_gradients=1,
        most_gradients=200,
    )  # fmt: skip
    policy = FitPolicy(budget=BudgetPolicy(least_steps=30), network=network)
    model = clone(REGRESSOR).set_params(policy=policy, num_networks=20).fit(*line())
    assert [stage.name for stage in model.result_.stages] == ["ensemble", "mclmc"]
    assert len(model.draws_["precision"].unique()) > 2, "more than the ensemble's members"


@pytest.mark.parametrize("noise", ["heteroscedastic", "learn", 3.0, dist.Gamma(2.0, 0.5)])
def test_kinds_of_noise(noise: Any) -> None:
    X, y = line()
    model = clone(REGRESSOR).set_params(noise=noise, num_networks=1).fit(X, y)
    mean, sd = model.predict(X, return_std=True)
    assert (np.ptp(sd) > 1e-6) == (noise == "heteroscedastic")
    if noise == 3.0:
        assert_allclose(sd, 3.0, rtol=1e-6)  # in units of the targets
    ends = stats.norm(mean, sd).interval(0.9)
    assert_allclose(model.predict_interval(X), np.transpose(ends), rtol=1e-9)


def test_pipelines_cross_validation_and_pickles() -> None:
    X, y = line()
    assert (cross_val_score(REGRESSOR, X, y, cv=2) > 0.1).all()
    steps = make_pipeline(PolynomialFeatures(include_bias=True), clone(REGRESSOR)).fit(X, y)
    again = pickle.loads(pickle.dumps(steps))
    assert (again.predict(X) == steps.predict(X)).all()
    assert str(again[-1].result_) == str(steps[-1].result_)


def test_data_frames_and_their_names(small: BayesianMLPRegressor) -> None:
    X, y = line()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = clone(REGRESSOR).fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    assert (model.predict(frame) == small.predict(X)).all()
    with pytest.raises(ValueError, match="(?s)feature names should match.*must be in the same"):
        model.predict(frame[["b", "a", "c"]])
    frame.loc[3, "b"] = None
    for method in (model.fit, lambda X, y: model.predict(X)):
        with pytest.raises(ValueError, match="Input X contains NaN"):
            method(frame, y)


def test_integers_and_floats_give_the_same_model() -> None:
    X, y = np.round(line()[0]).astype(np.int64), np.round(line()[1]).astype(np.int64)
    expected = clone(REGRESSOR).fit(X.astype(np.float64), y.astype(np.float64)).predict(X)
    assert (clone(REGRESSOR).fit(X, y).predict(X) == expected).all()
    assert expected.dtype == np.float64


def test_constant_columns_and_targets() -> None:
    X, y = line()
    X[:, 1] = 1e6
    model = clone(REGRESSOR).fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    model = BayesianMLPRegressor((), random_state=0).fit(X, np.full(ROWS, 7.0))
    mean, sd = model.predict(X, return_std=True)
    assert_allclose(mean, 7.0, atol=0.2)
    assert (sd < 0.2).all()


@pytest.mark.parametrize(
    ("value", "noise"),
    [(0.0, None), (1e-6, "heteroscedastic"), (-1e9, 0.1)],
)
def test_networks_of_a_constant_target(value: float, noise: Any) -> None:
    X, _ = line()
    model = clone(REGRESSOR).set_params(noise=noise, policy=ensemble_of_two(200))
    mean, sd = model.fit(X, np.full(ROWS, value)).predict(X, return_std=True)
    assert_allclose(mean, value, atol=0.03)
    assert (0 < sd).all() and (sd < 0.2).all()


def test_units_of_the_targets_do_not_matter(small: BayesianMLPRegressor) -> None:
    X, y = line()
    expected = small.predict(X, return_std=True)
    for scale, shift in [(1e-6, 0.0), (1e6, 1e9)]:
        model = clone(REGRESSOR).fit(X, scale * y + shift)
        mean, sd = model.predict(X, return_std=True)
        assert_allclose((mean - shift) / scale, expected[0], rtol=1e-3)
        assert_allclose(sd / scale, expected[1], rtol=1e-3)


def test_a_class_that_the_training_part_misses_has_no_column() -> None:
    X, y = line()
    labels = np.digitize(y, y.mean() + [-4.0, 4.0])
    kept = labels != 1
    model = clone(CLASSIFIER).fit(X[kept], labels[kept])
    assert model.classes_.tolist() == [0, 2]
    assert model.predict_proba(X).shape == (ROWS, 2)
    assert model.score(X, labels) <= kept.mean()


@pytest.mark.parametrize("hidden", [np.array([2, 3]), np.int64(2), 2])
def test_numbers_of_numpy(hidden: Any) -> None:
    values = {"hidden_layer_sizes": hidden, "noise": np.float32(0.3), "prior": np.int64(1)}
    model = clone(REGRESSOR).set_params(num_networks=1, **values).fit(*line())
    widths = [len(value[0]) for name, value in model.draws_.items() if name.endswith("bias")]
    assert widths == [*np.ravel(hidden), 1]


def test_logarithms_of_probabilities() -> None:
    X, y = line()
    model = clone(CLASSIFIER).fit(X, y > y.mean())
    assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def faults() -> Iterator[tuple[Any, Any, Any, str]]:
    X, y = line()
    yield REGRESSOR, X[:1], y[:1], "1 sample.* while a minimum of 2 is required"
    yield REGRESSOR, X, np.where(y > y.mean(), np.nan, y), "Input y contains NaN"
    yield REGRESSOR, np.full_like(X, np.inf), y, "Input X contains infinity"
    yield CLASSIFIER, X, np.ones(ROWS), "y has 1 class, .*two classes or more. Cure: other rows"
    yield CLASSIFIER, X, np.full(ROWS, "no"), "y has 1 class, 'no'"
    yield CLASSIFIER, X, y, "Unknown label type: continuous"
    cases = {
        "activation": ("cubic", "activation must be one of .*'relu'.*, but got 'cubic'"),
        "hidden_layer_sizes": ((8, 0), "hidden_layer_sizes must be at least 1, but got 0"),
        "max_seconds": (0.0, "max_seconds must be positive, but got 0.0"),
        "num_networks": (0, "num_networks must be at least 1, but got 0"),
        "noise": (-1.0, "noise must be positive, but got -1.0"),
    }
    for name, (value, message) in cases.items():
        yield clone(REGRESSOR).set_params(**{name: value}), X, y, message


@pytest.mark.parametrize(("estimator", "X", "y", "message"), list(faults()))
def test_faults_are_named(estimator: Any, X: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clone(estimator).fit(X, y)


def test_faults_of_predictions(fitted: BayesianMLPRegressor) -> None:
    X, _ = line()
    with pytest.raises(ValueError, match="level must be a probability between 0 and 1, but got 90"):
        fitted.predict_interval(X, 90)
    with pytest.raises(ValueError, match="num_samples must be at least 1, but got 0"):
        fitted.sample(X, 0)
