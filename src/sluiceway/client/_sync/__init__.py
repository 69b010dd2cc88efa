"""The blocking half of the client. `tools/unasync.py` generates `client.py` and `channel.py`; the rest is written by hand."""
