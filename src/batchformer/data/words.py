"""Word vectors of class names, from files of GloVe, word2vec and fastText (text or binary) and arrays (.npz).

Only the requested words are kept. Nothing is downloaded.
"""

import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float

from batchformer.errors import UserError, reason_of

Vectors = dict[str, np.ndarray]
_PARTS = re.compile(r"[\s_\-./]+")
_FASTTEXT, _FASTTEXT_VERSIONS = 793712314, (11, 12)
_ADVICE = "give a text or binary file of GloVe, word2vec or fastText, or an .npz with `words` and `vectors`"


def embed_names(
    names: Sequence[str], files: Sequence[str | Path], synonyms: Mapping[str, str] | None = None
) -> Float[np.ndarray, "names dim"]:
    """A vector for each name; the vectors of several files are put side by side.

    A name is looked up as it is and in lower case; one that is not there is split at spaces, underscores, hyphens, dots
    and slashes, and is the mean of its words (`Faux.Fur`: of faux and fur). A word without a vector is an error that
    names it, unless `synonyms` has another one for it.
    """
    known = {word.lower(): other for word, other in (synonyms or {}).items()}
    return np.concatenate([_embed_by(names, Path(file).expanduser(), known) for file in files], axis=1)


def _embed_by(names: Sequence[str], file: Path, synonyms: Mapping[str, str]) -> np.ndarray:
    wholes = [synonyms.get(name.lower(), name) for name in names]
    words = [[part for word in _parts(whole) for part in _parts(synonyms.get(word.lower(), word))] for whole in wholes]
    wanted = [*wholes, *(word for each in words for word in each)]
    found = read_vectors(file, (form for word in wanted for form in _forms(word)))
    rows = []
    for name, whole, parts in zip(names, wholes, words, strict=True):
        vector = _find(whole, found)
        if vector is None:
            vectors: dict[str, np.ndarray | None] = {part: _find(part, found) for part in parts}
            if missing := [part for part in parts if vectors[part] is None] or ([] if parts else [whole]):
                raise UserError(
                    f"{file} has no vector of {missing[0]!r}, which the name {name!r} needs: take a file that has it, "
                    f"or name another word for it in data.synonyms."
                )
            vector = np.mean([vectors[part] for part in parts], axis=0)  # type: ignore[arg-type]
        rows.append(vector)
    return np.stack(rows).astype(np.float32)


def _parts(name: str) -> list[str]:
    return [part for part in _PARTS.split(name) if part]


def _forms(word: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((word.lower(), word)))


def _find(word: str, found: Vectors) -> np.ndarray | None:
    return next((found[form] for form in _forms(word) if form in found), None)


def read_vectors(file: Path, wanted: Iterable[str]) -> Vectors:
    """The vectors of those of the wanted words that the file has; fastText's binary files make one for any word."""
    needed = set(wanted)
    try:
        with open(file, "rb") as opened:
            found = _reader_of(file, opened)(file, opened, needed)
    except FileNotFoundError:
        raise UserError(f"data.words: there is no file {file}.") from None
    except (OSError, ValueError, KeyError, struct.error, EOFError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(f"{file} cannot be read as word vectors ({reason_of(problem)}): {_ADVICE}.") from problem
    if bad := [word for word, vector in found.items() if not np.isfinite(vector).all()]:
        raise UserError(f"{file}: the vector of {bad[0]!r} has values that are no numbers: repair the file.")
    return found


def _reader_of(file: Path, opened: IO[bytes]) -> Callable[[Path, IO[bytes], set[str]], Vectors]:
    start = opened.read(4)
    opened.seek(0)
    if start[:2] == b"PK":
        return _read_arrays
    if len(start) == 4 and struct.unpack("<i", start)[0] == _FASTTEXT:
        return _read_fasttext
    first = opened.readline(1 << 20)
    size = first.split()
    is_header = len(size) == 2 and all(part.isdigit() for part in size)
    after = opened.read(1 << 14)
    opened.seek(len(first) if is_header else 0)
    if not is_header:
        return _read_text
    line = after.split(b"\n", 1)[0].split()
    count, dim = map(int, size)
    is_text = len(line) > dim and _is_number(line[-1])
    return _read_text if is_text else partial(_read_word2vec, count=count, dim=dim)


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_arrays(file: Path, opened: IO[bytes], wanted: set[str]) -> Vectors:
    with np.load(file) as arrays:
        words, vectors = arrays["words"], arrays["vectors"]
    if vectors.ndim != 2 or len(words) != len(vectors):
        raise UserError(f"{file} has {len(words)} words and vectors of the shape {vectors.shape}: a row for each.")
    return {str(word): vectors[k].astype(np.float32) for k, word in enumerate(words.tolist()) if str(word) in wanted}


def _read_text(file: Path, opened: IO[bytes], wanted: set[str]) -> Vectors:
    """Lines of a word and its numbers. GloVe's largest file has words with spaces: the numbers are the last ones."""
    found: Vectors = {}
    encoded = {word.encode(): word for word in wanted}
    dim = None
    for number, line in enumerate(opened, 1):
        if dim is None:
            parts = line.split()
            dim = len(parts) - 1
            if dim < 1 or not _is_number(parts[-1]):
                raise ValueError(f"line {number} is no word with its numbers")
        if line.split(b" ", 1)[0].strip() not in encoded:  # nearly all, of a million
            continue
        word, *values = line.rstrip().rsplit(b" ", dim)
        if word not in encoded:
            continue
        if len(values) != dim:
            raise ValueError(f"{encoded[word]!r} has {len(values)} numbers and the first word {dim}")
        found.setdefault(encoded[word], np.array(values, dtype=np.float32))
    return found


def _read_word2vec(file: Path, opened: IO[bytes], wanted: set[str], *, count: int, dim: int) -> Vectors:
    """A word, a space and the bytes of its vector; some writers end each with a line break."""
    found: Vectors = {}
    encoded = {word.encode(): word for word in wanted}
    content, place = b"", 0
    for _ in range(count):
        while (end := content.find(b" ", place)) < 0 or len(content) < end + 1 + 4 * dim:
            more = opened.read(1 << 22)
            if not more:
                raise EOFError("it ends before its last word")
            content, place = content[place:] + more, 0
        word = content[place:end].lstrip(b"\n")
        if word in encoded:
            found[encoded[word]] = np.frombuffer(content, "<f4", dim, end + 1).copy()
            if len(found) == len(encoded):
                break
        place = end + 1 + 4 * dim
    return found


def _read_fasttext(file: Path, opened: IO[bytes], wanted: set[str]) -> Vectors:
    """A model of fastText: the vector of a word is the mean of its own and those of its character n-grams.

    A word that it does not know is the mean of its n-grams, unless it is made of several words.
    """
    content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    version, *_, buckets, shortest, longest, _, _ = struct.unpack_from("<13id", content, 4)
    if version not in _FASTTEXT_VERSIONS:
        raise ValueError(f"a fastText model of version {version}")
    place = 4 + struct.calcsize("<13id")
    entries, words, _, _, pruned = struct.unpack_from("<3i2q", content, place)
    place += struct.calcsize("<3i2q")
    encoded = {word.encode(): word for word in wanted}
    numbers: dict[bytes, int] = {}
    for number in range(entries):
        end = content.find(b"\0", place)
        if end < 0:
            raise EOFError("it ends before its last word")
        if number < words and (entry := content[place:end]) in encoded:
            numbers[entry] = number
        place = end + 1 + struct.calcsize("<qb")
    place += struct.calcsize("<2i") * max(pruned, 0)
    quantised, rows, columns = struct.unpack_from("<?2q", content, place)
    if quantised:
        raise UserError(
            f"{file} is a quantised fastText model (.ftz), whose vectors are only approximate: take the .bin or .vec "
            f"file that it was made from."
        )
    matrix = np.frombuffer(content, "<f4", rows * columns, place + struct.calcsize("<?2q")).reshape(rows, columns)
    found: Vectors = {}
    for raw, word in encoded.items():
        own = [numbers[raw]] if raw in numbers else []
        grams = [words + _hash(gram) % buckets for gram in _ngrams(word, shortest, longest)] if buckets else []
        if own or (grams and len(_parts(word)) == 1):
            found[word] = matrix[own + grams].mean(0)
    return found


def _ngrams(word: str, shortest: int, longest: int) -> list[bytes]:
    """The character n-grams of <word>, but neither bracket alone."""
    framed = f"<{word}>"
    spans = [(k, k + n) for k in range(len(framed)) for n in range(max(shortest, 1), longest + 1)]
    alone = ((0, 1), (len(framed) - 1, len(framed)))
    return [framed[k:end].encode() for k, end in spans if end <= len(framed) and (k, end) not in alone]


def _hash(text: bytes) -> int:
    """FNV-1a as fastText has it: bytes above 127 count as negative numbers."""
    value = 2166136261
    for byte in text:
        value = ((value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) & 0xFFFFFFFF
    return value
