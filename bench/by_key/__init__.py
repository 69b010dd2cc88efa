"""Items with keys, in order by key, through several consumers: ours and its peers (`python -m bench key_peers`)."""
