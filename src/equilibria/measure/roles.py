"""What a parameter is, by the module that holds it."""

from __future__ import annotations

import re

from torch import Tensor, nn

from equilibria.measure.parameters import names_of


def roles_of(model: nn.Module) -> dict[str, str]:
    """A word or two for every parameter, by name: "Conv weight", "BatchNorm scale", "Linear bias".

    Example:
        >>> roles_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
        {'0.weight': 'Conv weight', '0.bias': 'Conv bias', '1.weight': 'BatchNorm scale', '1.bias': 'BatchNorm shift'}
    """
    names = names_of(model)
    roles: dict[str, str] = {}
    for module in model.modules():
        kind = re.sub(r"\d+d$", "", type(module).__name__)
        held = dict(module.named_parameters(recurse=False))
        if nn.utils.parametrize.is_parametrized(module):
            kind = re.sub(r"^Parametrized", "", kind)
            held |= dict(module.parametrizations.named_parameters())  # type: ignore[union-attr]
        for own, param in held.items():
            roles.setdefault(names[id(param)][0], f"{kind} {_part(own, param, is_norm='norm' in kind.lower())}")
    return {name: roles[name] for name, *_ in names.values()}


def _part(own: str, param: Tensor, *, is_norm: bool) -> str:
    if own.endswith(".original0"):
        return "magnitude"  # of weight_norm
    if own.endswith(".original1"):
        return "direction"
    shift = "bias" in own
    if is_norm:
        return "shift" if shift else "scale"
    return "bias" if shift else "weight" if param.ndim >= 2 or own == "weight" else own
