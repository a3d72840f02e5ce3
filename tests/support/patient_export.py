"""For workers whose last words are counted: however long the machine stands still, they get them out.

A module of workflows beside the shop, so that every process of a worker imports it.
"""

from pipeline.admin.gauges import Gauges
from pipeline.telemetry import metrics_export, spans_export

ENOUGH = 60.0  #: seconds; a collector that does not answer is not what is tested
spans_export.stop.__defaults__ = (ENOUGH,)
metrics_export.MetricsExport.end.__defaults__ = (ENOUGH,)
Gauges.__init__.__kwdefaults__ = {"max_age": 0.5, "timeout": 3.0}  # a new value is there soon
