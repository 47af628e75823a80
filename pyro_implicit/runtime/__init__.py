# SPDX-License-Identifier: Apache-2.0
"""Services for all other rooms: sites, output, the state of the process, minibatches, files."""

__all__: list[str] = []
