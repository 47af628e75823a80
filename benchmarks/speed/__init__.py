# SPDX-License-Identifier: Apache-2.0
"""Times of steps, fits and growing models."""
