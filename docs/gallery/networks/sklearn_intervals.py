# SPDX-License-Identifier: Apache-2.0
"""
Prediction intervals with scikit-learn
======================================

This page compares three regressors with intervals on two data sets of scikit-learn: a Bayesian
network, a Gaussian process, and gradient boosting of quantiles. The data sets are the progression
of diabetes (442 patients, ten measurements) and the colour of wines (178 wines, twelve
measurements). A quarter of the rows is held out.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats
from sklearn.datasets import load_diabetes, load_wine
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_implicit.sklearn import BayesianMLPRegressor

wine = load_wine().data
data = {
    "diabetes": load_diabetes(return_X_y=True),
    "wine": (np.delete(wine, 9, axis=1), wine[:, 9]),  # column 9 is the colour's intensity
}
LEVEL = 0.9

# %%
# Three kinds of intervals
# ------------------------
#
# Each function fits one regressor and returns the ends of its central 90 % intervals. The network
# standardises its data itself. ``max_seconds`` keeps this page fast; without it a fit takes up to
# three minutes.


def network(X, y, new):
    model = BayesianMLPRegressor((16,), activation="tanh", max_seconds=30, random_state=0)
    return model, model.fit(X, y).predict_interval(new, LEVEL)


def gaussian_process(X, y, new):
    kernel = ConstantKernel() * RBF(np.full(X.shape[1], 3.0), (0.1, 1e6)) + WhiteKernel()
    process = GaussianProcessRegressor(kernel, normalize_y=True)
    model = make_pipeline(StandardScaler(), process).fit(X, y)
    mean, sd = model.predict(new, return_std=True)
    return model, np.transpose(stats.norm(mean, sd).interval(LEVEL))


def boosting(X, y, new):
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    models = [
        HistGradientBoostingRegressor(loss="quantile", quantile=tail, random_state=0).fit(X, y)
        for tail in tails
    ]
    return models, np.transpose([model.predict(new) for model in models])


# %%
# Coverage and width on held-out rows
# -----------------------------------
#
# An interval should cover 90 % of the new targets, and be narrow. The interval score (Gneiting and
# Raftery, 2007) counts both: the width plus ``2 / (1 - level)`` times the distance of the targets
# outside; lower is better. Widths and scores are in standard deviations of the targets. With so few
# rows the Gaussian process is at least as good as the network; the intervals of boosting are too
# narrow.

methods = {"network": network, "Gaussian process": gaussian_process, "boosting": boosting}
fitted, intervals, targets = {}, {}, {}
print(f"{'data':10}{'method':18}{'coverage':>9}{'width':>7}{'score':>7}")
for name, (X, y) in data.items():
    X, new, y, targets[name] = train_test_split(X, y, test_size=0.25, random_state=0)
    for method, run in methods.items():
        fitted[name, method], ends = run(X, y, new)
        intervals[name, method] = low, high = np.asarray(ends).T
        outside = np.maximum(0, np.maximum(low - targets[name], targets[name] - high))
        width = (high - low).mean() / y.std()
        score = width + 2 / (1 - LEVEL) * outside.mean() / y.std()
        print(f"{name:10}{method:18}{(outside == 0).mean():9.0%}{width:7.2f}{score:7.2f}")

# %%
# What ``fit`` did, and whether to trust it
# -----------------------------------------
#
# ``result_`` is the result of :func:`~pyro_implicit.fit`, with its stages and diagnostics.

for name in data:
    print(fitted[name, "network"].result_)
print(fitted["wine", "network"].result_.diagnose())

# %%
# Figure
# ------
#
# Intervals of the wines, in the order of their colour.

order = targets["wine"].argsort()
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
for axis, method in zip(axes, methods, strict=True):
    low, high = intervals["wine", method]
    axis.vlines(range(len(order)), low[order], high[order], alpha=0.5)
    axis.plot(targets["wine"][order], "k.", markersize=4)
    axis.set(title=method, xlabel="wine, by colour")
axes[0].set_ylabel("colour intensity")
plt.show()
