# SPDX-License-Identifier: Apache-2.0
"""31 models of 64 to 2,502 latent variables, run and measured by :mod:`benchmarks.zoo`."""
