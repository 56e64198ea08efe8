"""Folders that a server or a runtime takes as they are: a converted file, the native library, and a client."""
