"""A language model: what it takes to convert, and what its tokens then say."""
