"""Converted files held against promises, clocks and labels."""
