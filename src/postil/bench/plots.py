"""Results of benchmarks as pictures."""

from __future__ import annotations

from pathlib import Path

from postil.bench.margins import Result, Row


def plot(result: Result, path: Path) -> None:
    """Write a PNG: who takes how long, and how that grows with the document.

    Raises:
        ImportError: matplotlib is not installed (`pip install "postil[bench]"`).
    """
    import matplotlib as mpl

    mpl.use("agg")  # no screen is needed
    from matplotlib import pyplot

    first = result.rows[0]
    cases = {(r.document_tokens, r.segment_tokens, r.margin_tokens) for r in result.rows}
    figure, axes = pyplot.subplots(1, 2 if len(cases) > 1 else 1, figsize=(11, 4.5), squeeze=False)
    same = [row for row in result.rows if _case(row) == _case(first)]
    _bars(axes[0][0], same)
    if len(cases) > 1:
        _growth(axes[0][1], [row for row in result.rows if row.who == first.who])
    figure.suptitle(
        f"{result.model}, {result.quantize or result.dtype}; {result.machine}, "
        f"{result.threads} threads; {result.date}, medians of {result.runs}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _case(row: Row) -> tuple[int, int, int]:
    return row.document_tokens, row.segment_tokens, row.margin_tokens


def _bars(axes, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    """Plain and with margins, for everyone who read the first workload."""
    places = range(len(rows))
    axes.barh([p - 0.2 for p in places], [r.plain_s for r in rows], 0.4, label="plain")
    axes.barh([p + 0.2 for p in places], [r.margins_s for r in rows], 0.4, label="with margins")
    for place, row in zip(places, rows, strict=True):
        axes.text(row.margins_s, place + 0.2, f" {row.ratio:.2f}x", va="center", fontsize=9)
    axes.set_yticks(list(places), [row.who.replace(", ", "\n") for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds")
    document, segment, margin = _case(rows[0])
    axes.set_title(f"{document:,} tokens, segments of {segment}, margins of {margin}", fontsize=10)
    axes.legend()


def _growth(axes, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    """The ratio of a read with margins to a plain one, over the length of the document."""
    series: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        series.setdefault((row.segment_tokens, row.margin_tokens), []).append(row)
    for (segment, margin), points in series.items():
        points.sort(key=lambda row: row.document_tokens)
        axes.plot(
            [row.document_tokens for row in points],
            [row.ratio for row in points],
            "o-",
            label=f"segments of {segment}, margins of {margin}",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({row.document_tokens for row in rows})
    axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    axes.set_xlabel("tokens of the document")
    axes.set_ylabel("with margins / plain")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
