"""What the consumer engine costs per item, beside bare loops that do the same: `python benchmarks/engine.py`.

The loops are those of tests/consumer_engine/test_overhead.py, which keeps the ratios below 2.5. The work is next to nothing, so
the ratio is the worst there is. Telemetry is off. Processor time, the least of several rounds taken in turns. It needs no
server and takes a few seconds.
"""

import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from tests.consumer_engine.test_overhead import COUNT, WIDTH, with_asyncio, with_threads


def main() -> None:
    """Measure and print."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}, Python {platform.python_version()}"
    )
    table = Table("", "bare loop, µs per item", "engine, µs per item", "ratio", title=f"{COUNT} items, {WIDTH} at once")
    for name, loops in {"threads": with_threads, "asyncio": with_asyncio}.items():
        bare, engine = loops()
        table.add_row(name, f"{bare:.1f}", f"{engine:.1f}", f"{engine / bare:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
