# SPDX-License-Identifier: Apache-2.0
"""Image networks, as in the papers."""
