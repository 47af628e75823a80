# SPDX-License-Identifier: Apache-2.0
"""Automatic inference with ``fit``, and its parts."""

from pyro_implicit.fitting.auto import fit
from pyro_implicit.fitting.candidates import (
    Candidate,
    choose,
    exact_guide,
    exact_log_weights,
    frame_of_draws,
    mixture_weights,
    weigh,
)
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.log_evidence import LogEvidence, log_evidence
from pyro_implicit.fitting.model_comparison import ModelComparison, compare_models
from pyro_implicit.fitting.policy import (
    BudgetPolicy,
    ChoicePolicy,
    CorrectionPolicy,
    FitPolicy,
    HeldOutPolicy,
    MixturePolicy,
    NetworkPolicy,
    Schedule,
    SimulatorPolicy,
    StartPolicy,
    TrainingPolicy,
    UpdatePolicy,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.simulation import SimulatorDiagnosis, SimulatorFit, fit_simulator
from pyro_implicit.fitting.training import default_loss, train
from pyro_implicit.fitting.updating import JointPrior, posterior_as_prior
from pyro_implicit.runtime.progress import Stage

__all__ = [
    "BudgetPolicy",
    "Candidate",
    "ChoicePolicy",
    "CorrectionPolicy",
    "Fit",
    "FitPolicy",
    "HeldOut",
    "HeldOutPolicy",
    "JointPrior",
    "LogEvidence",
    "MixturePolicy",
    "ModelComparison",
    "NetworkPolicy",
    "Schedule",
    "SimulatorDiagnosis",
    "SimulatorFit",
    "SimulatorPolicy",
    "Stage",
    "StartPolicy",
    "TrainingPolicy",
    "UpdatePolicy",
    "choose",
    "compare_models",
    "default_loss",
    "exact_guide",
    "exact_log_weights",
    "fit",
    "fit_simulator",
    "frame_of_draws",
    "log_evidence",
    "mixture_weights",
    "posterior_as_prior",
    "train",
    "weigh",
]
