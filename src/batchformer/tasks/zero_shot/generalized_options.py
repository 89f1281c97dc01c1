"""Options of generalized zero-shot learning; the defaults are those of CE-GZSL for CUB."""

from dataclasses import dataclass
from typing import Literal

from batchformer.nn.encoder import Norm
from batchformer.training.optimizers import refuse_bad_betas, refuse_negative_rates
from batchformer.training.options import ModuleOptions, refuse_below


@dataclass
class EmbeddingModuleOptions(ModuleOptions):
    """The module, on the embedding of a batch; critic and generator stay per sample. The appendix names no place.

    Args:
        dropout: on attention, MLP and residual branches.
        norm: "post" as published, "pre", or "relative".
        rows: "real": embeddings of real features in the critic's step; "both": also of synthetic features in the
            generator's step.
    """

    dropout: float = 0.5
    norm: Norm = "post"
    rows: Literal["real", "both"] = "real"


@dataclass
class GeneratorOptions:
    """Generator and critic, trained as in WGAN-GP.

    Args:
        noise_dim: width of the noise; null: the number of attributes.
        width: hidden layer of the generator.
        critic_width: hidden layer of the critic.
        critic_steps: steps of the critic for each step of the generator.
        penalty: weight of the gradient penalty.
        classification_weight: f_clswgan: weight of the cross entropy of generated features, by a softmax classifier
            that was trained on real ones.
    """

    noise_dim: int | None = None
    width: int = 4096
    critic_width: int = 4096
    critic_steps: int = 5
    penalty: float = 10.0
    classification_weight: float = 0.01

    def check(self) -> None:
        refuse_below("generator", self, 1, "noise_dim", "width", "critic_width", "critic_steps")
        refuse_below("generator", self, 0, "penalty", "classification_weight")


@dataclass
class ContrastOptions:
    """Embedding and contrast of CE-GZSL.

    Args:
        embedding_dim: width of the embedding, which the final classifier reads.
        projection_dim: width of its projection, which instances are contrasted in.
        comparator_width: hidden layer of the comparator of rows and classes.
        instance_temperature: of the contrast between instances.
        class_temperature: of the contrast between classes.
        instance_weight: weight of the former in the generator's step; in the critic's it is 1.
        class_weight: weight of the latter in the generator's step; in the critic's it is 1.
        accumulate_comparator: as released, the gradient of the comparator is that of all critic's steps since the
            beginning of the epoch.
    """

    embedding_dim: int = 2048
    projection_dim: int = 512
    comparator_width: int = 2048
    instance_temperature: float = 0.1
    class_temperature: float = 0.1
    instance_weight: float = 0.001
    class_weight: float = 0.001
    accumulate_comparator: bool = False

    def check(self) -> None:
        refuse_below("contrast", self, 1, "embedding_dim", "projection_dim", "comparator_width")
        refuse_below("contrast", self, 1e-6, "instance_temperature", "class_temperature")
        refuse_below("contrast", self, 0, "instance_weight", "class_weight")


@dataclass
class SoftmaxOptions:
    """The final classifier, trained before every evaluation on all real training features and synthetic unseen ones.

    Args:
        synthetic: features generated for each unseen class.
        epochs: passes over them.
        batch_size: null: as many as `synthetic`, as released.
        lr: Adam's learning rate, with betas 0.5 and 0.999.
    """

    synthetic: int = 100
    epochs: int = 25
    batch_size: int | None = None
    lr: float = 1e-3

    def check(self) -> None:
        refuse_below("softmax", self, 1, "synthetic", "epochs", "batch_size")
        refuse_below("softmax", self, 0, "lr")


@dataclass
class LinearMapOptions:
    """ESZSL, the linear map between features and attributes.

    Args:
        ridge: weight of the penalty on the side of the features.
        attribute_ridge: weight of the penalty on the side of the attributes.
    """

    ridge: float = 100.0
    attribute_ridge: float = 1.0

    def check(self) -> None:
        refuse_below("linear", self, 1e-9, "ridge", "attribute_ridge")


@dataclass
class AdamOptions:
    """Adam of the critic's side and of the generator.

    Args:
        lr: learning rate.
        betas: Adam's two.
        decay: the learning rate is multiplied by this after every `decay_epochs`.
        decay_epochs: see `decay`.
        module_lr_factor: the module's learning rate is this times lr.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.5, 0.999)
    decay: float = 0.99
    decay_epochs: int = 100
    module_lr_factor: float = 1.0

    def check(self) -> None:
        refuse_negative_rates(self)
        refuse_bad_betas(self.betas)
        refuse_below("optimizer", self, 0, "decay")
        refuse_below("optimizer", self, 1, "decay_epochs")
