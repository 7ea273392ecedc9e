"""Removal of secrets from text and options: user names, passwords and signatures in URLs, and API keys.

A URL keeps its scheme, host and path. The user name and password become ``***``. The complete query and fragment also become
``***``, because each service has a different name for its signature: ``https://***@host/train.tar?***``. The value of an option
with a name such as ``api_key`` or ``password`` becomes ``***``. A URL without its secrets cannot be opened.
:func:`check_secrets` detects such URLs.
"""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "***"
"""Text that replaces a secret."""

SECRET_NAME = (
    r"(?:[\w-]{0,60}[_-])?(?:password|passwd|pwd|secret|api[_-]?key|apikey|access[_-]?key|secret[_-]?key|account[_-]?key"
    r"|(?:access|api|auth|sas|session|bearer|hf|personal)[_-]?token|credentials?|authorization)"
)
"""Regular expression for names of options that hold a secret. ``token`` alone is not included: in text it may belong to a
tokenizer, but as the name of an option it is a secret, see :func:`redacted`."""

_START = r"[A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,3}"  # a URL that was handled as a path has one slash
_QUOTE_ENDS = r"[\"'`](?=[\s,;:.)\]}]|$)"
_URL = re.compile(rf"{_START}(?:(?!{_QUOTE_ENDS})\S)+")
_PARTS = re.compile(rf"(?P<start>{_START})(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)", re.DOTALL)
_NAMED = re.compile(
    rf"(?i)(?<![\w-])(?P<name>{SECRET_NAME}[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"',;&}}]+)"
)
_PATH = re.compile(r"(?<![^\s\"'\[(,=:])/(?:[^\s/\"',;]+/)+([^\s/\"',;]*)")
_HIDDEN_IN_URL = re.compile(rf"{_START}(?:\*\*\*@|[^\s?]*\?\*\*\*)")


def redact(text: str) -> str:
    """Replace secrets in a text with ``***``: secrets in URLs, and values after the name of a secret (``api_key=...``).

    Args:
        text: any text, such as an error message or a command-line argument.
    """
    return _NAMED.sub(lambda match: match["name"] + HIDDEN, _redact_urls(text))


def redacted(value: Any, name: str = "") -> Any:
    """Return nested options with secrets replaced by ``***``. Unchanged parts are the same objects, not copies.

    Args:
        value: dicts, namespaces, lists, tuples and plain values; other objects are returned unchanged.
        name: name of the option that has this value; empty if unknown. The value of an option such as ``password`` is replaced
            completely.
    """
    if isinstance(value, str):
        if value and _is_secret(name):
            return HIDDEN
        # A value that is one URL may contain spaces and quotes; within a text, these end the URL.
        text = _redact_url(value) if re.match(_START, value) else _redact_urls(value)
        return value if text == value else text
    if isinstance(value, dict | Namespace):
        items = value if isinstance(value, dict) else vars(value)
        changed = {key: new for key, item in items.items() if (new := redacted(item, str(key))) is not item}
        if not changed:
            return value
        # A shallow copy, which keeps the class of a Namespace or a dict subclass.
        result = copy.copy(value)
        (result if isinstance(result, dict) else vars(result)).update(changed)
        return result
    if isinstance(value, list | tuple):
        listed = [redacted(item, name) for item in value]
        if all(new is old for new, old in zip(listed, value, strict=True)):
            return value
        return tuple(listed) if isinstance(value, tuple) else listed
    return value


def published(value: Any, name: str = "") -> Any:
    """Return nested options for publication: secrets become ``***``, and local paths lose their folders.

    A path is cut to its last component if it is absolute, or begins with ``~`` or ``..``. Other relative paths do not change.

    Args:
        value: dicts, lists, tuples, strings, paths and plain values; other objects are returned unchanged.
        name: name of the option that has this value; empty if unknown. The value of an option such as ``password`` is replaced
            completely.
    """
    if isinstance(value, str | PurePath):
        text = redacted(str(value), name)
        local = text.removeprefix("file://")
        return PurePath(local).name if re.match(r"(?:/+[^/\n]+|~[\w.-]*|\.\.)/+[^/]", local) else _PATH.sub(r"\1", text)
    if isinstance(value, Mapping):
        return {key: published(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [published(item, name) for item in value]
    return value


def check_secrets(url: str, option: str | None = None) -> None:
    """Check that a URL does not contain ``***``, the text that replaces secrets when URLs are saved.

    Args:
        url: URL or path.
        option: name of the option that holds the URL, for the message; None if not known.

    Raises:
        ValueError: if the URL contains ``***`` in place of a secret; the message asks for the complete URL.
    """
    if _HIDDEN_IN_URL.search(url):
        option_text = f"--{option}=URL" if option else "the option that holds it"
        raise ValueError(
            f"{url}: user names, passwords and queries of URLs are not written to files, so this URL is not complete; "
            f"give it again on the command line ({option_text})"
        )


def hidden_options(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of options in which ``***`` replaces a secret.

    Args:
        value: nested mappings, namespaces, lists, tuples and plain values.
        path: dotted name of ``value``; empty for the outermost options.
    """
    if isinstance(value, str):
        if _HIDDEN_IN_URL.search(value) or (value == HIDDEN and _is_secret(path.rpartition(".")[2])):
            yield path
    elif isinstance(value, Mapping | Namespace):
        for key, item in (value if isinstance(value, Mapping) else vars(value)).items():
            yield from hidden_options(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        yield from dict.fromkeys(name for item in value for name in hidden_options(item, path))


def _is_secret(name: str) -> bool:
    return name == "token" or re.fullmatch(f"(?i){SECRET_NAME}", name) is not None


def _redact_urls(text: str) -> str:
    if ":/" not in text:
        return text
    return _URL.sub(_redact_in_text, text)


def _redact_in_text(match: re.Match[str]) -> str:
    url = match[0].rstrip(":;,.)]}")  # punctuation of the sentence
    return _redact_url(url) + match[0][len(url) :]


def _redact_url(url: str) -> str:
    """Replace the secrets in a URL with ``***``. The text may also be several URLs joined by ``::``, the syntax of fsspec."""
    return "::".join(_redact_link(link) for link in re.split(rf"::(?={_START})", url))


def _redact_link(url: str) -> str:
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return url
    start, authority, path, query = parts.groups()
    host = authority.rpartition("@")[2]
    port = host.rpartition(":")[2] if ":" in host and not host.endswith("]") else ""
    behind = path + query
    if "@" not in authority and "@" in behind and not re.fullmatch(r"\d*", port):
        # The text after the colon is not a port, so it begins a password that contains a slash, a question mark or a number
        # sign which should have been written as %2F, %3F or %23. The host follows the last @.
        path, mark, _ = behind.rpartition("@")[2].partition("?")
        return f"{start}{HIDDEN}@{path}{f'?{HIDDEN}' if mark else ''}"
    user = f"{HIDDEN}@" if "@" in authority else ""
    return f"{start}{user}{host}{path}{f'?{HIDDEN}' if query else ''}"
