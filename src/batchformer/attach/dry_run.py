"""Dry runs: a forward of somebody's model with blank images, or with an example of theirs, that leaves no state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.contexts import dry_run_state
from batchformer.errors import UserError
from batchformer.nn.streams import count_rows, resize_rows

_SIZES = (224, 32, 64, 299, 384, 28, 96, 128, 256, 160, 192, 288, 336, 448, 512)  # a wrong one is refused at once
_PIXEL_MASK = "pixel_mask"  # how transformers' detectors are told which pixels are image
_ATTENTION_MASK, _TOKEN_TYPES = "attention_mask", "token_type_ids"  # what tokenizers give beside the token ids


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """A batch of the user's for dry runs, of models that take more than images."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Example | None:
        """From what `attach(example_inputs=)` takes."""
        if given is None:
            return None
        example = (
            cls(kwargs=given) if isinstance(given, Mapping) else cls(given if isinstance(given, tuple) else (given,))
        )
        if not count_rows([*example.args, *example.kwargs.values()]):
            raise UserError(
                "example_inputs= has no tensor with a batch axis: give a batch as the model is called with."
            )
        return example

    def rows(self, count: int) -> _Inputs:
        every = resize_rows([*self.args, *self.kwargs.values()], count)
        return tuple(every[: len(self.args)]), dict(zip(self.kwargs, every[len(self.args) :], strict=True))


def call_blank(
    model: nn.Module,
    images: int = 2,
    before_each: Callable[[], Any] | None = None,
    example: Example | None = None,
    with_graph: bool = False,
    training: bool = False,
    noise: bool = False,
) -> tuple[Any, Exception | None]:
    """What the model returns for blank images of the first size it takes, or for the example given; else None and the
    first error. It leaves no state: no gradient, no statistics, no random number drawn.

    Args:
        before_each: called before each size that is tried.
        with_graph: keep the graph of gradients.
        training: in training mode (but for BatchNorm) instead of eval mode.
        noise: images of noise, the same at each call, instead of blank ones.
    """
    problem: Exception | None = None
    with dry_run_state(model, training), torch.set_grad_enabled(with_graph):
        for args, kwargs in _examples(model, example, images) if example else _blanks(model, images, noise):
            if before_each is not None:
                before_each()
            try:
                return model(*args, **kwargs), None
            except Exception as error:  # any model's forward may raise anything for a wrong size
                problem = problem or error.with_traceback(None)  # whose frames hold the model, and it in this one
    return None, problem


def _blanks(model: nn.Module, images: int, noise: bool) -> Iterator[_Inputs]:
    if takes_text(model):
        dummies: Any = model.dummy_inputs
        device = next(model.parameters()).device
        example = Example(kwargs={name: value.to(device) for name, value in dummies.items()})
        yield from _examples(model, example, images)
        return
    weight = next(model.parameters(), torch.empty(0))
    for shape in _input_shapes(model):
        blank = torch.zeros(images, *shape, device=weight.device, dtype=weight.dtype)
        generator = torch.Generator().manual_seed(0)
        given = torch.randn(blank.shape, generator=generator).to(blank) if noise else blank
        yield (given,), blank_mask(model, blank)


def _examples(model: nn.Module, example: Example, rows: int) -> Iterator[_Inputs]:
    """The example; of sequences for transformers' models also what else they may be given later, with every row.

    The last sequence ends in the middle: masks of whole sequences are not passed on, and so would not be seen.
    """
    args, kwargs = example.rows(rows)
    main = getattr(model, "main_input_name", None)
    given = kwargs.get(main, args[0] if len(args) == 1 else None) if isinstance(main, str) else None
    if isinstance(given, Tensor) and given.ndim == 2:
        mask = torch.ones_like(given, dtype=torch.long)
        mask[-1, given.shape[1] // 2 :] = 0
        more = {_ATTENTION_MASK: mask, _TOKEN_TYPES: torch.zeros_like(mask)}
        names = argument_names(type(model).forward)
        kwargs = {**{name: value for name, value in more.items() if name in names}, **kwargs}
    yield args, kwargs


def takes_text(model: nn.Module) -> bool:
    """Whether a model of transformers takes token ids, of which it has a batch as `dummy_inputs`.

    Models of sound and video have the same `dummy_inputs`, which they do not take.
    """
    name = getattr(model, "main_input_name", None)
    return isinstance(name, str) and name in (getattr(model, "dummy_inputs", None) or {})


def _input_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Input shapes that the model declares, or the one that transformers wraps; then usual sizes."""
    inner = model._modules.get(getattr(model, "base_model_prefix", None) or "")
    shapes = [shape for part in (model, inner) if part is not None for shape in _declared_shapes(part)]
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Linear):
        shapes.append((first.in_features,))
    channels = first.in_channels if isinstance(first, nn.Conv2d) else 3
    return shapes + [(channels, s, s) for s in _SIZES if (channels, s, s) not in shapes]


def _declared_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
    # a ViT made for another size than its weights
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    shapes = [(3, *built)] if isinstance(built, tuple) else _shape_in_config(model)
    return shapes + ([tuple(size)] if size else [])


def _shape_in_config(model: nn.Module) -> list[tuple[int, ...]]:
    """The input shape in the configuration of a model of transformers, where it has one."""
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if isinstance(size, int):
        size = (size, size)
    return [(channels, *size)] if isinstance(size, tuple | list) and isinstance(channels, int) else []


def argument_names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def takes_padded_images(model: nn.Module) -> bool:
    """Whether a model takes images of several sizes in one batch, as every detector of transformers does."""
    return _PIXEL_MASK in argument_names(type(model).forward)


def blank_mask(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """For a dry run: the last image is half as wide as the canvas, because masks of whole images are not passed on."""
    if not takes_padded_images(model):
        return {}
    mask = torch.ones(len(images), *images.shape[-2:], dtype=torch.long, device=images.device)
    mask[-1, :, images.shape[-1] // 2 :] = 0
    return {_PIXEL_MASK: mask}
