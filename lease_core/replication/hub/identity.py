"""Who is calling: with mutual TLS the names in the certificate, and nothing that the caller says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class NotYou(Exception):
    """The caller claims to be somebody else, or nobody."""


class Caller:
    """One end of a connection. ``names`` are those of its certificate, None if it showed none."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names

    @classmethod
    def of(cls, auth: Mapping[str, Sequence[bytes]]) -> Caller:
        """The caller that gRPC's auth context describes."""
        if not auth.get("x509_pem_cert"):
            return cls(None)
        found = [*auth.get("x509_common_name", ()), *auth.get("x509_subject_alternative_name", ())]
        return cls(list(dict.fromkeys(name.decode(errors="replace") for name in found if name)))

    @property
    def owner(self) -> str:
        """Whose cursors it may move: the first name of the certificate (its common name, if it has one)."""
        return self._names[0] if self._names else ""

    def source(self, claimed: str) -> str:
        """The source that it may publish as. Raises ``NotYou``."""
        if self._names is None:
            if not claimed:
                raise NotYou("source: say which, as there is no certificate to tell")
            return claimed
        if not self._names:
            raise NotYou("the certificate has no name: it needs a common name or a subject alternative name")
        if claimed and claimed not in self._names:
            raise NotYou(f"source: the certificate is of {', '.join(self._names)}, not of {claimed}")
        return claimed or self._names[0]
