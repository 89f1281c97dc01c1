"""``batchformer export RUN``: write the plain weights of a run and check that they load."""

import json
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.errors import UserError
from batchformer.files import write_atomically
from batchformer.runs.result import variant_of

HELP = """
batchformer export RUN [--out model.safetensors] [--ema] [--calibrated] [--trust]

Write the plain weights of a run, without BatchFormer, and prove that they load strictly into the stock model and give
the same outputs. Metadata in the file: how to build it, class names, image size, mean, std.

  --ema    the averaged weights, of a run that kept an average (model.ema, model.swad)
  --calibrated  divide the weights of the classifier by the temperature that was fitted after the training, so that the
           softmax of the outputs is calibrated
  --trust  import classes outside this package that the run folder names; only if you know where it comes from
"""


def run(args: list[str]) -> int:
    given = read_arguments(
        args, [Option("out"), Option("ema", "nothing"), Option("calibrated", "nothing"), Option("trust", "nothing")]
    )
    if len(given.positional) != 1:
        raise UserError("export needs one run folder: batchformer export runs/digits-lt/batchformer-seed0")

    from batchformer.cli.finished_run import load_run

    found = load_run(given.positional[0], trust=given.flag("trust"))
    out = Path(given.value("out") or found.folder.path / "model.safetensors")
    if note := found.note():
        print(note)
    temperature = found.temperature() if given.flag("calibrated") else None
    proof = export(found, out, averaged=given.flag("ema"), temperature=temperature)
    print(f"{out}: {proof['tensors']} tensors, {proof['parameters']:,} parameters, no trace of BatchFormer.")
    print(f"Proved: they load strict=True into a fresh {proof['builder']},")
    print(f"        and on {proof['images']} random images its outputs equal those of the trained network bit for bit.")
    print("\nLoad them anywhere:")
    print("  from safetensors.torch import load_file")
    print(f"  {proof['code']}")
    print(f"  model.load_state_dict(load_file({str(out)!r}))")
    return 0


def export(found: Any, out: Path, averaged: bool = False, temperature: float | None = None) -> dict[str, Any]:
    """Write the file; refuse to if a fresh stock model does not load it or has other outputs."""
    import torch
    from safetensors.torch import load, save

    import batchformer as bf

    task = found.task
    try:
        net = task.trained_network(averaged)
        if temperature is not None:
            task.calibrate(net, temperature)
    except UserError as problem:
        raise UserError(f"{found.folder.path}: {problem}") from problem
    inputs = task.export_inputs(found.data)
    net.to(memory_format=torch.contiguous_format)  # another memory format sums in another order
    net.requires_grad_(False)  # so do matrix products of weights that require gradients
    with torch.inference_mode():
        expected = _answers(net.eval()(*inputs))
    plain = bf.detach(net) if bf.attachment_of(net) is not None else net
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in plain.state_dict().items()}
    metadata, call, imports = task.export_notes()
    if not call:  # a task of the user's own: its run folder knows how to make it, and for which data
        call = f"load_run({str(found.folder.path)!r}, trust=True).task.plain_network()"
        imports = "from batchformer.cli.finished_run import load_run"
    content = save(weights, {**metadata, **_metadata(found)})

    fresh = task.plain_network()
    fresh.load_state_dict(load(content), strict=True)
    with torch.inference_mode():
        answers = _answers(fresh.eval().requires_grad_(False)(*inputs))
    if not all(map(torch.equal, answers, expected)):
        raise UserError(
            f"The exported weights do not reproduce the outputs of {found.folder.path}; nothing was written."
        )
    write_atomically(out, lambda file: file.write(content))
    return {
        "tensors": len(weights),
        "parameters": sum(p.numel() for p in fresh.parameters()),
        "images": len(inputs[0]),
        "builder": call,
        "code": f"{imports}; model = {call}",
    }


def _answers(outputs: Any) -> list[Any]:
    """The output tensors of a network: logits; of a detector boxes and masks too; all of a dict."""
    if isinstance(outputs, dict) and "logits" not in outputs:
        return list(outputs.values())
    named = [getattr(outputs, name, None) for name in ("logits", "pred_boxes", "pred_masks")]
    return [answer for answer in named if answer is not None] or [outputs]


def _metadata(found: Any) -> dict[str, str]:
    info = found.task.data_info
    known = {name: json.dumps(info[name]) for name in ("mean", "std") if name in info}
    for name in ("mean", "std", "image_size"):
        if hasattr(found.data, name):
            known[name] = json.dumps(getattr(found.data, name))
    classes = [str(name) for name in info.get("classes", ())]
    if classes:
        known |= {"num_classes": str(len(classes)), "class_names": json.dumps(classes)}
    return {**known, "recipe": found.config["run"]["recipe"], "variant": variant_of(found.config), "format": "pt"}
