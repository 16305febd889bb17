"""Every definition, theorem and figure of the noisy Rayleigh quotient."""

from __future__ import annotations

from equilibria.lab.papers.items import Item, at_desk_scale, preset_only, works

ITEMS: tuple[Item, ...] = (
    works(
        "Section 2.1, assumptions 1, 2",
        "the noisy Rayleigh quotient",
        names="lab.problems.RayleighQuotient",
        laws="rayleigh.NoisyRayleigh",
    ),
    works("Definition 1", "angular update", laws="rayleigh.angular_update rayleigh.angle_from_gradient"),
    works(
        "Lemma 1",
        "equilibrium angle and norm",
        laws="rayleigh.equilibrium_angle rayleigh.equilibrium_norm_sq rayleigh.norm_sq_at",
        experiments="nrq-equilibrium nrq-networks",
    ),
    works("Eq. 16", "diffusion of the alignment", laws="rayleigh_risk.alignment_sde rayleigh_risk.quotient_bounds"),
    works(
        "Theorem 1",
        "bounds of the risk",
        laws="rayleigh_risk.risk_lower_bound rayleigh_risk.risk_upper_bound",
        figures="nrq-bounds/theorem-1",
    ),
    works(
        "Corollary 1",
        "a larger angle: faster, and a higher floor",
        laws="rayleigh_risk.equilibrium_risk_bounds rayleigh_curve.exact_risk_curve",
        experiments="nrq-equilibrium",
    ),
    works(
        "Corollary 2",
        "when the risk escapes",
        laws="rayleigh_risk.escape_norm_sq",
        figures="nrq-escape/corollary-2",
    ),
    works(
        "Corollary 3",
        "(k, k^2, 1/k^2) change nothing",
        laws="translation.translate_scale",
        experiments="nrq-initialization",
    ),
    works(
        "Theorem 2, eq. 26",
        "stationary law of the alignment and its risk",
        laws="watson.watson_log_density watson.watson_moments watson.bingham_log_density rayleigh_risk.stationary_risk",
        figures="nrq-stationary/theorem-2",
    ),
    works(
        "Eq. 27",
        "rate of convergence to the stationary law",
        laws="rayleigh_risk.spectral_gap",
        experiments="nrq-stationary",
    ),
    works("Remarks 1, 4", "the noisy quadratic model beside it", laws="rayleigh.noisy_quadratic_loss"),
    works("Remarks 2, 3", "risk against angle along the curve", laws="rayleigh_curve.risk_curve"),
    works("Figure 1", "the landscape with weight decay", figures="nrq-landscape/figure-1"),
    works("Figure 2 (a)-(d)", "three weight decays", figures="nrq-equilibrium/figure-2-a-d"),
    works("Figure 2 (e)-(h)", "after lr / 10, with and without rescale", figures="nrq-escape/figure-2-e-h"),
    works("Figure 2 (i)-(l)", "scales of the first weights", figures="nrq-initialization/figure-2-i-l"),
    at_desk_scale(
        "Figure 3 (a)-(d)", "equal lr wd on CIFAR-10", figures="nrq-networks/figure-3", note="three seeds of ten"
    ),
    at_desk_scale(
        "Figure 3 (e)-(h)",
        "pseudo-overfitting on CIFAR-10",
        figures="smd-pseudo-overfitting/pseudo-overfitting",
        note="three to four seeds of ten",
    ),
    at_desk_scale(
        "Figure 3 (i)-(l)",
        "first weights times ten on CIFAR-10",
        figures="nrq-networks/figure-3",
        note="three seeds of ten",
    ),
    preset_only(
        "Figure 4",
        "ResNet-50 on ImageNet, lr 1, no momentum",
        experiments="nrq-imagenet",
        note="the pairs of lr and weight decay of its lines are those of figure 3 in proportion",
    ),
)
