"""Measuring how good a converted file's uncertainty is."""
