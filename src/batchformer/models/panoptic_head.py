"""DETR's mask head on a trained detector: building it, loading and freezing the detector, masks of matched queries."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.errors import UserError, reason_of
from batchformer.nn import BatchFormer

_MAPS = 4  # feature maps of the backbone that the head reads, the smallest through the encoder
_MODULE = "batchformer."  # the prefix of the module's keys while it is attached


def with_mask_head(detector: Any, **config: Any) -> Any:
    """`DetrForSegmentation` around this detector (not a copy); the head is initialised as published.

    DETR (section 4.4): an attention of every query over the encoder's output gives maps for each head, which a small
    FPN brings to a quarter of the image's size, one mask for each query. `config` are fields of the detector's
    configuration that the losses of the masks read: `mask_loss_coefficient`, `dice_loss_coefficient` (1 and 1 as
    published), `auxiliary_loss`.
    """
    import transformers

    from batchformer.models.detector_loss import segmentation_loss

    if not isinstance(detector, transformers.DetrForObjectDetection):
        raise UserError(
            f"the mask head needs a DETR, not a {type(detector).__name__}: train the detector with model.detector=detr."
        )
    maps = detector.model.backbone.intermediate_channel_sizes
    if len(maps) != _MAPS:
        raise UserError(
            f"the mask head reads {_MAPS} feature maps, but the backbone of this detector gives {len(maps)}."
        )
    heads, width = detector.config.encoder_attention_heads, detector.config.d_model
    if (width + heads) % 8:
        raise UserError(
            f"the mask head needs d_model + encoder_attention_heads to divide by 8, not {width} + {heads}: choose "
            f"others for the detector."
        )
    for name, value in config.items():
        setattr(detector.config, name, value)
    with torch.random.fork_rng(devices=[]):  # the detector it builds is discarded and must not advance the RNG
        network = transformers.DetrForSegmentation(detector.config)
    network.detr = detector
    network.loss_function = segmentation_loss
    _begin(network)
    return network


def _begin(network: Any) -> None:
    """The head as published: Kaiming (a = 1) for its convolutions, Xavier for its attention, all biases 0."""
    for part in (network.mask_head, network.bbox_attention):
        for module in part.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            else:
                continue
            assert module.bias is not None
            nn.init.zeros_(module.bias)


def load_detector(network: Any, weights: Mapping[str, Tensor], source: str, with_module: bool) -> None:
    """Put the weights of a trained detector below the head; the module's, if it is attached, too.

    `with_module`: the module is attached and must be trained with the detector; a detector that was trained without
    it is refused, because its module would stay as random as it is.
    """
    module = {key: value for key, value in weights.items() if key.startswith(_MODULE)}
    plain = {key: value for key, value in weights.items() if not key.startswith(_MODULE)}
    if with_module and not module:
        raise UserError(
            f"the detector in {source} was trained without BatchFormerV2, so a frozen module would stay random: set "
            f"model.method=baseline, or give one trained with model.method=batchformer (--init-from detector=RUN)."
        )
    if any(key.startswith("mask_head.") for key in plain):
        raise UserError(
            f"{source} is a run with a mask head already: give the detector of the first stage (--init-from "
            f"detector=RUN), or resume that run (--resume)."
        )
    own, name = network.detr.state_dict(), "class_labels_classifier.bias"
    if name in plain and len(plain[name]) != len(own[name]):
        raise UserError(
            f"the detector in {source} has {len(plain[name]) - 1} categories and the data have {len(own[name]) - 1}: "
            f"the mask head needs a detector of all categories, things and stuff."
        )
    _check_fit(own, plain, source)
    network.detr.load_state_dict(plain)
    if with_module:
        held = network.get_submodule(_MODULE.rstrip("."))
        _check_fit(held.state_dict(prefix=_MODULE), module, source)
        held.load_state_dict({key.removeprefix(_MODULE): value for key, value in module.items()})


def read_pretrained(source: Path, kind: Any = None) -> dict[str, Tensor]:
    """The weights in a folder of `save_pretrained`, those of an attached module too.

    Read by transformers, because it saves under other names than its models have; the module's keys, which it skips,
    are added. `kind`: the class of the detector, DETR by default.
    """
    import transformers
    from safetensors.torch import load_file

    kind = kind or transformers.DetrForObjectDetection
    try:
        detector = kind.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as problem:
        raise UserError(
            f"--init-from: transformers cannot read a {kind.__name__} from {source}: {reason_of(problem)}."
        ) from problem
    written = (pair for file in sorted(source.glob("model*.safetensors")) for pair in load_file(file).items())
    return {**detector.state_dict(), **{key: value for key, value in written if key.startswith(_MODULE)}}


def freeze_detector(network: Any) -> None:
    """No gradient for anything but the head, the module's parameters included (paper, section 4.3)."""
    network.requires_grad_(False)
    for parameter in head_parameters(network):
        parameter.requires_grad_(True)


def quiet_detector(network: Any) -> None:
    """Put a frozen detector in eval mode (no dropout, no updates of statistics), but keep BatchFormer's training flag.

    DETR's released code leaves the dropout of the frozen detector on while the head is trained.
    """
    training = network.training
    network.detr.eval()
    for module in network.modules():
        if isinstance(module, BatchFormer):
            module.eval()
            module.training = training


def head_parameters(network: Any) -> Iterator[nn.Parameter]:
    yield from network.bbox_attention.parameters()
    yield from network.mask_head.parameters()


@contextmanager
def only_matched_masks(network: Any, labels: Sequence[dict[str, Tensor]]) -> Iterator[None]:
    """Context: a `DetrForSegmentation` in training computes only masks of queries matched with an object, others are 0.

    DETR computes a mask for every one of its 100 queries, and its mask losses read those of the few that are matched
    with an object of the image. Which they are is known from classes and boxes, before the head. `labels` are those of
    the images; with two streams they are matched with both.
    """
    wanted: list[Bool[Tensor, "rows queries"]] = []

    def match(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        queries = args[0] if args else kwargs["query_states"]
        wanted.append(_matched(network, queries.detach(), labels))

    head = network.mask_head
    head.__dict__["forward"] = lambda **given: _some_masks(head, wanted.pop(), **given)
    try:
        with network.bbox_attention.register_forward_pre_hook(match, with_kwargs=True):
            yield
    finally:
        del head.__dict__["forward"]


def _check_fit(own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    wrong = sorted(own.keys() ^ found.keys()) or [k for k in own if own[k].shape != found[k].shape]
    if wrong:
        there = "has another shape" if wrong[0] in own and wrong[0] in found else "is only on one side"
        raise UserError(
            f"the detector in {source} is another one than this recipe describes ({wrong[0]} {there}, {len(wrong)} "
            f"such): give model.backbone, model.detector_args and model.batchformer as it was trained with."
        )


@torch.no_grad()
def _matched(
    network: Any, queries: Float[Tensor, "rows queries dim"], labels: Sequence[dict[str, Tensor]]
) -> Bool[Tensor, "rows queries"]:
    """The matched queries, by the loss's matcher on the same predictions, in the loss's precision."""
    from batchformer.models.detector_loss import full, softmax_matcher

    rows = len(queries)
    outputs = {
        "logits": full(network.detr.class_labels_classifier(queries)),
        "pred_boxes": full(network.detr.bbox_predictor(queries).sigmoid()),
    }
    with torch.autocast(queries.device.type, enabled=False):
        matches = softmax_matcher(network.config)(outputs, list(labels) * (rows // len(labels)))
    found = torch.zeros(queries.shape[:2], dtype=torch.bool)
    for row, (source, _) in enumerate(matches):
        found[row, source] = True
    if not found.any():  # a batch without objects: the head still runs, as every process must run it
        found[0, 0] = True
    return found.to(queries.device)


def _some_masks(
    head: Any,
    wanted: Bool[Tensor, "rows queries"],
    features: Float[Tensor, "rows dim height width"],
    attention_masks: Float[Tensor, "rows queries heads height width"],
    fpn_features: Sequence[Float[Tensor, "rows _ _ _"]],
) -> Float[Tensor, "rows*queries 1 _ _"]:
    row, query = wanted.nonzero(as_tuple=True)
    masks = type(head).forward(
        head,
        features=features[row],
        attention_masks=attention_masks[row, query][:, None],
        fpn_features=[each[row] for each in fpn_features],
    )
    every = masks.new_zeros(wanted.numel(), *masks.shape[1:])
    return every.index_copy(0, row * wanted.shape[1] + query, masks)
