# SPDX-License-Identifier: Apache-2.0
"""Simulators without a likelihood: two tasks of sbibm, with sbi as opponent."""
