"""Write what workers declare about operations. Only ``transitions`` may import this."""

from pipeline.store.database import Statement
from pipeline.store.rows import OperationNameRow

_COLUMNS = """connector, operation, is_mutation, params_schema, result_schema, redact, shown, shows, look_up, keyed,
  key_lifetime, can_reconcile, can_fetch, timeout, settle, value, four_eyes_above"""
_TYPES = """connector text, operation text, is_mutation boolean, params_schema jsonb, result_schema jsonb,
    redact text[], shown text[], shows text, look_up text, keyed boolean, key_lifetime interval, can_reconcile boolean,
    can_fetch boolean, timeout interval, settle interval, value text, four_eyes_above numeric"""
_CHANGED = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.replace("\n", "").replace(" ", "").split(",")[2:])

#: Insert operations that are new, and change those that differ if ``can_replace``. An equal one is not touched.
UPSERT = Statement[OperationNameRow](f"""
WITH declared AS (
  SELECT {_COLUMNS} FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x({_TYPES})
)
INSERT INTO pipeline.operations AS o ({_COLUMNS})
SELECT {_COLUMNS} FROM declared d WHERE NOT EXISTS (
  SELECT FROM pipeline.operations known WHERE known.connector = d.connector AND known.operation = d.operation
    AND (NOT :can_replace OR to_jsonb(known) - 'registered_at' = to_jsonb(d)))
ORDER BY connector, operation
ON CONFLICT (connector, operation) DO UPDATE SET {_CHANGED}, registered_at = pipeline.clock() WHERE :can_replace
RETURNING o.connector, o.operation
""")
