"""Change streams of other systems, as ChangeStreams."""
