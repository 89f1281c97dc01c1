"""report.html: one file that opens offline, from any number of runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from batchformer.errors import UserError
from batchformer.report.comparison import comparison_table, format_interval, format_summary, signed
from batchformer.report.measures import measure_of
from batchformer.report.runs import Run, by_recipe, load_runs
from batchformer.report.sections import recipe_section
from batchformer.report.studies import Study, find_studies, with_references
from batchformer.report.study_card import study_card

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
<p class="lede">$lede</p>
$navigation</header>
$overview$sections
<footer>Made by <code>batchformer report</code> from result files; nothing on this page was typed in by hand.</footer>
</main>
</body>
</html>
""")


def write_report(paths: Iterable[Path | str], out: Path | str, title: str | None = None) -> Path:
    """Write the page about all runs found under `paths` to `out` (a file, or a folder that gets `report.html`)."""
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    page = render(load_runs(paths), title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(out, page)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    return out


def render(runs: Sequence[Run], title: str | None = None) -> str:
    """The page as text."""
    recipes = with_references(by_recipe(runs))
    several = len(recipes) > 1
    title = title or ("BatchFormer, with and without" if several else f"BatchFormer on {next(iter(recipes))}")
    names = {recipe: f"recipe-{number}" for number, recipe in enumerate(recipes, 1)}
    studies = {f"study-{k}": study for k, study in enumerate(_studies(runs), 1)}
    told = {variant.recipe for study in studies.values() for variant in study.variants}
    alone = {recipe: group for recipe, group in recipes.items() if recipe not in told}
    return _PAGE.substitute(
        title=escape(title),
        style=files("batchformer.report").joinpath("page.css").read_text(encoding="utf-8"),
        lede=_lede(runs, len(recipes)),
        navigation=_navigation({recipe: names[recipe] for recipe in alone}, studies) if several else "",
        overview=(_overview(alone, names) if several and alone else "")
        + "".join(study_card(name, study, names) for name, study in studies.items()),
        sections="".join(recipe_section(names[recipe], group, several) for recipe, group in recipes.items()),
    )


def _lede(runs: Sequence[Run], recipes: int) -> str:
    recipe_words = "one recipe" if recipes == 1 else f"{recipes} recipes"
    run_words = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    how = {("baseline", "batchformer"): "with and without", ("batchformer",): "with", ("baseline",): "without"}
    methods = tuple(sorted({run.method for run in runs}))
    told = f"{run_words} of {recipe_words}, trained {how[methods]} attention over the batch."
    if methods == ("baseline",):
        return told
    return f"{told} The module is gone at test time: what is evaluated is the plain network."


def _studies(runs: Sequence[Run]) -> list[Study]:
    """Those with more to compare than one recipe with and without the method, which its own section does."""
    return [study for study in find_studies(by_recipe(runs)) if study.reference is not None and len(study.variants) > 2]


def _navigation(names: Mapping[str, str], studies: Mapping[str, Study]) -> str:
    places = {**{f"Study: {study.base}": name for name, study in studies.items()}, **names}
    items = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for words, name in places.items())
    return f'<nav aria-label="Recipes"><ul>{items}</ul></nav>\n'


def _overview(recipes: Mapping[str, Sequence[Run]], names: Mapping[str, str]) -> str:
    lines = []
    measures = [measure_of(run.metrics for run in runs) for runs in recipes.values()]
    judged = "Test accuracy over all classes (top-1)"
    if any(measure.objects for measure in measures):
        judged = ", ".join(dict.fromkeys(measure.name.capitalize() for measure in measures))
    for recipe, runs in recipes.items():
        row = comparison_table([run.raw for run in runs])[0]
        difference = "–"
        if row.difference is not None:
            difference = f'{signed(row.difference.mean)}<span class="interval">{format_interval(row.difference)}</span>'
        cells = [format_summary(row.baseline), format_summary(row.batchformer)]
        sides = "".join("<td>{} <span class='sd'>{}</span></td>".format(*cell.partition(" ")[::2]) for cell in cells)
        lines.append(
            f'<tr><th scope="row"><a href="#{names[recipe]}">{escape(recipe)}</a></th>{sides}'
            f'<td class="strong">{difference}</td></tr>'
        )
    return (
        f'<div class="card overview"><table><caption>{judged}, percent'
        '</caption><thead><tr><th scope="col">Recipe</th><th scope="col">baseline</th><th scope="col">BatchFormer</th>'
        f'<th scope="col">difference</th></tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _write_whole(out: Path, text: str) -> None:
    """A reader, or a full disk, never sees half a page."""
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
