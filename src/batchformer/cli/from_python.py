"""``runs.fit``, ``runs.compare`` and ``runs.load``: the commands from Python, with results that show themselves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchformer.cli import quiet_libraries
from batchformer.cli.show import metrics_rows, metrics_table, name_of
from batchformer.errors import UserError, causes
from batchformer.runs.folder import RunFolder
from batchformer.runs.options import dotted

Fields = Mapping[str, Any]  # dotted keys ("trainer.max_epochs") or sections of them


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run. In a notebook it is shown as the table of its measures.

    Args:
        folder: its run folder.
        result: the content of result.json.
    """

    folder: Path
    result: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """The measures by key, as result.json has them."""
        return self.result["metrics"]

    @property
    def history(self) -> list[dict[str, float]]:
        """The measures after each epoch that was evaluated."""
        return self.result["history"]

    def network(self, averaged: bool = False, trust: bool = False) -> Any:
        """The trained network without the module, in eval mode; `averaged`: with the average of its weights."""
        from batchformer.cli.export_network import plain_network_of
        from batchformer.cli.finished_run import load_run

        return plain_network_of(load_run(str(self.folder), trust=trust), averaged).network

    def export(
        self, out: str | Path | None = None, format: str = "safetensors", trust: bool = False, **options: Any
    ) -> Path:
        """Write the network as `batchformer export` does (`half`, `averaged`, `license`); returns the place."""
        from batchformer.cli.export import FORMATS
        from batchformer.cli.export_network import export
        from batchformer.cli.finished_run import load_run

        if format not in FORMATS:
            raise UserError(f"format={format!r} must be one of {', '.join(FORMATS)}.")
        place = Path(out) if out is not None else self.folder / FORMATS[format]
        export(load_run(str(self.folder), trust=trust), place, format, **options)
        return place

    def __repr__(self) -> str:
        return metrics_table(self.result)

    def _repr_html_(self) -> str:
        from batchformer.report.html_parts import plain_table

        return plain_table(["measure", "value"], metrics_rows(self.result), name_of(self.result))


@dataclass(frozen=True, repr=False)
class Runs:
    """The runs of a comparison. In a notebook they are shown as one table, with the verdict below.

    Args:
        folder: the folder of the comparison; report.html in it is the page.
        runs: all of its runs.
    """

    folder: Path
    runs: list[Run]
    table: Any = field(init=False)

    def __post_init__(self) -> None:
        from batchformer.report import compare_runs

        object.__setattr__(self, "table", compare_runs([run.result for run in self.runs]))

    @property
    def verdict(self) -> str:
        from batchformer.report import verdict

        return verdict(self.table).sentence

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Any:
        return iter(self.runs)

    def __repr__(self) -> str:
        from batchformer.report import format_table

        return f"{format_table(self.table)}\n\n{self.verdict}"

    def _repr_html_(self) -> str:
        from html import escape

        from batchformer.report.html_parts import plain_table
        from batchformer.report.tables import comparison_table, format_cell

        made = comparison_table(self.table)
        rows = [[row.head, *(format_cell(cell, row.digits) for cell in row.cells)] for row in made.rows]
        return f"{plain_table(made.header, rows)}<p>{escape(self.verdict)}</p>"


def fit(recipe: str | Path, fields: Fields | None = None, **options: Any) -> Run:
    """Train one run of a recipe, as `batchformer fit` does.

    Args:
        recipe: a shipped name, or a YAML file.
        fields: fields of the recipe to change: ``{"trainer.max_epochs": 3, "model.batchformer.heads": 8}``.
        options: those of the command, with underscores: ``seed=1, method="baseline", data_root="photos", epochs=3,
            resume=True, overwrite=True, no_analysis=True``; a list gives an option several times.
    """
    from batchformer.cli import fit as command

    folder = _called(command.trained, _words(recipe, fields, options))
    if folder is None:
        raise UserError("nothing was kept: runs.fit takes neither print_config nor trainer.fast_dev_run.")
    return load(folder.path)  # type: ignore[return-value]


def compare(
    recipe: str | Path,
    fields: Fields | None = None,
    seeds: int | Sequence[int] = 3,
    variants: Mapping[str, Fields] | None = None,
    **options: Any,
) -> Runs:
    """Train variants of a recipe over seeds, as `batchformer compare` does: with and without BatchFormer by default.

    Args:
        recipe: a shipped name, or a YAML file.
        fields: fields of the recipe to change in all runs.
        seeds: how many, or which.
        variants: name -> the fields that it changes; the first is the reference.
        options: those of the command, with underscores: ``targets="all", data_root="photos", epochs=3, resume=True``.
    """
    from batchformer.cli import compare as command

    words = _words(recipe, fields, options)
    words += ["--seeds", *([str(seeds)] if isinstance(seeds, int) else map(str, seeds))]
    for name, changed in (variants or {}).items():
        pairs = ",".join(f"{key}={value}" for key, value in _flat(changed))
        words += ["--variant", f"{name}:{pairs}"]
    return load(_called(command.compared, words))  # type: ignore[return-value]


def load(folder: str | Path) -> Run | Runs:
    """A finished run, or a comparison, from its folder; nothing in it is executed."""
    place = Path(folder)
    if (place / "compare.json").is_file():
        from batchformer.cli.compare import runs_in

        runs = [load(folder.path) for folder in runs_in(place) if folder.finished]
        return Runs(place, runs)  # type: ignore[arg-type]
    found = RunFolder(place)
    found.require()
    result = found.read_result()
    if result is None:
        raise UserError(f"{place} is not finished: resume it with runs.fit(..., out={str(place)!r}, resume=True).")
    return Run(place, result)


def _called(command: Any, words: list[str]) -> Any:
    try:
        with quiet_libraries():
            return command(words)
    except Exception as problem:
        for cause in causes(problem):  # jsonargparse wraps errors of constructors in its own
            if isinstance(cause, UserError) and cause is not problem:
                raise cause from None
        raise


def _words(recipe: str | Path, fields: Fields | None, options: Mapping[str, Any]) -> list[str]:
    words = [str(recipe)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option, str(each)]
    return words + [word for key, value in _flat(fields or {}) for word in (f"--{key}", value)]


def _flat(fields: Fields) -> list[tuple[str, str]]:
    flat = {key: value for name, given in fields.items() for key, value in dotted(given, name).items()}
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in flat.items()]
