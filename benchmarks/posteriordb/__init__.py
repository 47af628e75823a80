# SPDX-License-Identifier: Apache-2.0
"""Posteriors of posteriordb as Pyro models, with their reference draws."""
