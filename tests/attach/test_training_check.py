"""A module that is attached and does not train causes one warning that names the reason; nothing else does."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import batchformer as bf
from batchformer.errors import UserError

from .small_models import TOKENS, Net

LABELS = torch.arange(4) % 3
CRITERION = bf.TwoStreamLoss(nn.CrossEntropyLoss())
STEPS = 70  # enough for three comparisons, the least that warn
EVAL_STEPS = 100  # in eval mode the first one comes later


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, every: int = 1) -> None:
    for step in range(steps):
        CRITERION(model(TOKENS), LABELS).backward()
        if step % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()


def said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if "BatchFormer" in str(one.message)]


def attached() -> tuple[Net, bf.Attachment]:
    model = Net().train()
    return model, bf.attach(model, before="fc", heads=2)


def sgd(parameters: Iterator[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def made_before() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().train()
    optimizer = sgd(model.parameters())
    bf.attach(model, before="fc", heads=2)
    return model, optimizer


def made_before_and_fused() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    bf.attach(model, before="fc", heads=2)
    return model, optimizer


def made_from_names() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = attached()
    return model, sgd(chain(model.low.parameters(), model.fc.parameters()))


def frozen_afterwards() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = attached()
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    return model, sgd(p for p in model.parameters() if p.requires_grad)


def in_eval_mode() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = attached()
    return model.eval(), sgd(model.parameters())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (made_before, "no optimizer changes its parameters. Create the optimizer after attach"),
        (made_before_and_fused, "no optimizer changes its parameters"),
        (made_from_names, "no optimizer changes its parameters"),
        (frozen_afterwards, "frozen"),
        (in_eval_mode, r"in eval mode, where it does nothing. Call model.train\(\)"),
    ],
)
def test_a_module_that_does_not_train_warns_once_with_the_reason(case: Callable, reason: str) -> None:
    model, optimizer = case()
    with pytest.warns(UserWarning, match=reason):
        train(model, optimizer, EVAL_STEPS)
    assert not said(lambda: train(model, optimizer))


def test_forgetting_train_after_a_validation_is_noticed() -> None:
    model, _ = attached()
    optimizer = sgd(model.parameters())
    assert not said(lambda: train(model, optimizer))
    model.eval()
    with torch.no_grad():
        model(TOKENS)
    with pytest.warns(UserWarning, match="in eval mode"):
        train(model, optimizer, EVAL_STEPS)


def test_gradients_in_validation_are_no_training_in_eval_mode() -> None:
    model, attachment = attached()
    train(model, sgd(model.parameters()))
    for parameter in attachment.parameters():
        parameter.requires_grad_(False)  # once it is known to train, training steps are not checked any more
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)

    def epochs() -> None:
        for _ in range(6):
            train(model.train(), optimizer, steps=20)
            for _ in range(20):
                model.eval()(TOKENS)

    assert not said(epochs)


def test_a_module_that_is_not_trained_on_purpose_causes_no_warning() -> None:
    model, optimizer = made_before()
    bf.attachment_of(model).expect_no_training()
    assert not said(lambda: train(model, optimizer))


def test_attacks_in_eval_mode_between_training_steps_do_not_affect_the_check() -> None:
    def train_on_attacks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            images = TOKENS.clone().requires_grad_()
            for _ in range(3):
                torch.autograd.grad(CRITERION(model.eval()(images), LABELS), images)
            train(model.train(), optimizer, steps=1)

    model, _ = attached()
    assert not said(lambda: train_on_attacks(model, sgd(model.parameters())))
    assert "no optimizer" in said(lambda: train_on_attacks(*made_before()))[0]


def accumulated(model: Net, attachment: bf.Attachment) -> None:
    train(model, sgd(model.parameters()), every=30)


def warmed_up_at_zero(model: Net, attachment: bf.Attachment) -> None:
    optimizer = sgd(model.parameters(), lr=0.0)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer)


def fused(model: Net, attachment: bf.Attachment) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))


def module_fused_and_the_rest_not(model: Net, attachment: bf.Attachment) -> None:
    """The first leaves versions of parameters as they are, the second does not."""
    own = set(attachment.parameters())
    inner = torch.optim.AdamW(own, lr=0.1, fused=True)
    outer = sgd(p for p in model.parameters() if p not in own)
    for _ in range(STEPS):
        train(model, inner, steps=1)
        train(model, outer, steps=1)


def other_optimizer_every_tenth_step(model: Net, attachment: bf.Attachment) -> None:
    own = set(attachment.parameters())
    inner, outer = sgd(iter(own)), sgd(p for p in model.parameters() if p not in own)
    for _ in range(STEPS // 10):
        train(model, outer, steps=9)
        train(model, inner, steps=1)


def frozen_backbone(model: Net, attachment: bf.Attachment) -> None:
    model.low.requires_grad_(False)
    model.high.requires_grad_(False)
    train(model, sgd(p for p in model.parameters() if p.requires_grad))


def all_frozen_but_the_input(model: Net, attachment: bf.Attachment) -> None:
    model.requires_grad_(False)
    for _ in range(STEPS):
        model(TOKENS.clone().requires_grad_()).sum().backward()


def mixed_precision_with_skipped_steps(model: Net, attachment: bf.Attachment) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**60), sgd(model.parameters())
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.float16):
            loss = CRITERION(model(TOKENS), LABELS)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gradients_in_eval_mode(model: Net, attachment: bf.Attachment) -> None:
    for _ in range(EVAL_STEPS):
        model.eval()(TOKENS.clone().requires_grad_()).sum().backward()


def files_loaded_between(model: Net, attachment: bf.Attachment) -> None:
    model(TOKENS)
    model.load_state_dict(Net().state_dict(), strict=False)
    warmed_up_at_zero(model, attachment)


def momentum_encoder_inside_while_the_learning_rate_is_zero(model: Net, attachment: bf.Attachment) -> None:
    model.keys = nn.Linear(6, 8).requires_grad_(False)
    optimizer = sgd(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            model.keys.weight.lerp_(model.low.weight, 0.01)


def teacher_in_eval_mode(model: Net, attachment: bf.Attachment) -> None:
    teacher, optimizer = AveragedModel(model), sgd(model.parameters())
    teacher.eval()
    for _ in range(EVAL_STEPS):
        teacher(TOKENS)  # with gradients
        train(model, optimizer, steps=1)
        teacher.update_parameters(model)


def first_without_the_module(model: Net, attachment: bf.Attachment) -> None:
    optimizer = sgd(model.parameters())
    model(TOKENS)
    with attachment.disabled():
        train(model, optimizer)
    train(model, optimizer)


def detached_and_trained_on(model: Net, attachment: bf.Attachment) -> None:
    model(TOKENS)
    attachment.detach()
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        train(model, optimizer, steps=1)
        attachment.plain(TOKENS)


def functional(model: Net, attachment: bf.Attachment) -> None:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return CRITERION(torch.func.functional_call(model, weights, (x,)), LABELS)

    for _ in range(STEPS // 3):
        gradients = torch.func.grad(loss)(weights, TOKENS)
        weights = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}


def in_ddp(model: Net, attachment: bf.Attachment) -> None:
    with one_process():
        wrapped = nn.parallel.DistributedDataParallel(model)
        train(wrapped, sgd(wrapped.parameters()))


class one_process:
    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "use",
    [
        accumulated,
        warmed_up_at_zero,
        fused,
        module_fused_and_the_rest_not,
        other_optimizer_every_tenth_step,
        frozen_backbone,
        all_frozen_but_the_input,
        mixed_precision_with_skipped_steps,
        gradients_in_eval_mode,
        files_loaded_between,
        momentum_encoder_inside_while_the_learning_rate_is_zero,
        teacher_in_eval_mode,
        first_without_the_module,
        detached_and_trained_on,
        functional,
        in_ddp,
    ],
    ids=lambda use: use.__name__,
)
def test_no_false_alarm(use: Callable) -> None:
    assert said(lambda: use(*attached())) == []


@pytest.mark.traced
@pytest.mark.parametrize("case", [made_before, in_eval_mode, None])
def test_a_compiled_model_stays_one_graph_and_the_guard_notices(case: Callable | None) -> None:
    model = attached()[0]
    model, optimizer = case() if case else (model, sgd(model.parameters()))
    attachment, guard = bf.attachment_of(model), bf.StreamGuard(3, every=10**6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(TOKENS)

    def loop() -> None:
        for _ in range(EVAL_STEPS):
            logits = compiled(TOKENS)
            rows = nn.functional.cross_entropy(logits, bf.repeat_targets(LABELS, logits), reduction="none")
            guard.update_rows(rows, attachment)
            rows.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.compiler.set_stance("fail_on_recompile"):
        assert len(said(loop)) == (case is not None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_trains_is_checked_anew(copied: Callable) -> None:
    model, _ = attached()
    train(model, sgd(model.parameters()))
    twin = copied(model)
    with pytest.warns(UserWarning, match="no optimizer"):
        train(twin, sgd(chain(twin.low.parameters(), twin.fc.parameters())))


def test_a_module_that_was_attached_inside_ddp_is_refused_in_training() -> None:
    with one_process():
        wrapped = nn.parallel.DistributedDataParallel(Net().train())
        bf.attach(wrapped.module, before="fc", heads=2)
        with pytest.raises(UserError, match="attach first, then wrap"):
            wrapped(TOKENS)
        assert len(wrapped.eval()(TOKENS)) == 4
