"""The plain network of a run as weights, as an ONNX model or as a torch.export program, proved equal and written."""

import copy
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError, reason_of
from batchformer.files import refuse_to_replace, refuse_unwritable, write_atomically
from batchformer.runs.result import variant_of

_IMAGES = 4
#: largest difference that is allowed, as a part of the largest output: in float32 other kernels sum in another order
TOLERANCE = {False: 1e-4, True: 2e-2}


@dataclass
class Plain:
    """The plain network of a run with its trained weights, and what the trained network answers to some inputs."""

    network: nn.Module
    inputs: tuple[Any, ...]
    expected: list[Tensor]
    inputs_are: str
    call: str
    imports: str
    metadata: dict[str, str]

    def with_proof(self, difference: float) -> dict[str, str]:
        """The metadata of a file that was checked."""
        return {**self.metadata, "checked_on": self.inputs_are, "max_difference": repr(difference)}

    def difference(self, answers: Sequence[Tensor], half: bool, what: str) -> float:
        """The largest difference to the trained network; refused where it is more than rounding."""
        pairs = list(zip(answers, self.expected, strict=True))
        found = max(float((answer.float() - expected).abs().max()) for answer, expected in pairs)
        largest = max(float(expected.abs().max()) for _, expected in pairs)
        if not found <= TOLERANCE[half] * max(1.0, largest):
            raise UserError(
                f"{what} does not reproduce the outputs of the trained network: they differ by {found:.3g} where the "
                f"largest is {largest:.3g}; nothing was written."
            )
        return found


@dataclass(frozen=True)
class Proof:
    """What was written and how it was checked."""

    tensors: int
    parameters: int
    sentence: str
    code: list[str]
    difference: float


def export(
    found: Any, out: Path, kind: str = "safetensors", *, half: bool = False, averaged: bool = False,
    temperature: float | None = None, license: str | None = None,
) -> Proof:  # fmt: skip
    """Write the network of a run (`load_run`); nothing is written if it does not give the same outputs when loaded."""
    plain = plain_network_of(found, averaged, temperature)
    if kind == "folder":
        from batchformer.cli.export_folder import write_folder

        sentence, code, difference = write_folder(found, plain, out, half, license)
    else:
        refuse_unwritable(out)
        refuse_to_replace(out, lambda content: b"recipe" in content)  # of the metadata
        content, sentence, code, difference = _WRITERS[kind](plain, half, out)
        write_atomically(out, lambda file: file.write(content))
    weights = plain.network.state_dict()
    parameters = sum(p.numel() for p in plain.network.parameters())
    return Proof(len(weights), parameters, sentence, code, difference)


def plain_network_of(found: Any, averaged: bool = False, temperature: float | None = None) -> Plain:
    """A fresh stock network with the weights of the run: it loads them strictly and has its outputs bit for bit.

    With a `temperature` all logits are divided by it.
    """
    task = found.task
    try:
        net = task.trained_network(averaged)
        if temperature is not None:
            task.calibrate(net, temperature)
    except UserError as problem:
        raise UserError(f"{found.folder.path}: {problem}") from problem
    inputs, inputs_are = _inputs(found)
    if temperature is not None:
        inputs_are += f", all logits divided by the temperature {temperature:.2f},"
    net.to(memory_format=torch.contiguous_format)  # another memory format sums in another order
    net.requires_grad_(False)  # so do matrix products of weights that require gradients
    with torch.inference_mode():
        expected = answers_of(net.eval()(*inputs))
    plain = bf.detach(net) if bf.attachment_of(net) is not None else net
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in plain.state_dict().items()}
    notes, call, imports = task.export_notes()
    if not call:  # a task without code for it: its run folder knows how to make it, and for which data
        trust = ", trust=True" if found.config["run"].get("code") else ""
        call = f"load_run({str(found.folder.path)!r}{trust}).task.plain_network()"
        imports = "from batchformer.cli.finished_run import load_run"
    fresh = task.plain_network()
    fresh.load_state_dict(weights, strict=True)
    fresh.eval().requires_grad_(False)
    with torch.inference_mode():
        answers = answers_of(fresh(*inputs))
    if not all(map(torch.equal, answers, expected)):
        raise UserError(
            f"The exported weights do not reproduce the outputs of {found.folder.path}; nothing was written."
        )
    clones = [answer.clone() for answer in expected]  # made in inference mode
    return Plain(fresh, inputs, clones, inputs_are, call, imports, {**notes, **_metadata(found)})


def answers_of(outputs: Any) -> list[Tensor]:
    """The output tensors of a network: logits; of a detector boxes and masks too; all of a dict."""
    if isinstance(outputs, dict) and "logits" not in outputs:
        return list(outputs.values())
    named = [getattr(outputs, name, None) for name in ("logits", "pred_boxes", "pred_masks")]
    return [answer for answer in named if answer is not None] or [outputs]


class _Answers(nn.Module):
    """A network whose output is a tuple of tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(answers_of(self.network(*inputs)))


def _inputs(found: Any) -> tuple[tuple[Any, ...], str]:
    """Images of the first evaluation set; where the data are not there or are no images, random inputs."""
    drawn = found.task.export_inputs(found.data)
    if len(drawn) == 1 and isinstance(drawn[0], Tensor) and drawn[0].ndim == 4:
        try:
            found.data.setup("fit")
            loaders = found.data.val_dataloader()
            batch = as_batch(next(iter(loaders[0] if isinstance(loaders, list | tuple) else loaders)))
        except (UserError, OSError, StopIteration, KeyError, TypeError):
            batch = {}
        images = batch.get("images")
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] == drawn[0].shape[1]:
            images = images[:_IMAGES].float().contiguous().clone()
            return (images,), f"{len(images)} test images"
    return drawn, f"{len(drawn[0])} random {'images' if drawn[0].ndim == 4 else 'inputs'}"


def _in(plain: Plain, half: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """The network and its inputs in the precision of the file."""
    if not half:
        return plain.network, plain.inputs
    inputs = tuple(x.half() if isinstance(x, Tensor) and x.is_floating_point() else x for x in plain.inputs)
    return copy.deepcopy(plain.network).half(), inputs


def _safetensors(plain: Plain, half: bool, out: Path) -> tuple[bytes, str, list[str], float]:
    from safetensors.torch import load, save

    network, inputs = _in(plain, half)
    weights = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in network.state_dict().items()
    }
    content = save(weights, plain.metadata)  # cloned: heads of a detector may share theirs, which the format refuses
    network.load_state_dict(load(content), strict=True)
    with torch.inference_mode():
        difference = plain.difference(answers_of(network(*inputs)), half, "the float16 network")
    content = save(load(content), plain.with_proof(difference))
    sentence = f"they load strict=True into a fresh {plain.call},\n"
    sentence += f"        and on {plain.inputs_are} its outputs {differ(difference)}."
    made = f"model = {plain.call}{'.half()' if half else ''}"
    loads = f"model.load_state_dict(load_file({str(out)!r}))"
    return content, sentence, ["from safetensors.torch import load_file", f"{plain.imports}; {made}", loads], difference


def _pt2(plain: Plain, half: bool, out: Path) -> tuple[bytes, str, list[str], float]:
    network, inputs = _in(plain, half)
    program, batch = _with_free_batch(
        inputs, lambda shapes: torch.export.export(_Answers(network).eval(), inputs, dynamic_shapes=shapes)
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    difference = _compare(plain, inputs, lambda given: loaded(*given), half, batch, "the program of torch.export")
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"metadata.json": json.dumps(plain.with_proof(difference))})
    sentence = f"loaded again, its outputs on {plain.inputs_are} {differ(difference)}{_batch_words(batch)}."
    code = ["import torch", f"model = torch.export.load({str(out)!r}).module()"]
    return file.getvalue(), sentence, [*code, f"outputs = model(images)   # {_shape(inputs)}"], difference


def _onnx(plain: Plain, half: bool, out: Path) -> tuple[bytes, str, list[str], float]:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as missing:
        install = 'pip install "batchformer[onnx]"'
        raise UserError(f"--format onnx needs {missing.name}; install it with: {install}") from missing
    network, inputs = _in(plain, half)
    names = ["images", *(f"input_{number}" for number in range(1, len(inputs)))]
    program, batch = _with_free_batch(
        inputs,
        lambda shapes: torch.onnx.export(
            _Answers(network).eval(), inputs, dynamo=True, dynamic_shapes=shapes, verbose=False, input_names=names
        ),
    )
    model = program.model_proto
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=providers)
    # the exporter has several ways to trace, some of which fix the size in spite of `dynamic_shapes`
    batch = batch and not any(isinstance(given.shape[0], int) for given in session.get_inputs() if given.shape)

    def answer(given: tuple[Any, ...]) -> list[Tensor]:
        fed = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, fed)]

    difference = _compare(plain, inputs, answer, half, batch, "the ONNX model")
    for key, value in plain.with_proof(difference).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    content = model.SerializeToString()
    sentence = f"in onnxruntime its outputs on {plain.inputs_are} {differ(difference)}{_batch_words(batch)}."
    code = ["import onnxruntime", f"session = onnxruntime.InferenceSession({str(out)!r})"]
    return (
        content,
        sentence,
        [*code, f"outputs = session.run(None, {{'images': images}})   # {_shape(inputs)}"],
        difference,
    )


_WRITERS: dict[str, Callable[[Plain, bool, Path], tuple[bytes, str, list[str], float]]] = {
    "safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx,
}  # fmt: skip


def _with_free_batch(inputs: tuple[Any, ...], trace: Callable[[Any], Any]) -> tuple[Any, bool]:
    """What `trace` makes, and whether for any batch size: some networks fix the size they are traced with."""
    free = {"inputs": tuple({0: torch.export.Dim("batch")} if isinstance(x, Tensor) else None for x in inputs)}
    try:
        return trace(free), True
    except Exception:  # torch and the exporter have no common class for what they cannot trace
        pass
    try:
        return trace(None), False
    except Exception as problem:
        raise UserError(f"the network cannot be traced for this format ({reason_of(problem)}).") from problem


def _compare(
    plain: Plain, inputs: tuple[Any, ...], answer: Callable[[tuple[Any, ...]], Sequence[Tensor]], half: bool,
    free_batch: bool, what: str,
) -> float:  # fmt: skip
    with torch.inference_mode():
        difference = plain.difference(list(answer(inputs)), half, what)
        if free_batch and len(inputs[0]) > 1:
            fewer = tuple(x[:-1] if isinstance(x, Tensor) else x for x in inputs)
            rows = copy.copy(plain)
            rows.expected = [each[:-1] for each in plain.expected]
            difference = max(difference, rows.difference(list(answer(fewer)), half, what))
    return difference


def differ(difference: float) -> str:
    if difference == 0:
        return "equal those of the trained network bit for bit"
    return f"differ from those of the trained network by at most {difference:.2g}"


def _batch_words(free: bool) -> str:
    return ", at two batch sizes" if free else "; its batch size is fixed"


def _shape(inputs: tuple[Any, ...]) -> str:
    images = inputs[0]
    return f"{tuple(images.shape)}, {str(images.dtype).removeprefix('torch.')}"


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
