"""MetaStores."""
