"""``batchformer export RUN``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.errors import UserError
from batchformer.runs.atomic import write_atomically

HELP = """
batchformer export RUN [--out model.safetensors] [--ema]

Write the plain weights of a run, without BatchFormer, and prove that they load strictly into the stock model and give
the same outputs. Metadata in the file: backbone, num_classes, class_names, image_size, mean, std.

  --ema    the moving average of the weights, of a run that kept one (model.ema)
"""
_LARGEST_SIDE = 256  # of the images of the proof: detectors take 800 and more


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("out"), Option("ema", "nothing")])
    if len(given.positional) != 1:
        raise UserError("export needs one run folder: batchformer export runs/digits-lt/batchformer-seed0")

    from batchformer.cli.finished_run import load_run

    found = load_run(given.positional[0])
    out = Path(given.value("out") or found.folder.path / "model.safetensors")
    if note := found.note():
        print(note)
    proof = export(found, out, averaged=given.flag("ema"))
    print(f"{out}: {proof['tensors']} tensors, {proof['parameters']:,} parameters, no trace of BatchFormer.")
    print(f"Proved: they load strict=True into a fresh {proof['builder']},")
    print(f"        and on {proof['images']} random images its outputs equal those of the trained network bit for bit.")
    print("\nLoad them anywhere:")
    print("  from safetensors.torch import load_file")
    print(f"  {proof['code']}")
    print(f"  model.load_state_dict(load_file({str(out)!r}))")
    return 0


def export(found: Any, out: Path, averaged: bool = False) -> dict[str, Any]:
    """Write the file; refuse to if a fresh stock model does not load it or answers differently."""
    import torch
    from safetensors.torch import load, save

    import batchformer as bf

    task, data, net = found.task, found.data, found.task.net
    if averaged:
        if not hasattr(task, "ema"):
            way_out = (
                "train with --model.ema 0.9999"
                if hasattr(task, "ema_decay")
                else "only image classification (the vit-* and deit-* recipes) can keep one, with --model.ema 0.9999"
            )
            raise UserError(f"{found.folder.path} kept no moving average of its weights: {way_out}.")
        net = task.ema.module
    side = min(data.image_size, _LARGEST_SIDE)
    images = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))
    net.to(memory_format=torch.contiguous_format)  # another layout sums in another order
    net.requires_grad_(False)  # and so do products of weights that are trained, beside those of frozen ones
    with torch.inference_mode():
        expected = _answers(net.eval()(images))
    plain = net if task.attachment is None else bf.detach(net)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in plain.state_dict().items()}
    classes = len(task.class_counts)
    content = save(weights, _metadata(found, classes))

    fresh = task.plain_net(classes)
    fresh.load_state_dict(load(content), strict=True)
    with torch.inference_mode():
        answers = _answers(fresh.eval().requires_grad_(False)(images))
    if not all(map(torch.equal, answers, expected)):
        raise UserError(
            f"The exported weights do not reproduce the outputs of {found.folder.path}; nothing was written."
        )
    write_atomically(out, lambda file: file.write(content))
    builder, code = _how_to_build(task, classes)
    return {
        "tensors": len(weights),
        "parameters": sum(p.numel() for p in fresh.parameters()),
        "images": len(images),
        "builder": builder,
        "code": code,
    }


def _answers(outputs: Any) -> list[Any]:
    """What a network answers: logits, or those, boxes and masks of a detector."""
    named = [getattr(outputs, name, None) for name in ("logits", "pred_boxes", "pred_masks")]
    return [answer for answer in named if answer is not None] or [outputs]


def _metadata(found: Any, classes: int) -> dict[str, str]:
    data = found.data
    detector = getattr(found.task, "detector", None)
    kind = {} if detector is None else {"detector": detector, "detector_args": json.dumps(found.task.detector_args)}
    return {
        **kind,
        "backbone": found.task.backbone,
        "backbone_args": json.dumps(found.task.backbone_args),
        "num_classes": str(classes),
        "class_names": json.dumps(found.class_names),
        "image_size": str(data.image_size),
        "mean": json.dumps(data.mean),
        "std": json.dumps(data.std),
        "recipe": found.config["run"]["recipe"],
        "method": found.config["model"]["method"],
        "format": "pt",
    }


def _how_to_build(task: Any, classes: int) -> tuple[str, str]:
    from batchformer.models.create import OWN

    if hasattr(task, "detector"):
        arguments = "".join(f", {name}={value!r}" for name, value in task.detector_args.items())
        call = f"create_detector({task.detector!r}, num_labels={classes}, backbone={task.backbone!r}{arguments})"
        imports = "from batchformer.models import create_detector"
        if hasattr(task, "segments"):
            call, imports = f"with_mask_head({call})", f"{imports}, with_mask_head"
        return call, f"{imports}; model = {call}"
    arguments = "".join(f", {name}={value!r}" for name, value in task.backbone_args.items())
    if task.normed_classifier:
        call = f"use_normed_classifier(create_backbone({task.backbone!r}, {classes}{arguments}))"
        imports = "from batchformer.models import create_backbone, use_normed_classifier"
    elif task.backbone in OWN:
        call = f"{task.backbone}(num_classes={classes}{arguments})"
        imports = f"from batchformer.models import {task.backbone}"
    else:
        call = f"timm.create_model({task.backbone!r}, num_classes={classes}{arguments})"
        imports = "import timm"
    return call, f"{imports}; model = {call}"
