"""Define a calibration method: a function from one tensor's statistics to the range of values to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgeq.calibration.statistics import TensorStatistics
from edgeq.errors import UsageError
from edgeq.model.quant_params import Grid


@dataclass(frozen=True)
class Option:
    """Describe a parameter of a method. The parameter's value is a finite number above `above` and at most `most`."""

    name: str
    default: float
    help: str
    above: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True)
class RangeMethod:
    """Describe one calibration method.

    Attributes:
        name: name for `Scheme.method` and the command line.
        title: short description of the range that the method chooses.
        range: function (statistics of a tensor with at least one element, grid, options) → (low, high), in the tensor's
            own units. The caller limits the result to the extrema, widens it to include zero, and makes it symmetric
            for a symmetric grid.
        options: parameters of the method.
        search: combinations of option values that tuning tries.
        compared: whether reports show the method's range next to the range in use.
    """

    name: str
    title: str
    range: Callable[[TensorStatistics, Grid, Mapping[str, float]], tuple[float, float]]
    options: tuple[Option, ...] = ()
    search: tuple[Mapping[str, float], ...] = ({},)
    compared: bool = True

    def settings(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the value of every option: the given value, or the default.

        Raises:
            UsageError: an option is unknown, or its value is out of bounds.
        """
        options = {option.name: option for option in self.options}
        for name, value in values.items():
            if name not in options:
                takes = f"It has: {', '.join(options)}" if options else "It has none"
                raise UsageError(f"calibration method {self.name} has no option {name!r}", takes)
            option = options[name]
            number = isinstance(value, int | float) and math.isfinite(value)
            if not number or not option.above < value <= option.most:
                raise UsageError(f"calibration option {name} is {value!r}", f"It is {_bounds(option)}")
        return {name: values.get(name, option.default) for name, option in options.items()}


def _bounds(option: Option) -> str:
    limits = [f"above {option.above:g}"] if math.isfinite(option.above) else []
    limits += [f"at most {option.most:g}"] if math.isfinite(option.most) else []
    return " ".join(["a finite number", " and ".join(limits)]).rstrip() + f", such as {option.default:g}"
