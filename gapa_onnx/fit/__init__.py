"""What the calibration data say: one pass over them, and the numbers of every site."""
