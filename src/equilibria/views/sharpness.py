"""The notebook card of `Sharpness`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.views.notebook import card, svg_bars

if TYPE_CHECKING:
    from equilibria.curvature._sharpness import Sharpness


def sharpness_card(sharpness: Sharpness) -> str:
    """A card with the shares of the first eigenvector by tensor, and one row per eigenvalue."""
    shares = {name: float(part.square().sum()) for name, part in sharpness.vectors[0].items()}
    ranked = sorted(shares.items(), key=lambda item: item[1], reverse=True)
    rows = zip(sharpness.values, sharpness.bound, sharpness.residuals, strict=True)
    certainty = "99.9 %" if sharpness.certified else "estimate"
    return card(
        str(sharpness),
        picture=svg_bars(ranked, label="share of the first eigenvector by tensor"),
        headings=("eigenvalue", "value", f"relative error, at most ({certainty})", "residual"),
        rows=[
            [f"{place}", f"{value:.6g}", f"{bound:.1e}", f"{residual:.1e}"]
            for place, (value, bound, residual) in enumerate(rows, 1)
        ],
        notes=["The bars are the shares of the first eigenvector in each tensor."],
    )
