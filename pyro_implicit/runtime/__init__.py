# SPDX-License-Identifier: Apache-2.0
"""Services for all other rooms: sites, warnings, printing, locks, random streams, files."""

__all__: list[str] = []
