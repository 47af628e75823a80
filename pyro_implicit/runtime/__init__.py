# SPDX-License-Identifier: Apache-2.0
"""Services for all other folders: sites, output, global state, processes, minibatches, files."""

__all__: list[str] = []
