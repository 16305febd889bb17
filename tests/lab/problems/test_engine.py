"""The engine against torch's optimizers, its own slow way, and itself in other pieces."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import methodcaller

import numpy as np
import pytest
import torch
from tests.helpers.small_worlds import PROBLEMS, TRIALS, point, without_kernel

from equilibria.control._projected_gd import ProjectedGD
from equilibria.control._scalar_rmsprop import ScalarRMSprop as TorchRMSprop
from equilibria.lab.problems import ScalarRMSpropRule, Simulation, SimulationRun, SimulationState, Valley
from equilibria.lab.problems import state as streams
from equilibria.theory import SGD

OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"weight_decay": 0.02, "momentum": 0.9},
    "dampening": {"weight_decay": 0.02, "momentum": 0.8, "dampening": 0.5},
    "nesterov": {"weight_decay": 0.02, "momentum": 0.7, "nesterov": True},
}
STEPS = 40


def draws_of(problem, seed, trial, steps):
    if not problem.draws:
        return [None] * steps
    return torch.tensor(streams.generator(seed, trial).standard_normal((steps, problem.draws)))


def by_torch(problem, start, make, *, steps=STEPS, seed=0, before_step=None):
    """Weights after every step, (steps, trials, size), by torch.optim and autograd in float64."""
    paths = []
    for trial in range(len(start)):
        loss_of = (problem if problem.trials is None else problem.take(trial, trial + 1)).torch_loss
        params = {name: torch.nn.Parameter(torch.tensor(part[trial])) for name, part in problem.split(start).items()}
        optimizer, path = make(list(params.values())), []
        for step, draws in enumerate(draws_of(problem, seed, trial, steps)):
            if before_step is not None:
                before_step(step, optimizer)
            optimizer.zero_grad()
            loss = loss_of(params, draws)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            path.append(np.concatenate([param.detach().numpy().ravel().copy() for param in params.values()]))
        paths.append(path)
    return np.array(paths).transpose(1, 0, 2)


def after_each_step(moment):
    return moment.after.copy()


def path_of(problem, start, rule, **options):
    record = {"after": after_each_step}
    return Simulation(problem, start, rule=rule, steps=STEPS, record=record, **options).run()["after"]


def close(mine, theirs):
    """1e-12 of the largest number, which is 4,500 roundings: 40 steps of some tens of operations each."""
    assert np.abs(mine - theirs).max() <= 1e-12 * np.abs(theirs).max()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_lock_step_with_torch(name, options):
    problem = PROBLEMS[name]()
    start, _, _ = point(problem, seed=2, scale=2.0)
    theirs = by_torch(problem, start, lambda params: torch.optim.SGD(params, lr=0.05, **options), seed=5)
    close(path_of(problem, start, SGD(0.05, **options), seed=5), theirs)
    close(path_of(without_kernel(problem), start, SGD(0.05, **options), seed=5), theirs)


def test_schedules_and_rescaling_as_in_torch():
    problem = PROBLEMS["noisy-rayleigh"]()
    start, _, _ = point(problem, seed=3)
    lrs, decays, rescale = 0.1 * 0.97 ** np.arange(STEPS), np.linspace(0.3, 0.0, STEPS), {0: 1.5, 7: 0.5, 8: 3.0}

    def before_step(step, optimizer):
        optimizer.param_groups[0].update(lr=lrs[step], weight_decay=decays[step])
        factor = rescale.get(step, 1.0)
        for param in optimizer.param_groups[0]["params"]:
            param.data.mul_(factor)
            if "momentum_buffer" in optimizer.state[param]:
                optimizer.state[param]["momentum_buffer"].div_(factor)

    def make(params):
        return torch.optim.SGD(params, lr=1.0, momentum=0.9)

    theirs = by_torch(problem, start, make, before_step=before_step)
    rule = SGD(1.0, momentum=0.9)
    for every in (1, 3):  # the events fall on records and between them
        simulation = Simulation(
            problem,
            start,
            rule=rule,
            steps=STEPS,
            lr=lrs,
            weight_decay=decays,
            rescale=rescale,
            record={"after": after_each_step},
            every=every,
        )
        close(simulation.run()["after"], theirs[::every])


@pytest.mark.parametrize("compiled", [True, False])
def test_scalar_rmsprop_is_that_of_torch(compiled):
    problem = Valley() if compiled else without_kernel(Valley())
    start, moments = np.array([[1e-2, 2.0], [2e-2, 1.0], [0.3, -1.0]]), np.array([1e-3, 2e-3, 0.5])
    rule = ScalarRMSpropRule(0.02, decay=0.99, second_moment=moments)
    mine = path_of(problem, start, rule)
    for trial, moment in enumerate(moments):

        def make(params, moment=moment):
            return TorchRMSprop(params, lr=0.02, decay=0.99, second_moment=float(moment))

        close(mine[:, [trial]], by_torch(problem, start[[trial]], make))


@pytest.mark.parametrize("compiled", [True, False])
def test_projected_descent_is_that_of_torch(compiled):
    """Feeding the effective rates of torch's projected descent as a schedule follows the same path."""
    problem = PROBLEMS["sphere3d-rotated"]()
    start = problem.at([0.3, 1.3, 1.2])
    used = []

    class Watched(ProjectedGD):
        def step(self):
            super().step()
            used.append(next(iter(self.state.values()))["effective_lr"])

    theirs = by_torch(problem, start, lambda params: Watched(params, lr=0.2, weight_decay=0.05))
    unit = start / np.linalg.norm(start)
    if not compiled:
        problem = without_kernel(problem)
    mine = path_of(problem, unit, SGD(1.0), lr=np.array(used), projected=True)
    close(mine * np.linalg.norm(start), theirs)
    np.testing.assert_allclose(np.linalg.norm(mine, axis=2), 1.0, rtol=1e-14)


@pytest.mark.parametrize("name", PROBLEMS)
def test_parts_give_the_same_numbers(name):
    problem = PROBLEMS[name]()
    start, _, _ = point(problem)
    record = ["norm", "angle", "weights"]
    whole = Simulation(
        problem, start, rule=SGD(0.05, 0.1, momentum=0.5), steps=60, record=record, every=7, seed=3, rescale={11: 2.0}
    )
    expected = whole.run()
    for workers in (1, 2, TRIALS, 10):
        parts = [pickle.loads(pickle.dumps(part)) for part in whole.parts(workers)]
        assert len(parts) == min(workers, TRIALS)
        same(SimulationRun.side_by_side([part.run() for part in parts]), expected)


def same(first, second):
    assert np.array_equal(first.steps, second.steps)
    assert first.values.keys() == second.values.keys()
    for name in second.values:
        assert np.array_equal(first[name], second[name]), name
    assert first.state.step == second.state.step
    for name in ("weights", "buffers", "moments", "streams"):
        assert np.array_equal(getattr(first.state, name), getattr(second.state, name)), name


@pytest.mark.slow
def test_other_processes_give_the_same_numbers():
    problem = PROBLEMS["noisy-rayleigh"]()
    whole = Simulation(problem, problem.start(5, norm_sq=2.0), rule=SGD(0.1, 0.1), steps=300, record=["norm", "risk"])
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        same(SimulationRun.side_by_side(pool.map(methodcaller("run"), whole.parts(2))), whole.run())


def test_parts_of_scalar_rmsprop_keep_their_moments():
    rule = ScalarRMSpropRule(0.02, decay=0.99, second_moment=np.array([1e-3, 2e-3, 0.5]))
    whole = Simulation(Valley(), np.array([[1e-2, 2.0], [2e-2, 1.0], [0.3, -1.0]]), rule=rule, steps=20)
    same(SimulationRun.side_by_side([part.run() for part in whole.parts(2)]), whole.run())


@pytest.mark.parametrize("name", ["noisy-rayleigh", "completion"])
def test_a_resumed_run_gives_the_same_numbers(name, tmp_path):
    problem = PROBLEMS[name]()
    start, _, _ = point(problem)
    settings = {"rule": SGD(0.05, 0.1, momentum=0.9), "record": ["norm", "angle"], "every": 5, "rescale": {33: 1.1}}
    whole = Simulation(problem, start, steps=3000, **settings).run()
    for stop in (1, 33, 34, 1777):
        first = Simulation(problem, start, steps=stop, **settings).run()
        first.state.save(tmp_path / "state.npz")
        rest = Simulation(problem, start, steps=3000, **settings).run(
            state=SimulationState.load(tmp_path / "state.npz")
        )
        same(SimulationRun.in_time([first, rest]), whole)


def test_stretches_are_the_run():
    problem = PROBLEMS["noisy-rayleigh"]()
    simulation = Simulation(problem, problem.start(4, norm_sq=1.0), rule=SGD(0.1, 0.1), steps=1000, every=9)
    stretches = list(simulation.stream(chunk=123))
    assert [stretch.state.step for stretch in stretches] == [*range(123, 1000, 123), 1000]
    same(SimulationRun.in_time(stretches), simulation.run())
    halfway = simulation.run(state=stretches[3].state)
    same(SimulationRun.in_time([*stretches[:4], halfway]), simulation.run())


def test_stretches_without_a_record_are_put_together_too():
    problem = PROBLEMS["regression"]()
    simulation = Simulation(problem, problem.initial, rule=SGD(0.1, 0.1), steps=30, every=20, record=["weights"])
    same(SimulationRun.in_time(simulation.stream(chunk=7)), simulation.run())


def test_the_block_length_changes_nothing(monkeypatch):
    problem = PROBLEMS["noisy-rayleigh"]()
    simulation = Simulation(problem, problem.start(4, norm_sq=1.0), rule=SGD(0.1, 0.1), steps=500, every=9)
    expected = simulation.run()
    monkeypatch.setattr("equilibria.lab.problems.simulation._NUMBERS", 100)
    same(simulation.run(), expected)


@pytest.mark.parametrize("name", ["noisy-rayleigh", "regression"])
def test_groups_of_trials_give_the_same_numbers(name, monkeypatch):
    problem = PROBLEMS[name]()
    start, _, _ = point(problem)
    rule = SGD(0.05, 0.1, momentum=0.5)
    simulation = Simulation(problem, start, rule=rule, steps=1500, record=(), seed=3, rescale={11: 2.0, 1200: 0.5})
    expected, seen = simulation.run(), []
    monkeypatch.setattr("equilibria.lab.problems.simulation._TOGETHER", 2)
    stretches = list(simulation.stream(chunk=1100, progress=lambda done, total: seen.append(done)))
    same(SimulationRun.in_time(stretches), expected)
    assert seen == sorted(seen) and seen[-1] == 1500


@pytest.mark.parametrize("record", [(), ("norm",)])
def test_many_trials_cost_no_more_calls_each_than_few(record, monkeypatch):
    """Drawing is a call per trial and block; blocks of two steps would make it what a run costs."""
    problem, calls = PROBLEMS["noisy-rayleigh"](), []
    trials, steps, real = 20_000, 32, streams.fill
    monkeypatch.setattr(streams, "fill", lambda drawn, draws: (calls.append(len(drawn)), real(drawn, draws)))
    start = np.ones((trials, problem.size))
    monkeypatch.setattr(streams, "generators", lambda seed, first, count: [np.random.default_rng(0)] * count)
    Simulation(problem, start, rule=SGD(0.1, 0.1), steps=steps, record=record, every=steps).run()
    assert sum(calls) <= 2 * trials


def test_other_seeds_and_trials_are_other_numbers():
    problem = PROBLEMS["random-walk"]()
    start = np.ones((4, 5))
    runs = [Simulation(problem, start, rule=SGD(0.1, 0.1), steps=3, seed=seed).run().state.weights for seed in (0, 1)]
    rows = np.concatenate(runs)
    assert len(np.unique(rows[:, 0])) == 8
