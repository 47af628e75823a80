# SPDX-License-Identifier: Apache-2.0
"""What steps, posteriors and growing models cost."""
