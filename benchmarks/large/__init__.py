# SPDX-License-Identifier: Apache-2.0
"""Thirty models of 64 to 2,003 latent variables, run and measured by :mod:`benchmarks.zoo`."""
