"""Base class of data of several domains; one is held out of training for testing, or adapted to without its labels."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from batchformer.data.augment.options import check_at_least
from batchformer.data.loading.epoch_loader import EpochLoader, JoinedLoader
from batchformer.data.loading.order import balanced_order, generator
from batchformer.data.sets.classification import ClassificationData
from batchformer.errors import UserError, did_you_mean

DrawingRule = Literal["replacement", "shortest"]


class Part(NamedTuple):
    """Some samples of a domain: images as bytes or file paths, their labels, and their source (for messages)."""

    samples: np.ndarray
    labels: np.ndarray
    source: str

    def take(self, index: np.ndarray) -> "Part":
        return Part(self.samples[index], self.labels[index], self.source)


class DomainData(ClassificationData):
    """Several domains: the sources, which are trained on, and the target, which is used for testing only.

    A training batch holds equally many samples of each source, domain by domain, and `domains`, the index of each
    sample's domain in `source_domains` (in `declare`: "domains"). The evaluation sets are "target", with the number of
    sources as its domain index, and "source": the samples held out of the sources.

    Args:
        target: the domain that is left out and tested on.
        sources: the domains trained on; by default all others.
        holdout: the part of each source domain that is held out, drawn by `seed`, where there is no official split.
        steps_per_epoch: an epoch is that many steps.
        draw: how domains of unequal size are drawn from; see `batchformer.data.loading.order.balanced_order`.
        adapt: domain adaptation. A training batch is {"source": batch, "target": batch}, the second one of as many
            images of the target as the first has in all, with labels of -1.
        allow_missing_classes: a domain may be without some of the classes.
        batch_size: of one process, all sources together: a multiple of their number.
    """

    evaluation_sets = ("target", "source")
    holdout_set = "source"
    source_domains: list[str]

    def __init__(
        self,
        root: str | None = None,
        *,
        target: str | None = None,
        sources: list[str] | None = None,
        holdout: float = 0.2,
        steps_per_epoch: int = 100,
        draw: DrawingRule = "replacement",
        adapt: bool = False,
        allow_missing_classes: bool = False,
        batch_size: int = 96,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_at_least(1, steps_per_epoch=steps_per_epoch)
        if not 0 < holdout < 1:
            raise UserError(f"data.holdout is a part of each source domain, above 0 and below 1, got {holdout}.")
        if draw not in get_args(DrawingRule):
            raise UserError(f"data.draw is one of {', '.join(get_args(DrawingRule))}, got {draw!r}.")
        if self.augment_repeats > 1:
            raise UserError(
                "data.augment_repeats is not for data of several domains, which have an order of their own."
            )
        self.sources, self.holdout, self.steps_per_epoch = sources, holdout, steps_per_epoch
        self.draw, self.adapt, self.allow_missing_classes = draw, adapt, allow_missing_classes
        self.allow_empty_classes = allow_missing_classes  # a class may be one of the target's alone
        self.targets, self.target = self._find_domains(), target

    # for subclasses

    @abstractmethod
    def _find_domains(self) -> tuple[str, ...]:
        """The names of all domains; those found on disk, where the data set does not define them."""

    def _choose_domains(self) -> list[str]:
        """The source domains and the target, in this order."""
        self.targets = self._find_domains()
        if len(self.targets) < 2:
            found = f"one domain only ({self.targets[0]})" if self.targets else "no domain"
            raise UserError(
                f"{self.root} has {found}: there must be one to train on and another to test on (`batchformer data` "
                f"shows the layout)."
            )
        if self.target is None:
            raise UserError(
                f"data.target is not set: name the domain to leave out and test on, one of {', '.join(self.targets)}."
            )
        self.choose_target(self.target)
        sources = [name for name in self.targets if name != self.target] if self.sources is None else self.sources
        for name in sources:
            if name not in self.targets:
                known = ", ".join(self.targets)
                hint = did_you_mean(name, self.targets)
                raise UserError(f"data.sources: there is no {name!r}; choose from {known}.{hint}")
        if not sources or self.target in sources or len({*sources}) < len(sources):
            raise UserError(
                f"data.sources names domains other than the target {self.target!r}, each once, got {sources}."
            )
        if self.batch_size % len(sources):
            below = self.batch_size // len(sources) * len(sources)
            near = " or ".join(str(size) for size in (below, below + len(sources)) if size)
            raise UserError(
                f"data.batch_size {self.batch_size} is no multiple of the {len(sources)} source domains, of which a "
                f"batch holds equal numbers: choose {near}."
            )
        self.source_domains = list(sources)
        return [*sources, self.target]

    def _arrange(
        self, found: Mapping[str, Sequence[Part]], classes: list[str]
    ) -> dict[str, tuple[Part, dict[str, np.ndarray]]]:
        """Build the sets by name, each with its fields, from the domains, sources first and the target last.

        A domain has two parts where there is an official split (of a source training and held-out samples, of the
        target those to adapt to and to test on); otherwise one, which is divided here.
        """
        for name, parts in found.items():
            labels = np.concatenate([part.labels for part in parts])
            _check_domain(name, labels, classes, parts[0].source, self.allow_missing_classes)
        pairs = [parts if len(parts) == 2 else self._divided(name, parts[0]) for name, parts in found.items()]
        *sources, target = pairs
        sets = {"train": [train for train, _ in sources], "source": [held for _, held in sources]}
        sets["target"] = [target[1]]
        if self.adapt:
            sets["unlabelled"] = [target[0]._replace(labels=np.full(len(target[0].labels), -1))]
        counts = {name: [len(part.labels) for part in parts] for name, parts in sets.items()}
        arranged = {}
        for name, parts in sets.items():
            first = 0 if name in ("train", "source") else len(sources)
            domains = np.repeat(np.arange(first, first + len(parts)), counts[name])
            samples = np.concatenate([part.samples for part in parts])
            labels = np.concatenate([part.labels for part in parts])
            arranged[name] = Part(samples, labels, _listed([part.source for part in parts])), {"domains": domains}
        return arranged

    def _divided(self, name: str, part: Part) -> tuple[Part, Part]:
        if name == self.target:
            return part, part
        count = len(part.labels)
        if count < 2:
            raise UserError(f"the domain {name} has one image only: a part of a source domain is held out; add some.")
        order = generator(self.seed, name, "holdout").permutation(count)
        held = max(1, int(count * self.holdout))
        return part.take(np.sort(order[held:])), part.take(np.sort(order[:held]))

    def _count(self, sets: Mapping[str, Any], digest: Any) -> None:
        super()._count(sets, digest)
        domains = {name: each.fields["domains"] for name, each in sets.items()}
        self._counts = {name: np.unique(each, return_counts=True)[1].tolist() for name, each in domains.items()}
        self.test_images = len(sets["target"].labels)  # results are about these

    # for loaders and users

    def training_loader(self) -> EpochLoader:
        source = self.make_loader("train", training=True)
        if not self.adapt:
            return source
        return JoinedLoader({"source": source, "target": self.make_loader("unlabelled", True)}, self._current_epoch)

    def _loader_options(self, name: str, training: bool) -> dict[str, Any]:
        options = super()._loader_options(name, training)
        if training and options["sampler"] is None:
            counts, seed = self._counts[name], options["seed"]
            each = options["world"] * self.batch_size // len(counts)
            if self.draw == "shortest" and min(counts) < each:
                names = self.source_domains if name == "train" else [str(self.target)]
                raise UserError(
                    f"the domain {names[int(np.argmin(counts))]} has {min(counts)} training images, fewer than the "
                    f"{each} that a batch takes of it: lower data.batch_size, or set data.draw to replacement."
                )
            options["sampler"] = partial(
                balanced_order, counts=counts, each=each, steps=self.steps_per_epoch, seed=seed, draw=self.draw
            )
        return options

    def declare(self) -> dict[str, Any]:
        return {**super().declare(), "domains": list(self.source_domains)}

    def describe(self) -> dict[str, Any]:
        domains = self._find_domains()
        chosen = self.target
        if chosen is None and len(domains) > 1:
            self.target = domains[0]  # nothing is trained: any of them shows what is there
        numbers = super().describe()
        pairs = zip(self.source_domains, self._counts["train"], strict=True)
        trained = ", ".join(f"{name} ({count:,})" for name, count in pairs)
        details = [
            f"trained on {trained}; {sum(self._counts['source']):,} images of these are held out",
            f"tested on {self.target} ({self._counts['target'][0]:,})",
        ]
        if chosen is None:
            details.append(f"data.target is not set, {self.target} is an example; compare --targets all takes each")
        return numbers | {"details": details}


def _check_domain(name: str, labels: np.ndarray, classes: list[str], source: str, allow_missing: bool) -> None:
    if not len(labels):
        raise UserError(
            f"the domain {name} has no images in {source}: put some there, in a folder for each class, or take the "
            f"domain out."
        )
    missing = sorted({*range(len(classes))} - {*labels.tolist()})
    if missing and not allow_missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"the domain {name} has no image of the class {classes[missing[0]]}{more} in {source}: add some, take the "
            f"class out, or set data.allow_missing_classes to true."
        )


def _listed(sources: list[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
