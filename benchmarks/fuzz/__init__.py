# SPDX-License-Identifier: Apache-2.0
"""Random models against densities written from what was drawn."""
