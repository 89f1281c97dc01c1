"""Generalized zero-shot learning: generated features of unseen classes, with or without BatchFormer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.data.loading.order import Sampler, generator
from batchformer.errors import UserError
from batchformer.losses import gradient_penalty, supervised_contrast
from batchformer.metrics.gather import process_and_count
from batchformer.models.generalized import Comparator, Critic, Generator, linear, linear_map
from batchformer.tasks.zero_shot.generalized_classifier import SeenAndUnseen, fit_softmax
from batchformer.tasks.zero_shot.generalized_options import (
    AdamOptions,
    ContrastOptions,
    EmbeddingModuleOptions,
    GeneratorOptions,
    LinearMapOptions,
    SoftmaxOptions,
)
from batchformer.training.captured_step import CapturedStep, count_step
from batchformer.training.options import as_options, plain_values
from batchformer.training.reseed import reseed
from batchformer.training.task import CHECK_EVERY, Batch

Algorithm = Literal["ce_gzsl", "f_clswgan", "linear"]
_PURPOSE = 2  # of the random numbers of the classifier of real features


class GeneralizedZeroShot(SeenAndUnseen):
    """Learns from features of seen classes and attributes of all; tested on both; logs `val/unseen seen harmonic`.

    CE-GZSL (Han et al., 2021): a generator makes features of a class from its attributes (WGAN-GP), an embedding is
    trained by contrast between instances (`supervised_contrast`) and between classes (`Comparator`), and a softmax
    classifier on the embedding learns from real features of seen and generated ones of unseen classes. f-CLSWGAN (Xian
    et al., 2018) is the same without embedding: the generator is guided by a classifier of the real features. `linear`
    is ESZSL, in closed form.

    BatchFormer (appendix, Table 1) relates the embeddings of real features in the critic's step; both streams go into
    both contrasts. The paper does not name the place. A step is one of the critic, and every `critic_steps`-th also
    one of the generator, on the same batch. Accuracies are means over classes, of the weights of the last step. The
    released code reports the epoch of training and of the classifier that is best on the test set: with `oracle`.

    Args:
        algorithm: ce_gzsl, f_clswgan or linear.
        method: "batchformer", or "baseline" for the same training without the module; the module needs ce_gzsl.
        batchformer: the module and the rows it relates.
        generator: generator and critic.
        contrast: ce_gzsl: embedding and contrast.
        softmax: the final classifier, and that of real features of f_clswgan.
        linear: of the linear map.
        optimizer: of critic and generator.
        oracle: also report the epoch best on the test set, as the released code does.
        seed: determines initial weights and the random numbers of each step.
        cuda_graph: on a CUDA device, run the steps of critic and generator as one CUDA graph each; elsewhere no
            difference.
    """

    seen_classes: Tensor
    position: Tensor

    def __init__(
        self,
        algorithm: Algorithm = "ce_gzsl",
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: EmbeddingModuleOptions = EmbeddingModuleOptions(),
        generator: GeneratorOptions = GeneratorOptions(),
        contrast: ContrastOptions = ContrastOptions(),
        softmax: SoftmaxOptions = SoftmaxOptions(),
        linear: LinearMapOptions = LinearMapOptions(),
        optimizer: AdamOptions = AdamOptions(),
        oracle: bool = False,
        seed: int = 0,
        cuda_graph: bool = False,
    ) -> None:
        softmax = as_options(SoftmaxOptions, softmax, "softmax")
        super().__init__(softmax.epochs if oracle and algorithm != "linear" else 0, seed, cuda_graph)
        self.automatic_optimization = False  # critic and generator step in turn
        if algorithm not in ("ce_gzsl", "f_clswgan", "linear"):
            raise UserError(f"model.algorithm={algorithm!r} must be ce_gzsl, f_clswgan or linear.")
        if method not in ("batchformer", "baseline"):
            raise UserError(f'method={method!r} must be "batchformer" or "baseline".')
        if method == "batchformer" and algorithm != "ce_gzsl":
            raise UserError(
                f"model.algorithm {algorithm} has no embedding that BatchFormer could relate: set model.method to "
                "baseline, or model.algorithm to ce_gzsl."
            )
        self.algorithm, self.method, self.softmax = algorithm, method, softmax
        self.module_options = batchformer = as_options(EmbeddingModuleOptions, batchformer, "batchformer")
        self.generator_options = generator = as_options(GeneratorOptions, generator, "generator")
        self.contrast = contrast = as_options(ContrastOptions, contrast, "contrast")
        self.linear_options = linear = as_options(LinearMapOptions, linear, "linear")
        self.optimizer_options = optimizer = as_options(AdamOptions, optimizer, "optimizer")
        self.save_hyperparameters(plain_values(locals()))
        self.embedding_dim = contrast.embedding_dim if algorithm == "ce_gzsl" else 0
        self.module: bf.BatchFormer | None = None
        self._steps: dict[str, Callable[[Batch], dict[str, Tensor]]] = {}

    # ---- building

    def build(self, data: DataInfo) -> None:
        super().build(data)
        self.register_buffer("seen_classes", self.seen.nonzero().squeeze(1), persistent=False)
        self.register_buffer("position", self.seen.cumsum(0) - 1, persistent=False)  # of a class among the seen ones
        sizes, options = (self.attributes.shape[1], data.feature_dim), self.generator_options
        if self.algorithm != "linear":
            self.generator = Generator(*sizes, options.noise_dim, options.width)
            self.critic = Critic(*sizes, options.critic_width)
        if self.algorithm == "f_clswgan":
            self.real_classifier = linear(data.feature_dim, int(self.seen.sum()))
        if self.algorithm == "ce_gzsl":
            embedded = self.embedding_dim
            self.projection = linear(embedded, self.contrast.projection_dim)
            self.comparator = Comparator(embedded, sizes[0], self.contrast.comparator_width)
            if self.contrast.accumulate_comparator:
                for k, parameter in enumerate(self.comparator.parameters()):
                    self.register_buffer(f"accumulated_{k}", torch.zeros_like(parameter))
        if self.method == "batchformer":
            reseed(self.seed, 1)
            given = {name: value for name, value in asdict(self.module_options).items() if name != "rows"}
            self.module = bf.BatchFormer(self.embedding_dim, **given)

    def check_trainer(self) -> None:
        if self.trainer.precision == "16-mixed":
            raise UserError("trainer.precision 16-mixed is not for two optimizers in turn: use bf16-mixed or 32-true.")

    def sampler(self, data: Any) -> Sampler:
        """Every batch of the critic is drawn anew, without replacement; an epoch has enough for the generator."""
        count, size, seed = data.train_images, data.batch_size, data.seed
        steps = self.generator_options.critic_steps * math.ceil(count / size)
        if self.algorithm == "linear":  # which is solved when it is evaluated
            steps = 1

        def order(epoch: int) -> np.ndarray:
            draw = generator(seed, epoch, "critic")
            batches = [[draw.permutation(count) for _ in range(math.ceil(size / count))] for _ in range(steps)]
            return np.concatenate([np.concatenate(each)[:size] for each in batches])

        return order

    def configure_optimizers(self) -> Any:
        if self.algorithm == "linear":
            return None
        options = self.optimizer_options
        names = ("critic", "projection", "comparator") if self.algorithm == "ce_gzsl" else ("critic",)
        parameters = [parameter for name in names for parameter in getattr(self, name).parameters()]
        groups = [{"params": [*parameters, *self.net.embedding.parameters()], "lr_factor": 1.0}]
        if self.module is not None:
            groups.append({"params": list(self.module.parameters()), "lr_factor": options.module_lr_factor})
        settings: dict[str, Any] = {"lr": options.lr, "betas": tuple(options.betas), "fused": self.fused or None}
        return torch.optim.Adam(groups, **settings), torch.optim.Adam(self.generator.parameters(), **settings)

    def learning_rate(self) -> float:
        options = self.optimizer_options
        return options.lr * options.decay ** (self.trainer.current_epoch // options.decay_epochs)

    # ---- training

    def step(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of the critic's step, without an update."""
        return self.critic_losses(batch)

    def critic_losses(self, batch: Batch) -> dict[str, Tensor]:
        """WGAN-GP's, with the signs of a minimum, and CE-GZSL's two contrasts of real features with weight 1."""
        real, attributes = self.net.scaled(batch["features"]), self.attributes[batch["labels"]]
        with torch.no_grad():
            fake = self.generator(attributes)
        distance = self.critic(real, attributes).mean() - self.critic(fake, attributes).mean()
        penalty = gradient_penalty(lambda rows: self.critic(rows, attributes), real, fake)
        losses = {"distance": distance, "penalty": penalty}
        loss = self.generator_options.penalty * penalty - distance
        if self.algorithm == "ce_gzsl":
            embedded, labels = self.net.embedding(real), batch["labels"]
            if self.module is not None:
                embedded, labels = self.module(embedded, labels)
            losses["instance"] = self._instance_loss(self._projected(embedded), labels)
            losses["class"] = self._class_loss(embedded, labels)
            loss = loss + losses["instance"] + losses["class"]
        return {"loss": loss, **losses}

    def generator_losses(self, batch: Batch) -> dict[str, Tensor]:
        """The critic's score, and CE-GZSL's two contrasts of generated features with their weights."""
        labels = batch["labels"]
        attributes = self.attributes[labels]
        fake = self.generator(attributes)
        loss = -self.critic(fake, attributes).mean()
        if self.algorithm == "f_clswgan":
            guided = F.cross_entropy(self.real_classifier(fake), self.position[labels])
            return {"generator": loss + self.generator_options.classification_weight * guided, "guided": guided}
        with torch.no_grad():  # real rows take part in the contrast and are not changed by it
            real = self._projected(self.net.embedding(self.net.scaled(batch["features"])))
        embedded, of_fake = self.net.embedding(fake), labels
        if self.module is not None and self.module_options.rows == "both":
            embedded, of_fake = self.module(embedded, labels)
        together = torch.cat([self._projected(embedded), real]), torch.cat([of_fake, labels])
        instance, of_class = self._instance_loss(*together), self._class_loss(embedded, of_fake)
        loss = loss + self.contrast.instance_weight * instance + self.contrast.class_weight * of_class
        return {"generator": loss, "instance_generated": instance, "class_generated": of_class}

    def _projected(self, embedded: Tensor) -> Tensor:
        return F.normalize(self.projection(embedded), dim=1)

    def _instance_loss(self, projected: Tensor, labels: Tensor) -> Tensor:
        return supervised_contrast(projected, labels, self.contrast.instance_temperature)

    def _class_loss(self, embedded: Tensor, labels: Tensor) -> Tensor:
        scores = self.comparator(embedded, self.attributes[self.seen_classes])
        return F.cross_entropy(scores / self.contrast.class_temperature, self.position[labels])

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.algorithm == "f_clswgan" and self.trainer.global_step == 0:  # later it is in the checkpoint
            features, labels = self.training_set()
            reseed(self.seed, _PURPOSE)
            fit_softmax(self.real_classifier, features, self.position[labels], self.softmax)
            self.share(list(self.real_classifier.parameters()))
        steps = {"critic": self._train_critic, "generator": self._train_generator}
        self._steps = {name: CapturedStep(step) if self._whole_step else step for name, step in steps.items()}
        self._captured = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.algorithm != "linear":
            batch = as_batch(batch)
            if batch_idx == 0 and self.contrast.accumulate_comparator and self.algorithm == "ce_gzsl":
                torch._foreach_zero_(self._accumulated())
            losses = self._steps["critic"](batch)
            if (batch_idx + 1) % self.generator_options.critic_steps == 0:
                losses = {**losses, **self._steps["generator"](batch)}
            self.record(losses, len(batch["labels"]))
            if self.device.type != "cuda" or (batch_idx + 1) % CHECK_EVERY == 0:
                self._raise_if_not_finite()
        count_step(self.trainer)

    def _train_critic(self, batch: Batch) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)[0]  # type: ignore[index]
        optimizer.zero_grad(set_to_none=True)
        losses = self.critic_losses(batch)
        with torch.autocast(self.device.type, enabled=False):
            losses["loss"].backward()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, self._of_all([p.grad for p in parameters]), strict=True):
            parameter.grad = gradient
        if self.algorithm == "ce_gzsl" and self.contrast.accumulate_comparator:
            # summed in buffers, which a checkpoint inside an epoch keeps
            for total, parameter in zip(self._accumulated(), self.comparator.parameters(), strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad)
                parameter.grad.copy_(total)
        optimizer.step()
        return {name: value.detach() for name, value in losses.items()}

    def _train_generator(self, batch: Batch) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)[1]  # type: ignore[index]
        parameters = list(self.generator.parameters())
        losses = self.generator_losses(batch)
        with torch.autocast(self.device.type, enabled=False):
            gradients = torch.autograd.grad(losses["generator"], parameters)  # of the generator alone
        for parameter, gradient in zip(parameters, self._of_all(gradients), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return {name: value.detach() for name, value in losses.items()}

    def _of_all(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The means over all processes; the hooks of DDP do not see what is differentiated here."""
        if (processes := process_and_count()[1]) == 1:
            return gradients
        flat = torch.cat([each.flatten() for each in gradients])
        torch.distributed.all_reduce(flat)
        parts = (flat / processes).split([each.numel() for each in gradients])
        return [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]

    def _accumulated(self) -> list[Tensor]:
        return [self.get_buffer(f"accumulated_{k}") for k, _ in enumerate(self.comparator.parameters())]

    def on_train_end(self) -> None:
        super().on_train_end()
        self._steps = {}

    # ---- evaluation

    def fit_classifier(self, features: Tensor, labels: Tensor) -> None:
        """Train on the real features of seen classes and on what the generator makes of the unseen ones."""
        if self.algorithm == "linear":
            options = self.linear_options
            weights = linear_map(features, labels, self.attributes, self.seen, options.ridge, options.attribute_ridge)
            self.net.classifier.weight.copy_(weights)
            self.net.classifier.bias.zero_()
            return
        unseen = (~self.seen).nonzero().squeeze(1).repeat_interleave(self.softmax.synthetic)
        self.train_classifier(features, labels, self.generator(self.attributes[unseen]), unseen, self.softmax)
