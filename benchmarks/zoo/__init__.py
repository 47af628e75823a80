# SPDX-License-Identifier: Apache-2.0
"""Ordinary Pyro models, of the kinds that users write, with reference draws of each."""
