"""Secrets in text: user names, passwords and signatures of URLs, and keys of services, kept out of everything that is written.

A URL keeps its scheme, host and path. User name and password become ``***``, and so does the complete query with the
fragment, because each service calls its signature by a different name: ``https://***@host/train.tar?***``. The value of an
option that is called ``api_key``, ``password`` or the like becomes ``***``. A URL whose secrets were removed cannot be
opened, see :func:`check_secrets`.
"""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "***"
"""Text in place of a secret."""

SECRET_NAME = (
    r"(?:[\w-]{0,60}[_-])?(?:password|passwd|pwd|secret|api[_-]?key|apikey|access[_-]?key|secret[_-]?key|account[_-]?key"
    r"|(?:access|api|auth|sas|session|bearer|hf|personal)[_-]?token|credentials?|authorization)"
)
"""Names of options that hold a secret; ``token`` alone is one in configurations, where no tokenizer is meant."""

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
    """Replace the secrets of the URLs in a text, and values after the name of a secret (``api_key=...``), by ``***``.

    Args:
        text: any text, such as an error message or an argument of the command line.
    """
    return _NAMED.sub(lambda match: match["name"] + HIDDEN, _redact_urls(text))


def redacted(value: Any, name: str = "") -> Any:
    """Nested options without secrets; the same object where there are none.

    Args:
        value: dicts, namespaces, lists, tuples and plain values; anything else stays as it is.
        name: name of the option that has this value.
    """
    if isinstance(value, str):
        if value and _is_secret(name):
            return HIDDEN
        text = _redact_url(value) if re.match(_START, value) else _redact_urls(value)
        return value if text == value else text
    if isinstance(value, dict | Namespace):
        items = value if isinstance(value, dict) else vars(value)
        changed = {key: new for key, item in items.items() if (new := redacted(item, str(key))) is not item}
        if not changed:
            return value
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
    """Nested options for a file that is published: without secrets, local paths outside the folder as their last part alone."""
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
    """Reject a URL whose secrets were removed when it was written down.

    Args:
        url: any location.
        option: option that holds it, for the message.

    Raises:
        ValueError: saying to give the URL again.
    """
    if _HIDDEN_IN_URL.search(url):
        again = f"--{option}=URL" if option else "the option that holds it"
        raise ValueError(
            f"{url}: user names, passwords and queries of URLs are not written into files, so that this URL is not complete; "
            f"give it again on the command line ({again})"
        )


def hidden_options(value: Any, path: str = "") -> Iterator[str]:
    """Dotted names of the options whose secrets were removed when they were written down."""
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
    """One URL, or several chained by ``::`` as fsspec has them, without secrets."""
    return "::".join(_redact_link(link) for link in re.split(rf"::(?={_START})", url))


def _redact_link(url: str) -> str:
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return url
    start, authority, path, rest = parts.groups()
    host = authority.rpartition("@")[2]
    port = host.rpartition(":")[2] if ":" in host and not host.endswith("]") else ""
    behind = path + rest
    if "@" not in authority and "@" in behind and not re.fullmatch(r"\d*", port):
        # Not a port: a password with a slash, a question mark or a number sign that is not written as %2F, %3F or %23.
        path, mark, _ = behind.rpartition("@")[2].partition("?")
        return f"{start}{HIDDEN}@{path}{f'?{HIDDEN}' if mark else ''}"
    user = f"{HIDDEN}@" if "@" in authority else ""
    return f"{start}{user}{host}{path}{f'?{HIDDEN}' if rest else ''}"
