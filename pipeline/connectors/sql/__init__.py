"""Connector for effects in a SQL database."""

from pipeline.connectors.sql.connector import Sql, query, transaction
from pipeline.connectors.sql.effects import create_effects_table, effects_table
from pipeline.connectors.sql.errors import UnknownCommitError

__all__ = ["Sql", "UnknownCommitError", "create_effects_table", "effects_table", "query", "transaction"]
