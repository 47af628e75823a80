# SPDX-License-Identifier: Apache-2.0
"""The classic BUGS examples for NumPyro, with the same names, sites and arguments."""
