# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks."""

from __future__ import annotations

from pyro_implicit.nn.bayesian import start_values, to_bayesian_
from pyro_implicit.nn.evaluation import evaluate
from pyro_implicit.nn.models import NetworkModel, classifier, regressor
from pyro_implicit.nn.prediction import FunctionValues, predict
from pyro_implicit.nn.predictive_means import Prediction
from pyro_implicit.nn.reports import Detection, Foreign, LabelReport, NumberReport, Reliability

__all__ = [
    "Detection",
    "Foreign",
    "FunctionValues",
    "LabelReport",
    "NetworkModel",
    "NumberReport",
    "Prediction",
    "Reliability",
    "classifier",
    "evaluate",
    "predict",
    "regressor",
    "start_values",
    "to_bayesian_",
]
