"""The asyncio half of the client. `tools/unasync.py` generates the blocking `client.py` and `channel.py` from the ones here."""
