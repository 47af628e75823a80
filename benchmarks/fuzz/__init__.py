# SPDX-License-Identifier: Apache-2.0
"""Random models, compared with independently written densities."""
