"""The URL of a database: read from text, and shown without its secrets."""

from __future__ import annotations

import sqlalchemy as sa

from lease_core.errors import InvalidInput


def parsed(url: str | sa.URL) -> sa.URL:
    """``url`` in its parts, or ``InvalidInput`` that says what one looks like, and nothing of what was given."""
    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidInput("url", "is not a database URL; use sqlite:///path or postgresql://user@host/db") from None


def shown(url: sa.URL) -> str:
    """The URL for people and logs, without its secrets."""
    secret = {name: "***" for name in url.query if "pass" in name}
    return url.update_query_dict(secret).render_as_string(hide_password=True)
