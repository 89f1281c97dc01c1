"""Turns jsonargparse's multi-line errors into one line with the nearest name or the expected type."""

import re
from collections.abc import Iterable

from batchformer.errors import UserError, did_you_mean

_UNKNOWN = (
    re.compile(r"unrecognized arguments: --(?P<key>[\w.\-]+)"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"Option '(?P<key>[\w.]+)' is not accepted"),
)
_PARSER_KEY = re.compile(r'Parser key "(?P<key>[\w.]+)"')
_VALUE = re.compile(r"(?:Got value|Given value): (?P<value>.*)")
_OTHER_KIND = re.compile(r"Import path (?P<path>\S+) does not correspond to a subclass of (?P<kind>\w+)")
_EXPECTED = re.compile(r"Expected an? (?P<type>.*?)(?:\. Got value.*)?$", re.MULTILINE)


def in_one_line(message: str, known_keys: Iterable[str]) -> UserError:
    """Turn an error message of jsonargparse into a `UserError` of one sentence."""
    if (unknown := _unknown_key(message, known_keys)) is not None:
        return unknown
    if "Problems parsing config" in message:
        return UserError(f"The recipe is not valid YAML: {_squeeze(message.split(':', 1)[1])}.")
    return _wrong_value(message) or UserError(_squeeze(message)[:300])


def _unknown_key(message: str, known_keys: Iterable[str]) -> UserError | None:
    for pattern in _UNKNOWN:
        if match := pattern.search(message):
            parts = match.groupdict()
            key = parts["key"]
            if parts.get("group"):
                key = f"{parts['group']}.{key}"
            elif outer := _PARSER_KEY.search(message):
                key = f"{outer['key']}.init_args.{key}"
            return unknown_key(key, known_keys)
    return None


def unknown_key(key: str, known_keys: Iterable[str]) -> UserError:
    """The error about a key that no recipe has, with the nearest one."""
    if key.rsplit(".", 1)[-1] == "num_classes":
        return UserError(f"Unknown key {key}: how many classes there are is read from the data, leave it out.")
    if key.rsplit(".", 1)[-1] == "holdout":  # which --best and --early-stop set
        return UserError(
            "--best and --early-stop choose by images held out of the training set (data.holdout), and these data hold "
            "none out; folders, lists and detection data can, the evaluation set chooses nothing."
        )
    if key.rsplit(".", 1)[-1] == "skip_bad":
        return UserError("--skip-bad leaves out files, and these data are not read from image files: leave it out.")
    return UserError(f"Unknown key {key}.{did_you_mean(key, known_keys)}")


def _wrong_value(message: str) -> UserError | None:
    keys = [match["key"] for match in _PARSER_KEY.finditer(message)]
    if not keys:
        return None
    key = keys[0] if len(keys) == 1 else f"{keys[0]}.init_args.{keys[-1]}"
    inner = message[message.rfind(f'Parser key "{keys[-1]}"') :]
    if problem := re.search(r"Problem with given class_path '(?P<path>[^']*)':\s*(?P<why>[^\n]*)", inner):
        return UserError(f"{key}.class_path {problem['path']}: {problem['why'].rstrip('.')}.")
    if other := _OTHER_KIND.search(inner):
        return UserError(f"{key}.class_path {other['path']}: this task takes {other['kind']}, and that is none.")
    value = _VALUE.search(inner)
    nested = re.search(r"- Expected a <class 'NoneType'>", inner)
    if len(keys) > 1 and nested:  # that line belongs to the outer key
        inner = inner[: nested.start()]
    types = list(dict.fromkeys(_plain_type(match["type"]) for match in _EXPECTED.finditer(inner)))
    if not types or value is None:
        return None
    return UserError(f"{key}: expected {' or '.join(types)}, got {value['value'].strip()}.")


def _plain_type(text: str) -> str:
    text = text.strip()
    if text == "<class 'NoneType'>":
        return "null"
    if match := re.fullmatch(r"<class '(?:.*\.)?(\w+)'>", text):
        return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(
            match[1], match[1]
        )
    if match := re.fullmatch(r"typing\.Literal\[(.*)\]", text):
        return match[1].replace("'", "")
    return text.removeprefix("typing.")


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")
