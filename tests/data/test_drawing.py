"""What is drawn on an image is where the objects are, and can be read."""

import numpy as np
import pytest
from PIL import Image

from batchformer.data.drawing import class_colour, draw_boxes, draw_segments

GREY = Image.new("RGB", (600, 500), (128, 128, 128))
NAMES = ["cat", "dog", "grass"]


def coloured(picture, colour):
    return (np.asarray(picture) == np.array(colour)).all(-1)


def test_a_box_is_drawn_along_its_edges_in_the_colour_of_its_class():
    drawn = coloured(draw_boxes(GREY, np.array([[100.0, 200.0, 301.0, 401.0]]), [1], NAMES), class_colour(1))
    assert drawn[300, 100]
    assert drawn[300, 300]
    assert drawn[400, 200]
    assert not drawn[300, 110:290].any()
    assert not drawn[402:].any()


def test_names_stay_inside_the_image_and_off_each_other():
    edge = np.array([[0.0, 0.0, 20.0, 20.0], [590.0, 490.0, 600.0, 500.0], [0.0, 0.0, 22.0, 21.0]])
    drawn = draw_boxes(GREY, edge, [0, 1, 2], NAMES, [0.9, 0.8, 0.7])
    plates = [coloured(drawn, class_colour(label)).sum() for label in range(3)]
    assert min(plates) > 0.6 * max(plates)  # no plate is cut off or covered by another


def test_a_box_out_of_the_image_or_turned_inside_out_is_no_failure():
    wild = np.array([[-50.0, -50.0, 900.0, 900.0], [300.0, 300.0, 200.0, 200.0]])
    assert draw_boxes(GREY, wild, [0, 1], NAMES, [0.1, 0.2]).size == GREY.size
    assert np.array_equal(np.asarray(draw_boxes(GREY, np.zeros((0, 4)), [], NAMES)), np.asarray(GREY))


def test_small_images_are_enlarged_with_their_boxes():
    small = GREY.resize((60, 50))
    drawn = draw_boxes(small, np.array([[10.0, 20.0, 30.0, 40.0]]), [1], NAMES)
    factor = drawn.width // 60
    assert factor >= 8
    assert drawn.size == (60 * factor, 50 * factor)
    assert coloured(drawn, class_colour(1))[30 * factor, 10 * factor]


@pytest.fixture
def segmentation():
    ids = np.zeros((500, 600), dtype=np.int32)
    ids[250:] = 7
    ids[100:200, 100:300] = 3
    ids[100:200, 400:500] = 9
    infos = [{"id": 7, "label_id": 2}, {"id": 3, "label_id": 0, "score": 0.9}, {"id": 9, "label_id": 0, "score": 0.8}]
    return ids, infos


def test_segments_are_tinted_by_class_two_of_a_class_differ_and_void_stays(segmentation):
    drawn = np.asarray(draw_segments(GREY, *segmentation, NAMES)).astype(int)
    assert (drawn[20, 20] == 128).all()
    grass, cat, other_cat = drawn[480, 20], drawn[110, 110], drawn[110, 410]
    assert np.abs(grass - cat).sum() > 60
    assert np.abs(cat - other_cat).sum() > 20
    assert np.abs(grass - 128).sum() > 20


def test_the_name_of_a_segment_is_on_it(segmentation):
    plate = coloured(draw_segments(GREY, *segmentation, NAMES), class_colour(2))
    rows = np.flatnonzero(plate.any(1))
    assert rows.min() > 250


def test_many_classes_have_colours_of_their_own():
    assert len({class_colour(label) for label in range(133)}) == 133
