# SPDX-License-Identifier: Apache-2.0
"""Networks of the papers' kinds, on images."""
