"""Every definition, theorem, figure and table of Spherical Motion Dynamics and of its appendix."""

from __future__ import annotations

from equilibria.lab.papers.items import Item, at_desk_scale, works

_OTHER_DATA = "a ResNet-8 on CIFAR-10 at 8x8 or 16x16 pixels"
_TOP_1 = f"{_OTHER_DATA}, which decides the difference; 76.25 and 76.27 % are claims of the preset"

ITEMS: tuple[Item, ...] = (
    works("Lemma 1", "the gradient is tangent and goes with one over the norm", names="symmetries"),
    works(
        "Definition 1",
        "unit gradient",
        names="watch",
        laws="rules.momentum_unit_grad_sq",
        note="column `unit_grad_sq`",
    ),
    works("Definition 2", "angular update", names="watch", laws="angles.log_cos_balance", note="column `angle`"),
    works("eq. (1)-(5)", "updates, effective learning rate, angle of earlier works", laws="rules.SGD targets.targets"),
    works("eq. (12)-(15)", "one step of norm and angle", laws="moments.heavy_ball_step angles.log_cos_balance"),
    works(
        "Theorem 1",
        "equilibrium norm of SGD, and how fast it is approached",
        laws="equilibrium.heavy_ball approach.heavy_ball_approach fluctuation.fluctuation",
        experiments="smd-synthetic smd-fixed-lr",
    ),
    works("Assumptions 1-3", "small lr wd, steady unit gradient", names="watch", laws="settling.tracking_lag"),
    works("Remark 1", "agreement with van Laarhoven's norm", laws="equilibrium.heavy_ball"),
    works(
        "Theorem 2",
        "the same with momentum",
        laws="equilibrium.heavy_ball moments.heavy_ball_step transient.evolve",
        experiments="smd-synthetic smd-fixed-lr",
    ),
    at_desk_scale(
        "Assumptions 4-6",
        "gradient and momentum buffer are hardly correlated (h~)",
        laws="rules.momentum_unit_grad_sq approach.oscillation_threshold correlation.mean_gradient_share_with_momentum",
        experiments="smd-correlation smd-fixed-lr",
        note="0.95 at the paper's lr and wd; contradicted at 25 times their product",
    ),
    works(
        "Remark 2",
        "momentum approaches 1/(1-a) times faster",
        laws="settling.relaxation settling.steps_to_tolerance",
        experiments="smd-transient smd-fixed-lr",
    ),
    works(
        "Theorem 3",
        "equilibrium angle of SGD and SGDM",
        laws="equilibrium.heavy_ball fluctuation.fluctuation",
        experiments="smd-fixed-lr smd-synthetic",
        note="the bound in probability is that of the appendix",
    ),
    works("Remark 3", "momentum turns less per step", laws="angles.angular_diffusion", note="and more over many steps"),
    works(
        "Corollary 3.1",
        "steps to the new equilibrium after lr / k",
        laws="settling.minimum_settling_steps settling.after_lr_drop",
        figures="smd-transient/corollary-3-1",
        experiments="smd-multistage",
    ),
    works(
        "§5.2",
        "dividing the weights by k^(1/4) at lr / k",
        names="control.RescaleOnDecay",
        laws="states.rescale_factors states.rescaled",
        figures="smd-rescale-law/section-5-2",
        experiments="smd-multistage",
    ),
    works(
        "Lemmas 2, 3, remark 5",
        "steps of the proofs in appendix B: the norm's floor, a contraction, a smaller variance",
        laws="deviation.norm_sq_floor deviation.momentum_contraction fluctuation.fluctuation",
        note="remark 4 lists the first-order expansions that the proofs use; the laws here are exact without them",
    ),
    works(
        "§6, §C.3",
        "linear scaling of lr with the batch, and angles over n steps",
        names="translate",
        laws="angles.linear_scaling_ratio angles.n_step_angles correlation.measured_scaling_ratio",
        experiments="smd-linear-scaling eq-diffusion",
    ),
    works(
        "Figure 1",
        "illustration of the balance",
        figures="nrq-landscape/figure-1",
        note="of a noisy Rayleigh quotient",
    ),
    at_desk_scale(
        "Figure 2",
        "unit gradient, norm and angle of one layer, SGD and SGDM",
        figures="smd-fixed-lr/fixed-lr",
        note=_OTHER_DATA,
    ),
    at_desk_scale(
        "Figure 3 (a)-(c)", "angles of all layers over lr stages", figures="smd-multistage/angles", note=_OTHER_DATA
    ),
    at_desk_scale(
        "Figure 3 (d)-(f)",
        "the same for Mask R-CNN on COCO",
        figures="smd-detection/angles",
        note="a small detector on scenes of digits",
    ),
    works("Figure 4", "four simulations of SGD", figures="smd-synthetic/figure-4"),
    works("Figure 5", "four simulations of SGDM", figures="smd-synthetic/figure-5"),
    at_desk_scale(
        "Figure 6", "unit gradients over lr stages", figures="smd-multistage/unit-gradients", note=_OTHER_DATA
    ),
    at_desk_scale("Figure 7", "n small steps against one large", figures="smd-linear-scaling/angles", note=_OTHER_DATA),
    at_desk_scale("Figure 8", "gradients of larger batches", figures="smd-linear-scaling/gradients", note=_OTHER_DATA),
    at_desk_scale(
        "Figure 9",
        "MobileNet-V2 and ShuffleNet-V2+",
        names="lab.nets.MobileNetV2 lab.nets.ShuffleNetV2",
        figures="smd-architectures/architectures",
        note="small ones on CIFAR-10; the published ones in the preset",
    ),
    at_desk_scale(
        "Table 1",
        "accuracy with and without rescaled weights, ImageNet",
        experiments="smd-multistage",
        note=_TOP_1,
    ),
    at_desk_scale(
        "Table 2",
        "the same for Mask R-CNN on COCO",
        experiments="smd-detection",
        note="a small detector on scenes of digits",
    ),
)

APPENDIX_ITEMS: tuple[Item, ...] = (
    works("Lemma 1, remark C.1", "scale invariance", names="symmetries"),
    works(
        "Theorem 1",
        "equilibrium of SGD, sharper",
        laws="equilibrium.heavy_ball approach.heavy_ball_approach fluctuation.fluctuation",
        experiments="smd-synthetic",
    ),
    works("Assumptions 3, 7", "how fast L may drift", laws="settling.tracking_lag", experiments="smd-synthetic"),
    works(
        "Theorem 2",
        "equilibrium of SGDM, sharper",
        laws="transient.evolve equilibrium.heavy_ball",
        experiments="smd-synthetic",
    ),
    works("eps < (1 - sqrt(a))^2", "where the approach oscillates", laws="approach.oscillation_threshold"),
    works(
        "Lemmas C.1, C.2",
        "deviations of ||w||^2 with a probability",
        laws="deviation.norm_sq_floor deviation.momentum_contraction",
    ),
    works(
        "Theorem 3",
        "equilibrium angle",
        laws="equilibrium.heavy_ball deviation.angle_deviation",
    ),
    works(
        "Corollary 3.1",
        "steps to the new equilibrium",
        laws="settling.minimum_settling_steps",
        experiments="smd-transient",
    ),
    works(
        "Lemma D.1, eq. (180)-(184)",
        "the diffusion picture: noise alone sets the norm",
        laws="rayleigh.sde_norm_fourth fluctuation.noise_split settling.relaxation",
        experiments="smd-noise",
    ),
    at_desk_scale(
        "Appendix E",
        "at a fixed lr wd more momentum turns less, with a larger loss",
        experiments="smd-momentum",
        note=_OTHER_DATA,
    ),
    at_desk_scale(
        "Appendix F",
        "pseudo-overfitting: accuracy dips as the angle climbs back",
        figures="smd-pseudo-overfitting/pseudo-overfitting",
        note="four classes of CIFAR-10 at 8x8 pixels",
    ),
    at_desk_scale(
        "Figure 1",
        "mean against variance of the unit gradient",
        figures="smd-noise/noise",
        note="batches of 32; with the paper's 256 the ratio here would be eight times as large, and not small",
    ),
    at_desk_scale(
        "Figure 2",
        "no dip of the accuracy on ImageNet",
        experiments="smd-multistage",
        note=_OTHER_DATA,
    ),
    works("Figures 3, 4", "the eight simulations", figures="smd-synthetic/figure-4 smd-synthetic/figure-5"),
    at_desk_scale(
        "Figure 5", "unit gradients over lr stages", figures="smd-multistage/unit-gradients", note=_OTHER_DATA
    ),
    at_desk_scale(
        "Figures 6, 7",
        "linear scaling",
        figures="smd-linear-scaling/angles smd-linear-scaling/gradients",
        note=_OTHER_DATA,
    ),
    at_desk_scale(
        "Figure 8",
        "MobileNet-V2 and ShuffleNet-V2+",
        figures="smd-architectures/architectures",
        note="small ones on CIFAR-10; the published ones in the preset",
    ),
    at_desk_scale("Table 1", "accuracy, ImageNet", experiments="smd-multistage", note=_TOP_1),
    at_desk_scale(
        "Table 2", "Mask R-CNN on COCO", experiments="smd-detection", note="a small detector on scenes of digits"
    ),
)
