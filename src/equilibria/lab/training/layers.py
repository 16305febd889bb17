"""What watching found, as arrays of steps by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Samples of several layers at the same steps.

    Attributes:
        step: of each row; the sample is of the step that begins then.
        names: of the layers.
        columns: name of a column of the sample table -> values, steps by layers.
    """

    step: NDArray[np.int64]
    names: tuple[str, ...]
    columns: dict[str, NDArray[np.float64]]


def by_layer(samples: pa.Table, columns: Sequence[str] = ("angle", "angle_equilibrium", "norm")) -> Layers:
    """The samples of a watched run by step and layer.

    Args:
        samples: of `equilibria.watch` or `equilibria.read_run`.
        columns: which.

    Raises:
        EquilibriaError: layers that were not all sampled at the same steps.

    Example:
        >>> table = pa.table({"step": [0, 0, 5, 5], "param": ["a", "b", "a", "b"], "angle": [0.1, 0.2, 0.3, 0.4]})
        >>> found = by_layer(table, ["angle"])
        >>> found.step.tolist(), found.names, found.columns["angle"].tolist()
        ([0, 5], ('a', 'b'), [[0.1, 0.2], [0.3, 0.4]])
    """
    params = [str(name) for name in samples["param"].to_pylist()]
    names = tuple(dict.fromkeys(params))
    places = {name: place for place, name in enumerate(names)}
    step, row = np.unique(samples["step"].to_numpy(), return_inverse=True)
    if samples.num_rows != len(step) * len(names):
        raise EquilibriaError(
            f"got {samples.num_rows} samples of {len(names)} layers at {len(step)} steps; expected one for each"
        )
    column = np.array([places[name] for name in params], dtype=np.int64)
    found = {name: np.empty((len(step), len(names))) for name in columns}
    for name, values in found.items():
        values[row, column] = samples[name].to_numpy(zero_copy_only=False)
    return Layers(step, names, found)
