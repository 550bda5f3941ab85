"""An IO manager whose outputs become visible only when their lease is completed: the log is the manifest.

An output is written to a folder that no other lease writes to, and then published by completing the lease with the
address as its result, in one transaction. Readers go by the log alone: they load what it says was completed, in its
order, as of one of its numbers if they like. Whoever lost the lease may write as much as he wants; the queue refuses
his complete, so the log never names his files, and ``vacuum`` removes them.
"""

# without `from __future__ import annotations`: Dagster must see the class of a nested resource, not its name
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

import dagster as dg
import fsspec
from pydantic import Field

from lease_core import LeaseError, LeaseQueue
from lease_core.errors import LeaseLost, LeaseRefused
from omnirelay_dagster.batch import LeasedBatch, give_up, in_process
from omnirelay_dagster.lease_folders import (
    Removed,
    folder_of,
    granted_before,
    lease_folders,
    lease_of,
    leases_held,
    remove,
    settle,
)
from omnirelay_dagster.manifest import NothingPublished, Published, manifest_of
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.spark.job_group import stopped_by_signals
from omnirelay_dagster.spark.parquet_output import SparkHandler
from omnirelay_dagster.spark.schema_drift import EVOLUTIONS
from omnirelay_dagster.type_handlers import BUILT_IN, Storing, TypeHandler

_BUILT_IN: tuple[TypeHandler, ...] = (*BUILT_IN, SparkHandler())


class FencedIOManager(dg.ConfigurableIOManager):
    """Stores the outputs of leased assets and ops so that only a valid lease can make them visible.

    ``handle_output`` writes the value, then completes the batch with its address. If the queue refuses, because the
    lease ran out or was taken over, the step fails, Dagster records no materialization, and no reader ever sees the
    files. ``load_input`` gives the outputs of all completed batches of the upstream asset, in the order of the log.

    Which file format is used depends on the value's type; for more than the built-in ones set ``handlers`` in a
    subclass.
    """

    base_path: str = Field(description="a local folder, or a URL that fsspec knows, such as s3://bucket/prefix")
    queue: LeaseQueueResource
    storage_options: dict[str, Any] = Field({}, description="settings of the fsspec filesystem")
    as_of: int | None = Field(None, description="load what the log said at this sequence number, not the latest")
    schema_evolution: list[str] = Field(
        [], description="how columns of Spark outputs may change from batch to batch: 'add_columns', 'widen_types'"
    )
    spark: dg.ConfigurableResource | None = None  # type: ignore[type-arg]
    """dagster-pyspark's resource, for inputs that are Spark DataFrames; not needed where a session is active."""

    handlers: ClassVar[tuple[TypeHandler, ...]] = ()
    """Type handlers of your own, tried before the built-in ones."""

    def __init__(self, **fields: Any) -> None:
        queue = fields.get("queue")
        if queue is None or isinstance(queue, str | LeaseQueue):
            raise dg.DagsterInvalidDefinitionError(
                f"{type(self).__name__}(queue={queue!r}): give it the LeaseQueueResource whose leases publish its "
                f"outputs, the one the assets use: landing = LeaseQueueResource(url=...), then "
                f"{type(self).__name__}(base_path=..., queue=landing)"
            )
        if fields.get("base_path") == "":
            raise dg.DagsterInvalidDefinitionError(
                f"{type(self).__name__}(base_path=''): name a folder or a URL such as s3://bucket/prefix"
            )
        _check_evolution("schema_evolution", fields.get("schema_evolution") or ())
        super().__init__(**fields)

    # Storing

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Write the output and complete its batch. Once this returns it is published; if it raises it is not."""
        if "omnirelay/batches" in context.output_metadata:
            return  # the account of an op that has drained the queue: its batches are published already
        batch = _batch_of(context)
        try:
            with stopped_by_signals(batch):
                published = self.publish(context, batch, obj)
        except (LeaseRefused, LeaseLost):
            raise  # who lost a part of the batch has nothing to say about the rest: it is handed back
        except Exception as error:
            batch.close_spark_groups(error)
            batch.raise_if_lost(error)
            give_up(batch, error)  # Dagster does not tell the asset, so its items learn of the error here
            raise
        except BaseException as error:
            batch.close_spark_groups(error)  # interrupted: the asset is told too late to stop the executors in time
            raise
        if published is not None:
            context.add_output_metadata(_metadata(published))

    def publish(self, context: dg.OutputContext, batch: LeasedBatch, value: Any) -> Published | None:
        """Write ``value`` as the output of ``batch`` and complete the batch with its address.

        ``None`` means that there is nothing to store: the batch is completed, and nothing is published. Raises
        ``LeaseRefused`` if any lease of the batch is no longer good; then nothing is visible of what was written.
        """
        self._check(context, batch, value)
        if value is None:
            batch.complete()
            return None
        written = self._write(context, batch, value)
        manifest_of(batch.queue).keep_log(batch.queue)
        before = batch.queue.stats().head
        try:
            batch.complete(_result(context, written))
        except LeaseRefused as refused:
            refused.add_note(
                f"fenced off: {written.uri} was written but is not published: nobody reads it, and vacuum removes it"
            )
            raise
        return written._replace(sequence_number=_number_of(batch, before))

    def _check(self, context: dg.OutputContext, batch: LeasedBatch, value: Any) -> None:
        """Refuse, before anything is written, what could not be published or would not be found again."""
        batch.check()
        mine = self.queue.get_queue()
        if (mine.queue_id, mine.namespace) != (batch.queue.queue_id, batch.queue.namespace):
            raise dg.DagsterInvariantViolationError(
                f"{_name(context)}: leases from {batch.queue!r}, but its IO manager reads {mine!r}; give both the same "
                "LeaseQueueResource, or this asset an IO manager of its own (io_manager_key=...)"
            )
        if batch.completed or (value is not None and not batch.remaining):
            what = "was completed" if batch.completed else "has no item left: all were failed or released"
            raise dg.DagsterInvariantViolationError(
                f"{_name(context)}: the batch {what}, so its output cannot be published; leave completing to the IO "
                "manager, and return None if there is nothing to store"
            )

    def _write(self, context: dg.OutputContext, batch: LeasedBatch, value: Any) -> Published:
        fs, base = self._filesystem()
        storing = self._storing(_subject(context), context.definition_metadata)
        handler = self._handler_of(value, _name(context)).configured(storing)
        fence = max(lease.token.fence for lease in batch.leases)
        partition = _partition_of(context)
        by_columns = handler.name == SparkHandler.name and bool(storing.partition_by)
        folder = folder_of(_parts(context), partition, f"{batch.id}-{fence}", by_columns=by_columns)
        path = f"{folder}/{'omnirelay_part=0' if by_columns else 'part-0'}{handler.suffix}"
        fs.makedirs(f"{base}/{folder}", exist_ok=True)
        try:
            rows = handler.write(value, fs, f"{base}/{path}")
        except TypeError as error:
            error.add_note(f"while storing the output of {_name(context)} as {handler.name}")
            raise
        settle(fs, base, folder)
        uri = fs.unstrip_protocol(f"{base}/{path}")
        size = int(fs.du(f"{base}/{path}"))
        return Published(None, batch.id, fence, _subject(context), partition, handler.name, path, uri, rows, size)

    def _storing(self, subject: str, given: Mapping[str, Any]) -> Storing:
        """What was declared for an asset: here, or in its own metadata."""
        evolution = _plain(given.get("omnirelay/schema_evolution"))
        partition_by = _plain(given.get("omnirelay/partition_by")) or ()
        return Storing(
            subject,
            (partition_by,) if isinstance(partition_by, str) else tuple(partition_by),
            _check_evolution("omnirelay/schema_evolution", self.schema_evolution if evolution is None else evolution),
            lambda: self._paths(self._published(subject, None)[0]),
            self.spark,
        )

    def _paths(self, found: Sequence[Published]) -> list[str]:
        """Where parquet outputs are."""
        _, base = self._filesystem()
        return [f"{base}/{each.path}" for each in found if each.path.endswith(SparkHandler.suffix)]

    # Loading

    def load_input(self, context: dg.InputContext) -> Any:
        """What has been published of the upstream output, as the type that the input is annotated with."""
        given = context.definition_metadata
        upstream = context if context.has_asset_key else context.upstream_output
        assert upstream is not None
        partitioned = context.has_asset_key and context.has_asset_partitions
        partitions = list(context.asset_partition_keys) if partitioned else None
        as_of = self.as_of if given.get("omnirelay/as_of") is None else _plain(given["omnirelay/as_of"])
        lenient = bool(_plain(given.get("omnirelay/allow_empty")) or _plain(given.get("allow_missing_partitions")))
        found, number = self._published(_subject(upstream), as_of)
        storing = self._storing(_subject(upstream), {**_upstream_metadata(context), **given})
        value = self._as(context.dagster_type.typing_type, storing, found, partitions, number, lenient)
        context.log.info(f"loaded {_subject(upstream)} as of number {number} of {self.queue.namespace!r}")
        return value

    def load(
        self,
        asset: str | dg.AssetKey | Sequence[str],
        as_type: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        after: int = 0,
        as_of: int | None = None,
        allow_empty: bool = False,
        schema_evolution: Sequence[str] | None = None,
    ) -> Any:
        """What an input annotated ``as_type`` would get, for notebooks and scripts. ``asset`` is named as in the UI.

        ``after`` leaves out what was published up to that number: with the number of the last look, what came since.
        """
        subject = _asset(asset)
        found, number = self._published(subject, self.as_of if as_of is None else as_of, after)
        storing = self._storing(subject, {"omnirelay/schema_evolution": schema_evolution})
        return self._as(as_type, storing, found, partitions, number, allow_empty)

    def published(
        self, asset: str | dg.AssetKey | Sequence[str], *, after: int = 0, as_of: int | None = None
    ) -> list[Published]:
        """The outputs of an asset that completed leases point to, in the order of the log, from ``after`` on."""
        return self._published(_asset(asset), self.as_of if as_of is None else as_of, after)[0]

    def _published(self, subject: str, as_of: int | None, after: int = 0) -> tuple[list[Published], int]:
        """The subject's outputs, and the number of the log they are as of."""
        queue = self.queue.get_queue()
        found, number = manifest_of(queue).outputs(queue, subject, as_of)
        return [each for each in found if (each.sequence_number or 0) > after], number

    def _as(
        self,
        wanted: Any,
        storing: Storing,
        found: list[Published],
        partitions: Sequence[str] | None,
        number: int,
        lenient: bool,
    ) -> Any:
        """The outputs as one value or, if that is what is wanted, a dict with one for each partition."""
        subject = storing.subject
        kind, by_partition = _kind(wanted)
        if partitions is None and by_partition and found:
            partitions = _partitions(found, subject)
        if partitions is not None:
            asked = set(partitions)
            found = [each for each in found if each.partition in asked]
        missing = _missing(found, partitions)
        if missing and not lenient:
            raise NothingPublished(
                f"{subject}: nothing is published{missing} as of number {number} of the queue "
                f"{self.queue.namespace!r}. Materialize it first; or, to go on with what there is, give the input "
                'metadata={"omnirelay/allow_empty": True}'
            )
        if not by_partition and (partitions is None or kind is not None or len(partitions) == 1):
            return self._read(kind, storing, found)
        split: dict[str, list[Published]] = {key: [] for key in partitions or ()}
        for each in found:
            split[each.partition or ""].append(each)
        return {key: self._read(kind, storing, some) for key, some in split.items() if some}

    def _read(self, kind: type | None, storing: Storing, found: list[Published]) -> Any:
        subject = storing.subject
        if kind is None and not found:
            return None
        handler = self._handler_named(found[0].format, subject) if kind is None else self._handler_for(kind, subject)
        for each in found:
            if not each.path.endswith(handler.suffix):
                raise dg.DagsterInvariantViolationError(
                    f"{subject}: {each.uri} was published as {each.format}, which cannot be loaded as {handler.name}; "
                    f"annotate the input with a type that is stored as {each.format}"
                )
        fs, base = self._filesystem()
        try:
            value = handler.configured(storing).read(fs, [f"{base}/{each.path}" for each in found])
        except FileNotFoundError as error:
            error.add_note(
                f"{subject} was published, but not all of it is under base_path={self.base_path!r}: has base_path "
                "changed without its files being moved along, or were files removed by hand?"
            )
            raise
        if kind is not None and not isinstance(value, kind):
            raise dg.DagsterInvariantViolationError(
                f"{subject}: the outputs of all its batches come as one {type(value).__name__}, not as "
                f"{kind.__name__}; annotate the input with {type(value).__name__}"
            )
        return value

    def _handler_of(self, value: Any, who: str) -> TypeHandler:
        for handler in (*self.handlers, *_BUILT_IN):
            if handler.matches(type(value)):
                return handler
        raise self._no_handler(who, f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored")

    def _handler_for(self, kind: type, who: str) -> TypeHandler:
        for handler in (*self.handlers, *_BUILT_IN):
            if handler.matches(kind):
                return handler
        raise self._no_handler(who, f"an input annotated {kind!r} cannot be loaded")

    def _handler_named(self, name: str, who: str) -> TypeHandler:
        for handler in (*self.handlers, *_BUILT_IN):
            if handler.name == name:
                return handler
        raise self._no_handler(who, f"it was published as {name!r}, which cannot be loaded")

    def _no_handler(self, who: str, problem: str) -> Exception:
        names = ", ".join(handler.name for handler in (*self.handlers, *_BUILT_IN))
        return dg.DagsterInvariantViolationError(
            f"{who}: {problem}. {type(self).__name__} knows {names}; convert it to one of these, or add a TypeHandler "
            f"to `handlers` in a subclass of {type(self).__name__}"
        )

    def _filesystem(self) -> tuple[Any, str]:
        fs, base = fsspec.core.url_to_fs(self.base_path, **self.storage_options)
        return fs, base.rstrip("/")

    # Tidying

    def vacuum(
        self,
        older_than: float | timedelta = timedelta(days=1),
        *,
        dry_run: bool = False,
        keep: Iterable[str] | Callable[[], Iterable[str]] = (),
    ) -> list[Removed]:
        """Remove what was written under leases that never published it, and nothing else. Gives what that was.

        A folder goes only if all of this holds: it has this manager's layout; the log of this queue says that the
        lease it is named after was granted, more than ``older_than`` (seconds) ago; that lease is not held any more;
        and no completed lease points to it. Whatever cannot be proved stays. Safe at any time, next to any writer.

        ``keep`` names addresses that stay even so, or a function that gives them once the folders are listed: files
        which others refer to, should the database ever be replaced by a copy from before they were published. For an
        Iceberg table that is ``vacuum(keep=table.data_files)``.
        """
        age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
        fs, base = self._filesystem()
        queue = self.queue.get_queue()
        # In this order. A folder seen now belongs to a lease granted before; if that is no longer held, then it is
        # either published already, which the log read last will say, or can never be.
        folders = lease_folders(fs, base)
        in_use = leases_held(queue)
        known = manifest_of(queue).lease_ids(queue)
        kept = frozenset(keep() if callable(keep) else keep)
        removed = []
        for folder, files in folders.items():
            lease_id, fence = lease_of(folder)
            if lease_id in in_use or lease_id in known or not granted_before(queue, lease_id, fence, age):
                continue
            if kept and any(fs.unstrip_protocol(file) in kept for file in files):
                continue
            if not dry_run:
                remove(fs, f"{base}/{folder}", files)
            removed.append(Removed(fs.unstrip_protocol(f"{base}/{folder}"), lease_id, fence, sum(files.values())))
        return removed


def _result(context: dg.OutputContext, written: Published) -> dict[str, Any]:
    return {
        "kind": "omnirelay.output",
        "asset": written.subject,
        "partition": written.partition,
        "uri": written.uri,
        "path": written.path,
        "format": written.format,
        "rows": written.rows,
        "bytes": written.bytes,
        "fence": written.fence,
        "run": context.run_id,
    }


def _number_of(batch: LeasedBatch, after: int) -> int | None:
    """The log number under which the batch was just published. Not worth failing for: it is published."""
    with suppress(LeaseError):
        while True:
            found, reached = batch.queue.completions(after)
            for completion in found:
                if completion.lease_id == batch.id:
                    return completion.sequence_number
            if reached == after:
                break
            after = reached
    return None


def _metadata(published: Published) -> dict[str, Any]:
    given = {
        "dagster/uri": published.uri,
        "dagster/row_count": published.rows,
        "omnirelay/bytes": published.bytes,
        "omnirelay/sequence_number": published.sequence_number,
    }
    return {key: value for key, value in given.items() if value is not None}


def _check_evolution(where: str, given: Any) -> tuple[str, ...]:
    """The declared ways in which columns may change, if they are ones that exist."""
    several = (given,) if isinstance(given, str) else tuple(given)
    for each in several:
        if each not in EVOLUTIONS:
            known = " and ".join(map(repr, EVOLUTIONS))
            raise dg.DagsterInvalidDefinitionError(f"{where}: {each!r} is none of {known}; leave it out for no change")
    return several


# What a context is about


def _upstream_metadata(context: dg.InputContext) -> Mapping[str, Any]:
    """What the upstream asset itself says about how it is stored, as far as this run knows it."""
    return (context.upstream_output.definition_metadata if context.upstream_output is not None else None) or {}


def _batch_of(context: dg.OutputContext) -> LeasedBatch:
    lease_id = _plain(context.output_metadata.get("omnirelay/lease"))
    if lease_id is None:
        raise dg.DagsterInvariantViolationError(
            f"{_name(context)}: the fenced IO manager publishes the outputs of leases, and this is no leased work. "
            "Declare it with @leased_asset(queue=...) or @leased_op(queue=...), or give it another IO manager "
            "(io_manager_key=...)"
        )
    batch = in_process.get(lease_id)
    if batch is None:
        raise dg.DagsterInvariantViolationError(
            f"{_name(context)}: the lease {lease_id} is not held by this process, so its output cannot be published; "
            "an output must be returned by the step that leased the batch"
        )
    return batch


def _parts(context: dg.InputContext | dg.OutputContext) -> Sequence[str]:
    return context.asset_key.path if context.has_asset_key else context.get_identifier()


def _subject(context: dg.InputContext | dg.OutputContext) -> str:
    """What an output is an output of, as the log has it: an asset's key, or run, step and output of an op."""
    if context.has_asset_key:
        return context.asset_key.to_escaped_user_string()
    return "op:" + "/".join(context.get_identifier())


def _asset(asset: str | dg.AssetKey | Sequence[str]) -> str:
    return asset if isinstance(asset, str) else dg.AssetKey.from_coercible(asset).to_escaped_user_string()


def _name(context: dg.OutputContext) -> str:
    return f"asset {context.asset_key.to_user_string()}" if context.has_asset_key else f"op {context.step_key}"


def _partition_of(context: dg.OutputContext) -> str | None:
    if not context.has_asset_key or not context.has_asset_partitions:
        return None
    keys = list(context.asset_partition_keys)
    if len(keys) != 1:
        raise dg.DagsterInvariantViolationError(
            f"{_name(context)}: an output is of one partition, but this run is for {len(keys)}; launch the backfill "
            "with one run for each partition (dg.BackfillPolicy.multi_run(1))"
        )
    return str(keys[0])


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


def _kind(annotation: Any) -> tuple[type | None, bool]:
    """The class that an annotation asks for (none: whatever was stored), and whether in a dict by partition."""
    if get_origin(annotation) in (Union, UnionType):
        some = [each for each in get_args(annotation) if each is not NoneType]
        return _kind(some[0]) if len(some) == 1 else (None, False)
    plain = get_origin(annotation) or annotation
    if plain is dict:
        inner = get_args(annotation)[1:] or (None,)
        return _kind(inner[0])[0], True
    return (plain if isinstance(plain, type) and plain not in (Any, object) else None), False


def _partitions(found: list[Published], subject: str) -> list[str]:
    """The partitions there are, for a reader who wants them in a dict and has not said which."""
    keys = [each.partition for each in found if each.partition is not None]
    if len(keys) < len(found):
        raise dg.DagsterInvariantViolationError(
            f"{subject}: an input annotated with dict gets a value for each partition, and this has no partitions; "
            "annotate the input with the type of the values, or list for what is stored as JSON"
        )
    return sorted(set(keys))


def _missing(found: list[Published], partitions: Sequence[str] | None) -> str:
    """What was asked for and is not there, as words to put into a sentence."""
    if partitions is None:
        return "" if found else " yet"
    there = {each.partition for each in found}
    absent = [key for key in partitions if key not in there]
    if not absent:
        return ""
    return f" for {', '.join(absent[:5])}{f' and {len(absent) - 5} more partitions' if len(absent) > 5 else ''}"


# Folders


def publish_batch(context: Any, batch: LeasedBatch, value: Any) -> bool:
    """Publish the output of one of many batches of a running step. False if its IO manager is not a fenced one."""
    step = context.get_step_execution_context()
    for handle in _outputs(step):
        manager = step.get_io_manager(handle)
        if isinstance(manager, FencedIOManager):
            manager.publish(step.get_output_context(handle, batch.metadata()), batch, value)
            return True
    return False


def _outputs(step: Any) -> Iterator[Any]:
    from dagster._core.execution.plan.outputs import StepOutputHandle

    for output in step.step.step_outputs:
        if output.properties.asset_check_key is None:
            yield StepOutputHandle(step.step.key, output.name)
