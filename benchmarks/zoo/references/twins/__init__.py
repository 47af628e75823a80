# SPDX-License-Identifier: Apache-2.0
"""The zoo's models once more, for NumPyro: of the same names, sites and arguments.

Discrete latents are summed out by hand. Only NumPyro's environment can import this.
"""
