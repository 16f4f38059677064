"""Descriptions of entries by name."""

from fedjax_het import describe


def test_all_entries_of_a_name_are_described():
    text = describe("drift")
    assert "drift (skews): " in text and "drift (metrics): " in text and "--skew drift:" in text
    assert describe("fedprox").startswith("fedprox: ")
