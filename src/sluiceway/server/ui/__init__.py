"""The dashboard: pages at /ui for whoever would rather look than read. It knows nothing but the public API, and asks it as the reader."""
