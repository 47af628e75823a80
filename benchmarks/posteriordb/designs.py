# SPDX-License-Identifier: Apache-2.0
"""Arguments of the models from the data of a posterior: the columns of the regressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Data",
    "autoregression",
    "columns",
    "earnings",
    "kidscore",
    "log_mesquite",
    "mom_work",
    "nes",
    "tensors",
]

Data = dict[str, Any]
Arguments = tuple[Tensor, ...]


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _with_intercept(*predictors: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(predictors[0]), *predictors], dim=-1)


def _levels(values: list[int], levels: range) -> list[Tensor]:
    """One indicator for each level."""
    return [_tensor([float(value == level) for value in values]) for level in levels]


def tensors(*names: str) -> Callable[[Data], Arguments]:
    """The named entries of the data, unchanged."""
    return lambda data: tuple(_tensor(data[name]) for name in names)


def columns(response: str, *predictors: str) -> Callable[[Data], Arguments]:
    """A regression of one entry of the data on others."""

    def design(data: Data) -> Arguments:
        X = _with_intercept(*(_tensor(data[name]) for name in predictors))
        return X, _tensor(data[response])

    return design


def autoregression(data: Data) -> Arguments:
    y, lags = _tensor(data["y"]), data["K"]
    return y.unfold(0, lags, 1)[:-1].flip(-1), y[lags:]


def earnings(kind: str) -> Callable[[Data], Arguments]:
    """Log earnings on height and other columns, ``kind`` as in the name of the posterior."""

    def design(data: Data) -> Arguments:
        earn, height, male = (_tensor(data[name]) for name in ("earn", "height", "male"))
        z = (height - height.mean()) / height.std()
        predictors = {
            "log10earn_height": (height,),
            "logearn_height": (height,),
            "logearn_height_male": (height, male),
            "logearn_logheight_male": (height.log(), male),
            "logearn_interaction_z": (z, male, z * male),
        }[kind]
        y = earn.log10() if kind == "log10earn_height" else earn.log()
        return _with_intercept(*predictors), y

    return design


def kidscore(centre: Callable[[Tensor, Tensor], tuple[Any, Any]]) -> Callable[[Data], Arguments]:
    """Score on mother's school, her IQ and their product, after subtracting ``centre(hs, iq)``."""

    def design(data: Data) -> Arguments:
        hs, iq = _tensor(data["mom_hs"]), _tensor(data["mom_iq"])
        hs_centre, iq_centre = centre(hs, iq)
        hs, iq = hs - hs_centre, iq - iq_centre
        return _with_intercept(hs, iq, hs * iq), _tensor(data["kid_score"])

    return design


def mom_work(data: Data) -> Arguments:
    return _with_intercept(*_levels(data["mom_work"], range(2, 5))), _tensor(data["kid_score"])


def log_mesquite(kind: str) -> Callable[[Data], Arguments]:
    """Log weight on logarithms of sizes, ``kind`` as in the name of the posterior."""

    def design(data: Data) -> Arguments:
        names = ("diam1", "diam2", "canopy_height", "total_height", "density", "weight")
        diam1, diam2, canopy, total, density, weight = (_tensor(data[name]).log() for name in names)
        group, volume, area = _tensor(data["group"]), diam1 + diam2 + canopy, diam1 + diam2
        predictors = {
            "logmesquite": (diam1, diam2, canopy, total, density, group),
            "logmesquite_logvolume": (volume,),
            "logmesquite_logva": (volume, area, group),
            "logmesquite_logvash": (volume, area, diam1 - diam2, total, group),
        }[kind]
        return _with_intercept(*predictors), weight

    return design


def nes(data: Data) -> Arguments:
    ages = _levels(data["age_discrete"], range(2, 5))
    names = ("real_ideo", "race_adj", "educ1", "gender", "income")
    ideology, race, education, gender, income = (_tensor(data[name]) for name in names)
    X = _with_intercept(ideology, race, *ages, education, gender, income)
    return X, _tensor(data["partyid7"])
