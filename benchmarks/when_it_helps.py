"""docs/when-it-helps.md, its pictures, and the table in README.md, from result files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchformer.errors import UserError
from batchformer.metrics.measures import Measure
from batchformer.report.charts import linear_axis
from batchformer.report.comparison import Comparison, compare_runs, signed, with_unit
from batchformer.report.figures import chart_of_rows, possible_differences
from batchformer.report.runs import Run, by_recipe, load_runs
from benchmarks._chart_files import chart_svg
from benchmarks._gain import READ_AS, Gain
from benchmarks._markdown import markdown, with_results
from benchmarks.paper import MAIN

README_HEADER = ("accuracy, %", "without", "with", "difference, 95 % interval", "seeds", "paper", "read as")
HEADER = ("", *README_HEADER[1:5], "read as")


@dataclass(frozen=True)
class Pair:
    """Two sides, each a recipe and a variant of it. `readme`: the words of its row there, if it has one."""

    title: str
    without: tuple[str, str]
    with_it: tuple[str, str]
    readme: str = ""


@dataclass(frozen=True)
class Question:
    """A section of the page: what a practitioner asks, what was trained for it, and what to do with the answer."""

    name: str
    title: str
    setting: str
    pairs: Sequence[Pair]
    advice: str


@dataclass(frozen=True)
class Answer(Gain):
    """A pair whose two sides were both trained."""

    pair: Pair


def _module(title: str, recipe: str, without: str = "baseline", readme: str = "") -> Pair:
    """One recipe with and without the module."""
    with_it = "batchformer" if without == "baseline" else f"{without}+batchformer"
    return Pair(title, (recipe, without), (recipe, with_it), readme)


def _v2(title: str, without: str, with_it: str, readme: str = "") -> Pair:
    return Pair(
        title, (f"vit-cifar100-32-{without}", "baseline"), (f"vit-cifar100-32-{with_it}", "batchformer"), readme
    )


def _mixing(title: str, without: str, with_it: str, variant: str = "baseline", readme: str = "") -> Pair:
    name = "mix-vit-cifar100-32-"
    return Pair(title, (name + without, variant), (name + with_it, variant), readme)


_ON_SOFTMAX = "imagenette-lt-on-softmax"
_LONG_TAIL = "CIFAR-100-LT, ResNet-32, Balanced Softmax, BatchFormer before the classifier"
QUESTIONS = (
    Question(
        "schedule",
        "You train briefly, or for long",
        f"{_LONG_TAIL}, imbalance 100, by the length of the schedule.",
        (
            _module("1/8 of the schedule", "cifar100-lt-100-short"),
            _module(
                "the whole schedule",
                "cifar100-lt-100",
                readme="BatchFormer, CIFAR-100-LT (imbalance 100), ResNet-32, Balanced Softmax",
            ),
        ),
        "Expect little from it at the whole schedule; accuracy then moves from rare classes to frequent ones.",
    ),
    Question(
        "data",
        "Your classes are more or less unequal",
        f"{_LONG_TAIL}, by imbalance: the largest class divided by the smallest; the whole schedule, of 50 half of it.",
        (
            Pair(
                "imbalance 50",
                ("cifar100-lt-50-tuning-baseline", "baseline"),
                ("cifar100-lt-50-tuning-mean", "batchformer"),
            ),
            _module("imbalance 100", "cifar100-lt-100"),
            _module("imbalance 200", "cifar100-lt-200"),
        ),
        "The imbalance alone is no reason to switch it on.",
    ),
    Question(
        "start",
        "You begin with ImageNet weights",
        "Imagenette at 64 px made long-tailed (858 pictures of the first class, 8 of the last), MobileNetV2 from "
        "ImageNet weights, Balanced Softmax, 20 epochs; trained on a CPU.",
        (_module("BatchFormer", "imagenette-lt"),),
        "With your own pictures, let `batchformer compare folder-lt --data-root DIR --seeds 5` decide.",
    ),
    Question(
        "classifier",
        "You train a new classifier on frozen features",
        "The same images and network, trained with softmax; then for seconds a new or rescaled classifier on its "
        "features. With BatchFormer: in the first stage, and in the second unless it only rescales (LWS, tau-norm).",
        tuple(
            Pair(title, (f"{_ON_SOFTMAX}-{stage}", "baseline"), (f"{_ON_SOFTMAX}-{with_it}", "batchformer"))
            for title, stage, with_it in (
                ("softmax alone", "baseline", "batchformer"),
                ("Balanced Softmax", "decoupled", "decoupled-batchformer"),
                ("BALMS", "balms", "balms-batchformer"),
                ("cRT", "crt", "crt-batchformer"),
                ("LWS", "lws", "lws-batchformer"),
                ("tau-norm", "tau-norm", "tau-norm-batchformer"),
            )
        ),
        "The second stage is what helps ([all numbers](long-tail.md#results)).",
    ),
    Question(
        "v2",
        "You train a small vision transformer from scratch",
        "CIFAR-100 at 32 px, DeiT-Ti's width and depth, 50 epochs; BatchFormerV2 with two streams, at equal epochs and "
        "held to a baseline that trains nearly as many GPU-seconds.",
        (
            _v2(
                "all blocks at equal epochs",
                "baseline",
                "published",
                "BatchFormerV2 after all blocks of a small ViT, CIFAR-100, equal epochs",
            ),
            _v2("all blocks at equal time", "long", "published", "the same, equal GPU time"),
            _v2("block 8 at equal epochs", "baseline", "published-block8"),
            _v2("block 8 at equal time", "long-block8", "published-block8"),
            _module("DeiT-Ti at 224 px", "deit-ti-cifar100-100"),
        ),
        "Use it where pictures are what you are short of; where it is GPU time, train the baseline for longer.",
    ),
    Question(
        "transmix",
        "You train with mixed images",
        "The same small vision transformer; TransMix in place of CutMix.",
        (
            _mixing("TransMix", "cutmix", "transmix", readme="TransMix instead of CutMix, the same ViT"),
            _mixing("both with BatchFormerV2", "cutmix-batchformer", "transmix-batchformer", "batchformer"),
        ),
        "CutMix is enough until your own comparison says otherwise.",
    ),
    Question(
        "domains",
        "You test on another domain",
        "PACS (photographs, paintings, cartoons, sketches), the mean over the four domains left out in turn: "
        "MobileNetV2 from ImageNet weights at 96 px, 300 steps on a CPU. MNIST to USPS and back, the mean of both: "
        "BatchFormer over the rows of source and target.",
        (
            _module("PACS, ERM", "pacs-mobilenetv2", "erm"),
            _module("source only", "mnist-usps", "source-only"),
            _module("DANN", "mnist-usps", "dann"),
            _module("MDD", "mnist-usps", "mdd"),
        ),
        "In adaptation the method decides (MDD); the module is no replacement for it.",
    ),
    Question(
        "classes",
        "You look for classes without a training picture",
        "PlantVillage's pairs of state and crop, AUC, on fixed or trained features; CE-GZSL on CUB, harmonic mean of "
        "seen and unseen accuracy.",
        (
            _module("fixed visual product", "plantvillage-czsl", "visual-product"),
            _module("fixed CompCos", "plantvillage-czsl", "compcos"),
            _module("fixed CGE", "plantvillage-czsl", "cge"),
            _module("trained visual product", "plantvillage-czsl-trained", "visual-product"),
            _module("trained CompCos", "plantvillage-czsl-trained", "compcos"),
            _module("trained CGE", "plantvillage-czsl-trained", "cge"),
            _module("CE-GZSL from attributes", "cub-gzsl", "ce-gzsl"),
            _module("CE-GZSL from sentences", "cub-gzsl-sentences", "ce-gzsl"),
        ),
        "Worth a trial with a graph of pairs (CGE) on features that stay fixed.",
    ),
    Question(
        "embedded",
        "You have a laptop and some minutes",
        "The recipes that need no download, one of each family: scikit-learn's digits of 8 x 8 pixels, some of them "
        "turned, changed or joined, on a CPU. Accuracy over all classes; AUC of pairs; harmonic mean of seen and "
        "unseen classes; nearest neighbours in MoCo's features, a linear classifier on MAE's. Small networks on small "
        "pictures: they show that a family works, not what the module is worth on yours.",
        (
            _module("long tail", "digits-lt"),
            _module("BatchFormerV2 in a ViT", "vit-digits"),
            _module("unseen rotation", "digits-domains", "erm"),
            _module("unseen pairs", "digits-states", "visual-product"),
            _module("unseen pairs, CGE", "digits-states", "cge"),
            _module("unseen classes, CE-GZSL", "digits-gzsl", "ce-gzsl"),
            _module("MoCo-v3", "moco-digits"),
            _module("MAE", "mae-digits"),
        ),
        "`batchformer compare RECIPE --seeds 5` repeats a row; "
        "[why MoCo-v3's neighbours are worse](self-supervised.md#moco-v3-on-the-digits).",
    ),
    Question(
        "hands",
        "You estimate meshes",
        "Hands rendered at 64 px from a rigged hand, a small Mesh Graphormer with BatchFormerV2, on a CPU: error of "
        "the vertices after alignment (PA-MPVPE), where lower is better.",
        (_module("BatchFormerV2", "hands-tiny"),),
        "`batchformer compare hands-tiny --seeds 5` repeats it.",
    ),
)

_INTRODUCTION = """\
# When does it help?

Every comparison of ours with and without the module, by the question a practitioner asks. Written by
`python -m benchmarks.pages when-it-helps` from the files in `results/`: last epoch,
mean ± standard deviation over seeds, the difference over matched seeds with its 95 % interval. "Better" and "worse"
mean that the interval leaves out zero; each comparison is read alone, so of twenty without any effect one would.
"""


def answers(results: Path) -> list[tuple[Question, list[Answer]]]:
    """Each question with its pairs whose two sides were trained; those without any are left out."""
    tables = {recipe: compare_runs([run.raw for run in runs]) for recipe, runs in _trained(results).items()}
    found = [(question, list(_answered(question, tables))) for question in QUESTIONS]
    if not any(each for _, each in found):
        raise UserError(f"{results} holds both sides of no comparison: there is nothing to show.")
    return [(question, each) for question, each in found if each]


def _trained(results: Path) -> Mapping[str, Sequence[Run]]:
    return by_recipe(load_runs([results]))


def _answered(question: Question, tables: Mapping[str, Comparison]) -> Iterator[Answer]:
    for pair in question.pairs:
        sides = [(tables.get(recipe), variant) for recipe, variant in (pair.without, pair.with_it)]
        values = [table.by_seed(table.primary, variant) if table else {} for table, variant in sides]
        table = sides[0][0]
        if table is not None and all(values):
            yield Answer(table.primary, values[0], values[1], pair)


def page(results: Path) -> tuple[str, dict[str, str]]:
    """The page in Markdown, and its pictures by the names of their files."""
    found = answers(results)
    lines, pictures = [_INTRODUCTION, f"{in_short([a for _, each in found for a in each])}\n"], {}
    for question, each in found:
        picture = f"when-it-helps-{question.name}.svg"
        pictures[picture] = _picture(question, each)
        rows = [[answer.pair.title, *answer.cells, answer.reading] for answer in each]
        lines += [
            f"## {question.title}\n",
            f"{question.setting}\n",
            f"**{_sentence(each)}** {question.advice}\n",
            f"![{question.title}: the difference of each comparison with its interval]({picture})\n",
            f"{markdown(HEADER, rows)}\n",
        ]
    return "\n".join(lines), pictures


def in_short(found: Sequence[Answer]) -> str:
    """How many comparisons ended in which way."""
    by_sides = {(answer.pair.without, answer.pair.with_it): answer.reading for answer in found}
    readings = list(by_sides.values())
    several = [reading for reading in readings if not reading.startswith("one seed")]
    better, worse, unclear = (several.count(READ_AS[side]) for side in (1, -1, 0))
    told = f"{better} better, {worse} worse, {unclear} without a clear difference"
    single = len(readings) - len(several)
    one = f"; {single} more {'has' if single == 1 else 'have'} one seed" if single else ""
    return f"Of {len(several)} comparisons over several seeds, {told}{one}."


def _sentence(found: Sequence[Answer]) -> str:
    """What the intervals say, in one sentence."""
    by_reading: dict[str, list[str]] = {}
    for answer in found:
        told = f"{answer.pair.title} ({signed(answer.difference.mean, 2)})" if answer.difference else answer.pair.title
        by_reading.setdefault(answer.reading, []).append(told)
    sentence = "; ".join(f"{reading}: {', '.join(titles)}" for reading, titles in by_reading.items())
    return f"{sentence[0].upper()}{sentence[1:]}."


def _picture(question: Question, found: Sequence[Answer]) -> str:
    """A row for each comparison: the difference of every seed as a ring, its mean and interval as a bar."""
    measure, height = found[0].measure, len(found)
    differences = [answer.difference for answer in found if answer.difference is not None]
    each_seed = [answer.each_seed for answer in found]
    values, within = possible_differences(differences, measure)
    values += [value for of_pair in each_seed for value in of_pair]
    room = 0.1 * max(map(abs, values))
    label = with_unit("difference", measure.points)
    x = linear_axis([*values, room, -room], label, within=within)
    chart = chart_of_rows("pairs", x, [answer.pair.title for answer in found], 80 + 34 * height, longest=26)
    for k, (answer, of_pair) in enumerate(zip(found, each_seed, strict=True)):
        level, gain = height - k - 0.5, answer.difference
        if gain is not None and gain.low is not None and gain.high is not None:
            chart.interval((gain.low, level), (gain.high, level), "")
            chart.segment((gain.mean, level - 0.3), (gain.mean, level + 0.3), "whisker")
        chart.dots([(value, level) for value in of_pair], "others", radius=4)
    chart.divider(0)
    return chart_svg(chart, question.title, _sentence(found))


def readme_table(results: Path) -> str:
    """The rows of the README, of those that were trained."""
    rows = [
        [answer.pair.readme, *answer.cells, _paper(answer.pair, answer.measure), answer.reading]
        for _, found in answers(results)
        for answer in found
        if answer.pair.readme
    ]
    if not rows:
        raise UserError(f"{results} holds both sides of no row of the README: there is nothing to show.")
    return markdown(README_HEADER, rows)


def _paper(pair: Pair, measure: Measure) -> str:
    """What the paper gained, where the two sides are the two sides of one of its rows."""
    row = MAIN.get(pair.with_it[0]) if pair.without[0] == pair.with_it[0] else None
    if row is None or row.baseline is None or row.batchformer is None:
        return "–"
    return signed(row.batchformer[measure.key] - row.baseline[measure.key], 1)


def pages(root: Path) -> dict[Path, str]:
    """The README with its table, the page and its pictures."""
    readme, results = root / "README.md", root / "results"
    text, pictures = page(results)
    drawn = {root / "docs" / name: picture for name, picture in pictures.items()}
    return {readme: with_results(readme, readme_table(results)), root / "docs" / "when-it-helps.md": text, **drawn}
