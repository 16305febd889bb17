"""What is recorded, how a run ends badly, and what is refused before it begins."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from mpmath import mp
from tests.helpers.small_worlds import PROBLEMS, without_kernel

from equilibria.errors import EquilibriaError
from equilibria.lab.problems import (
    RECORDERS,
    DivergenceError,
    RayleighQuotient,
    ScalarRMSpropRule,
    Simulation,
    SimulationState,
    Sphere3D,
    Valley,
)
from equilibria.theory import SGD


def small(**changes):
    settings = {"rule": SGD(0.1, 0.01), "steps": 10, **changes}
    return Simulation(RayleighQuotient([1.0, 2.0, 3.0]), [1.0, 1.0, 1.0], **settings)


def test_records_are_of_the_state_before_a_step_and_of_that_step():
    names = [name for name in RECORDERS if name != "weights"]
    problem = PROBLEMS["regression"]()
    run = Simulation(problem, problem.initial, rule=SGD(0.5, 0.01), steps=9, record=[*names, "weights"], every=4).run()
    assert run.steps.tolist() == [0, 4, 8]
    path = [problem.initial]
    for _ in range(9):
        path.append(path[-1] - 0.5 * (problem.gradient(path[-1]) + 0.01 * path[-1]))
    for record, step in enumerate(run.steps):
        w, after = path[step], path[step + 1]
        norm = np.linalg.norm(w, axis=1)
        unit, unit_after = w / norm[:, None], after / np.linalg.norm(after, axis=1, keepdims=True)
        moved, bent = unit_after - unit, problem.gradient(unit_after) - problem.gradient(unit)
        expected = {
            "weights": w,
            "norm": norm,
            "angle": np.arccos((unit * unit_after).sum(axis=1)),
            "loss": problem.value(w),
            "risk": problem.risk(w),
            "gradient_norm": np.linalg.norm(problem.gradient(unit), axis=1),
            "sharpness": np.linalg.eigvalsh(problem.hessian(unit))[:, -1],
            "secant_sharpness": (moved * bent).sum(axis=1) / (moved * moved).sum(axis=1),
            "effective_lr": 0.5 / (0.995 * norm**2),
        }
        assert expected.keys() == run.values.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(run[name][record], value, rtol=1e-7, err_msg=name)
    np.testing.assert_allclose(run.state.weights, path[9], rtol=1e-12)


def test_a_tiny_angle_keeps_its_digits():
    """Against 50 digits: acos of the cosine would have none left."""
    run = small(rule=SGD(1e-9), steps=1, record=["angle", "weights"]).run()
    with mp.workdps(50):
        w, after = (mp.matrix(x.tolist()) for x in (run["weights"][0, 0], run.state.weights[0]))
        cosine = (w.T * after)[0] / (mp.norm(w) * mp.norm(after))
        expected = float(mp.acos(cosine))
    assert expected < 1e-9
    assert run["angle"][0, 0] == pytest.approx(expected, rel=2e-16 / expected)  # a rounding of the unit vectors


def test_recorders_of_ones_own():
    run = small(
        record={"step": lambda moment: np.full(len(moment.weights), moment.step), "size": "norm"}, every=3
    ).run()
    assert run["step"].tolist() == [[0.0], [3.0], [6.0], [9.0]]
    assert run["size"][0, 0] == pytest.approx(3**0.5)
    with pytest.raises(EquilibriaError, match="expected one of what was recorded: step, size"):
        run["norm"]


def test_nothing_recorded_still_moves():
    assert small(record=()).run().state.step == 10
    assert small(record=(), steps=1).run().values == {}


def test_progress_is_told():
    seen = []
    small(steps=2500).run(progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1024, 2500), (2048, 2500), (2500, 2500)]


@pytest.mark.parametrize("compiled", [True, False])
def test_divergence_names_step_and_trial(compiled):
    """The valley is unstable above lr = 2/(1 + y^2); found here by hand, step by step."""
    start, lr = np.array([[0.0, 1.0], [0.1, 1.0], [0.1, 3.0]]), 0.9
    w, step = start.copy(), 0
    with np.errstate(all="ignore"):
        while np.isfinite(w).all():
            x, y = w.T
            w = w - lr * np.stack([(1 + y * y) * x, y * x * x], axis=1)
            step += 1
    bad = int((~np.isfinite(w).all(axis=1)).argmax())
    problem = Valley() if compiled else without_kernel(Valley())
    for record in ((), ("norm", "sharpness")):
        with pytest.raises(DivergenceError, match=f"trial {bad + 20} after step {step - 1}, with lr=0.9") as caught:
            Simulation(problem, start, rule=SGD(lr), steps=5000, record=record, first_trial=20).run()
        assert (caught.value.step, caught.value.trial) == (step - 1, bad + 20)


def test_the_first_divergence_of_all_groups_is_named(monkeypatch):
    """The last trial diverges first."""
    start = np.array([[0.0, 1.0], [0.1, 2.0], [0.1, 3.0]])
    simulation = Simulation(Valley(), start, rule=SGD(0.9), steps=5000, record=())
    with pytest.raises(DivergenceError) as expected:
        simulation.run()
    monkeypatch.setattr("equilibria.lab.problems.simulation._TOGETHER", 1)
    with pytest.raises(DivergenceError) as caught:
        simulation.run()
    assert expected.value.trial == 2
    assert str(caught.value) == str(expected.value)


def test_a_weight_that_reaches_zero_is_reported():
    """lr wd = 1 and no gradient left: the next gradient of a scale-invariant loss does not exist."""
    with pytest.raises(DivergenceError, match="trial 0 after step 1"):
        Simulation(RayleighQuotient([1.0, 2.0]), [1.0, 0.0], rule=SGD(1.0, 1.0), steps=5).run()


BAD = {
    "no steps": ({"steps": 0}, "steps=0"),
    "lr of 0": ({"rule": SGD(0.0)}, "lr=0; expected 0 < lr"),
    "negative lr in a schedule": ({"lr": [0.1, -0.1]}, "-0.1"),
    "weight decay that is not a number": ({"weight_decay": float("nan")}, "weight_decay=nan"),
    "every 0": ({"every": 0}, "every=0"),
    "another rule": ({"rule": "sgd"}, "theory.SGD or problems.ScalarRMSpropRule"),
    "projected momentum": ({"rule": SGD(0.1, momentum=0.9), "projected": True}, "momentum=0.9; expected momentum = 0"),
    "unknown recorder": ({"record": ["nrom"]}, "got record='nrom'; expected one of: norm, angle"),
    "recorder of another kind": ({"record": {"x": 1}}, r"record\['x'\]=1"),
    "rescale by 0": ({"rescale": {3: 0.0}}, "rescale=0"),
    "rescale at half a step": ({"rescale": {0.5: 2.0}}, "whole number"),
    "decay of an adaptive rule": (
        {"rule": ScalarRMSpropRule(0.1, decay=0.9, second_moment=1.0), "weight_decay": 0.1},
        "only for SGD",
    ),
    "moments of another number": (
        {"rule": ScalarRMSpropRule(0.1, decay=0.9, second_moment=[1.0, 2.0])},
        r"shape \(2,\); expected one number or 1",
    ),
    "negative seed": ({"seed": -1}, "seed=-1"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(EquilibriaError, match=message):
        small(**changes)


STARTS = {
    "too short": ([1.0, 2.0], "any number of trials of 3 numbers"),
    "too deep": (np.ones((1, 1, 3)), "any number of trials"),
    "none": (np.ones((0, 3)), "any number of trials"),
    "of norm 0": ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], "norm 0"),
    "not finite": ([1.0, np.inf, 1.0], "start=inf"),
}


@pytest.mark.parametrize(("start", "message"), STARTS.values(), ids=STARTS)
def test_starts_that_do_not_fit_are_refused(start, message):
    with pytest.raises(EquilibriaError, match=message):
        Simulation(Sphere3D(), start, rule=SGD(0.1), steps=1)


def test_a_start_needs_one_row_per_data_set():
    problem = PROBLEMS["regression"]()
    with pytest.raises(EquilibriaError, match="expected 3 trials of 9 numbers"):
        Simulation(problem, problem.initial[:2], rule=SGD(0.1), steps=1)


def test_a_recorder_must_give_a_row_per_trial():
    with pytest.raises(EquilibriaError, match=r"shape \(\) from recorder 'x'; expected 1 trials"):
        small(record={"x": lambda moment: np.float64(1.0)}).run()


def test_a_state_of_another_simulation_is_refused():
    state = small().run().state
    with pytest.raises(EquilibriaError, match="seed 0, first trial 0; expected"):
        small(seed=1, steps=20).run(state=state)
    with pytest.raises(EquilibriaError, match="after 10 steps; expected less than steps=10"):
        small().run(state=state)


def test_a_state_without_random_numbers_does_not_go_on_with_a_problem_that_needs_them():
    state = small().run().state
    noisy = RayleighQuotient([1.0, 2.0, 3.0], noise=1.0)
    with pytest.raises(EquilibriaError, match="that of this simulation"):
        Simulation(noisy, [1.0, 1.0, 1.0], rule=SGD(0.1, 0.01), steps=20).run(state=state)


def test_a_state_with_any_bit_turned_is_read_as_it_was_or_refused(tmp_path):
    file = tmp_path / "state.npz"
    state = small().run().state
    state.save(file)
    content, refused = file.read_bytes(), 0
    for bit in range(0, 8 * len(content), 23):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert np.array_equal(SimulationState.load(file).weights, state.weights)
        except EquilibriaError:
            refused += 1
    assert refused


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"words"])
def test_a_file_that_is_no_state_is_refused(tmp_path, content):
    path = tmp_path / "state.npz"
    with pytest.raises(EquilibriaError, match=r"SimulationState\.save"):
        SimulationState.load(path)
    path.write_bytes(content)
    with pytest.raises(EquilibriaError, match=r"SimulationState\.save"):
        SimulationState.load(path)


def test_the_numbers_need_no_torch():
    code = (
        "import sys, equilibria.lab.problems as p\n"
        "from equilibria.theory import SGD\n"
        "q = p.Regression.generate([0])\n"
        "p.Simulation(q, q.initial, rule=SGD(0.1), steps=2, record=['loss', 'sharpness']).run()\n"
        "assert 'torch' not in sys.modules, 'problems import torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
