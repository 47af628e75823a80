# SPDX-License-Identifier: Apache-2.0
"""15 classic BUGS examples with their vague priors, run and measured by :mod:`benchmarks.zoo`."""
