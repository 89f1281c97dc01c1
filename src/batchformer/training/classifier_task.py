"""Tasks whose network classifies images: one image, one label, a criterion of outputs and labels."""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data import ClassificationData
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError, read_whole_number
from batchformer.files import csv_text, refuse_to_replace, refuse_unwritable, write_text
from batchformer.metrics import ShotAccuracy
from batchformer.models.create import creation_code
from batchformer.training.network_task import NetworkTask
from batchformer.training.task import Batch

_BATCH = 64


class ClassifierTask(NetworkTask):
    """Base class of classifiers: the loss over both streams, accuracies of the plain network, predictions as CSV.

    A subclass defines, in addition to what `NetworkTask` requires, the loss of one stream (`build_criterion`), the
    metric (`build_metric`) and `step`.
    """

    data_class: ClassVar[type] = ClassificationData
    predict_options: ClassVar[Mapping[str, str]] = {
        "topk": "how many classes of each image are written",
        "strict": "stop at the first image that cannot be read",
        "calibrated": "probabilities of logits divided by the temperature of the run",
    }
    #: logits are divided by it before they become probabilities: 1 unless `predict --calibrated`
    temperature: float = 1.0

    analyses: Sequence[Any] = ("class_failures",)

    criterion: nn.Module
    metrics: nn.ModuleDict

    # ---- what a subclass gives

    @abstractmethod
    def build_criterion(self, data: DataInfo) -> nn.Module:
        """The loss of one stream."""

    def build_metric(self, data: DataInfo) -> ShotAccuracy:
        return ShotAccuracy(data.class_counts)

    @property
    def normed_classifier(self) -> bool:
        """Whether the backbone's classifier was replaced by a cosine classifier."""
        return False

    # ---- building

    def build(self, data: DataInfo) -> None:
        if len(data.class_counts) != len(data.classes):
            raise UserError(
                f"{len(data.class_counts)} class counts for {len(data.classes)} classes: there must be one per class."
            )
        super().build(data)
        self._build_losses_and_metrics(data)

    def set_data(self, data: DataInfo) -> None:
        if data.get("class_counts") != self.class_counts:
            self._build_losses_and_metrics(data)
            self.to(self.device)

    def _build_losses_and_metrics(self, data: DataInfo) -> None:
        """Build losses and metrics, which depend on the number of images of each class."""
        self.criterion = self.build_criterion(data)
        names = data.get("evaluation_sets") or ("val",)
        self.metrics = nn.ModuleDict({name: self.build_metric(data) for name in names})
        self.stream_criterion = bf.TwoStreamLoss(self.criterion, scale=self.stream_loss)

    # ---- evaluation

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "rows classes"]:
        # one memory format for every mixing: another one would recompile, perhaps during graph capture
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return self.net(images.contiguous(memory_format=layout))

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        logits = self.test_logits(batch["images"])
        self.metrics[name].update(logits, batch["labels"])  # type: ignore[operator]
        return {"loss": F.cross_entropy(logits, batch["labels"])}

    def results(self, name: str) -> dict[str, Tensor]:
        metric: Any = self.metrics[name]
        values = metric.compute()
        self.per_class = values.pop("per_class").tolist()
        metric.reset()
        return values

    def test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added."""
        with torch.compiler.set_stance("force_eager" if self.compile_net else "default"):
            return self(images).float()

    def predict_step(self, batch: Any, batch_idx: int) -> Float[Tensor, "batch classes"]:
        images = batch if isinstance(batch, Tensor) else as_batch(batch)["images"]
        return (self.test_logits(images) / self.temperature).softmax(1)

    # ---- commands

    def calibrate(self, net: nn.Module, temperature: float) -> None:
        """Divide the weights of the classifier, and so all logits, by the temperature, in place."""
        layers = [net.get_submodule(path) for path in bf.find_classifiers(net)]
        if self.normed_classifier or not layers or not all(type(layer) is nn.Linear for layer in layers):
            raise UserError(
                f"the logits of this {self.backbone} are not those of a linear classifier, so no temperature can be "
                "put into its weights: leave --calibrated out, and divide its logits by the temperature in result.json."
            )
        with torch.no_grad():
            for layer in layers:
                for parameter in layer.parameters(recurse=False):
                    parameter.div_(temperature)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        classes = len(self.class_counts)
        stock = creation_code(self.backbone, classes, self.backbone_args)
        metadata = {"backbone": self.backbone, "backbone_args": json.dumps(self.backbone_args)}
        if self.normed_classifier:
            arguments = "".join(f", {name}={value!r}" for name, value in self.backbone_args.items())
            call = f"use_normed_classifier(create_backbone({self.backbone!r}, {classes}{arguments}))"
            return metadata, call, "from batchformer.models import create_backbone, use_normed_classifier"
        return metadata, *stock

    def predict(self, images: list[Path], data: Any, out: Path | None, line: Any, **options: str) -> str:
        """A CSV file with one line per image: path, class_1, score_1, class_2, ..., error (why it was not read).

        Scores are probabilities, the best class first.
        """
        out = out or Path("predictions.csv")
        refuse_unwritable(out)  # before predicting, which may take long
        refuse_to_replace(out, lambda content: content.startswith(b"path,class_1,score_1"))
        names = [str(name) for name in self.data_info.classes]
        top = min(read_whole_number("topk", options.get("topk", "5"), 1), len(names))
        rows = []
        found = self._classified(images, data.predict_transform, top, "strict" in options)
        for done, (path, classes) in enumerate(found):
            if done >= _BATCH:  # a single batch is too short for a progress line
                line.update(done / len(images), path.name)
            cells = [cell for label, score in classes for cell in (names[label], f"{score:.6f}")]
            error = "" if cells else self.unreadable[path]
            rows.append([str(path), *(cells or [""] * 2 * top), error])
        line.clear()
        good = [row for row in rows if not row[-1]]
        if not good:
            raise UserError(rows[0][-1])
        columns = ["path", *(f"{kind}_{k + 1}" for k in range(top) for kind in ("class", "score")), "error"]
        write_text(out, csv_text(columns, rows))
        shown = [f"{row[0]}: {row[1]} ({float(row[2]):.1%})" for row in good[:5]]
        if len(good) > 5:
            shown.append(f"... and {len(good) - 5} more")
        many = f"{len(good)} {'image' if len(good) == 1 else 'images'}"
        return "\n".join([*shown, f"\n{many} classified: {out}"])

    def _classified(
        self, images: list[Path], transform: Any, top: int, strict: bool
    ) -> Iterator[tuple[Path, list[tuple[int, float]]]]:
        """Each image with its best classes; without any where it cannot be read."""
        with torch.inference_mode():
            for start in range(0, len(images), _BATCH):
                paths = images[start : start + _BATCH]
                pictures = [self.read_image(path, strict) for path in paths]
                best: Iterator[Any] = iter(())
                if pixels := [transform(picture) for picture in pictures if picture is not None]:
                    scores, labels = self.predict_step(torch.stack(pixels).to(self.device), 0).topk(top, dim=1)
                    best = zip(labels.tolist(), scores.tolist(), strict=True)
                for path, picture in zip(paths, pictures, strict=True):
                    yield path, [] if picture is None else list(zip(*next(best), strict=True))
