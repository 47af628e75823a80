# SPDX-License-Identifier: Apache-2.0
from benchmarks.evidence import for_a_page, tables


def test_tables_of_a_page():
    page = "# Title\n\n| a | b |\n| :-- | --: |\n| `x` | -1 |\n| y | 2 |\n\ntext\n\n| c |\n| -- |\n"
    assert tables(page) == [[["a", "b"], ["x", "-1"], ["y", "2"]], [["c"]]]


def test_fit_is_the_first_method_and_empty_columns_are_left_out():
    rows = [
        ["posterior", "dim", "AutoNormal", "AutoIAFNormal", "NUTS", "implicit"],
        ["arK", "7", "-1.5", "", "1", "0.8"],
        ["nes", "10", "9.3", "", "", "0.7"],
        ["blr", "6", "", "1.0", "2", "0.9"],
    ]
    assert for_a_page(rows) == [
        ["posterior", "dim", "fit", "AutoNormal", "NUTS"],
        ["arK", "7", "0.8", "-1.5", "1"],
        ["nes", "10", "0.7", "9.3", ""],
        ["blr", "6", "0.9", "", "2"],
    ]
    assert for_a_page([["target", "seeds"], ["funnel", "5"]]) == [
        ["target", "seeds"],
        ["funnel", "5"],
    ]
