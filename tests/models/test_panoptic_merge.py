"""Masks of queries become one segmentation: padding cut off, stuff fused, specks gone."""

from types import SimpleNamespace

import torch

from batchformer.models.panoptic_merge import panoptic_segments

IS_THING = [True, False]


def outputs(masks, labels, confident=8.0):
    """One image; each query sure of its label (2: no object)."""
    logits = torch.nn.functional.one_hot(torch.tensor(labels), 3).float()[None] * confident
    return SimpleNamespace(logits=logits, pred_masks=torch.stack(masks)[None])


def rectangle(top, left, bottom, right, value=5.0, shape=(16, 16)):
    mask = torch.full(shape, -5.0)
    mask[top:bottom, left:right] = value
    return mask


def merged(made, canvas=(16, 16), size=(16, 16), original=(16, 16)):
    return panoptic_segments(made, canvas, torch.tensor([size]), torch.tensor([original]), IS_THING)[0]


def labels_of(result):
    return [info["label_id"] for info in result["segments_info"]]


def test_things_stay_apart_and_the_same_stuff_is_one():
    parts = [rectangle(0, 0, 8, 8), rectangle(0, 8, 8, 16), rectangle(8, 0, 16, 8), rectangle(8, 8, 16, 16)]
    result = merged(outputs(parts, [0, 1, 0, 1]))
    assert labels_of(result) == [0, 1, 0]
    drawn = result["segmentation"]
    assert [drawn[0, 0], drawn[0, 15], drawn[15, 0], drawn[15, 15]] == [1, 2, 3, 2]
    assert sorted(drawn.unique().tolist()) == [info["id"] for info in result["segments_info"]]


def test_later_segments_keep_ids_of_their_own_after_stuff_was_fused():
    columns = [rectangle(0, 4 * k, 16, 4 * k + 4) for k in range(4)]
    result = merged(outputs(columns, [1, 0, 1, 0]))
    assert result["segmentation"][0].tolist() == [1] * 4 + [2] * 4 + [1] * 4 + [3] * 4
    assert labels_of(result) == [1, 0, 0]


def test_unsure_queries_and_those_without_object_do_not_take_part():
    parts = [rectangle(0, 0, 16, 8), rectangle(0, 8, 16, 16), rectangle(0, 0, 16, 16, 50.0)]
    assert labels_of(merged(outputs(parts, [0, 0, 2]))) == [0, 0]
    nothing = merged(outputs(parts, [0, 0, 2], confident=1.0))
    assert nothing["segments_info"] == []
    assert nothing["segmentation"].shape == (16, 16)
    assert not nothing["segmentation"].any()


def test_specks_are_given_to_others():
    result = merged(outputs([rectangle(0, 0, 16, 16), rectangle(3, 3, 5, 5, 9.0)], [0, 0]))
    assert len(result["segments_info"]) == 1
    assert (result["segmentation"] == 1).all()
    larger = merged(outputs([rectangle(0, 0, 16, 16), rectangle(3, 3, 6, 5, 9.0)], [0, 0]))
    assert (larger["segmentation"] == 2).sum() == 6


def test_the_padding_is_no_part_of_the_image():
    """The image is the upper left half of the canvas: what lies there fills the result."""
    left, right = rectangle(0, 0, 8, 4), rectangle(0, 4, 8, 16)
    result = merged(outputs([left, right], [0, 0]), canvas=(64, 64), size=(32, 32), original=(20, 40))
    drawn = result["segmentation"]
    assert drawn.shape == (20, 40)
    assert (drawn[:, :19] == 1).all()
    assert (drawn[:, 21:] == 2).all()


def test_a_fused_segment_has_the_score_of_its_surest_part():
    made = outputs([rectangle(0, 0, 16, 8), rectangle(0, 8, 16, 16)], [1, 1])
    made.logits[0, 1, 1] = 12.0
    (info,) = merged(made)["segments_info"]
    assert info["score"] == made.logits.softmax(-1)[0, 1, 1].item()
