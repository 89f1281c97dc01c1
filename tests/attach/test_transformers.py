"""transformers' image classifiers beyond the behaviour suite: labels inside `forward`, its Trainer, its files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from ..behaviour.cases import BEYOND_CASES, Case, without_randomness
from . import small_detectors

transformers = pytest.importorskip("transformers")
CLASSES = 5
TOKENS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
STAGES = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
KINDS = {
    "ViT": (TOKENS, "vit.layers.0"),
    "DeiT": (TOKENS, "deit.layers.0"),
    "Dinov2": (TOKENS, "dinov2.encoder.layer.0"),
    "Swin": (WINDOWS, "swin.encoder.layers.0"),
    "ConvNext": (STAGES, "convnext.encoder.stages.0"),
}


def build(kind: str = "ViT", **config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **{**KINDS[kind][0], **config})
        return getattr(transformers, f"{kind}ForImageClassification")(settings)


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(count) % CLASSES


def mean_of_streams(attachment: bf.Attachment, logits: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(attachment.plain(logits), labels) + F.cross_entropy(attachment.related(logits), labels)) / 2


@pytest.mark.parametrize("inside", [False, True], ids=["classifier", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_labels_given_to_the_model_follow_the_streams(kind: str, inside: bool) -> None:
    model, (images, labels) = build(kind).train(), batch()
    attachment = bf.attach(model, heads=2, dropout=0.0, **({"after": KINDS[kind][1]} if inside else {}))
    for outputs in (model(images, labels), model(labels=labels, pixel_values=images)):
        assert outputs.logits.shape == (8, CLASSES)
        torch.testing.assert_close(outputs.loss, mean_of_streams(attachment, outputs.logits, labels))
    as_tuple = model(images, labels, return_dict=False)
    assert (as_tuple[0].ndim, len(as_tuple[1])) == (0, 8)
    outputs = model.eval()(images, labels)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))


def test_a_place_that_gives_no_tensor_is_refused() -> None:
    with pytest.raises(UserError, match="'vit' returns neither a tensor nor"):
        bf.attach(build(), after="vit")


def test_the_number_of_labels_by_which_the_trainer_divides_counts_both_streams() -> None:
    model, (images, labels) = build().train(), batch()
    attachment = bf.attach(model, blocks=[0], heads=2, dropout=0.0)
    for count in (4, torch.tensor(4)):
        outputs = model(images, labels=labels, num_items_in_batch=count)
        torch.testing.assert_close(outputs.loss, mean_of_streams(attachment, outputs.logits, labels))


def test_labels_that_were_repeated_already_and_those_of_one_stream_stay() -> None:
    model, (images, labels) = build().train(), batch()
    attachment = bf.attach(model, blocks=[0], heads=2, dropout=0.0)
    assert torch.equal(model(images, torch.cat([labels, labels])).loss, model(images, labels).loss)
    with attachment.disabled():
        assert len(model(images, labels).logits) == 4
    attachment.detach()
    bf.attach(model, blocks=[0], heads=2, streams="split")
    assert len(model(images, labels).logits) == 4


@pytest.mark.traced
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older ones trace a mask of the plain rows")
def test_compiled_code_sees_the_labels_of_both_streams() -> None:
    model, (images, labels) = build().train(), batch()
    fast = torch.compile(model, backend="eager")
    assert len(fast(images, labels=labels).logits) == 4
    attachment = bf.attach(model, blocks=[0], heads=2, dropout=0.0)
    outputs = fast(images, labels=labels)
    torch.testing.assert_close(outputs.loss, mean_of_streams(attachment, outputs.logits, labels))


def test_hidden_states_and_attentions_come_through_and_have_plain_rows() -> None:
    model, twin, (images, labels) = build().train(), build().train(), batch()
    for one in (model, twin):
        one.set_attn_implementation("eager")  # which keeps the weights
    attachment = bf.attach(model, blocks=[0], heads=2, dropout=0.0)
    asked = {"labels": labels, "output_hidden_states": True, "output_attentions": True}
    outputs, expected = model(images, **asked), twin(images, **asked)
    assert [len(state) for state in outputs.hidden_states] == [4, 8, 8]
    plain = attachment.plain(outputs)
    assert type(plain) is type(expected)
    torch.testing.assert_close(
        [plain.logits, *plain.hidden_states, *plain.attentions],
        [expected.logits, *expected.hidden_states, *expected.attentions],
    )


def test_a_model_of_ones_own_with_labels_in_its_forward_is_served_as_well() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor, weight: float = 1.0, labels: list[int] | None = None) -> dict[str, Tensor]:
            logits = self.fc(x)
            return {"loss": weight * F.cross_entropy(logits, torch.tensor(labels)), "logits": logits}

    model = Own().train()
    attachment = bf.attach(model, before="fc", heads=2, dropout=0.0)
    labels = [0, 1, 2, 3]
    outputs = model(torch.randn(4, 6), 1.0, labels)
    torch.testing.assert_close(outputs["loss"], mean_of_streams(attachment, outputs["logits"], torch.tensor(labels)))


@pytest.mark.parametrize(
    ("kind", "paths"),
    [("ViT", ("vit.layers.0", "vit.layers.1")), ("Dinov2", ("dinov2.encoder.layer.0", "dinov2.encoder.layer.1"))],
)
def test_blocks_have_their_place(kind: str, paths: tuple[str, ...]) -> None:
    assert bf.attach(build(kind), blocks="all", heads=2).paths == paths


def beyond(name: str) -> Case:
    return next(case for case in BEYOND_CASES if name in case.name)


@pytest.mark.parametrize("name", ["DistilBert", "DistilBertForSequenceClassification-after", "VideoMAE", "Segformer"])
def test_labels_of_texts_videos_and_pixels_follow_the_streams(name: str) -> None:
    case = beyond(name)
    model = without_randomness(case.model()).train()
    attachment = case.attach(model, dropout=0.0)
    labels = torch.arange(3) if name != "Segformer" else torch.randint(7, (3, 64, 64))
    outputs = model(case.images(), labels=labels)
    assert len(outputs.logits) == 2 * len(labels)
    logits = [attachment.plain(outputs).logits, attachment.related(outputs).logits]
    if name == "Segformer":
        logits = [F.interpolate(one, labels.shape[-2:], mode="bilinear", align_corners=False) for one in logits]
    torch.testing.assert_close(outputs.loss, sum(F.cross_entropy(one, labels) for one in logits) / 2)


@pytest.mark.parametrize("name", ["BertForSequenceClassification-after", "DistilBert", "Wav2Vec2"])
def test_after_a_layer_sequences_may_be_padded_as_tokenizers_do(name: str) -> None:
    case = next(case for case in BEYOND_CASES if name in case.name and case.places)
    model = without_randomness(case.model()).train()
    mask = torch.ones(3, *case.shape, dtype=torch.long)
    mask[1, case.shape[0] // 4 :] = 0
    batch = {model.main_input_name: case.images(), "attention_mask": mask}
    if name.startswith("Bert"):
        batch["token_type_ids"] = mask
    wanted = model(**batch).logits
    attachment = case.attach(model, dropout=0.0)
    found = model(**batch).logits
    torch.testing.assert_close(attachment.plain(found), wanted)
    assert len(attachment.related(found)) == 3
    assert len(model(case.images()).logits) == 6  # none is padded


def test_padding_of_texts_can_be_left_out_of_the_attention_over_the_batch() -> None:
    model = without_randomness(beyond("Bert").model()).train()
    bf.attach(model, after="bert.encoder.layer.0", mask_padding=True, dropout=0.0)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 6:] = 0
    texts = beyond("Bert").images()
    others = torch.where(mask == 1, texts, 2)
    assert torch.equal(*(model(one, attention_mask=mask).logits for one in (texts, others)))


def test_a_text_model_that_does_not_take_its_dummy_inputs_is_asked_for_an_example() -> None:
    model = beyond("Bert").model()
    model.bert.embeddings.word_embeddings = nn.Embedding(3, 16)  # their token ids go up to 7
    with pytest.raises(UserError, match=r"did not take its own dummy_inputs.*example_inputs="):
        bf.attach(model, after="bert.encoder.layer.0")
    bf.attach(model, after="bert.encoder.layer.0", example_inputs={"input_ids": torch.tensor([[0, 1], [2, 1]])})


def test_a_layer_that_is_skipped_at_random_is_an_error() -> None:
    case = beyond("Wav2Vec2ForSequenceClassification-after")
    model = case.model().train()
    case.attach(model)
    model.config.layerdrop = 1.0
    with pytest.raises(UserError, match=r"without calling the layer.*layerdrop"):
        model(case.images())


def test_a_timm_model_inside_transformers_is_found() -> None:
    arguments = {"img_size": 16, "depth": 1, "embed_dim": 24}
    config = transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", num_labels=CLASSES, model_args=arguments
    )
    model, (images, labels) = transformers.TimmWrapperForImageClassification(config).train(), batch()
    for places, paths in (({}, ("timm_model.head",)), ({"blocks": [0]}, ("timm_model.blocks.0",))):
        attachment = bf.attach(model, heads=3, dropout=0.0, **places)
        outputs = model(images, labels=labels)
        assert attachment.paths == paths
        torch.testing.assert_close(outputs.loss, mean_of_streams(attachment, outputs.logits, labels))
        attachment.detach()


def trainer(model: nn.Module, folder: Path, steps: int = 4, **arguments: Any) -> Any:
    images, labels = batch(12)
    data = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]
    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **arguments},
    )
    return transformers.Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True], ids=["classifier", "inside"])
def test_the_trainer_trains_the_module_and_leaves_a_stock_model(kind: str, inside: bool, tmp_path: Path) -> None:
    model = build(kind)
    attachment = bf.attach(model, heads=2, **({"after": KINDS[kind][1]} if inside else {}))
    started = [p.clone() for p in (*attachment.parameters(), *model.classifier.parameters())]
    training = trainer(model, tmp_path / "run", gradient_checkpointing=model.supports_gradient_checkpointing)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert 0.5 < losses[0] < 1.8 * math.log(CLASSES)  # the mean of both streams at the start, not their sum
    assert all(math.isfinite(loss) for loss in losses)
    trained = (*attachment.parameters(), *model.classifier.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(started, trained, strict=True))
    evaluated = training.evaluate()["eval_loss"]
    attachment.detach()
    model.save_pretrained(tmp_path / "trained")
    build(kind).save_pretrained(tmp_path / "stock")
    ours, stock = (load_file(tmp_path / folder / "model.safetensors") for folder in ("trained", "stock"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in stock.items()}
    loaded, problems = type(model).from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(problems.values())
    assert trainer(loaded, tmp_path / "again").evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-5)


def test_a_loss_of_ones_own_is_given_to_the_trainer_and_counts_by_its_part_of_the_step(tmp_path: Path) -> None:
    """As docs/attach.md writes it, over two accumulated batches: what the model computes by itself from its labels."""
    criterion, rows = bf.TwoStreamLoss(nn.CrossEntropyLoss()), []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        rows.append(len(outputs["logits"]))
        mean = criterion(outputs["logits"], labels)
        return mean if num_items_in_batch is None else mean * len(labels) / num_items_in_batch

    logged, trained = [], []
    for own in (None, loss):
        model = build()
        torch.manual_seed(0)
        bf.attach(model, blocks=[0], heads=2, dropout=0.0)
        training = trainer(model, tmp_path, steps=2, gradient_accumulation_steps=2, optim="sgd")
        training.compute_loss_func = own
        training.train()
        logged.append([entry["loss"] for entry in training.state.log_history if "loss" in entry])
        trained.append(list(model.parameters()))
    assert rows == [8, 8, 8]  # the second step has the one batch that is left
    assert logged[0] == pytest.approx(logged[1], rel=1e-3)
    torch.testing.assert_close(trained[0], trained[1])


def test_the_trainer_goes_on_from_a_checkpoint_of_an_attached_model(tmp_path: Path) -> None:
    """With ConvNeXt: of others transformers' own resume finds no weights (the test below)."""
    whole, resumed = build("ConvNext"), build("ConvNext")
    for model in (whole, resumed):
        torch.manual_seed(0)
        bf.attach(model, heads=2)
    trainer(whole, tmp_path, save_strategy="steps", save_steps=2).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ViT", build),
        ("Swin", lambda: build("Swin")),
        ("DINOv2", lambda: build("Dinov2")),
        ("the DETR family", small_detectors.BUILD["detr"]),
        ("the DETR family", small_detectors.BUILD["deformable"]),
    ],
)
def test_models_that_transformers_cannot_resume_are_listed(name: str, make: Any, tmp_path: Path) -> None:
    """Their files have other names than their weights, which the Trainer does not translate back (5.18 to 5.22)."""
    if name == "DINOv2" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("older versions name the weights of DINOv2 alike in files and models")
    model = make()
    model.save_pretrained(tmp_path)
    assert not set(model.state_dict()) <= set(load_file(tmp_path / "model.safetensors"))
    page = Path(__file__).parents[2] / "docs" / "attach.md"
    line = next(part for part in page.read_text().split("\n- ") if part.startswith("`resume_from_checkpoint`"))
    assert name in line


def test_before_a_head_that_flattens_first_the_error_names_the_layer_inside() -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    model = transformers.ResNetForImageClassification(config)
    with pytest.raises(UserError, match=r"name the layer inside, before='classifier\.1'"):
        bf.attach(model, before="classifier")
    assert bf.attach(model, before="classifier.1").paths == tuple(bf.find_classifiers(model))


def test_while_attached_a_stock_file_can_be_written_too(tmp_path: Path) -> None:
    model = build()
    attachment = bf.attach(model, heads=2)
    model.save_pretrained(tmp_path / "both")
    assert any(key.startswith("batchformer.") for key in load_file(tmp_path / "both" / "model.safetensors"))
    model.save_pretrained(tmp_path / "plain", state_dict=attachment.plain_state_dict())
    loaded, problems = type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(problems.values())
    for ours, theirs in zip(loaded.parameters(), build().parameters(), strict=True):
        assert torch.equal(ours, theirs)
