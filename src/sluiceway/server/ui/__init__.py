"""The dashboard: live pages at /ui. It uses only the public API, with the credentials of the reader."""
