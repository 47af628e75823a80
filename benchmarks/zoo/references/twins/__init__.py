# SPDX-License-Identifier: Apache-2.0
"""The zoo's models for NumPyro, with the same names, sites and arguments.

Discrete latents are marginalised by hand. Importing requires NumPyro.
"""
