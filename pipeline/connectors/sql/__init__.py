"""Connector for effects in a SQL database."""

from pipeline.connectors.sql.connector import Sql, query, transaction
from pipeline.connectors.sql.transactions import UnknownCommitError, create_effects_table, effects_table

__all__ = ["Sql", "UnknownCommitError", "create_effects_table", "effects_table", "query", "transaction"]
