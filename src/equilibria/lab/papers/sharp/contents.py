"""Every definition, theorem and figure of sharpness reduction."""

from __future__ import annotations

from equilibria.lab.papers.items import Item, at_desk_scale, missing, works

ITEMS: tuple[Item, ...] = (
    works("Definition 1.1", "spherical sharpness", names="sharpness SharpnessTracker"),
    works(
        "Lemma 3.1",
        "projected descent at an effective lr",
        names="control.ProjectedGD",
        laws="stability.effective_lr stability.projected_step",
    ),
    works("Theorem 3.2", "stationarity in the end", laws="stability.stationarity_guarantee"),
    works("Lemma 4.1", "descent lemma", laws="stability.descent_bound"),
    works("Definitions 4.2, D.2", "Polyak-Lojasiewicz condition", laws="dominance.pl_constant"),
    works(
        "Theorem 4.3",
        "the edge of stability is reached",
        laws="stability.crossing_time stability.eos_delay stability.stability_ratio",
        experiments="sharp-regression sharp-completion",
    ),
    works(
        "Assumptions 4.4, 4.5",
        "a manifold of minimisers with one top eigenvalue",
        names="lab.manifold lab.problems.Sphere3D lab.problems.SphereValley",
    ),
    works(
        "Eq. (3), (8)",
        "sharpness-reduction flow",
        names="lab.manifold",
        laws="flow.flow_velocity flow.integrate_flow flow.log_sharpness_rate",
        experiments="sharp-3d",
    ),
    works(
        "Theorem 4.6",
        "descent with weight decay follows the flow",
        laws="flow.integrate_flow flow_examples.sphere3d_angle",
        figures="sharp-3d/figure-3",
        note="from one start; no success rate over random starts",
    ),
    works(
        "Remark 4.7",
        "size of the oscillation",
        laws="hamiltonian.mean_square_displacement stability.edge_of_stability",
    ),
    works(
        "Section 4.2.3",
        "period and level of the oscillation",
        laws="hamiltonian.period_steps hamiltonian.orbit",
        experiments="sharp-regression",
    ),
    works(
        "Theorem 5.1, lemma O.1",
        "linear regression: the flow ends at the least norm",
        names="lab.problems.Regression",
        laws="flow_examples.regression_flow flow_examples.regression_geometry",
        experiments="sharp-regression",
    ),
    works("Section 5", "descent beats gradient flow however small lr", experiments="sharp-gradient-flow"),
    works(
        "Definitions B.1-B.4",
        "scalar RMSprop",
        names="control.ScalarRMSprop",
        laws="effective_schedulers.scalar_rmsprop_step",
    ),
    works("Definition B.5", "quasi-RMSprop scheduler", laws="effective_schedulers.quasi_rmsprop_parameters"),
    works("Definition B.6, remark B.8", "GWSI scheduler", laws="effective_schedulers.gwsi_moment_step"),
    works(
        "Theorems B.7, B.9",
        "effective lr of weight decay as schedulers",
        laws="effective_schedulers.gwsi_parameters effective_schedulers.gwsi_step",
        figures="sharp-schedulers/theorems-b7-b9",
    ),
    works(
        "Theorem B.10",
        "projected descent follows the flow from random starts",
        experiments="sharp-random-starts",
        note="C_b = 4 is contradicted",
    ),
    works("Assumptions B.11, B.12", "the same for a full space", names="lab.problems.Valley"),
    works("Theorem B.13", "descent in the full space", laws="flow.flow_velocity", experiments="sharp-rmsprop"),
    works(
        "Corollary B.14",
        "scalar RMSprop follows the flow, for any C_b",
        laws="flow_examples.rmsprop_valley_position",
        figures="sharp-rmsprop/corollary-b14",
    ),
    works(
        "Theorem C.1, lemma C.3, eq. (12)",
        "the PAC-Bayes theorem behind C.2",
        laws="generalization.pac_bayes_gap generalization.gaussian_divergence generalization.noise_radius",
    ),
    works(
        "Theorem C.2",
        "PAC-Bayes bound by spherical sharpness",
        laws="generalization.pac_bayes_bound generalization.max_noise",
        experiments="sharp-coverage",
        figures="sharp-pacbayes/appendix-c-r",
        note="on trained regressions, over resampled data: it holds, and is loose",
    ),
    works("Lemma D.1", "derivatives of a scale-invariant function", names="symmetries sharpness"),
    works(
        "Theorems D.3-D.6",
        "rank of the Hessian, the PL condition, and how far a gradient flow goes",
        laws="dominance.local_pl_constant dominance.flow_length",
    ),
    works("Lemma E.1", "one step of the norm", laws="stability.norm_step"),
    works(
        "Appendix F",
        "the three-dimensional example",
        names="lab.problems.Sphere3D",
        laws="flow_examples.sphere3d_angle",
        experiments="sharp-3d",
    ),
    works("Appendix G.3", "threshold of the plain sharpness", laws="stability.raw_threshold"),
    works(
        "Definitions H.1, H.2",
        "drift states and the RMS-drift process",
        laws="hamiltonian.rms_drift hamiltonian.potential",
    ),
    works(
        "Definition H.21, theorem H.22",
        "energy and its drift",
        laws="hamiltonian.energy hamiltonian.sphere_energy_rate",
    ),
    missing("Lemmas G, H.3-H.20, theorem H.23, I-N", "steps of the proofs"),
    works(
        "Appendix R.2",
        "scale of the final BatchNorm, label smoothing",
        laws="generalization.final_bn_minimum generalization.label_smoothing",
        experiments="sharp-pacbayes",
    ),
    works("Figure 1", "matrix completion", names="lab.problems.Completion", figures="sharp-completion/figure-1"),
    at_desk_scale(
        "Figure 2",
        "VGG-11 on CIFAR-10 after the fit",
        figures="sharp-vgg/figure-2",
        note="500 images of four classes",
    ),
    works("Figure 3", "norm, gradient and the 3-D trajectory", figures="sharp-3d/figure-3"),
    works("Figure 4", "linear regression with BatchNorm", figures="sharp-regression/figure-4"),
    works("Figure 5", "phase portrait", figures="sharp-hamiltonian/figure-5"),
    works("Figure 6", "matrix completion, 400 to 1600 entries", figures="sharp-completion/figure-6"),
    works("Figure 7", "matrix completion, 1600 to 3200 entries", figures="sharp-completion/figure-7"),
    at_desk_scale(
        "Figure 8",
        "scale-invariant ResNet-20",
        figures="sharp-resnet/figures-8-9",
        note="500 images of four classes",
    ),
    at_desk_scale(
        "Figure 9", "standard ResNet-20", figures="sharp-resnet/figures-8-9", note="500 images of four classes"
    ),
    at_desk_scale(
        "Figure 10",
        "the first steps of VGG-11",
        figures="sharp-vgg/figure-10",
        note="first weights are torch's; in the preset those of the cited code",
    ),
    works("Figure 11", "matrix completion, a closer look", figures="sharp-completion/figure-11"),
    at_desk_scale("Figure 12", "VGG-11, a closer look at 200 steps", figures="sharp-vgg/figure-12"),
    at_desk_scale("Figure 13", "without weight decay", figures="sharp-vgg/figure-2", experiments="sharp-ablations"),
    at_desk_scale(
        "Figure 14", "several weight decays", figures="sharp-ablations/figure-14", note="one of them not zero"
    ),
    at_desk_scale(
        "Figure 15",
        "first effective learning rates",
        figures="sharp-ablations/figure-15",
        note="over a factor of 10, not a million",
    ),
    works("Figure 16", "the scale-invariant VGG-11", names="lab.nets.ScaleInvariantVGG"),
    works("Figure 17", "the two ResNet-20", names="lab.nets.PreActivationResNet"),
    at_desk_scale("Figure 18", "scales of the final BatchNorm", figures="sharp-ablations/figure-18"),
)
