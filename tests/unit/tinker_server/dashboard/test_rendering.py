"""Numbers and amounts on pages are short, also at the next power of ten."""

import pytest

from tinker_server.dashboard.rendering import amount, number


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (9999.4, 4, "9999"),
        (9999.7, 4, "10,000"),
        (-9999.7, 4, "-10,000"),
        (99.6, 2, "100"),
        (0.0123456, 4, "0.01235"),
        (123456789, 4, "123,456,789"),
        (1e154, 4, "1e+154"),
        (-1.5e300, 4, "-1.5e+300"),
    ],
)
def test_a_number_has_an_exponent_only_where_its_digits_would_be_too_many(
    value: float, digits: int, shown: str
) -> None:
    assert number(value, digits) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9_999, "9,999"),
        (9_999.7, "10,000"),
        (12_345, "12.3 k"),
        (999_600, "1 M"),
        (123_456_789, "123 M"),
        (999_999_999, "1 G"),
        (1.5e12, "1.5 T"),
        (1.5e15, "1,500 T"),
    ],
)
def test_an_amount_that_is_rounded_up_to_the_next_unit_has_this_unit(value: float, shown: str) -> None:
    assert amount(value) == shown
