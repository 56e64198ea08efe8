"""Numbers that only the variance graph itself can tell, on left-out calibration rows."""
