"""Alembic's entry point. It always runs on a connection that ``lease_core.store.migrate`` hands it."""

from alembic import context

from lease_core.store.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
context.run_migrations()
