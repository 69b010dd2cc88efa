"""Floor 3: the codecs. They decode JSON and Arrow into model requests and encode model answers as bytes."""
