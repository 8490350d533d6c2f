"""The report of a comparison: one self-contained HTML file, and the same as Markdown, PNG and JSON.

Charts are drawn here; sentences and tables are in ``report.html.jinja``, for HTML and Markdown alike.
"""

import base64
import codecs
import dataclasses
import io
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter

from cplm_jax.errors import MachineError, UserError
from cplm_jax.evaluation import comparison as facts
from cplm_jax.evaluation.comparison import Comparison, Excerpt, Point, Reading, RunFigures
from cplm_jax.training.run_directory import write_atomically

FILES = ("report.html", "report.md", "report.json", "loss.png", "context.png", "calibration.png", "text.png")
FORMAT = "cplm_jax comparison 1"
METRICS = (
    *("loss", "bits_per_byte", "loss_in_context", "loss_novel"),
    *("loss_detection", "loss_novel_detection", "loss_novel_identity", "fraction_in_context"),
    *("accuracy", "accuracy_in_context", "accuracy_novel", "copy_accuracy"),
    *("gate", "gate_in_context", "gate_novel", "responsibility", "responsibility_in_context"),
)
PARTIAL = "\N{MIDDLE DOT}"

_OPEN, _CLOSE = "\N{MATHEMATICAL LEFT ANGLE BRACKET}", "\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
# Characters that draw nothing, or that reorder what follows them.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")

# Okabe and Ito's blue against a grey: told apart by hue, lightness, dashes and markers.
_LOOKS: tuple[dict[str, Any], dict[str, Any]] = (
    {"color": "#5f5f5f", "linestyle": "--", "marker": "s", "markersize": 3.5, "linewidth": 1.6},
    {"color": "#0072b2", "linestyle": "-", "marker": "o", "markersize": 3.5, "linewidth": 1.8},
)
_PART_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#009e73", "linestyle": "-", "marker": "^"},
    {"color": "#d55e00", "linestyle": "--", "marker": "v"},
    {"color": "black", "linestyle": ":", "marker": "."},
)
_TINT = "#e69f00"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.edgecolor": "none",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "cplm_jax",
    "text.parse_math": False,  # names and text may have dollars
}


class _Chart(NamedTuple):
    draw: Callable[[bool], Figure]  # for a wide page, or for a phone
    alt: str


def default_output(run_a: Path, run_b: Path) -> Path:
    """Returns the folder that holds both runs. Raises :class:`UserError` if they lie in different ones."""
    parents = {Path(run).expanduser().resolve().parent for run in (run_a, run_b)}
    if len(parents) > 1:
        raise UserError(f"{run_a} and {run_b} lie in different folders; say where to write with --output DIR")
    return parents.pop()


def check_output(folder: Path) -> None:
    """Checks that a report can be written to a folder, which need not exist yet.

    Raises:
      UserError: if it cannot be made or written, or holds files of these names that no report wrote.
    """
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.exists(p))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output {folder}: {existing} is no folder that can be written to")
    there = [name for name in FILES if (folder / name).exists()]
    try:
        ours = json.loads((folder / "report.json").read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, LookupError, TypeError):
        ours = False
    if there and not ours:
        raise UserError(f"--output {folder}: {', '.join(there)} is not of a report; choose another folder")


def write_report(comparison: Comparison, output: Path) -> Path:
    """Writes report.html, report.md, report.json and the PNG files; those of an earlier report are replaced.

    Returns:
      The path of report.html.

    Raises:
      UserError: see :func:`check_output`.
      MachineError: if a file cannot be written.
    """
    output = Path(output).expanduser()
    check_output(output)
    charts = _charts(comparison)
    # First and with its mark, so that the next report may replace what a kill leaves of this one.
    files = {"report.json": json.dumps(as_json(comparison), indent=1, allow_nan=False).encode("utf-8")}
    files |= {f"{name}.png": _image(chart.draw, True, "png") for name, chart in charts.items()}
    files["report.md"] = render_markdown(comparison).encode("utf-8")
    files["report.html"] = render_html(comparison).encode("utf-8")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(output / name, content)
        for name in set(FILES) - files.keys():
            (output / name).unlink(missing_ok=True)
    except OSError as e:
        raise MachineError(f"--output {output}: cannot be written: {e.strerror or e}") from e
    return output / "report.html"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns every number of the report under stable keys, ``None`` if it is undefined or not finite."""
    tree = dataclasses.asdict(comparison)
    for name, run in (("reference", comparison.reference), ("candidate", comparison.candidate)):
        tree[name] |= {"metrics": {m: run.metrics.get(m) for m in METRICS}, "costs": costs(run)}
    for excerpt, source in zip(tree["excerpts"], comparison.excerpts, strict=True):
        excerpt["texts"] = token_texts(source.pieces)
        del excerpt["pieces"]
    return _plain({"format": FORMAT, "change": changes(comparison), **tree})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def changes(comparison: Comparison) -> dict[str, float | None]:
    """Return, for each of :data:`METRICS`, candidate minus reference."""
    a, b = comparison.reference.metrics, comparison.candidate.metrics
    return {name: b[name] - a[name] if name in a and name in b else None for name in METRICS}


def costs(run: RunFigures) -> dict[str, float | None]:
    """Returns parameters, time and memory of a run; ``None`` for what was not recorded."""
    memory = run.details.get("memory_per_device") or {}
    train, rows = run.config["train"], run.details.get("rows_per_epoch")
    argument, temporary = memory.get("argument_bytes"), memory.get("temporary_bytes")
    return {
        "parameters": run.details.get("parameters"),
        "copy_head_parameters": run.details.get("copy_head_parameters"),
        "step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
        "memory_bytes": None if argument is None or temporary is None else argument + temporary,
        "argument_bytes": argument,
        "temporary_bytes": temporary,
        "compile_seconds": run.details.get("compile_seconds"),
        "epochs": train["steps"] * train["batch_size"] / rows if rows else None,
    }


def token_texts(pieces: Sequence[bytes]) -> list[str]:
    """Returns what each token shows, of a text given as the bytes of its tokens.

    A character that several tokens spell is shown by the last of them, the others show
    :data:`PARTIAL`; bytes that are no UTF-8 become U+FFFD, invisible characters are named, and a
    token without bytes is BOS if it comes first, else EOS.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for i, piece in enumerate(pieces):
        if piece:
            texts.append(_INVISIBLE.sub(_character_name, decoder.decode(piece)) or PARTIAL)
        else:
            decoder.reset()
            texts.append(_OPEN + ("end" if i else "start") + _CLOSE)
    return texts


def _character_name(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else f"{_OPEN}U+{code:04X}{_CLOSE}"


def _signed(number: float | None, form: str = "{:.3f}") -> str:
    """Shows a difference, with a sign unless it rounds to nothing."""
    if number is None:
        return "\N{EN DASH}"
    text = form.format(abs(number))
    return ("" if not re.search("[1-9]", text) else "+" if number > 0 else "\N{MINUS SIGN}") + text


def _shown(number: float | None, form: str = "{:.3f}") -> str:
    return "\N{EN DASH}" if number is None else form.format(number)


def _amount(number: float) -> str:
    """Shows a number of tokens or parameters in three figures: ``1.23 M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{max(0, 2 - int(math.log10(number / size)))}f} {unit}"
    return f"{number:.0f}"


def _readings(c: Comparison, excerpt: Excerpt) -> list[tuple[RunFigures, Reading]]:
    """Pairs the runs that can copy with what they made of an excerpt."""
    pairs = ((c.reference, excerpt.reference), (c.candidate, excerpt.candidate))
    return [(run, reading) for run, reading in pairs if run.copy_head is not None]


def render_html(comparison: Comparison) -> str:
    """Returns report.html, which needs nothing from elsewhere."""

    def embedded(chart: _Chart, wide: bool) -> str:
        data = base64.b64encode(_image(chart.draw, wide, "svg"))
        return "data:image/svg+xml;base64," + data.decode("ascii")

    charts = {
        name: {"alt": chart.alt, "wide": embedded(chart, True), "narrow": embedded(chart, False)}
        for name, chart in _charts(comparison).items()
        if name != "text"  # the page has the text itself
    }
    return _render(comparison, "html", str, charts)


def render_markdown(comparison: Comparison) -> str:
    """Returns report.md, which shows the PNG files that lie beside it."""

    def quote(text: str) -> str:
        return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))

    alts = {name: chart.alt for name, chart in _charts(comparison).items()}
    return re.sub(r"\n{3,}", "\n\n", _render(comparison, "markdown", quote, alts).strip("\n")) + "\n"


def _render(comparison: Comparison, form: str, quote: Callable[[str], str], charts: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cplm_jax.evaluation", "."),
        autoescape=form == "html",
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"signed": _signed, "shown": _shown, "amount": _amount, "quote": quote}
    runs = (comparison.reference, comparison.candidate)
    return environment.get_template("report.html.jinja").render(
        form=form,
        c=comparison,
        runs=runs,
        names=[quote(run.name) for run in runs],
        change=changes(comparison),
        costs=[costs(run) for run in runs],
        excerpts=[(e, token_texts(e.pieces), _readings(comparison, e)) for e in comparison.excerpts],
        charts=charts,
        facts=facts,
    )


def _charts(c: Comparison) -> dict[str, _Chart]:
    def ends(name: str) -> str:
        runs = (c.reference, c.candidate)
        return ", ".join(f"{run.name} {_shown(run.metrics.get(name))}" for run in runs)

    charts = {
        "loss": _Chart(partial(_loss_chart, c), f"Loss against tokens; final validation: {ends('loss')}"),
        "context": _Chart(
            partial(_context_chart, c),
            "Validation loss against tokens, by kind of target. "
            f"Final, in context: {ends('loss_in_context')}; novel: {ends('loss_novel')}",
        ),
    }
    if c.reference.calibration or c.candidate.calibration:
        alt = "Mean gate of each bin against the share of its targets in context, as in the table"
        charts["calibration"] = _Chart(lambda _: _calibration_chart(c), alt)
        charts["text"] = _Chart(lambda _: _text_chart(c), "Held-out text, tinted where it was copied")
    return charts


def _image(draw: Callable[[bool], Figure], wide: bool, kind: str) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), mpl.rc_context(_STYLE):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # no font has every character
        draw(wide).savefig(out, format=kind, dpi=170, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _label(run: RunFigures) -> str:
    return run.name if len(run.name) <= 20 else "\N{HORIZONTAL ELLIPSIS}" + run.name[-19:]


def _series(points: Sequence[Point], name: str) -> tuple[list[int], list[float]]:
    values = [getattr(p, name) for p in points]
    return [p.tokens for p in points], [math.nan if v is None else v for v in values]


def _finish(axes: Axes, title: str, room: float = 0.0) -> None:
    """Labels a panel. Its height leaves out the first tenth, adding ``room``, a share, for the legend."""
    lines = [line.get_xydata() for line in axes.lines]
    points = [(x, y) for line in lines for x, y in np.asarray(line, float) if not math.isnan(y)]
    last = max((x for x, _ in points), default=1.0)
    late = [y for x, y in points if x >= last / 10] or [0.0]
    margin = 0.07 * (max(late) - min(late)) or 0.1
    axes.set(title=title, xlabel="target tokens trained on", xlim=(0, 1.03 * last))
    axes.set_ylim(min(late) - margin - room * (max(late) - min(late)), max(late) + margin)
    axes.xaxis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))
    axes.legend(loc="lower right" if room else "best").set_in_layout(False)


def _loss_chart(c: Comparison, wide: bool) -> Figure:
    figure = Figure(figsize=(7.2, 3.8) if wide else (3.7, 3.5))
    axes = figure.add_subplot()
    for run, look in zip((c.reference, c.candidate), _LOOKS, strict=True):
        axes.plot(*_series(run.train, "loss"), color=look["color"], linewidth=0.7, alpha=0.5)
        axes.plot(*_series(run.validation, "loss"), label=f"validation, {_label(run)}", **look)
    _finish(axes, "Loss, nats per token (thin: training)")
    reach = c.candidate_reach
    if reach.tokens is not None:
        low = axes.get_ylim()[0]
        path = ([c.reference.tokens, reach.tokens, reach.tokens], [reach.loss, reach.loss, low])
        axes.plot(*path, color="black", linewidth=1, linestyle=":")
        text = ("at most " if reach.at_first_validation else "") + f"{reach.share:.2f} of the tokens"
        side = "right" if reach.tokens > c.reference.tokens / 2 else "left"
        axes.text(reach.tokens, low, f" {text} ", ha=side, va="bottom", fontsize=8)
    return figure


def _context_chart(c: Comparison, wide: bool) -> Figure:
    figure = Figure(figsize=(7.2, 2.9) if wide else (3.7, 7.6))
    panels = figure.subplots(1, 3) if wide else figure.subplots(3, 1)
    names = ("loss_in_context", "loss_novel", "loss")
    for axes, name, title in zip(panels, names, ("Loss in context", "Loss on novel targets"), strict=False):
        for run, look in zip((c.reference, c.candidate), _LOOKS, strict=True):
            axes.plot(*_series(run.validation, name), label=_label(run), **look)
        _finish(axes, title)
    reference = {p.step: p for p in c.reference.validation}
    candidate = [p for p in c.candidate.validation if p.step in reference]
    for name, label, look in zip(names, ("in context", "novel", "all"), _PART_LOOKS, strict=True):
        tokens, theirs = _series(candidate, name)
        _, ours = _series([reference[p.step] for p in candidate], name)
        panels[2].plot(tokens, np.subtract(theirs, ours), label=label, markersize=3.5, **look)
    panels[2].plot([0, c.candidate.tokens], [0, 0], color="black", linewidth=0.8)
    _finish(panels[2], f"Difference to {_label(c.reference)}", room=0.45)
    return figure


def _calibration_chart(c: Comparison) -> Figure:
    figure = Figure(figsize=(3.7, 3.5))
    axes = figure.add_subplot(aspect="equal", xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    for run, look in zip((c.reference, c.candidate), _LOOKS, strict=True):
        x, y, tokens = ([b[key] for b in run.calibration] for key in ("gate", "copyable", "tokens"))
        if tokens:
            area = 8 + 220 * np.asarray(tokens) / sum(tokens)
            axes.plot(x, y, color=look["color"], linestyle=look["linestyle"], linewidth=1)
            axes.scatter(x, y, area, color=look["color"], marker=look["marker"], alpha=0.8, label=_label(run))
    axes.set(xlabel="mean gate of the bin", ylabel="share of its targets in context")
    axes.legend(loc="lower right")
    return figure


def _text_chart(c: Comparison) -> Figure:
    width, size, row = 96, 7.5, 0
    cells: list[tuple[int, int, str, float, str]] = []
    for excerpt in c.excerpts:
        for run, reading in _readings(c, excerpt):
            title = f"{excerpt.document}: darker where {_label(run)} copied more"
            cells.append((row, 0, title[-width:], 0.0, "bold"))
            row, column = row + 1, 0
            for text, tint in zip(token_texts(excerpt.pieces), reading.responsibility, strict=True):
                for part in re.findall(r"\n|[^\n]{1,8}", text.replace("\t", "    ")):
                    if part == "\n" or column + len(part) > width:
                        row, column = row + 1, 0
                    if part != "\n":
                        cells.append((row, column, part, tint or 0.0, "normal"))
                        column += len(part)
            row += 2
    figure = Figure(figsize=((width + 2) * 0.602 * size / 72, row * 1.4 * size / 72))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, width + 1), ylim=(row, -0.5))
    axes.axis("off")
    for y, x, text, tint, weight in cells:
        axes.add_patch(Rectangle((x, y), len(text), 1, color=_TINT, alpha=tint, linewidth=0))
        axes.text(x, y + 0.5, text, family="DejaVu Sans Mono", size=size, va="center_baseline", weight=weight)
    return figure
