"""Addresses of endpoints, which may have a password in them that nobody should see."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from lease_core.errors import InvalidInput


def without_userinfo(field: str, url: str) -> tuple[str, str]:
    """An http address without the name and the password in it, and those two, as ``name:password``; "" if none.

    What cannot be taken apart is refused without being shown: it may be the password that is not escaped.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        sound = sound and ("@" in parts.netloc or "@" not in url)
    except ValueError:
        sound = False
    if not sound:
        raise InvalidInput(
            field,
            "must be http://host/path or https://host/path; in a name or password before the host write "
            "/ as %2F, ? as %3F, # as %23 and @ as %40",
        )
    userinfo, _, place = parts.netloc.rpartition("@")
    if not userinfo:
        return url, ""
    name, _, password = userinfo.partition(":")
    return parts._replace(netloc=place).geturl(), f"{unquote(name)}:{unquote(password)}"
