"""Word vectors from every kind of file, names of several words, and what is said where a word or a file is wrong."""

import struct

import numpy as np
import pytest

from batchformer.data.words import embed_names, read_vectors
from batchformer.errors import UserError

VECTORS = {"apple": [1.0, 2.0, 3.0], "black": [0.5, -1.5, 2.0], "rot": [3.0, 0.0, -1.0], "Paris": [9.0, 9.0, 9.0]}
WORDS = list(VECTORS)


def write_text(path, header):
    lines = [f"{word} {' '.join(map(str, vector))}\n" for word, vector in VECTORS.items()]
    lines.insert(1, ". . . 7 7 7\n" if not header else "x 7 7 7\n")  # GloVe's largest file has words with spaces
    path.write_text((f"{len(lines)} 3\n" if header else "") + "".join(lines))


def write_word2vec(path, line_breaks):
    body = b"".join(
        word.encode() + b" " + struct.pack("<3f", *vector) + (b"\n" if line_breaks else b"")
        for word, vector in VECTORS.items()
    )
    path.write_bytes(f"{len(VECTORS)} 3\n".encode() + body)


def write_fasttext(path, quantised=False, buckets=11, version=12):
    """A model of n-grams of 3 to 4 characters, as fastText writes it."""
    head = struct.pack("<2i", 793712314, version) + struct.pack("<12id", 3, 5, 1, 1, 5, 1, 1, 2, buckets, 3, 4, 1, 1e-4)
    head += struct.pack("<3i2q", len(VECTORS) + 1, len(VECTORS), 1, 99, -1)
    entries = b"".join(word.encode() + b"\0" + struct.pack("<qb", 3, 0) for word in WORDS)
    entries += b"__label__x\0" + struct.pack("<qb", 1, 1)
    matrix = np.arange(3 * (len(VECTORS) + buckets), dtype="<f4").reshape(-1, 3) / 7
    body = struct.pack("<?2q", quantised, *matrix.shape) + matrix.tobytes()
    path.write_bytes(head + entries + body)
    return matrix


@pytest.fixture(params=["glove", "vec", "word2vec", "word2vec-lines", "npz"])
def file(request, tmp_path):
    path = tmp_path / f"words.{request.param}"
    if request.param in ("glove", "vec"):
        write_text(path, header=request.param == "vec")
    elif request.param.startswith("word2vec"):
        write_word2vec(path, request.param.endswith("lines"))
    else:
        path = tmp_path / "words.npz"
        np.savez(path, words=np.array(WORDS), vectors=np.array(list(VECTORS.values()), dtype=np.float32))
    return path


def test_every_kind_of_file_has_the_same_vectors(file):
    found = read_vectors(file, [*WORDS, "unknown"])
    assert found.keys() == VECTORS.keys()
    for word, vector in VECTORS.items():
        np.testing.assert_array_equal(found[word], np.float32(vector))


def test_names_of_several_words_are_their_mean_whatever_parts_them(file):
    black_rot = np.mean([VECTORS["black"], VECTORS["rot"]], axis=0)
    for name in ("black-rot", "Black_Rot", "black.rot", "black rot"):
        found = embed_names([name, "apple", "Paris"], [file])
        np.testing.assert_allclose(found, [black_rot, VECTORS["apple"], VECTORS["Paris"]])


def test_several_files_are_put_side_by_side_and_synonyms_replace_words(file):
    found = embed_names(["Nubuck", "nubuck-apple"], [file, file], {"nubuck": "black rot"})
    black_rot = np.mean([VECTORS["black"], VECTORS["rot"]], axis=0)
    three = np.mean([VECTORS["black"], VECTORS["rot"], VECTORS["apple"]], axis=0)
    np.testing.assert_allclose(found, [[*black_rot, *black_rot], [*three, *three]], rtol=1e-6)


def test_a_missing_word_is_named(file):
    with pytest.raises(UserError, match=r"no vector of 'Nubuck', which the name 'Nubuck\.apple' needs.*data\.synonyms"):
        embed_names(["apple", "Nubuck.apple"], [file])


def test_fasttext_adds_the_vectors_of_character_ngrams(tmp_path):
    matrix = write_fasttext(tmp_path / "cc.bin")

    def bucket(gram):
        value = 2166136261
        for byte in gram.encode():
            signed = byte - 256 if byte > 127 else byte  # a signed char in C++
            value = ((value ^ (signed & 0xFFFFFFFF)) * 16777619) % 2**32
        return len(VECTORS) + value % 11

    found = read_vectors(tmp_path / "cc.bin", ["rot", "rötung", "black-rot"])
    grams = ["<ro", "<rot", "rot", "rot>", "ot>"]
    np.testing.assert_allclose(found["rot"], matrix[[WORDS.index("rot"), *map(bucket, grams)]].mean(0), rtol=1e-6)
    framed = "<rötung>"
    unknown = [framed[k : k + n] for k in range(len(framed)) for n in (3, 4) if k + n <= len(framed)]
    np.testing.assert_allclose(found["rötung"], matrix[[bucket(gram) for gram in unknown]].mean(0), rtol=1e-6)
    assert "black-rot" not in found  # is the mean of its words
    both = embed_names(["black-rot"], [tmp_path / "cc.bin"])[0]
    separate = read_vectors(tmp_path / "cc.bin", ["black", "rot"])
    np.testing.assert_allclose(both, np.mean([separate["black"], separate["rot"]], axis=0), rtol=1e-6)


def test_an_empty_word_at_the_begin_is_passed_over(tmp_path):
    vector = struct.pack("<3f", 1.0, 2.0, 3.0)
    (tmp_path / "words").write_bytes(b"2 3\n" + b" " + vector + b"apple " + vector)
    assert read_vectors(tmp_path / "words", ["apple"])["apple"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda path: write_fasttext(path, quantised=True), "quantised fastText model"),
        (lambda path: write_fasttext(path, version=3), "version 3"),
        (lambda path: path.write_bytes(struct.pack("<2i", 793712314, 12)), "cannot be read as word vectors"),
        (lambda path: path.write_bytes(b"2 3\napple " + b"\1" * 6), "ends before its last word"),
        (lambda path: path.write_text("apple 1 2 3\nblack 1 2\n"), "'black' has 2 numbers and the first word 3"),
        (lambda path: path.write_text("apple 1 nan 3\nblack 1 2 3\n"), "'apple' has values that are no numbers"),
        (lambda path: path.write_text("this is no file of vectors\n"), "line 1 is no word with its numbers"),
        (lambda path: np.savez(path.open("wb"), words=np.array(["a"])), "cannot be read as word vectors"),
        (lambda path: np.savez(path.open("wb"), words=np.array(["a"]), vectors=np.ones((2, 3))), "a row for each"),
        (lambda path: None, "there is no file"),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path, content, said):
    content(tmp_path / "words")
    with pytest.raises(UserError, match=said) as caught:
        embed_names(["apple", "black"], [tmp_path / "words"])
    assert "\n" not in str(caught.value)
