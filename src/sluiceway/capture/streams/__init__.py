"""Change streams of external systems, as ChangeStreams."""
