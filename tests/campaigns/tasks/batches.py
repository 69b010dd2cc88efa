"""A streaming query that reads a capture by micro-batches into a queue: `python -m tests.campaigns.tasks.batches CAPTURE.json CHECKPOINT`.

SIGTERM ends it between two batches, or in one.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from sluiceway.spark import session


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    options = {name: config[name] for name in ("name", "meta", "stream") if name in config}
    options |= {f"stream.{name}": value for name, value in config["options"].items()}
    spark = session("batches")
    changes = spark.readStream.format("sluiceway-capture").options(**options).load()
    items = changes.selectExpr("payload", "kind", "key as reference")
    writer = items.writeStream.format("sluiceway").options(url=config["url"], queue=config["queue"])
    query = writer.option("checkpointLocation", sys.argv[2]).start()
    signal.signal(signal.SIGTERM, lambda *_: query.stop())
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
