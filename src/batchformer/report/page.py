"""report.html: one file that opens offline, from any number of runs."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from batchformer.files import write_text
from batchformer.report.comparison import DEFAULT_PAIR, Comparison, compare_runs, measure_word, shown_name, with_unit
from batchformer.report.first_screen import html_cell, verdict_line
from batchformer.report.runs import Run, by_recipe, load_runs
from batchformer.report.sections import brief_section, recipe_section

MOST_WHOLE = 4  # recipes; on a page of more each is brief and collapsed, with an index above them
MADE_BY = "Made by <code>batchformer report</code>"
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
<footer>$footer</footer>
</main>
</body>
</html>
""")


def write_report(paths: Iterable[Path | str], out: Path | str, title: str | None = None) -> Path:
    """Write the page about all runs found under `paths` to `out` (a file, or a folder that gets `report.html`)."""
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    write_text(out, render(load_runs(paths), title))
    return out


def render(runs: Sequence[Run], title: str | None = None) -> str:
    """The page as text."""
    recipes = by_recipe(runs)
    several, many = len(recipes) > 1, len(recipes) > MOST_WHOLE
    names = {recipe: f"recipe-{number}" for number, recipe in enumerate(recipes, 1)}
    only_the_pair = {run.variant for run in runs} <= set(DEFAULT_PAIR)
    if several and any(len(compare_runs([run.raw for run in group]).shown) > 1 for group in recipes.values()):
        usual = "BatchFormer, with and without" if only_the_pair else f"{len(recipes)} recipes compared"
    elif several:
        usual = f"{len(recipes)} recipes"
    else:
        usual = f"{'BatchFormer on ' * only_the_pair}{next(iter(recipes))}"
    links = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for words, name in names.items())
    return whole_page(
        title or usual,
        _lede(runs, recipes, only_the_pair),
        "".join(
            brief_section(names[recipe], group) if many else recipe_section(names[recipe], group, several)
            for recipe, group in recipes.items()
        ),
        navigation=f'<nav aria-label="Recipes"><ul>{links}</ul></nav>\n' if several and not many else "",
        overview=_index(recipes, names) if many else _overview(recipes, names) if several else "",
        footer=f"{MADE_BY} from result files; no number was entered by hand.",
    )


def whole_page(title: str, lede: str, sections: str, navigation: str = "", overview: str = "", footer: str = "") -> str:
    """A page with its style; `sections`, `navigation`, `overview` and `footer` are HTML."""
    return _PAGE.substitute(
        title=escape(title),
        style=files("batchformer.report").joinpath("page.css").read_text(encoding="utf-8"),
        lede=escape(lede),
        navigation=navigation,
        overview=overview,
        sections=sections,
        footer=footer,
    )


def _index(recipes: Mapping[str, Sequence[Run]], names: Mapping[str, str]) -> str:
    """A line for each recipe: its name and its verdict."""
    lines = []
    for recipe, runs in recipes.items():
        kind, line = verdict_line(compare_runs([run.raw for run in runs]))
        link = f'<a href="#{names[recipe]}">{escape(recipe)}</a>'
        lines.append(f'<li>{link} <span class="line {kind}">{escape(line)}</span></li>')
    told = "Open a recipe for its table, picture and curves. For more, run batchformer report on its results alone."
    return f'<div class="card index"><ul>{"".join(lines)}</ul></div><p class="explain">{told}</p>'


def _lede(runs: Sequence[Run], recipes: Mapping[str, Sequence[Run]], only_the_pair: bool) -> str:
    recipe_words = "one recipe" if len(recipes) == 1 else f"{len(recipes)} recipes"
    run_words = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    tables = [compare_runs([run.raw for run in group]) for group in recipes.values()]
    trained = {run.variant for run in runs}
    variants = list(dict.fromkeys(v for table in tables for v in table.variants if v in trained))
    if len(variants) > 8:  # the index has them
        return f"{run_words} of {recipe_words}."
    if not only_the_pair:
        targets = list(dict.fromkeys(run.target for run in runs if run.target is not None))
        told = f"{run_words} of {recipe_words}. Variants: {', '.join(map(shown_name, variants))}."
        return f"{told} Targets: {', '.join(targets)}." if targets else told
    how = {("baseline", "batchformer"): "with and without", ("batchformer",): "with", ("baseline",): "without"}
    told = f"{run_words} of {recipe_words}, trained {how[tuple(sorted(variants))]} attention over the batch."
    if variants == ["baseline"]:
        return told
    return f"{told} All numbers are those of the plain network: the module is not used at test time."


def _overview(recipes: Mapping[str, Sequence[Run]], names: Mapping[str, str]) -> str:
    """The primary measure of every recipe and variant, beside that of its reference."""
    tables = {recipe: compare_runs([run.raw for run in runs]) for recipe, runs in recipes.items()}
    alone = all(len(table.shown) == 1 for table in tables.values())  # nothing is compared
    pairs = all(table.is_default_pair for table in tables.values())
    judged = dict.fromkeys(with_unit(table.primary.words, table.primary.unit) for table in tables.values())
    caption = "; ".join(judged)
    compared = [*(["baseline", "BatchFormer"] if pairs else ["reference", "variant"]), "difference"]
    heads = ["Recipe", *(["result"] if alone else compared)]
    lines = []
    for recipe, table in tables.items():
        for variant in table.shown if alone else table.others or (table.reference,):
            link = f'<a href="#{names[recipe]}">{escape(recipe)}</a>'
            if len(judged) > 1:
                measure = with_unit(measure_word(table.primary), table.primary.unit)
                link += f'<span class="interval">{escape(measure)}</span>'
            lines.append(f'<tr><th scope="row">{link}</th>{_overview_cells(table, variant, alone, not pairs)}</tr>')
    header = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f'<div class="card overview"><table><caption>{escape(caption[:1].upper() + caption[1:])}</caption><thead><tr>'
        f"{header}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _overview_cells(table: Comparison, variant: str, alone: bool, name_variants: bool) -> str:
    measure, digits = table.primary, table.digits(table.primary)
    cells = []
    for each in (variant,) if alone else (table.reference, variant):
        cell = html_cell(table.cell(measure, each), digits)
        small = f'<span class="interval">{escape(shown_name(each))}</span>' if name_variants or alone else ""
        cells.append(cell.removesuffix("</td>") + f"{small}</td>")
    return "".join([*cells, "" if alone else html_cell(table.difference(measure, variant) or "–", digits)])
