"""Alembic migrations: the only way to a database schema."""
