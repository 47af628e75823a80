# SPDX-License-Identifier: Apache-2.0
"""The large models for NumPyro, with the same names, sites and arguments."""
