"""What a page shows of the two streams, of pictures in a run folder and of the mixing."""

import json

import pytest
from made_up import classification, comparison, health, write
from PIL import Image

from batchformer.errors import UserError
from batchformer.report import load_runs, write_report

BASE = "vit-cifar100-32"


def test_balanced_classes_leave_out_what_is_about_frequency(tmp_path):
    results = [classification(BASE, m, s) for m in ("baseline", "batchformer") for s in (0, 1)]
    text = write_report([write(tmp_path, results)], tmp_path / "page.html").read_text()
    assert "training frequency" not in text
    assert "Fig. 6" not in text
    assert "Training loss of both streams" in text


def test_runs_without_streams_have_no_section_about_them(tmp_path):
    text = write_report([write(tmp_path, comparison(seeds=1))], tmp_path / "page.html").read_text()
    assert "The two streams" not in text


def with_health(folder, content):
    run = write(folder, [classification(BASE)]) / f"{BASE}-batchformer-seed0"
    (run / "stream_health.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "The modules relate samples: each changes the related tokens by 14.0%"),
        (
            {"gradient_on_others": {"quiet": {"norm_share": 0.25, "squared_share": 0.006}}},
            "25.0% of the gradient of a sample&#x27;s loss falls on other samples (by norms, 0.6% by squares)",
        ),
        ({"related_loss": 4.6}, "stays at chance (4.60): nothing is learnt"),
        ({"related_loss": 4.6, "plain_loss": 4.4}, "stays at chance (4.60) and the plain one is near it (4.40)"),
        ({"related_loss": 4.6, "plain_loss": None}, "stays at chance (4.60): nothing is learnt"),
        ({"gradient_on_others": {"quiet": {"norm_share": 0.002}}}, "hardly relate"),
        ({"points": [{"path": "blocks.0", "change_quiet": 0.03}]}, "hardly relate"),
        ({"gradient_on_others": {}}, "is incomplete"),
    ],
)
def test_the_page_says_whether_the_related_stream_lives(tmp_path, change, words):
    with_health(tmp_path, {**health(), **change})
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert words in text


def test_the_health_of_a_result_file_lies_beside_it(tmp_path):
    (tmp_path / "batchformer-seed0.json").write_text(json.dumps(classification(BASE)))
    (tmp_path / "batchformer-seed0.stream_health.json").write_text(json.dumps(health(depth=3)))
    (run,) = load_runs([tmp_path])
    assert [point["path"] for point in run.health["points"]] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("content", ["{", "[]", '{"points": 3}', '{"points": [1]}'])
def test_a_damaged_health_file_is_named(tmp_path, content):
    with_health(tmp_path, content)
    with pytest.raises(UserError, match=r"stream_health\.json"):
        load_runs([tmp_path])


def test_pictures_of_a_run_are_inside_the_page_and_nothing_else_is(tmp_path):
    run = write(tmp_path, [classification(BASE)]) / f"{BASE}-batchformer-seed0"
    folder = run / "pictures"
    folder.mkdir()
    Image.new("RGB", (40, 10), (9, 9, 9)).save(folder / "seen.png")
    (folder / "script.svg").write_text("<svg onload='alert(1)'/>")
    (run / "secret.png").write_bytes((folder / "seen.png").read_bytes())
    index = [
        {"file": "seen.png", "title": "Who & whom", "caption": "<b>caption</b>"},
        {"file": "script.svg", "title": "no"},
        {"file": "../secret.png", "title": "outside"},
        {"file": "missing.png", "title": "gone"},
    ]
    (folder / "pictures.json").write_text(json.dumps(index))
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert text.count("data:image/") == text.count("data:image/png;base64,") == 1
    assert 'alt="Who &amp; whom"' in text
    assert "&lt;b&gt;caption" in text
    assert "onload" not in text


def test_pictures_that_are_gone_leave_no_empty_section_and_a_damaged_index_is_told_as_such(tmp_path):
    run = write(tmp_path, comparison(seeds=1)) / "cifar100-lt-100-batchformer-seed0"
    (run / "pictures").mkdir()
    (run / "pictures" / "pictures.json").write_text('[{"file": "gone.png"}]')
    assert "The two streams" not in write_report([tmp_path], tmp_path / "page.html").read_text()
    (run / "pictures" / "pictures.json").write_text("{")
    with pytest.raises(UserError, match="draw the pictures again"):
        write_report([tmp_path], tmp_path / "page.html")


def test_a_run_with_a_picture_of_its_mixing_shows_it(tmp_path):
    write(tmp_path, [classification("vit-cifar100-32-transmix", "baseline", 0, 54)])
    page = write_report([tmp_path], tmp_path / "without.html").read_text()
    assert "Mixing</h3>" not in page
    folder = next(tmp_path.glob("*/result.json")).parent / "mixing"
    folder.mkdir()
    Image.new("RGB", (900, 300)).save(folder / "mixed.png")
    (folder / "pictures.json").write_text('[{"file": "mixed.png", "title": "TransMix", "caption": "What it shows."}]')
    page = write_report([tmp_path], tmp_path / "with.html").read_text()
    assert "<h3>Mixing</h3>" in page
    assert "What it shows." in page
    assert page.count("data:image/png;base64,") == 1


def test_each_variant_with_streams_has_losses_of_its_own(tmp_path):
    methods = {"plain": "baseline", "published": "batchformer", "stable": "batchformer"}
    made = [{**classification(BASE, m, 0), "variant": name, "reference": "plain"} for name, m in methods.items()]
    made[2]["streams"]["related_loss"] = [9.0 for _ in made[2]["streams"]["related_loss"]]
    text = write_report([write(tmp_path, made)], tmp_path / "page.html").read_text()
    assert text.count("<h3>The two streams</h3>") == 1
    assert text.count("Training loss of both streams</h4>") == 2
    assert "related stream ends at 9.00" in text
