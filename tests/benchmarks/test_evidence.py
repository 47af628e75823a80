# SPDX-License-Identifier: Apache-2.0
from benchmarks.evidence import tables


def test_tables_of_a_page():
    page = "# Title\n\n| a | b |\n| :-- | --: |\n| `x` | -1 |\n| y | 2 |\n\ntext\n\n| c |\n| -- |\n"
    assert tables(page) == [[["a", "b"], ["x", "-1"], ["y", "2"]], [["c"]]]
