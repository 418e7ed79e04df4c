"""Runs the migrations on the connection that `tinker_server.store.database.Database.migrate` passes."""

from alembic import context

from tinker_server.store.tables import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
