# SPDX-License-Identifier: Apache-2.0
"""From a model to a fitted guide, without settings."""
