"""What operators see and do. Callers above get the database from here: they act through ``admin`` only."""

from pipeline.store.database import Database as Database
