"""The source model: read, looked at, added to."""
