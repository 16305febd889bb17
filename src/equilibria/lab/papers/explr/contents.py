"""Every definition, theorem and figure of the exponential learning rate."""

from __future__ import annotations

from equilibria.lab.papers.items import Item, at_desk_scale, works

_SMALL = "a PreResNet-8 on CIFAR-10 at 8x8 pixels"

ITEMS: tuple[Item, ...] = (
    works("Theorem 1.1", "weight decay is a growing lr, informally", laws="exponential.power_schedule"),
    works("Definition 1.2", "SGD with momentum and weight decay", laws="rules.SGD"),
    works(
        "Theorem 2.1",
        "constant lr: an exponential one",
        names="fold",
        laws="exponential.constant_schedule exponential.decay_roots exponential.power_schedule",
        experiments="explr-equivalence explr-constant",
    ),
    works("Remark 2.2", "limit of the decay", laws="exponential.decay_limit"),
    works("Section 2.1", "growth of 1.481 per epoch for PreResNet-32", names="fold", experiments="explr-equivalence"),
    works("Definition 2.3", "step decay", laws="texp.taper"),
    works(
        "Theorem 2.4",
        "tapered exponential schedule",
        names="control.TaperedExponential",
        laws="texp.texp texp.taper",
        experiments="explr-stepdecay",
    ),
    works(
        "Theorem 2.5",
        "any schedule: the same network function",
        names="control.FoldedWeightDecay fold",
        laws="folding.fold switching.to_folded switching.to_weight_decay",
        figures="explr-equivalence/theorem-2-5 explr-joint/theorem-2-5-jointly",
    ),
    works("Definition 2.6", "the same schedule in full", laws="folding.fold texp.texp"),
    works("Theorem 2.7", "error of the tapered schedule", laws="texp.texp_ratio_error"),
    works("Lemma 2.8", "scale invariance", names="symmetries"),
    works(
        "Theorem 3.1, section 3",
        "weight decay or BatchNorm alone converge, both do not",
        names="lab.problems.LogisticToy",
        laws="norms.cone_exit_bound",
        figures="explr-toy/section-3",
    ),
    works(
        "Eq. (7), section 4.1",
        "T-EXP without the instant drop",
        laws="texp.texp_without_drop",
        experiments="explr-v2",
    ),
    works("Appendix A, z1 and z2", "bounds of the roots", laws="exponential.decay_bounds exponential.decay_roots"),
    works(
        "Lemma A.1",
        "concentration of a chi-square variable, for the proof of theorem 3.1",
        laws="deviation.chi_square_tail",
    ),
    works("Appendix A.2, eq. 11", "the norm's own recursion", laws="norms.norm_residual"),
    works(
        "Theorem B.1",
        "the norm without weight decay",
        laws="norms.decay_free_norm",
        figures="explr-norms/theorems-b1-b2",
    ),
    works(
        "Theorem B.2",
        "sqrt(2 lr wd/(1 + momentum))",
        laws="norms.window_identity",
        figures="explr-norms/theorems-b1-b2",
    ),
    works("Section 1", "GroupNorm, LayerNorm, InstanceNorm; lr lowered on a plateau", experiments="explr-joint"),
    at_desk_scale(
        "Figure 1",
        "constant lr on PreResNet-32",
        figures="explr-constant/figure-1",
        note=_SMALL,
    ),
    at_desk_scale("Figure 2", "step decay and T-EXP", figures="explr-stepdecay/figure-2", note=_SMALL),
    at_desk_scale("Figure 3", "the instant drop", figures="explr-v2/figure-3", note=_SMALL),
    at_desk_scale("Figure 4", "cosine and its counterpart", figures="explr-cosine/figure-4", note=_SMALL),
    at_desk_scale("Figure 5", "angle per epoch", figures="explr-angle/figure-5", note=_SMALL),
)
