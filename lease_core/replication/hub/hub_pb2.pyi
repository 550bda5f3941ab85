from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    STORED: _ClassVar[Outcome]
    MISSING: _ClassVar[Outcome]
    REWRITES_HISTORY: _ClassVar[Outcome]
    INVALID: _ClassVar[Outcome]
    UNAVAILABLE: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
STORED: Outcome
MISSING: Outcome
REWRITES_HISTORY: Outcome
INVALID: Outcome
UNAVAILABLE: Outcome

class Batch(_message.Message):
    __slots__ = ("source", "namespace", "first", "last", "lines", "begins", "previous", "sha256", "damage")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    source: str
    namespace: str
    first: int
    last: int
    lines: bytes
    begins: bool
    previous: str
    sha256: str
    damage: Damage
    def __init__(self, source: _Optional[str] = ..., namespace: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., lines: _Optional[bytes] = ..., begins: _Optional[bool] = ..., previous: _Optional[str] = ..., sha256: _Optional[str] = ..., damage: _Optional[_Union[Damage, _Mapping]] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("last_good", "reason")
    LAST_GOOD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    last_good: int
    reason: str
    def __init__(self, last_good: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("outcome", "next", "reason", "sequence_number")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    next: int
    reason: str
    sequence_number: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., next: _Optional[int] = ..., reason: _Optional[str] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class PositionRequest(_message.Message):
    __slots__ = ("source", "namespace")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    source: str
    namespace: str
    def __init__(self, source: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class PositionReply(_message.Message):
    __slots__ = ("last", "first", "most_bytes")
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    last: int
    first: int
    most_bytes: int
    def __init__(self, last: _Optional[int] = ..., first: _Optional[int] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("source", "namespace", "after")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    source: str
    namespace: str
    after: int
    def __init__(self, source: _Optional[str] = ..., namespace: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("after", "reader", "source", "namespace", "once")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    after: int
    reader: str
    source: str
    namespace: str
    once: bool
    def __init__(self, after: _Optional[int] = ..., reader: _Optional[str] = ..., source: _Optional[str] = ..., namespace: _Optional[str] = ..., once: _Optional[bool] = ...) -> None: ...

class Merged(_message.Message):
    __slots__ = ("source", "namespace", "position", "first", "lines", "damage")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    source: str
    namespace: str
    position: int
    first: int
    lines: bytes
    damage: Damage
    def __init__(self, source: _Optional[str] = ..., namespace: _Optional[str] = ..., position: _Optional[int] = ..., first: _Optional[int] = ..., lines: _Optional[bytes] = ..., damage: _Optional[_Union[Damage, _Mapping]] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("reader", "position")
    READER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    reader: str
    position: int
    def __init__(self, reader: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class SourcesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SourcesReply(_message.Message):
    __slots__ = ("sources", "head")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceStatus]
    head: int
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceStatus, _Mapping]]] = ..., head: _Optional[int] = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("source", "namespace", "first", "last")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    source: str
    namespace: str
    first: int
    last: int
    def __init__(self, source: _Optional[str] = ..., namespace: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
