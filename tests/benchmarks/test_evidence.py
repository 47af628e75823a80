# SPDX-License-Identifier: Apache-2.0
from benchmarks.evidence import for_a_page, tables


def test_tables_of_a_page():
    page = "# Title\n\n| a | b |\n| :-- | --: |\n| `x` | -1 |\n| y | 2 |\n\ntext\n\n| c |\n| -- |\n"
    assert tables(page) == [[["a", "b"], ["x", "-1"], ["y", "2"]], [["c"]]]


def test_the_column_of_fit_stands_where_it_is_seen():
    rows = [
        ["posterior", "dim", "AutoNormal", "NUTS", "implicit"],
        ["arK", "7", "-1.5", "1", "0.8"],
    ]
    assert for_a_page(rows) == [
        ["posterior", "dim", "implicit", "AutoNormal", "NUTS"],
        ["arK", "7", "0.8", "-1.5", "1"],
    ]
    assert for_a_page([["target", "seeds"], ["funnel", "5"]]) == [
        ["target", "seeds"],
        ["funnel", "5"],
    ]
