# SPDX-License-Identifier: Apache-2.0
"""Good guides broken in known ways and sizes, and what ``diagnose`` says of them."""
