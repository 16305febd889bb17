"""The evidence about layers: computed for all of them at once, the same as for each alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pyarrow.compute as pc
from tests.helpers.sample_worlds import World, edited, together, world

from equilibria.diagnosis import diagnose, summarise_and_diagnose
from equilibria.diagnosis.layers import Layer, layers_of
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.summary import summarise, summarise_run
from equilibria.theory import SGD, SGDW, AdamW

EVIDENCE = (
    *("since", "rule", "unit_grad_sq", "trend", "lr_is_moving", "remaining", "correlation", "radial", "rounding"),
    *("changed_outside", "monotone", "drift", "vanishing"),
)


def layers(run: World) -> list[Layer]:
    sampled = sampled_run(run.samples, metadata=run.metadata)
    return layers_of(sampled, summarise_run(sampled))


def mixed() -> World:
    """Layers with different numbers of samples, rules and defects; some samples are unknown."""
    run = together(
        world(SGD(0.1, 5e-3), 200, layers=["radial"], radial=0.4, invariant=True),
        world(SGD(0.1, 2e-3, momentum=0.9), 300, layers=["correlated", "again"], correlation=0.6),
        world(SGDW(0.1, 5e-3, momentum=0.8), 300, layers=["fading"], unit_grad_sq=lambda step: math.exp(-step / 40)),
        world(AdamW(1e-2, 0.1), 120, layers=["adamw"], changed_outside={50: 1.1}),
        world(SGD(0.1, 5e-3), 240, layers=["dropped"], lr=lambda step: 0.1 if step < 80 else 0.02),
    )
    rng, table = np.random.default_rng(0), run.samples
    steps, names = table["step"].to_numpy(), np.array(table["param"])
    cosine = np.where((names == "dropped") & (steps > 120), 0.05, table["cosine"].to_numpy())
    grads = np.where((names == "again") & (rng.random(len(names)) < 0.3), np.nan, table["unit_grad_sq"].to_numpy())
    return World(edited(table, cosine=cosine, unit_grad_sq=grads), run.metadata)


def test_the_evidence_about_a_layer_does_not_depend_on_the_others():
    run = mixed()
    for layer in layers(run):
        own = World(run.samples.filter(pc.equal(run.samples["param"].cast("string"), layer.name)), run.metadata)
        (alone,) = layers(own)
        for name in EVIDENCE:
            np.testing.assert_equal(getattr(layer, name), getattr(alone, name), err_msg=f"{name} of {layer.name}")
        assert dataclasses.astuple(layer.summary) == dataclasses.astuple(alone.summary)


def test_the_evidence_is_there():
    by_name = {layer.name: layer for layer in layers(mixed())}
    assert by_name["radial"].radial is not None and by_name["correlated"].correlation is not None
    assert by_name["fading"].remaining < 0.1 and by_name["fading"].drift is not None
    assert by_name["adamw"].changed_outside == 1 / 120
    assert by_name["dropped"].since == 80 and by_name["dropped"].late_steps == (160, 239)


def test_summaries_and_findings_of_one_pass_are_those_of_two():
    run = mixed()
    summaries, findings = summarise_and_diagnose(run.samples, metadata=run.metadata)
    assert summaries == summarise(run.samples, metadata=run.metadata) and summaries
    assert findings == diagnose(run.samples, metadata=run.metadata) and findings
