"""Which logged metric is which number of which parameter.

Known are the names of this package (``equilibria/norm/<parameter>``), of levanter (``params/norm/...``,
``updates/norm/...``, ``grad/norm/...``), OLMo (``param/<parameter>.norm``, ``update_norm/...``), Composer
(``l2_norm/param/...``) and plain ones (``norm/<parameter>``, ``<parameter>/norm``), each also below a prefix such as
``optim/`` or ``train/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from equilibria.errors import EquilibriaError, one_of
from equilibria.findings import counted
from equilibria.tensors.parameters import plain_name

NUMBERS = ("norm", "norm_after", "update_norm", "angle", "relative_update", "grad_norm", "effective_lr")
"""What a log can say of a parameter at a step: columns of the sample table, and the norm after the step."""

SETTINGS = ("lr", "weight_decay")
_ALIASES = {
    "norm": "norm|norm_before|weight_norm|param_norm|parameter_norm|params/norm|param/norm|weights/norm|l2_norm/param",
    "norm_after": "norm_after|weight_norm_after|param_norm_after",
    "update_norm": "update_norm|updates/norm|update/norm|l2_norm/update|step_norm",
    "angle": "angle",
    "relative_update": "relative_update|update_ratio",
    "grad_norm": "grad_norm|gradient_norm|grad/norm|grads/norm|l2_norm/grad",
    "effective_lr": "effective_lr",
}
_OLMO = {"param": "norm", "update": "update_norm", "grad": "grad_norm"}
_NAMES_OF_SETTINGS = {
    "lr": r"(?:.*[/.])?(?:lr|learning_rate)(?:[-_/].*)?|(?:.*/)?LR.*",
    "weight_decay": r"(?:.*[/.])?(?:wd|weight_decay)(?:[-_/].*)?",
}
_TOGETHER = re.compile(r"total|global|all|mean|median|min|max|avg|sum", flags=re.IGNORECASE)
_VECTOR = re.compile(
    r"(?:^|[._/])(?:bias|b|scale|gamma|beta)$|(?:^|[._/])(?:\w*norm\w*|ln(?:_?\w{1,3})?|bn\d*)[._/](?:weight|w|g)$"
)
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Named:
    """Metrics sorted by what they say.

    Attributes:
        numbers: by parameter, then by number (one of `NUMBERS`), the name of the metric.
        settings: by setting, the names of the metrics that may be it.
        others: the other metrics.
    """

    numbers: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, tuple[str, ...]]
    others: tuple[str, ...]


def sorted_names(metrics: Iterable[str], columns: Mapping[str, str] | None = None) -> Named:
    """Sort metrics by their names.

    Args:
        metrics: their names.
        columns: by number, a pattern of names in which ``{param}`` stands for the parameter; goes before known names.

    Raises:
        EquilibriaError: if no metric is the norm or the angle of a parameter, with the names that there are.

    Example:
        >>> named = sorted_names(["params/norm/h.0.w", "params/norm/total", "updates/norm/h.0.w", "optim/lr"])
        >>> dict(named.numbers), named.settings["lr"]
        ({'h.0.w': {'norm': 'params/norm/h.0.w', 'update_norm': 'updates/norm/h.0.w'}}, ('optim/lr',))
    """
    names = sorted(metrics)
    own = [(number, _own_pattern(number, pattern)) for number, pattern in (columns or {}).items()]
    for number, pattern in own:
        if not any(pattern.fullmatch(name) for name in names):
            raise EquilibriaError(
                f"got columns={{{number!r}: {(columns or {})[number]!r}}}, which matches no metric; there are: "
                f"{_some(names)}",
                argument="columns",
            )
    numbers: dict[str, dict[str, str]] = {}
    rest: list[str] = []
    for name in names:
        found = _number_of(name, own)
        if found is None or _TOGETHER.fullmatch(found[1]):
            rest.append(name)
        else:
            number, param = found
            numbers.setdefault(plain_name(param), {}).setdefault(number, name)
    numbers = {
        param: of_param for param, of_param in numbers.items() if {"norm", "norm_after", "angle"} & set(of_param)
    }
    if not numbers:
        raise EquilibriaError(
            f"got {counted(len(names), 'metric')}, none of which names the norm of a parameter ({_some(names)}); "
            "expected names such as norm/<parameter>, params/norm/<parameter> or param/<parameter>.norm, or their "
            "pattern, columns={'norm': 'weights/{param}/l2'}",
            argument="columns",
        )
    settings = {
        setting: tuple(name for name in rest if re.fullmatch(pattern, name))
        for setting, pattern in _NAMES_OF_SETTINGS.items()
    }
    used = {name for of_setting in settings.values() for name in of_setting}
    used |= {name for of_param in numbers.values() for name in of_param.values()}
    return Named(numbers, settings, tuple(name for name in names if name not in used))


def is_vector(param: str) -> bool:
    """Whether the name of a parameter says that it is a bias or the scale of a normalisation.

    Example:
        >>> [is_vector(name) for name in ("h.0.attn.bias", "h.0.ln_1.weight", "norm1.weight", "lm_head.weight")]
        [True, True, True, False]
    """
    return _VECTOR.search(param.lower()) is not None


def _own_pattern(number: str, pattern: str) -> re.Pattern[str]:
    one_of("columns", number, NUMBERS)
    if not isinstance(pattern, str) or pattern.count("{param}") != 1:
        raise EquilibriaError(
            f"got columns={{{number!r}: {pattern!r}}}; expected a pattern with {{param}}, such as "
            "'weights/{param}/l2'",
            argument="columns",
        )
    return re.compile(re.escape(pattern).replace(re.escape("{param}"), "(?P<param>.+)"))


def _number_of(name: str, own: Iterable[tuple[str, re.Pattern[str]]]) -> tuple[str, str] | None:
    """The number and the parameter that a metric is about; None if its name says neither."""
    for number, pattern in (*own, *_KNOWN):
        match = pattern.fullmatch(name)
        if match:
            kind = match.groupdict().get("kind")
            return _OLMO[kind] if kind else number, match["param"]
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "no metric at all"


_KNOWN = (
    ("", re.compile(r"(?:.*/)?(?P<kind>param|update|grad)/(?P<param>[^/]+)\.norm")),  # OLMo
    *((number, re.compile(rf"(?:[^/]+/)??(?:{words})/(?P<param>.+)")) for number, words in reversed(_ALIASES.items())),
    *((number, re.compile(rf"(?P<param>.+)[/.](?:{words})")) for number, words in _ALIASES.items()),
)
