# SPDX-License-Identifier: Apache-2.0
"""Services below every other folder: warnings, progress bars, locks, random streams, files."""

__all__: list[str] = []
