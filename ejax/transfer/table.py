"""The result of ``transfer_run`` as a table with sentences below it."""

from collections.abc import Mapping
from typing import Any

_HEAD = ["engine", "condition", "success", "from", "to", "return", "from", "to"]


def as_markdown(result: Mapping[str, Any]) -> str:
    """Make the table, its columns aligned."""
    rows = [
        [row["engine"], row["condition"], *_cells(row.get("success"), 3), *_cells(row["return"], 2)]
        for row in result["rows"]
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in (_HEAD, ["-" * width for width in widths], *rows)
    ]
    what = f"{result['episodes']} episodes a row, intervals of 95 %"
    lines += ["", f"{what}; seed {result['seed']}, {result['checkpoint']}"]
    lines += [f"{name} is left out: not installed ({how})" for name, how in result["left_out"].items()]
    for row in result["rows"]:
        if row["nonfinite"]:
            lines.append(f"{row['engine']}, {row['condition']}: {row['nonfinite']} episodes with numbers not finite")
    return "\n".join([*lines, *(_sentence(each, result["tolerance"]) for each in result["differences"])])


def _sentence(found: Mapping[str, Any], tolerance: float) -> str:
    verdict = f"{found['of']} {'differs' if found['beyond'] else 'does not differ'} from {found['reference']}'s"
    text = f"{found['engine']}, {found['condition']}: {verdict} beyond the intervals. "
    if "first" not in found:
        return f"{text}--explain compares them step by step."
    if (first := found["first"]) is None:
        return f"{text}From equal states no number differs by {tolerance:g} of its range."
    numbers = f"{first['reference']:.5g} and {first['other']:.5g}, {first['size']:.2g} of its range"
    text += f"From equal states, {first['term']} is the first to differ by {tolerance:g}: {numbers}, in step "
    more = f"; beside it {', '.join(first['beside'][:4])}" if first["beside"] else ""
    ours, theirs = (", ".join(pairs) or "nothing" for pairs in first.get("touching", ([], [])))
    more += f"; in contact after it {ours}" + ("" if ours == theirs else f", by {found['engine']} {theirs}")
    return f"{text}{first['step']} of episode {first['episode']}{more}."


def _cells(estimate: Mapping[str, float] | None, digits: int) -> list[str]:
    return ["–"] * 3 if estimate is None else [f"{x:.{digits}f}" for x in estimate.values()]
