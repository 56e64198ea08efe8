"""The custom operators: contract, float64 reference, standard-ops function, index building."""
