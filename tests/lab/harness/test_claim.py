"""Verdicts follow from the numbers, for every kind of claim and with intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import claim_text
from equilibria.lab.harness.claim import (
    CONTRADICTED,
    EXCLUDED,
    NOT_SHOWN,
    SHOWN,
    Claim,
    Source,
    comparison,
    diagnostic,
    identity,
    not_demanded,
)

SOURCE = Source("smd", "eq. (4)", corrected="a root is missing", law="equilibrium.sgd")
FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (SOURCE.says("").near(-2, -2.09, relative=0.05), SHOWN),
        (SOURCE.says("").near(-2, -2.11, relative=0.05), CONTRADICTED),
        (SOURCE.says("").near(0, 0.1, absolute=0.1), SHOWN),
        (SOURCE.says("").near(0, -0.11, absolute=0.1), CONTRADICTED),
        (SOURCE.says("").at_most(1, 1), SHOWN),
        (SOURCE.says("").at_most(1, 1.001), CONTRADICTED),
        (SOURCE.says("").at_least(1, 1), SHOWN),
        (SOURCE.says("").at_least(1, 0.999), CONTRADICTED),
        (SOURCE.says("").to_rounding(2**-50, operations=4), SHOWN),
        (SOURCE.says("").to_rounding(2**-49, operations=4), CONTRADICTED),
        (SOURCE.says("").near(1, math.nan, relative=9), CONTRADICTED),
        (SOURCE.says("").at_least(1, math.inf), CONTRADICTED),
    ],
)
def test_a_number_without_scatter_is_shown_or_contradicted(claim, verdict):
    assert claim.verdict == verdict
    assert claim.fails == (verdict != SHOWN)


@pytest.mark.parametrize(
    ("interval", "verdict"), [((0.5, 0.9), SHOWN), ((-0.1, 0.9), NOT_SHOWN), ((-2, -0.1), CONTRADICTED)]
)
def test_with_an_interval_only_all_of_it_shows(interval, verdict):
    measured = sum(interval) / 2
    assert SOURCE.says("").at_least(0, measured, interval=interval).verdict == verdict
    flipped = (-interval[1], -interval[0])
    assert SOURCE.says("").at_most(0, -measured, interval=flipped).verdict == verdict


def test_an_interval_wider_than_the_tolerance_shows_nothing():
    assert SOURCE.says("").near(1, 1, relative=0.1, interval=(0.5, 1.5)).verdict == NOT_SHOWN


def test_the_order_is_the_slope_of_the_logarithms():
    sizes = [1e-2, 1e-3, 1e-4]
    claim = SOURCE.says("").of_order(0.5, sizes=sizes, errors=[3 * size**0.53 for size in sizes], absolute=0.05)
    assert claim.measured == pytest.approx(0.53, abs=1e-12)
    assert claim.verdict == SHOWN


def test_what_is_not_demanded_keeps_its_verdict_and_fails_nothing():
    claim = not_demanded(SOURCE.says("").at_most(1, 2))
    assert (claim.verdict, claim.fails) == (CONTRADICTED, False)


@given(expected=FINITE, measured=st.one_of(FINITE, st.just(math.nan)), tolerance=st.floats(0, 10), wide=st.floats(0, 5))
def test_json_gives_the_same_claim(expected, measured, tolerance, wide):
    interval = None if math.isnan(measured) else (measured - wide, measured + wide)
    claim = SOURCE.says("t").near(expected, measured, absolute=tolerance, interval=interval, unit="rad")
    again = Claim.from_dict(json.loads(json.dumps(claim.as_dict(), allow_nan=False)))
    assert again.verdict == claim.verdict
    assert again.as_dict() == claim.as_dict()


def test_a_typed_verdict_does_not_stand():
    values = SOURCE.says("the bound").at_most(1, 2).as_dict() | {"verdict": SHOWN}
    assert Claim.from_dict(values).as_dict()["verdict"] == CONTRADICTED


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.95, 1.05), SHOWN),
        ((1.0, 1.1), SHOWN),
        ((1.02, 1.08), EXCLUDED),
        ((0.92, 0.98), EXCLUDED),
        ((1.05, 1.15), NOT_SHOWN),
        ((0.8, 1.2), NOT_SHOWN),
        ((1.12, 1.2), CONTRADICTED),
    ],
)
def test_an_interval_within_the_tolerance_shows_only_the_number_it_contains(interval, verdict):
    for claim in (
        SOURCE.says("").near(1, sum(interval) / 2, relative=0.1, interval=interval),
        SOURCE.says("").near(1, sum(interval) / 2, absolute=0.1, interval=interval),
    ):
        assert claim.verdict == verdict
        assert claim.fails == (verdict in (NOT_SHOWN, CONTRADICTED))


@given(
    middle=st.floats(0.5, 2.0),
    half=st.floats(1e-6, 0.3),
    expected=st.floats(0.5, 2.0),
    tolerance=st.floats(1e-6, 0.5),
    wider=st.floats(1.0, 4.0),
)
def test_a_wider_tolerance_never_shows_an_excluded_law(middle, half, expected, tolerance, wider):
    verdicts = [
        SOURCE.says("").near(expected, middle, absolute=room, interval=(middle - half, middle + half)).verdict
        for room in (tolerance, tolerance * wider)
    ]
    contains = middle - half <= expected <= middle + half
    assert (SHOWN in verdicts) <= contains and (EXCLUDED in verdicts) <= (not contains)
    assert verdicts[0] not in (SHOWN, EXCLUDED) or verdicts[1] == verdicts[0]


def test_without_a_tolerance_the_interval_alone_decides():
    values = [0.9, 1.0, 1.1]  # 95 % interval 0.75 to 1.25
    assert SOURCE.says("").equals(1.2, values).verdict == SHOWN
    assert SOURCE.says("").equals(1.3, values).verdict == CONTRADICTED
    claim = SOURCE.says("").equals(1.2, values)
    assert claim_text.expected_text(claim) == "1.2, in the interval"
    assert Claim.from_dict(json.loads(json.dumps(claim.as_dict()))) == claim


def test_a_diagnostic_is_reported_and_neither_counted_nor_failing():
    off = diagnostic(SOURCE.says("").equals(1.3, [0.9, 1.0, 1.1]))
    assert off.verdict == CONTRADICTED and not off.fails
    assert claim_text.verdict_text(off) == "contradicted (diagnostic)"
    assert claim_text.claims_headline([off]) == "0 of 1 diagnostic agrees"
    assert claim_text.shown_counts({"ours": [off]}) == "No results yet"


def test_the_headline_counts_the_claims_of_each_group():
    near = SOURCE.says("").near(1, 1.05, relative=0.1, interval=(1.02, 1.08))
    good, bad = SOURCE.says("").at_most(1, 0.5), SOURCE.says("").at_most(1, 2)
    groups = {"papers": [good, near, bad, identity(good)], "ours": [not_demanded(bad)], "none": [comparison(good)]}
    assert claim_text.shown_counts(groups) == "Claims shown: papers 1 of 3; ours 0 of 1"
    assert claim_text.claims_headline(groups["papers"]) == (
        "1 of 3 claims shown, 1 within tolerance with the law excluded, 1 contradicted; 1 of 1 identity holds"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SOURCE.says("").near(1, 1), "expected one of the two"),
        (lambda: SOURCE.says("").near(1, 1, relative=1, absolute=1), "expected one of the two"),
        (lambda: SOURCE.says("").near(math.nan, 1, relative=1), "got expected=nan"),
        (lambda: SOURCE.says("").near(1, 1, relative=-1), "expected 0 <= tolerance"),
        (lambda: SOURCE.says("").near(1, 1, relative=1, interval=(2, 3)), "expected one around measured"),
        (lambda: Source("smdd", "eq. (4)"), "got paper='smdd'; expected one of: smd"),
    ],
)
def test_an_impossible_claim_raises(build, message):
    with pytest.raises(EquilibriaError, match=message):
        build()


def test_only_claims_are_counted_as_claims():
    good = SOURCE.says("").at_most(1, 0.5)
    bad = SOURCE.says("").at_most(1, 2)
    headline = claim_text.claims_headline([good, bad, identity(good), comparison(bad), comparison(good)])
    assert headline == "1 of 2 claims shown, 1 contradicted; 1 of 1 identity holds; 1 of 2 comparisons agree"
    assert identity(bad).fails and not comparison(bad).fails
    assert (
        claim_text.verdict_text(identity(good)) == "holds (identity)"
        and claim_text.verdict_text(identity(bad)) == "contradicted"
    )
    assert claim_text.verdict_text(comparison(bad)) == "does not agree (comparison)"


def test_a_number_of_the_paper_among_ours():
    """Student's interval by hand: of three draws it is 4.303 sqrt(4/3) standard deviations wide, each way."""
    values = np.exp([0.0, 1.0, 2.0])
    half = 4.302653 * math.sqrt(4 / 3)
    for printed, verdict in ((math.exp(1 + half - 0.01), SHOWN), (math.exp(1 - half - 0.01), CONTRADICTED)):
        claim = SOURCE.says("").among(printed, values)
        assert claim.verdict == verdict and not claim.fails
        assert Claim.from_dict(json.loads(json.dumps(claim.as_dict()))) == claim
    np.testing.assert_allclose(np.log(claim.interval), [1 - half, 1 + half], rtol=1e-6)


def test_digits_show_what_the_paper_is_off_by_and_the_tolerance():
    claim = SOURCE.says("").near(22.361239, 22.361239, relative=1.12e-12, printed=22.360680)
    shown = [
        claim_text.printed_text(claim),
        claim_text.expected_text(claim).split(" ")[0],
        claim_text.measured_text(claim),
    ]
    assert shown == ["22.36068", "22.361239", "22.361239"]
    steps = SOURCE.says("").near(30471.4, 30439, relative=0.01, unit="steps", interval=(30400, 30480))
    assert claim_text.expected_text(steps) == "30,471 steps ± 1 %" and claim_text.measured_text(steps).endswith(
        "[30,400, 30,480]"
    )
    fine = SOURCE.says("").near(0.0632614, 0.0632598, relative=6e-5)
    assert (claim_text.expected_text(fine).split(" ")[0], claim_text.measured_text(fine)) == ("0.0632614", "0.0632598")


@pytest.mark.parametrize(
    ("values", "agrees"), [([0.0, 1.0, 2.0, 3.0], "shown"), ([0.0, 0.0, -1.0, 3.0], "contradicted")]
)
def test_a_draw_without_a_logarithm_is_left_out_of_a_comparison_and_said(values, agrees):
    claim = Source("sharp", "fig. 4").says("edge").among(2.5, values)
    left = [value for value in values if value > 0]
    assert claim.text == f"edge ({len(left)} of 4 draws)" and claim.verdict == agrees and not claim.fails
    if len(left) > 1:
        assert claim.interval == claim.source.says("").among(2.5, left).interval
