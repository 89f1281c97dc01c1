"""A comparison: any number of variants of one recipe, against one of them, over seeds and targets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from batchformer.errors import UserError
from batchformer.metrics.measures import Measure, known, measures_of, primary_of, with_current_names
from batchformer.report.statistics import PairedDifference, Summary, paired_difference, summarise

DEFAULT_PAIR = ("baseline", "batchformer")
_NAMES = {"batchformer": "BatchFormer"}


@dataclass(frozen=True)
class Comparison:
    """The numbers of the runs of one recipe. Made by `compare_runs`.

    `variants`: the reference first, whether or not it has runs. `targets` is empty where the
    recipe has none. `measures`: the primary one, and those without `detail` that some run has a value for.
    """

    recipe: str
    measures: tuple[Measure, ...]
    variants: tuple[str, ...]
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Mapping[tuple[str, str, str | None], Mapping[int, float]] = field(repr=False)

    @property
    def primary(self) -> Measure:
        return primary_of(self.measures)

    @property
    def reference(self) -> str:
        return self.variants[0]

    @property
    def others(self) -> tuple[str, ...]:
        return self.variants[1:]

    @property
    def shown(self) -> tuple[str, ...]:
        """The variants of a table: all, or the only one that was run, which is compared with nothing."""
        found = tuple(v for v in self.variants if any(variant == v for _, variant, _ in self.values))
        return found if len(found) == 1 else self.variants

    @property
    def is_default_pair(self) -> bool:
        """With and without the module, the comparison that recipes make unless they say otherwise."""
        return self.variants == DEFAULT_PAIR

    def by_seed(self, measure: Measure, variant: str, target: str | None = None) -> dict[int, float]:
        """Seed -> value. Without a target: the mean over the targets, for the seeds that have all of them."""
        if target is not None or not self.targets:
            return dict(self.values.get((measure.key, variant, target), {}))
        columns = [self.values.get((measure.key, variant, each), {}) for each in self.targets]
        whole = [seed for seed in self.seeds if all(seed in column for column in columns)]
        return {seed: fmean(column[seed] for column in columns) for seed in whole}

    def cell(self, measure: Measure, variant: str, target: str | None = None) -> Summary | None:
        """Mean and deviation over the seeds; None where there is no run."""
        values = list(self.by_seed(measure, variant, target).values())
        return summarise(values) if values else None

    def paired_seeds(self, measure: Measure, variant: str, target: str | None = None) -> tuple[int, ...]:
        """Seeds that both the variant and the reference have; without a target, have for every target."""
        before, after = (self.by_seed(measure, each, target) for each in (self.reference, variant))
        return tuple(seed for seed in before if seed in after)

    def difference(self, measure: Measure, variant: str, target: str | None = None) -> PairedDifference | None:
        """Variant minus reference over matched seeds, with the interval over the seeds.

        Without a target every (target, seed) is a pair; the differences of a seed are averaged over the targets first,
        because the runs of one seed share weights and order and are not independent.
        """
        seeds = self.paired_seeds(measure, variant, target)
        if variant == self.reference or not seeds:
            return None
        before, after = (self.by_seed(measure, each, target) for each in (self.reference, variant))
        return paired_difference([before[seed] for seed in seeds], [after[seed] for seed in seeds])

    @property
    def readings(self) -> tuple[Measure, ...]:
        """The primary measure with other weights of the same runs."""
        primary = self.primary
        whole = primary.reading_of or primary.key
        return tuple(m for m in self.measures if m is not primary and whole in (m.key, m.reading_of))

    def reading_difference(self, measure: Measure, variant: str) -> PairedDifference | None:
        """A reading minus the primary measure of the same runs, with the interval over the seeds."""
        before, after = (self.by_seed(each, variant) for each in (self.primary, measure))
        seeds = [seed for seed in before if seed in after]
        return paired_difference([before[s] for s in seeds], [after[s] for s in seeds]) if seeds else None

    def digits(self, measure: Measure) -> int:
        """Decimals that numbers of this measure are written with: two, and more where all of them are small."""
        low, high = measure.bounds
        if low is not None and high is not None and high - low >= 10:
            return 2
        largest = max(
            (abs(v) for (key, _, _), of in self.values.items() if key == measure.key for v in of.values()),
            default=100.0,
        )
        return 2 if largest >= 10 else 3 if largest >= 1 else 4

    def as_plain(self) -> dict[str, Any]:
        """For JSON: what was compared, and a row for each measure, variant and target (null: the mean over them)."""
        rows = []
        for measure in self.measures:
            for variant in self.variants:
                for target in dict.fromkeys([*self.targets, None]):
                    cell = self.cell(measure, variant, target)
                    difference = self.difference(measure, variant, target)
                    rows.append(
                        {
                            "measure": measure.key,
                            "variant": variant,
                            "target": target,
                            "seeds": list(self.by_seed(measure, variant, target)),
                            "mean": cell and cell.mean,
                            "sd": cell and cell.sd,
                            "difference": difference and difference._asdict(),
                        }
                    )
        return {
            "recipe": self.recipe,
            "variants": list(self.variants),
            "targets": list(self.targets),
            "seeds": list(self.seeds),
            "measures": [measure.as_dict() for measure in self.measures],
            "rows": rows,
        }


def compare_runs(results: Iterable[Mapping[str, Any]]) -> Comparison:
    """From the contents of result files of one recipe, of this version or of 0.1.

    The reference is the one the files name, else "baseline", else the first by name.
    """
    results = [with_current_names(result) for result in results]
    recipes = sorted({str(result.get("recipe")) for result in results})
    if len(recipes) != 1:
        raise UserError(
            f"one table compares runs of one recipe, got {', '.join(recipes) or 'none'}: compare them one by one"
        )
    measures: dict[str, Measure] = {}
    values: dict[tuple[str, str, str | None], dict[int, float]] = {}
    runs: set[tuple[str, str | None, int]] = set()
    for result in sorted(results, key=lambda result: result["seed"]):
        variant, target, seed = result["variant"], result.get("target"), result["seed"]
        if (variant, target, seed) in runs:
            where = "" if target is None else f", target {target}"
            raise UserError(
                f"two runs of recipe {recipes[0]!r} have variant {variant}{where} and seed {seed}: "
                "pass only one of them"
            )
        runs.add((variant, target, seed))
        for measure in (each for each in measures_of(result) if each.primary or not each.detail):
            measures.setdefault(measure.key, measure)
            for value in known([result["metrics"].get(measure.key)]):
                values.setdefault((measure.key, variant, target), {})[seed] = value
    primary = primary_of(list(measures.values()))
    found = {key for key, _, _ in values}
    return Comparison(
        recipe=recipes[0],
        measures=tuple(m for m in measures.values() if (m.key in found and not m.detail) or m is primary),
        variants=_reference_first([result["variant"] for result in results], results),
        targets=tuple(dict.fromkeys(target for each in results if (target := each.get("target")) is not None)),
        seeds=tuple(sorted({seed for _, _, seed in runs})),
        values=values,
    )


def _reference_first(found: Sequence[str], results: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The others in the order of the results. Of the default pair both, even if only one of them was run."""
    named = [result["reference"] for result in results if result.get("reference")]
    if set(found) <= set(DEFAULT_PAIR) and set(named) <= {DEFAULT_PAIR[0]}:
        return DEFAULT_PAIR
    present = [name for name in named if name in found]
    reference = present[0] if present else DEFAULT_PAIR[0] if DEFAULT_PAIR[0] in found else (named or sorted(found))[0]
    return tuple(dict.fromkeys([reference, *found]))


def shown_name(variant: str) -> str:
    """A variant in a sentence or a legend."""
    return _NAMES.get(variant, variant)


def measure_word(measure: Measure) -> str:
    """One word for the axis or the head of a column: the label where that is the key properly written, else the key."""
    label, key = (re.sub(r"[-_ ]", "", words.lower()) for words in (measure.label, measure.key))
    same = label == key
    return measure.label if same else measure.key.replace("_", " ")


def rows_word(table: Comparison) -> str:
    """The same over rows of all measures (AP over AP50); empty where it is the name of the primary one alone (AUC)."""
    word = measure_word(table.primary)
    named = [word.lower() in measure.label.lower() for measure in table.measures]
    return word if all(named) or word.lower() not in table.primary.label.lower() else ""


def class_word(measure: Measure) -> str:
    """The same for its values of single classes."""
    return measure.of_class or measure_word(measure)


def with_unit(words: str, unit: str) -> str:
    return f"{words}, {unit}" if unit else words


def format_summary(summary: Summary | None, digits: int = 2) -> str:
    """`49.53 ± 0.34`; without deviation for one seed; a dash for none."""
    if summary is None:
        return "–"
    mean = f"{summary.mean:.{digits}f}".replace("-", "−")
    return mean if summary.sd is None else f"{mean} ± {summary.sd:.{digits}f}"


def format_difference(difference: PairedDifference | None, digits: int = 2) -> str:
    """`+0.49 [-0.12, +1.10]`; `+0.49 (one seed)` where there is no interval."""
    if difference is None:
        return "–"
    return f"{signed(difference.mean, digits)} {format_interval(difference, digits)}"


def format_interval(difference: PairedDifference, digits: int = 2) -> str:
    if difference.low is None or difference.high is None:
        return "(one seed)"
    return f"[{signed(difference.low, digits)}, {signed(difference.high, digits)}]"


def signed(value: float, digits: int = 2) -> str:
    """With its sign, and with a real minus; what rounds to zero has no sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text
