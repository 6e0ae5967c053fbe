"""Numbers as the lab writes them: three significant digits, the unit named, columns that align.

`sig` is the one rule; everything else picks a unit and calls it. A no-break space stands between a number and
its unit, a real minus before negatives, and `–` where nothing was measured (`0` is a measured zero).
"""

from __future__ import annotations

import math

NBSP = "\u00a0"
NONE = "\u2013"
_TIMES = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_WORK = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1.0))


def sig(value: float | None, digits: int = 3) -> str:
    """`145`, `22.3`, `6.00`, `0.41`, `0.04`, `0.004`, `1,230`: significant digits, trailing zeros kept; None gives `–`.

    Below 1 two decimals and below 0.01 one digit, so that a column does not grow with what does not matter.
    """
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.0005:
        return "<0.001" if value > 0 else "\u22120.000"
    exponent = math.floor(math.log10(float(f"{size:.{digits - 1}e}")))  # 99.96 is 100, not 100.0
    if size < 0.01:
        digits = 1
    elif exponent < 0:
        digits = min(digits, 3 + exponent)  # two decimals
    decimals = max(0, digits - 1 - exponent)
    text = f"{size:,.{decimals}f}"
    return f"\u2212{text}" if value < 0 else text


def count(value: int) -> str:
    """`743`, `8,916`: whole, with a thousands comma."""
    return f"{value:,d}"


def plural(n: int, word: str, many: str | None = None) -> str:
    """`1 launch`, `743 ops`: a count with its word, in the right number."""
    return f"{count(n)} {word if n == 1 else many or word + 's'}"


def percent(fraction: float | None, digits: int = 3) -> str:
    """0.563 -> `56.3%`, without a space; `0%` for zero."""
    return NONE if fraction is None else sig(100 * fraction, digits) + "%"


def cell(fraction: float | None) -> str:
    """A share in a `%` column: `35.0`, `8.1`, one decimal throughout, so that the column adds up to the eye."""
    return NONE if fraction is None else f"{100 * fraction:.1f}"


def unit(value: float, units) -> tuple[str, float]:
    """The largest unit in which `value` is at least 1 (after rounding to three digits)."""
    for name, factor in units:
        if abs(value) >= 0.9995 * factor:
            return name, factor
    return units[-1]


def time_unit(ns: float) -> tuple[str, float]:
    """("ms", 1e6): the unit for a column whose largest entry is `ns` nanoseconds."""
    return unit(ns, _TIMES)


def size_unit(nbytes: float) -> tuple[str, float]:
    return unit(nbytes, _SIZES)


def work_unit(flops: float) -> tuple[str, float]:
    return unit(flops, _WORK)


def pair(value: float | None, units) -> tuple[str, str]:
    """(number, unit), for a key figure that prints them in two sizes."""
    if value is None:
        return NONE, ""
    name, factor = unit(value, units) if value else units[-1]
    if units is _TIMES and not value:
        name = "ms"
    return sig(value / factor), name


def time_pair(ns: float | None) -> tuple[str, str]:
    return pair(ns, _TIMES)


def work_pair(flops: float | None) -> tuple[str, str]:
    return pair(flops, _WORK)


def _join(number: str, name: str) -> str:
    return f"{number}{NBSP}{name}" if name else number


def time(ns: float | None) -> str:
    """`145 ms`; the argument is in nanoseconds."""
    return _join(*time_pair(ns))


def size(nbytes: float | None) -> str:
    """`268 MiB`."""
    return _join(*pair(nbytes, _SIZES))


def work(flops: float | None) -> str:
    """`14.9 GFLOP`."""
    return _join(*work_pair(flops))


def rate(flops_per_second: float | None) -> str:
    """`182 GFLOP/s`."""
    return NONE if flops_per_second is None else work(flops_per_second) + "/s"


def mean_error(values) -> tuple[float, float | None]:
    """(mean, standard error of the mean); None for the error when there are fewer than two values.

    The `±` of the lab is this standard error: the mean of n runs lies within about twice it, 95 times of 100.
    """
    values = list(values)
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def error_like(error: float, mean: float, factor: float) -> str:
    """The `±` figure in the unit of its mean, with one significant digit more than the mean shows at most."""
    if error <= 0:
        return "0"
    step = 10 ** (math.floor(math.log10(abs(mean) / factor)) - 2) if mean else 1  # the mean's last shown place
    shown = max(error / factor, 0)
    decimals = max(0, -math.floor(math.log10(step)))
    text = f"{shown:,.{decimals}f}"
    return text if float(text.replace(",", "")) else sig(shown, 1)
