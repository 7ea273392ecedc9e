"""Rounding of numbers, and of means with their spread."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mhla.system.numbers import rounded, rounded_with_spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"), (0.25, "0.25"), (92.1349, "92.13"), (1234.56, "1,235"), (123456.7, "123,457"), (9999.7, "10,000"),
        (0.0001234567, "0.0001235"), (0.00001234567, "1.235e-05"), (-3.14159, "-3.142"), (0, "0"), (-0.0, "0"), (7, "7"),
        (12345, "12,345"), (1e20, "1e+20"), (None, "not finite"), (float("nan"), "not finite"), (float("-inf"), "not finite"),
    ],
)  # fmt: skip
def test_four_significant_digits(value: float | None, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("mean", "spread", "texts"),
    [
        (0.921345, 0.004213, ("0.9213", "0.0042")),
        (92.1345, 0.4213, ("92.13", "0.42")),
        (0.5, 0.0996, ("0.50", "0.10")),  # two digits of 0.0996 are 0.10, whose last place is the second
        (0.5, 0.0994, ("0.500", "0.099")),
        (12345.6, 1234.5, ("12,346", "1,234")),
        (2.5, 30.4, ("2", "30")),
        (0.921345, 0.0, ("0.9213", "0")),
        (1.23456789, 1e-9, ("1.23457", "1e-09")),
        (-0.0004, 0.012, ("0.000", "0.012")),
        (-0.25, 0.012, ("-0.250", "0.012")),
        (0.0, 0.5, ("0.00", "0.50")),
        (3.14159e-6, 2.5e-7, ("3.14e-06", "2.5e-07")),
        (3.1e-6, 2.5e-5, ("3e-06", "2.5e-05")),
        (0.0, 2.5e-7, ("0", "2.5e-07")),
    ],
)
def test_a_mean_ends_where_its_spread_ends(mean: float, spread: float, texts: tuple[str, str]) -> None:
    assert rounded_with_spread(mean, spread) == texts


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e4))
@settings(max_examples=300)
def test_rounding_errors_are_below_half_a_unit_of_the_last_place(mean: float, spread: float) -> None:
    mean_text, spread_text = rounded_with_spread(mean, spread)
    shown_mean, shown_spread = (Decimal(text.replace(",", "")) for text in (mean_text, spread_text))
    unit = Decimal(1).scaleb(shown_mean.as_tuple().exponent)  # type: ignore[arg-type]
    assert abs(shown_mean - Decimal(mean)) <= unit / 2
    assert abs(float(shown_spread) / spread - 1) <= 0.0501, "two significant digits"
    digits = len(mean_text.replace(",", "").replace("-", "").replace(".", "").lstrip("0"))
    assert digits <= 6 or "." not in mean_text


@pytest.mark.parametrize(("mean", "spread"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, -0.1)])
def test_what_cannot_be_rounded_is_an_error(mean: float, spread: float) -> None:
    with pytest.raises(ValueError, match="cannot be rounded"):
        rounded_with_spread(mean, spread)
