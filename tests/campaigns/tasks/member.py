"""One task of a capture, without Spark: `python -m tests.campaigns.tasks.member CAPTURE.json NAME`. SIGTERM has it leave in order."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

from sluiceway.capture import CaptureConfig, run_member


async def live(config: CaptureConfig, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_member(config, stop=stop, name_hint=name)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(live(CaptureConfig(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2]))


if __name__ == "__main__":
    main()
