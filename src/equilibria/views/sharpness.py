"""A sharpness as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.views.notebook import bars, card

if TYPE_CHECKING:
    from equilibria.curvature._sharpness import Sharpness


def sharpness_card(found: Sharpness) -> str:
    """In which tensors the first eigenvector lies; a row per eigenvalue."""
    shares = {name: float(part.square().sum()) for name, part in found.vectors[0].items()}
    ranked = sorted(shares.items(), key=lambda item: item[1], reverse=True)
    rows = zip(found.values, found.bound, found.residuals, strict=True)
    certainty = "99.9 %" if found.certified else "estimate"
    return card(
        str(found),
        picture=bars(ranked, what="share of the first eigenvector by tensor"),
        headings=("eigenvalue", "value", f"relative error, at most ({certainty})", "residual"),
        rows=[
            [f"{at}", f"{value:.6g}", f"{bound:.1e}", f"{rest:.1e}"] for at, (value, bound, rest) in enumerate(rows, 1)
        ],
        notes=["The bars are the shares of the first eigenvector in each tensor."],
    )
